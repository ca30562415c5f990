"""A part: one Parquet file that holds the results of a fixed range of rows. Written beside, verified, then named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from .counts import RowCounts
from .errors import OutputError, StorageError
from .folder import PART_NAME, storage_errors

ROW_GROUP_ROWS = 8192
"""Most rows in a row group, so that a reader of few rows stays small."""
_FINGERPRINT = b"specrun.fingerprint"
_ROW_START = b"specrun.row_start"
_ROW_END = b"specrun.row_end"
_COUNTS = b"specrun.counts"


def part_name(sequence: int, shard: int = 0) -> str:
    """File name of the part that holds rows [sequence * rows_per_part, (sequence + 1) * rows_per_part)."""
    return f"part-{shard:05d}-{sequence:06d}.parquet"


@dataclass(frozen=True, slots=True)
class Part:
    """A committed part, as its footer describes it."""

    sequence: int
    row_start: int
    row_stop: int
    num_bytes: int
    fingerprint: str
    """Hash of the job's fingerprint."""
    counts: RowCounts

    @property
    def name(self) -> str:
        return part_name(self.sequence)

    @property
    def num_rows(self) -> int:
        return self.row_stop - self.row_start

    def to_json(self) -> dict[str, str | int]:
        """The part's entry in manifest and journal."""
        return {
            "name": self.name,
            "rows": self.num_rows,
            "row_start": self.row_start,
            "row_stop": self.row_stop,
            "bytes": self.num_bytes,
        }

    @classmethod
    def read(cls, path: Path) -> Part | None:
        """The part at `path` from its footer alone; None when the file is not whole.

        Raises OutputError when it is not a part that a job wrote.
        """
        match = PART_NAME.fullmatch(path.name)
        try:
            footer = pq.read_metadata(path)
        except (pa.ArrowInvalid, OSError) as error:
            if getattr(error, "errno", None):
                raise StorageError(f"{path} cannot be read: {error}; check the disk and submit again") from error
            return None  # pyarrow says of a torn footer that it is invalid, or an OSError without a number
        metadata = footer.metadata or {}
        if match is None or not {_FINGERPRINT, _ROW_START, _ROW_END, _COUNTS} <= metadata.keys():
            raise OutputError(f"{path} is not a part that specrun wrote; move it away or choose another output.path")
        part = cls(
            sequence=int(match[2]),
            row_start=int(metadata[_ROW_START]),
            row_stop=int(metadata[_ROW_END]),
            num_bytes=path.stat().st_size,
            fingerprint=metadata[_FINGERPRINT].decode(),
            counts=RowCounts(**orjson.loads(metadata[_COUNTS])),
        )
        if footer.num_rows != part.num_rows or part.counts.num_rows != part.num_rows:
            raise OutputError(f"{path} holds {footer.num_rows} rows, its footer says {part.num_rows}; remove it")
        return part


def write_part(
    path: Path, part: Part, schema: pa.Schema, metadata: Mapping[str, str], tables: Iterable[pa.Table]
) -> Part:
    """Writes `tables`, each one row group, to a file of no name yet, reads its footer back and gives it with its size.

    `path` has a part's name and lies outside data/. After an exception no file is left there: a Parquet writer that
    leaves by an exception closes a valid file with the rows it has so far.
    """
    own = {
        _FINGERPRINT: part.fingerprint.encode(),
        _ROW_START: str(part.row_start).encode(),
        _ROW_END: str(part.row_stop).encode(),
        _COUNTS: orjson.dumps(asdict(part.counts)),
    }
    footer = {**{key.encode(): value.encode() for key, value in metadata.items()}, **own}
    try:
        with storage_errors(path):
            with pq.ParquetWriter(
                path, schema.with_metadata(footer), compression="zstd", compression_level=3
            ) as writer:
                for table in tables:
                    writer.write_table(table, row_group_size=ROW_GROUP_ROWS)
            written = Part.read(path)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    expected = (part.row_start, part.row_stop, part.fingerprint)
    if written is None or (written.row_start, written.row_stop, written.fingerprint) != expected:
        path.unlink(missing_ok=True)
        raise StorageError(f"{path}: what was written reads back differently; check the disk and submit again")
    return written
