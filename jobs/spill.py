"""Where the rows of an unfinished part wait on disk, so that a part that one slow row holds up costs no memory.

Two files a part. Results, in the order in which they finish, are lines of JSON: they outlive a crash, and a torn last
line costs the row it belongs to. What the reader knows of each row (id, passthrough columns) is Arrow: it does not have
to outlive anything, since a resumed job reads the rows of unfinished parts again.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from .counts import RowCounts
from .errors import StorageError
from .parts import ROW_GROUP_ROWS
from .schema import OutputRow, result_schema
from .store import storage_errors, sync

_TABLE_BYTES = 16 << 20
"""Result bytes in one table: bounds the memory of a commit where outputs are long."""


class ResultCodec:
    """An OutputRow as a line: a JSON list of its row_index and its generated columns."""

    def __init__(self, token_ids: bool, logprobs: bool) -> None:
        self.schema = result_schema(token_ids, logprobs)
        names = self.schema.names
        self._fields = attrgetter("row_index", *names)
        self._outcome = [names.index(n) + 1 for n in ("finish_reason", "error_code", "prompt_tokens", "output_tokens")]

    def encode(self, row: OutputRow) -> bytes:
        """The line, its end included."""
        values = self._fields(row)
        try:
            return orjson.dumps(values, option=orjson.OPT_APPEND_NEWLINE)
        except orjson.JSONEncodeError:
            # Text from a broken source may hold lone surrogates, which no file can.
            return orjson.dumps([_valid(value) for value in values], option=orjson.OPT_APPEND_NEWLINE)

    def decode(self, lines: Sequence[bytes]) -> list[list[Any]]:
        """One list a line; ValueError when one is not whole."""
        rows: list[list[Any]] = orjson.loads(b"[" + b",".join(lines) + b"]")
        if any(type(row) is not list or len(row) != len(self.schema) + 1 for row in rows):
            raise ValueError("not a line of results")
        return rows

    def count(self, values: Sequence[Any], counts: RowCounts) -> None:
        """Adds a decoded line to `counts`."""
        finish_reason, error_code, prompt_tokens, output_tokens = self._outcome
        counts.add(values[finish_reason], values[error_code], values[prompt_tokens], values[output_tokens])


def _valid(value: Any) -> Any:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


class PartSpill:
    """The finished rows of one open part, [row_start, row_stop). Memory: 8 bytes a row.

    Results that an earlier attempt left in `folder` are taken up again, as far as they are whole.
    """

    def __init__(self, folder: Path, sequence: int, rows: tuple[int, int], codec: ResultCodec) -> None:
        self.sequence = sequence
        self.row_start, self.row_stop = rows
        self.num_expected = 0
        """Leading rows whose id and passthrough columns are known."""
        self.counts = RowCounts()
        self._codec = codec
        self._results = folder / f"part-{sequence:06d}.jsonl"
        self._source = folder / f"part-{sequence:06d}.arrow"
        self._offsets = np.full(self.row_stop - self.row_start, -1, dtype=np.int64)
        self._num_bytes = 0
        self._dirty = False
        self._take_up()

    @property
    def num_done(self) -> int:
        """Rows that have a result."""
        return self.counts.num_rows

    @property
    def is_full(self) -> bool:
        """Whether every row has been expected and has a result."""
        return self.num_expected == self.num_done == len(self._offsets)

    def is_done(self, row_index: int) -> bool:
        """Whether the row has a result."""
        return bool(self._offsets[row_index - self.row_start] >= 0)

    def missing(self) -> list[int]:
        """Rows without a result, as global indices."""
        return (np.flatnonzero(self._offsets < 0) + self.row_start).tolist()

    def expect(self, source: pa.RecordBatch) -> None:
        """Appends what is known of the next rows."""
        with (
            storage_errors(self._source),
            open(self._source, "ab" if self.num_expected else "wb") as file,
            pa.ipc.new_stream(file, source.schema) as stream,
        ):
            stream.write_batch(source)
        self.num_expected += source.num_rows

    def append(self, rows: Sequence[OutputRow]) -> None:
        """Appends results in one write. Raises ValueError for a row that is done or was never read."""
        positions = [row.row_index - self.row_start for row in rows]
        if max(positions) >= self.num_expected or min(positions) < 0:
            raise ValueError(f"a row of {min(positions)}..{max(positions)} in part {self.sequence} was never read")
        self.restore(rows)

    def restore(self, rows: Sequence[OutputRow]) -> None:
        """As append(), for results that are known before their row is read: those of a part that is done again."""
        positions = [row.row_index - self.row_start for row in rows]
        if len(set(positions)) < len(positions) or (self._offsets[positions] >= 0).any():
            raise ValueError(f"a row of part {self.sequence} has two results")
        lines = [self._codec.encode(row) for row in rows]
        self._write(b"".join(lines))
        ends = np.cumsum([len(line) for line in lines]) + self._num_bytes
        self._offsets[positions[0]] = self._num_bytes
        self._offsets[positions[1:]] = ends[:-1]
        self._num_bytes = int(ends[-1])
        for row in rows:
            self.counts.add(row.finish_reason, row.error_code, row.prompt_tokens, row.output_tokens)

    def sync(self) -> None:
        """Makes the results so far survive a power cut."""
        if self._dirty:
            with storage_errors(self._results):
                sync(self._results)
            self._dirty = False

    def remove(self) -> None:
        """Forgets the part, once it is committed."""
        with storage_errors(self._results):
            self._source.unlink(missing_ok=True)
            self._results.unlink(missing_ok=True)  # last, since a resumed job looks for this one

    def failed(self) -> Iterator[tuple[int, str, str | None]]:
        """Row index, error code and message of each failed row, in input order."""
        if not self.counts.num_failed:
            return
        code, message = (self._codec.schema.names.index(name) + 1 for name in ("error_code", "error_message"))
        with storage_errors(self._results), open(self._results, "rb") as file:
            for offset in self._offsets[self._offsets >= 0].tolist():
                file.seek(offset)
                (values,) = self._codec.decode([file.readline()])
                if values[code] is not None:
                    yield values[0], values[code], values[message]

    def tables(self, schema: pa.Schema) -> Iterator[pa.Table]:
        """All rows in input order with the columns of `schema`, in pieces of bounded size. The spill is_full."""
        if self.row_start == self.row_stop:
            return
        source = self._read_source()
        with (
            storage_errors(self._results),
            open(self._results, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as results,
        ):
            yield from self._tables(schema, source, results)

    def _tables(self, schema: pa.Schema, source: pa.Table, results: mmap.mmap) -> Iterator[pa.Table]:
        start, num_rows = 0, len(self._offsets)
        while start < num_rows:
            lines: list[bytes] = []
            num_bytes = 0
            for offset in self._offsets[start : min(start + ROW_GROUP_ROWS, num_rows)].tolist():
                lines.append(results[offset : results.find(b"\n", offset)])
                num_bytes += len(lines[-1])
                if num_bytes >= _TABLE_BYTES:
                    break
            stop = start + len(lines)
            row_index, *columns = zip(*self._codec.decode(lines), strict=True)
            if row_index != tuple(range(self.row_start + start, self.row_start + stop)):
                raise StorageError(f"{self._results} has changed on disk; remove it and submit again")
            arrays = [pa.array(c, f.type) for c, f in zip(columns, self._codec.schema, strict=True)]
            known = source.slice(start, stop - start)
            yield pa.Table.from_arrays([pa.array(row_index, pa.int64()), *known.columns, *arrays], schema=schema)
            start = stop

    def _read_source(self) -> pa.Table:
        batches: list[pa.RecordBatch] = []
        with storage_errors(self._source), pa.memory_map(str(self._source)) as source:
            while source.tell() < source.size():  # one stream after the other, as expect() wrote them
                batches.extend(pa.ipc.open_stream(source))
        return pa.Table.from_batches(batches)

    def _write(self, content: bytes) -> None:
        with storage_errors(self._results), open(self._results, "ab", buffering=0) as file:
            try:
                if file.write(content) != len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(self._num_bytes)  # no row may follow a torn line
                raise
        self._dirty = True

    def _take_up(self) -> None:
        if not self._results.exists():
            return
        with storage_errors(self._results), open(self._results, "r+b") as file:
            for line in file:
                try:
                    (values,) = self._codec.decode([line])
                    position = values[0] - self.row_start
                    if not line.endswith(b"\n") or not 0 <= position < len(self._offsets):
                        break
                    if self._offsets[position] >= 0:
                        break
                    self._codec.count(values, self.counts)
                except (ValueError, TypeError):
                    break
                self._offsets[position] = self._num_bytes
                self._num_bytes += len(line)
            file.truncate(self._num_bytes)
