"""suffix_index/: rows of token ids that a job keeps for the drafts of the next one, one file a shard."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from .folder import SUFFIX_INDEX, WorkFolder
from .store import storage_errors

VOCABULARY = b"specrun.vocabulary"
"""In the footer of a file: vocabulary_hash() of the tokenizer that its token ids are of."""
NUM_TOKENS = b"specrun.num_tokens"
_GROUP_TOKENS = 1 << 19
"""Tokens in a row group, about: what a reader of the newest rows can leave out."""

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


def vocabulary_hash(token_bytes: Sequence[bytes]) -> str:
    """Tells tokenizers apart whose token ids mean different bytes."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(np.fromiter(map(len, token_bytes), np.int64, len(token_bytes)).tobytes())
    digest.update(b"".join(token_bytes))
    return digest.hexdigest()


def write_saved_index(folder: WorkFolder, shard: int, tokens: Int32, row_starts: Int64, vocabulary: str) -> int:
    """Writes M rows that lie end to end, the newest last, in place of what the shard saved before.

    tokens: [N]; row_starts: [M], ascending from 0. Gives the bytes written; without rows nothing is. Readers see the
    old file or the new one. Raises StorageError or OutputError.
    """
    if not len(row_starts):
        return 0
    name = f"part-{shard:05d}.parquet"
    path = folder.tmp / f"{SUFFIX_INDEX}-{name}"
    facts = {VOCABULARY: vocabulary.encode(), NUM_TOKENS: str(len(tokens)).encode()}
    offsets = pa.array(np.append(row_starts, len(tokens)), pa.int32())
    column = pa.ListArray.from_arrays(offsets, pa.array(tokens, pa.int32()))
    table = pa.Table.from_arrays([column], schema=pa.schema([("token_ids", column.type)], facts))
    try:
        with storage_errors(path):
            group_rows = max(1, len(column) * _GROUP_TOKENS // max(1, len(tokens)))
            pq.write_table(table, path, row_group_size=group_rows, compression="zstd", compression_level=1)
            num_bytes = path.stat().st_size
        folder.store.create([SUFFIX_INDEX])
        folder.publish(path, f"{SUFFIX_INDEX}/{name}")
    finally:
        path.unlink(missing_ok=True)
    return num_bytes
