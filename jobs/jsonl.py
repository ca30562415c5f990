"""JSONL input: a first pass finds columns, types and row count, a second one gives rows. Both stream."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, BinaryIO

import pyarrow as pa

from .columns import ColumnPlan, RowBlock, RowError
from .errors import InputError
from .input_files import InputFile, reading

BATCH_ROWS = 512
BATCH_BYTES = 16 << 20
MAX_LINE_BYTES = 256 << 20
MAX_COLUMNS = 10_000

_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_BOM = b"\xef\xbb\xbf"
_MAGIC = {
    b"PAR1": "is a Parquet file; name it *.parquet",
    b"\x1f\x8b": "is gzip data; name it *.jsonl.gz",
    b"\x28\xb5\x2f\xfd": "is zstd data; name it *.jsonl.zst",
    b"\xff\xfe": "is UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "is UTF-16 text; save it as UTF-8",
}


class _BeyondInt64:
    """Stands for the type of an integer that no int64 holds."""


_ARROW_TYPES = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}


class JsonlReader:
    """The rows of some JSONL files as if they were one. A blank line makes no row, a bad one a row with an error.

    Values are carried under the one JSON type that a column has in all rows (text, whole number, number, truth value);
    lists, objects, mixed types and whole numbers beyond 64 bits are carried as JSON text.
    Raises InputError naming a file that is not (compressed) text.
    """

    def __init__(self, files: Sequence[InputFile]) -> None:
        self._kinds: dict[str, set[type]] = {}
        self.files = [replace(file, num_rows=self._scan(file)) for file in files]
        self.columns = list(self._kinds)
        self.num_rows = sum(file.num_rows or 0 for file in self.files)

    def _scan(self, file: InputFile) -> int:
        num_rows = 0
        for _, line in _lines(file):
            num_rows += 1
            record, _ = _parse(line)
            for name, value in (record or {}).items():
                kind: type = type(value)
                if kind is int and not -(1 << 63) <= value < 1 << 63:
                    kind = _BeyondInt64
                seen = self._kinds.get(name)
                if seen is None:
                    seen = self._kinds[name] = set()
                seen.add(kind)
            if len(self._kinds) > MAX_COLUMNS:
                raise InputError(
                    f"{file.path}: more than {MAX_COLUMNS} different keys; put data that serves as keys into one object"
                )
        return num_rows

    def use(self, plan: ColumnPlan) -> pa.Schema:
        """Take the plan; returns the schema of the columns that it carries."""
        self._plan = plan
        self._schema = pa.schema([pa.field(name, self._arrow_type(name) or pa.string()) for name in plan.passthrough])
        return self._schema

    def _arrow_type(self, name: str) -> pa.DataType | None:
        """None where values are carried as JSON text."""
        kinds = self._kinds[name] - {type(None)}
        return _ARROW_TYPES.get(next(iter(kinds))) if len(kinds) == 1 else None

    def blocks(self, limit: int, skip: Callable[[int, int], bool]) -> Iterator[RowBlock]:
        """Rows [0, limit) in order, without those runs for which skip(start, stop) is true."""
        start = 0
        for file in self.files:
            if start >= limit:
                return
            stop = min(limit, start + (file.num_rows or 0))
            file.check_unchanged()
            for lines in _batched(_lines(file), stop - start):
                if not skip(start, start + len(lines)):
                    yield self._block(start, file, lines)
                start += len(lines)

    def _block(self, start: int, file: InputFile, lines: list[tuple[int, bytes]]) -> RowBlock:
        records: list[dict[str, Any]] = []
        errors: dict[int, RowError] = {}
        for position, (number, line) in enumerate(lines):
            record, error = _parse(line)
            if error is not None:
                code, message = error
                errors[position] = (code, f"line {number} of {file.path.name}: {message}")
            records.append(record or {})
        values = {name: [record.get(name) for record in records] for name in self._plan.values}
        if self._plan.id is not None:
            ids = values[self._plan.id]
            for position, value in enumerate(ids):
                if value is not None and not isinstance(value, str):
                    ids[position] = _as_written(self._plan.id, value, lines[position][1])
        return RowBlock(start, values, errors, self._passthrough(records))

    def _passthrough(self, records: list[dict[str, Any]]) -> pa.RecordBatch:
        if not self._schema.names:
            return pa.RecordBatch.from_arrays([pa.nulls(len(records))], ["row"]).select([])
        arrays = []
        for field in self._schema:
            values = [record.get(field.name) for record in records]
            if self._arrow_type(field.name) is None:
                values = [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
            arrays.append(pa.array(values, field.type))
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _lines(file: InputFile) -> Iterator[tuple[int, bytes]]:
    """Line number from 1 and bytes of every line that is not blank; only \\n ends a line."""
    with reading(file.path), closing(_open(file)) as stream:
        number = 0
        while line := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            if number == 1:
                line = _first_line(file, line)
            if len(line) > MAX_LINE_BYTES:
                raise InputError(f"{file.path}: line {number} has more than {MAX_LINE_BYTES} bytes; split the row")
            line = line.strip(b" \t\r\n")
            if line:
                yield number, line


def _open(file: InputFile) -> BinaryIO:
    compression = _COMPRESSIONS.get(file.path.suffix)
    if compression is None:
        return file.path.open("rb", buffering=1 << 20)
    if file.size == 0:
        raise InputError(f"{file.path}: is empty, not {compression} data; write the file again or remove it")
    # Arrow's streams, unlike Python's zstandard, tell a truncated file from a finished one.
    return io.BufferedReader(pa.input_stream(str(file.path), compression=compression), 1 << 20)


def _first_line(file: InputFile, line: bytes) -> bytes:
    for magic, text in _MAGIC.items():
        if line.startswith(magic):
            raise InputError(f"{file.path}: {text}")
    return line.removeprefix(_BOM)


def _batched(lines: Iterator[tuple[int, bytes]], num_rows: int) -> Iterator[list[tuple[int, bytes]]]:
    batch: list[tuple[int, bytes]] = []
    size = 0
    for numbered in lines:
        batch.append(numbered)
        size += len(numbered[1])
        num_rows -= 1
        if len(batch) == BATCH_ROWS or size >= BATCH_BYTES or num_rows == 0:
            yield batch
            batch, size = [], 0
        if num_rows == 0:
            return


def _parse(line: bytes) -> tuple[dict[str, Any] | None, RowError | None]:
    try:
        record = json.loads(line.decode())
        if b"\\u" in line:
            # An escaped half of a surrogate pair is JSON but not text: nothing could write it.
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeDecodeError as exc:
        return None, ("encoding_error", f"not UTF-8 at byte {exc.start}")
    except UnicodeEncodeError:
        return None, ("encoding_error", "holds half of a surrogate pair (\\ud800 to \\udfff)")
    except (ValueError, RecursionError) as exc:
        return None, ("parse_error", f"not JSON: {exc}")
    if not isinstance(record, dict):
        return None, ("parse_error", f"not a JSON object but {type(record).__name__}")
    return record, None


def _as_written(name: str, value: Any, line: bytes) -> str:
    """The text of an id that is no string; a number keeps the digits of the file (1.50 stays 1.50)."""
    if isinstance(value, float):
        value = json.loads(line, parse_float=str)[name]
        return str(value)
    return json.dumps(value, ensure_ascii=False)
