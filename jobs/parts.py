"""A part: one Parquet file that holds the results of a fixed range of rows. Written beside, verified, then named."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from .counts import RowCounts
from .errors import OutputError, StorageError
from .folder import DATA, PART_NAME
from .shard import Shard
from .store import Store, storage_errors

ROW_GROUP_ROWS = 8192
"""Most rows in a row group, so that a reader of few rows stays small."""
_FINGERPRINT = b"specrun.fingerprint"
_ATTEMPT = b"specrun.attempt"
_ROW_START = b"specrun.row_start"
_ROW_END = b"specrun.row_end"
_COUNTS = b"specrun.counts"
_OWN_KEYS = frozenset({_FINGERPRINT, _ATTEMPT, _ROW_START, _ROW_END, _COUNTS})

FailedRow = tuple[int, str | None, str, str | None]
"""Row index, id, error code, error message."""


def part_name(sequence: int, shard: int = 0) -> str:
    """File name of a shard's part; names sort as their rows do."""
    return f"part-{shard:05d}-{sequence:06d}.parquet"


@dataclass(frozen=True, slots=True)
class PartRanges:
    """How the rows [start, stop) of a shard are cut into parts: fixed, whatever happens to them."""

    start: int
    stop: int
    rows_per_part: int
    num_parts: int

    @classmethod
    def of(cls, shard: Shard, num_rows: int, rows_per_part: int) -> PartRanges:
        """Those of a shard of a job of `num_rows` rows; a job without rows has one part that shows the columns."""
        start, stop = shard.rows(num_rows)
        num_parts = -(-(stop - start) // rows_per_part)
        if num_rows == 0 and shard.index == 0:
            num_parts = 1
        return cls(start, stop, rows_per_part, num_parts)

    @property
    def num_rows(self) -> int:
        """Rows of the shard."""
        return self.stop - self.start

    def sequence(self, row_index: int) -> int:
        """Of the part that holds a row."""
        return (row_index - self.start) // self.rows_per_part

    def rows(self, sequence: int) -> tuple[int, int]:
        """First row of a part and the one after its last."""
        start = self.start + sequence * self.rows_per_part
        return start, min(start + self.rows_per_part, self.stop)


@dataclass(frozen=True, slots=True)
class Part:
    """A committed part, as its footer describes it."""

    shard: int
    sequence: int
    row_start: int
    row_stop: int
    fingerprint: str
    """Hash of the job's fingerprint."""
    attempt: int
    """The attempt that committed it."""
    counts: RowCounts
    num_bytes: int = 0

    @property
    def name(self) -> str:
        return part_name(self.sequence, self.shard)

    @property
    def path(self) -> str:
        """Its name in the output folder."""
        return f"{DATA}/{self.name}"

    @property
    def num_rows(self) -> int:
        return self.row_stop - self.row_start

    def to_json(self) -> dict[str, Any]:
        """The part's entry in manifest and journal."""
        return {
            "name": self.name,
            "row_start": self.row_start,
            "row_stop": self.row_stop,
            "bytes": self.num_bytes,
            "attempt": self.attempt,
            "counts": asdict(self.counts),
        }

    @classmethod
    def of_json(cls, entry: Mapping[str, Any], fingerprint: str) -> Part:
        """From to_json(). KeyError, TypeError or ValueError when it is none."""
        match = PART_NAME.fullmatch(entry["name"])
        if match is None:
            raise ValueError(entry["name"])
        return cls(
            shard=int(match[1]),
            sequence=int(match[2]),
            row_start=entry["row_start"],
            row_stop=entry["row_stop"],
            fingerprint=fingerprint,
            attempt=entry["attempt"],
            counts=RowCounts(**entry["counts"]),
            num_bytes=entry["bytes"],
        )

    @classmethod
    def read(cls, store: Store, name: str, num_bytes: int) -> Part | None:
        """The part data/`name` from its footer alone; None when the file is not whole.

        Raises OutputError when it is not a part that a job wrote.
        """
        path = store.path(f"{DATA}/{name}")
        # Read first and parsed from memory: pyarrow's errors for a torn footer and for a network that fails look alike,
        # and a part that cannot be reached just now is not damaged.
        with storage_errors(path), store.open(f"{DATA}/{name}") as file:
            content = _footer_bytes(file)
        try:
            footer = pq.read_metadata(pa.BufferReader(content))
        except (pa.ArrowInvalid, OSError):
            return None
        return cls._of_footer(footer, name, num_bytes, path)

    @classmethod
    def _of_footer(cls, footer: pq.FileMetaData, name: str, num_bytes: int, path: str) -> Part:
        metadata = footer.metadata or {}
        if not PART_NAME.fullmatch(name) or not metadata.keys() >= _OWN_KEYS:
            raise OutputError(f"{path} is not a part that specrun wrote; move it away or choose another output.path")
        entry = {
            "name": name,
            "row_start": int(metadata[_ROW_START]),
            "row_stop": int(metadata[_ROW_END]),
            "bytes": num_bytes,
            "attempt": int(metadata[_ATTEMPT]),
            "counts": orjson.loads(metadata[_COUNTS]),
        }
        part = cls.of_json(entry, metadata[_FINGERPRINT].decode())
        if footer.num_rows != part.num_rows or part.counts.num_rows != part.num_rows:
            raise OutputError(f"{path} holds {footer.num_rows} rows, its footer says {part.num_rows}; remove it")
        return part

    def schema(self, store: Store) -> pa.Schema:
        """Its columns."""
        with storage_errors(store.path(self.path)), store.open(self.path) as file:
            return pq.read_schema(file)

    def batches(self, store: Store, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Its rows in pieces of bounded size. StorageError when it cannot be read."""
        with storage_errors(store.path(self.path)), store.open(self.path) as file:
            parquet = pq.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
            yield from parquet.iter_batches(512, columns=columns, use_threads=False)

    def failed_rows(self, store: Store) -> Iterator[FailedRow]:
        """Each failed row, in input order."""
        if self.counts.num_failed:
            for batch in self.batches(store, ["row_index", "id", "error_code", "error_message"]):
                failed = batch.filter(pc.is_valid(batch.column("error_code")))
                yield from zip(*(column.to_pylist() for column in failed.columns), strict=True)


def _footer_bytes(file: pa.NativeFile) -> bytes:
    """The end of a Parquet file from its footer on; all of a file that is no longer than its footer says."""
    size: int = file.size()
    tail = file.read_at(min(size, 8), max(size - 8, 0))  # length of the footer, magic bytes
    num_bytes = min(size, 8 + int.from_bytes(tail[:4], "little")) if tail[4:] == b"PAR1" else 0
    content: bytes = file.read_at(num_bytes, size - num_bytes)
    return content


def write_part(
    path: Path, part: Part, schema: pa.Schema, metadata: Mapping[str, str], tables: Iterable[pa.Table]
) -> Part:
    """Writes `tables`, each one row group, to a file of no name yet, reads its footer back and gives it with its size.

    `path` has a part's name and lies outside data/. After an exception no file is left there: a Parquet writer that
    leaves by an exception closes a valid file with the rows it has so far.
    """
    own = {
        _FINGERPRINT: part.fingerprint.encode(),
        _ATTEMPT: str(part.attempt).encode(),
        _ROW_START: str(part.row_start).encode(),
        _ROW_END: str(part.row_stop).encode(),
        _COUNTS: orjson.dumps(asdict(part.counts)),
    }
    footer = schema.with_metadata({**{k.encode(): v.encode() for k, v in metadata.items()}, **own})
    try:
        with (
            storage_errors(path),
            open(path, "wb") as file,
            pq.ParquetWriter(file, footer, compression="zstd", compression_level=3) as writer,
        ):
            for table in tables:
                writer.write_table(table, row_group_size=ROW_GROUP_ROWS)
        return _read_back(path, part)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _read_back(path: Path, part: Part) -> Part:
    """The part as its file says; StorageError where that is not what was written."""
    try:
        with storage_errors(path):
            written = Part._of_footer(pq.read_metadata(path), path.name, path.stat().st_size, str(path))
    except pa.ArrowInvalid as error:
        raise StorageError(f"{path}: what was written cannot be read back; check the disk and submit again") from error
    if (written.row_start, written.row_stop, written.fingerprint) != (part.row_start, part.row_stop, part.fingerprint):
        raise StorageError(f"{path}: what was written reads back differently; check the disk and submit again")
    return written
