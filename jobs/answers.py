"""Answers that jobs have given, in pieces: out of parts, saved indexes and spill."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from .folder import WORK, OutputFolder
from .schema import result_schema
from .store import storage_errors

BATCH_ROWS = 512
TEXT_COLUMNS = ["row_index", "text", "finish_reason", "stop_reason", "error_code"]
"""Of a part whose texts are read,"""
ID_COLUMNS = ["row_index", "token_ids", "error_code"]
"""and of one whose token ids are."""

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Answers:
    """N answers of one part, in its order; failed rows are left out."""

    row_index: NDArray[np.int64]
    """[N] row in the job that gave the answer; in a saved index, which knows no rows, the place in the file."""
    texts: list[str | None]
    """N texts; None each where token_ids are known."""
    token_ids: list[Int32] | None
    """N rows of ids of this job's tokenizer, the stop token included; None where they would have to be made of the
    texts."""
    ended: NDArray[np.bool_]
    """[N] whether end-of-sequence follows the text, which it does not show; False where token_ids are known."""

    @classmethod
    def of_part(cls, batch: pa.RecordBatch, has_ids: bool) -> Answers:
        """From ID_COLUMNS, or from TEXT_COLUMNS. Raises ValueError or TypeError where they hold something else."""
        found = pc.is_valid(batch.column("token_ids" if has_ids else "text"))
        rows = batch.filter(pc.and_(found, pc.is_null(batch.column("error_code"))))
        index = rows.column("row_index").to_numpy().astype(np.int64, copy=False)
        if has_ids:
            return cls._of_ids(index, rows.column("token_ids"))
        is_stop = pc.equal(rows.column("finish_reason"), "stop").fill_null(False)
        ended = pc.and_(is_stop, pc.is_null(rows.column("stop_reason"))).to_numpy(zero_copy_only=False)
        return cls(index, rows.column("text").to_pylist(), None, ended)

    @classmethod
    def of_index(cls, batch: pa.RecordBatch, start: int) -> Answers:
        """From a saved index's column token_ids; `start` is the place of the first row. Errors as of_part()."""
        column = batch.column("token_ids")
        return cls._of_ids(np.flatnonzero(column.is_valid()) + start, column.drop_null())

    @classmethod
    def _of_ids(cls, index: NDArray[np.int64], column: pa.ListArray) -> Answers:
        values = column.flatten().to_numpy(zero_copy_only=False).astype(np.int32, casting="same_kind", copy=False)
        ends = np.cumsum(pc.list_value_length(column).to_numpy(zero_copy_only=False))
        rows = [values[a:b] for a, b in pairwise([0, *ends.tolist()])]
        return cls(index, [None] * len(rows), rows, np.zeros(len(rows), dtype=bool))


def spilled_answers(output: OutputFolder) -> Iterator[Answers]:
    """Answers that wait for their part to be full, as texts and in the order in which they came.

    On an object store those that a stopped attempt uploaded. A line that is torn ends its file. Raises StorageError.
    """
    store = output.store
    for shard in store.folders(WORK):
        for name in store.list(f"{WORK}/{shard}/spill"):
            if name.endswith(".jsonl"):
                path = f"{WORK}/{shard}/spill/{name}"
                with suppress(FileNotFoundError):  # another shard has committed these rows in the meantime
                    file = store.open(path)
                    with storage_errors(store.path(path)), file:
                        yield from _of_lines(io.BufferedReader(file, 1 << 20))


def _of_lines(lines: Iterator[bytes]) -> Iterator[Answers]:
    while batch := list(islice(lines, BATCH_ROWS)):
        rows = list(_whole(batch))
        answers = [row for row in rows if isinstance(row[_TEXT], str) and row[_ERROR_CODE] is None]
        index = np.array([row[0] for row in answers], dtype=np.int64)
        ended = np.array([row[_FINISH_REASON] == "stop" and row[_STOP_REASON] is None for row in answers], dtype=bool)
        yield Answers(index, [row[_TEXT] for row in answers], None, ended)
        if len(rows) < len(batch):
            return


def _whole(lines: list[bytes]) -> Iterator[list[Any]]:
    """The lines up to the first that is torn."""
    for line in lines:
        try:
            row = orjson.loads(line)
        except ValueError:
            return
        if not line.endswith(b"\n") or not isinstance(row, list) or len(row) <= len(_NAMES):
            return
        yield row


# A line is row_index and the generated columns; those that a job may leave out stand between the first and the last.
_NAMES = result_schema(token_ids=False, logprobs=False).names
_TEXT, _FINISH_REASON, _STOP_REASON = (_NAMES.index(name) + 1 for name in ("text", "finish_reason", "stop_reason"))
_ERROR_CODE = _NAMES.index("error_code") - len(_NAMES)
