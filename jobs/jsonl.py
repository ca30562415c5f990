"""JSONL input: a first pass finds columns, types, marks and hashes, a second one gives rows. Both stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any, cast

import orjson
import pyarrow as pa

from .columns import ColumnPlan, RowBlock
from .errors import InputError
from .input_files import InputFile
from .json_line import as_written, json_text, parse_line, parse_lines
from .lines import Mark, TextStream, numbered_lines, scan_lines

BATCH_ROWS = 512
BATCH_BYTES = 16 << 20
MAX_COLUMNS = 10_000

_KINDS = {str: "text", int: "int", float: "float", bool: "bool", list: "list", dict: "object", type(None): "null"}
_BEYOND_INT64 = "big"
_INT64 = range(-(1 << 63), 1 << 63)
_ARROW_TYPES = {"text": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}


class JsonlReader:
    """The rows of some JSONL files as if they were one. A blank line makes no row, a bad one a row with an error.

    Values are carried under the one JSON type that a column has in all rows (text, whole number, number, truth value);
    lists, objects, mixed types and whole numbers beyond 64 bits are carried as JSON text. NaN and Infinity, which
    Python writes, are numbers.
    Raises InputError naming a file that is not (compressed) text.
    """

    def __init__(self, files: Sequence[InputFile], known: Mapping[str, Any] | None = None) -> None:
        """`known` is what scan() gave for the very same files; without it each is read from end to end."""
        self._kinds: dict[str, dict[str, None]] = {}
        self._marks: list[list[Mark]] = []
        if known is None:
            self.files = [self._scan(file) for file in files]
            self._scanned()
        else:
            self.files = [
                replace(file, num_rows=seen["num_rows"], hash=seen["hash"])
                for file, seen in zip(files, known["files"], strict=True)
            ]
            self._marks = [[Mark(*mark) for mark in seen["offsets"]] for seen in known["files"]]
            self._recall(known)
        self.num_rows = sum(file.num_rows or 0 for file in self.files)

    @property
    def columns(self) -> list[str]:
        """Names of the keys in order of appearance."""
        return list(self._kinds)

    def scan(self) -> dict[str, Any]:
        """What the first pass found, as JSON values."""
        files = [
            {**file.state(), "hash": file.hash, "num_rows": file.num_rows, "offsets": [list(mark) for mark in marks]}
            for file, marks in zip(self.files, self._marks, strict=True)
        ]
        return {"files": files, "kinds": {name: list(kinds) for name, kinds in self._kinds.items()}}

    def _recall(self, known: Mapping[str, Any]) -> None:
        self._kinds = {name: dict.fromkeys(kinds) for name, kinds in known["kinds"].items()}

    def _scan(self, file: InputFile) -> InputFile:
        num_rows, marks, found = scan_lines(file, self._visit)
        self._marks.append(marks)
        if len(self._kinds) > MAX_COLUMNS:
            raise InputError(
                f"{file.path}: more than {MAX_COLUMNS} different keys; put data that serves as keys into one object"
            )
        return replace(file, num_rows=num_rows, hash=found)

    def _scanned(self) -> None:
        """All files have been read."""

    def _visit(self, lines: list[bytes]) -> None:
        columns = self._kinds
        for line in lines:
            record = _quick_look(line)
            if record is None or len(columns) > MAX_COLUMNS:
                continue
            for name, value in record.items():
                kind = _KINDS[value.__class__]
                if kind == "int" and value not in _INT64:
                    kind = _BEYOND_INT64
                if name not in columns:
                    columns[name] = {}
                columns[name][kind] = None

    def use(self, plan: ColumnPlan) -> pa.Schema:
        """Take the plan; returns the schema of the columns that it carries."""
        self._plan = plan
        self._schema = pa.schema([pa.field(name, self._arrow_type(name) or pa.string()) for name in plan.passthrough])
        return self._schema

    def _arrow_type(self, name: str) -> pa.DataType | None:
        """None where values are carried as JSON text."""
        kinds = self._kinds[name].keys() - {"null"}
        return _ARROW_TYPES.get(next(iter(kinds))) if len(kinds) == 1 else None

    def blocks(self, start: int, stop: int, skip: Callable[[int, int], bool]) -> Iterator[RowBlock]:
        """Rows [start, stop) in order, without those runs for which skip(start, stop) is true.

        Lines before `start` and of long skipped runs are neither parsed nor, in a plain file, read.
        """
        before = 0
        for file, marks in zip(self.files, self._marks, strict=True):
            first, before = before, before + (file.num_rows or 0)
            if first < stop and start < before:
                for at, numbered in _batches(
                    file, marks, max(0, start - first), min(stop, before) - first, first, skip
                ):
                    yield self._block(at, file, numbered)

    def _block(self, start: int, file: InputFile, lines: list[tuple[int, bytes]]) -> RowBlock:
        records, errors = parse_lines(file, lines)
        values = {name: [record.get(name) for record in records] for name in self._plan.values}
        if self._plan.id is not None:
            ids = values[self._plan.id]
            for position, value in enumerate(ids):
                if value is not None and not isinstance(value, str):
                    ids[position] = as_written(self._plan.id, value, lines[position][1])
        group = self._plan.group
        groups = None if group is None else [record.get(group) for record in records]
        return RowBlock(start, values, errors, self._passthrough(records), groups)

    def _passthrough(self, records: list[dict[str, Any]]) -> pa.RecordBatch:
        if not self._schema.names:
            return pa.RecordBatch.from_arrays([pa.nulls(len(records))], ["row"]).select([])
        arrays = []
        for field in self._schema:
            values = [record.get(field.name) for record in records]
            if self._arrow_type(field.name) is None:
                values = [None if value is None else json_text(value) for value in values]
            arrays.append(pa.array(values, field.type))
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _quick_look(line: bytes) -> dict[str, Any] | None:
    """The object of a line, in a third of the time, for a look at its types; a line that is no row may have one."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return parse_line(line)[0]
    if record.__class__ is not dict:
        return None
    for value in record.values():
        # orjson makes floats of whole numbers beyond 64 bits.
        if value.__class__ is float and not _INT64.start < value < _INT64.stop:
            return parse_line(line)[0]
    return cast(dict[str, Any], record)


def _batches(
    file: InputFile, marks: list[Mark], start: int, stop: int, before: int, skip: Callable[[int, int], bool]
) -> Iterator[tuple[int, list[tuple[int, bytes]]]]:
    """Rows [start, stop) of a file, whose first one is row `before` of all, with the global index of their first."""
    file.check_unchanged()
    with closing(TextStream(file)) as stream:
        for first, end in _runs(file, marks, start, stop, before, skip):
            row = first.row
            last = file.num_rows or 0 if end is None else end.row
            for numbered in _batched(numbered_lines(stream, first, end and end.byte), start - row, stop - row):
                row = max(row, start)
                if not skip(before + row, before + row + len(numbered)):
                    yield before + row, numbered
                row += len(numbered)
            if row < min(last, stop):
                raise InputError(f"{file.path}: has fewer rows than before; run the job on a finished file")
    file.check_unchanged()


def _runs(
    file: InputFile, marks: list[Mark], start: int, stop: int, before: int, skip: Callable[[int, int], bool]
) -> Iterator[tuple[Mark, Mark | None]]:
    """From which mark up to which one (None: the end) rows are needed."""
    end = Mark(file.num_rows or 0, -1, -1)
    run: tuple[Mark, Mark] | None = None
    for one, two in pairwise([*marks, end]):
        low, high = max(one.row, start), min(two.row, stop)
        if low < high and not skip(before + low, before + high):
            run = (run[0] if run else one, two)
        elif run is not None:
            yield run
            run = None
    if run is not None:
        yield run[0], run[1] if run[1] is not end else None


def _batched(lines: Iterator[tuple[int, bytes]], start: int, stop: int) -> Iterator[list[tuple[int, bytes]]]:
    """Lines [start, stop) of those given, in batches."""
    batch: list[tuple[int, bytes]] = []
    size = 0
    for position, numbered in enumerate(islice(lines, stop)):
        if position < start:
            continue
        batch.append(numbered)
        size += len(numbered[1])
        if len(batch) == BATCH_ROWS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
