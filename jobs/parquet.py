"""Parquet input: footers first, then rows in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from .columns import ColumnPlan, RowBlock, RowError
from .errors import ConfigError, InputError
from .input_files import InputFile, reading

BATCH_ROWS = 512
BATCH_BYTES = 16 << 20
"""Fewer rows in a block where rows are long."""

_STRINGS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
_BINARIES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_list_view, pa.types.is_fixed_size_list)


@dataclass(frozen=True, slots=True)
class _Footer:
    file: InputFile
    schema: pa.Schema
    row_groups: tuple[int, ...]
    """Rows in each."""
    row_bytes: int
    """Average size of a row, uncompressed."""


class ParquetReader:
    """The rows of some Parquet files as if they were one.

    Raises InputError naming the file when a footer cannot be read.
    """

    def __init__(self, files: Sequence[InputFile]) -> None:
        self._footers = [_read_footer(file) for file in files]
        self.files = [footer.file for footer in self._footers]
        self.columns = list(dict.fromkeys(name for footer in self._footers for name in footer.schema.names))
        self.num_rows = sum(sum(footer.row_groups) for footer in self._footers)

    def use(self, plan: ColumnPlan) -> pa.Schema:
        """Check the types of the columns that the plan names; returns the schema of those it carries.

        Raises ConfigError naming file, column and type; InputError where two files disagree.
        """
        for footer in self._footers:
            _check_column(footer, "id", plan.id, _is_id, "text or integers")
            _check_column(footer, "prompt", plan.prompt, _is_text, "text")
            _check_column(footer, "messages", plan.messages, _is_messages, "a list of {role, content} or JSON text")
        self._plan = plan
        self._schema = pa.schema([self._unified_field(name) for name in plan.passthrough])
        return self._schema

    def _unified_field(self, name: str) -> pa.Field:
        owner: Path | None = None
        field: Any = None
        for footer in self._footers:
            position = footer.schema.get_field_index(name)
            if position < 0:
                continue
            other = footer.schema.field(position).with_nullable(True).remove_metadata()
            try:
                schemas = [pa.schema([f]) for f in (field, other) if f is not None]
                unified = pa.unify_schemas(schemas).field(0)
            except pa.ArrowException as exc:
                raise InputError(
                    f"column {name!r} is {field.type} in {owner} and {other.type} in {footer.file.path}; "
                    "write one type in all files, or leave the column out with output.keep_columns"
                ) from exc
            if field is None or unified.type != field.type:
                owner = footer.file.path
            field = unified
        return field

    def blocks(self, limit: int, skip: Callable[[int, int], bool]) -> Iterator[RowBlock]:
        """Rows [0, limit) in order, without those runs for which skip(start, stop) is true."""
        start = 0
        for footer in self._footers:
            for first, row_groups in _runs(footer, start, limit, skip):
                yield from self._read(footer, first, row_groups, limit, skip)
            start += sum(footer.row_groups)

    def _read(
        self, footer: _Footer, start: int, row_groups: list[int], limit: int, skip: Callable[[int, int], bool]
    ) -> Iterator[RowBlock]:
        path = footer.file.path
        footer.file.check_unchanged()
        names = [
            name for name in dict.fromkeys((*self._plan.values, *self._plan.passthrough)) if name in footer.schema.names
        ]
        batch_rows = max(1, min(BATCH_ROWS, BATCH_BYTES // max(1, footer.row_bytes)))
        with ExitStack() as stack:
            with reading(path):
                parquet = stack.enter_context(_open(footer.file))
                # Threads would read ahead; without them one page of each column is in memory.
                batches = parquet.iter_batches(batch_rows, row_groups=row_groups, columns=names, use_threads=False)
            while start < limit:
                with reading(path):
                    batch = next(batches, None)
                if batch is None:
                    return
                batch = batch.slice(0, limit - start)
                if not skip(start, start + len(batch)):
                    yield self._block(start, batch)
                start += len(batch)

    def _block(self, start: int, batch: pa.RecordBatch) -> RowBlock:
        values: dict[str, list[Any]] = {}
        errors: dict[int, RowError] = {}
        for name in self._plan.values:
            position = batch.schema.get_field_index(name)
            values[name] = (
                _python_values(name, batch.column(position), errors) if position >= 0 else [None] * len(batch)
            )
        if not self._schema.names:
            return RowBlock(start, values, errors, batch.select([]))
        arrays = []
        for field in self._schema:
            position = batch.schema.get_field_index(field.name)
            array = batch.column(position) if position >= 0 else pa.nulls(len(batch), field.type)
            arrays.append(array if array.type == field.type else array.cast(field.type))
        return RowBlock(start, values, errors, pa.RecordBatch.from_arrays(arrays, schema=self._schema))


def _open(file: InputFile) -> pq.ParquetFile:
    # Both arguments are needed to stream: with either default a whole row group is buffered.
    return pq.ParquetFile(file.path, pre_buffer=False, buffer_size=1 << 20)


def _read_footer(file: InputFile) -> _Footer:
    with reading(file.path), _open(file) as parquet:
        metadata = parquet.metadata
        schema = parquet.schema_arrow
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        rows = tuple(group.num_rows for group in groups)
        size = sum(group.total_byte_size for group in groups)
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise InputError(f"{file.path}: has two columns named {twice[0]!r}; rename one")
    return _Footer(replace(file, num_rows=sum(rows)), schema, rows, size // max(1, sum(rows)))


def _runs(footer: _Footer, start: int, limit: int, skip: Callable[[int, int], bool]) -> Iterator[tuple[int, list[int]]]:
    """Neighbouring row groups that are needed, each run with the global index of its first row."""
    run: list[int] = []
    first = start
    for index, rows in enumerate(footer.row_groups):
        needed = rows > 0 and start < limit and not skip(start, min(start + rows, limit))
        if needed:
            if not run:
                first = start
            run.append(index)
        elif run and rows > 0:
            yield first, run
            run = []
        start += rows
    if run:
        yield first, run


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_null(kind) or any(test(kind) for test in _STRINGS + _BINARIES)


def _is_id(kind: pa.DataType) -> bool:
    return _is_text(kind) or pa.types.is_integer(kind)


def _is_messages(kind: pa.DataType) -> bool:
    if _is_text(kind):
        return True
    if not any(test(kind) for test in _LISTS):
        return False
    item = kind.value_type
    return pa.types.is_struct(item) and all(item.get_field_index(name) >= 0 for name in ("role", "content"))


def _check_column(
    footer: _Footer, key: str, name: str | None, accepts: Callable[[pa.DataType], bool], wanted: str
) -> None:
    if name is None:
        return
    position = footer.schema.get_field_index(name)
    if position < 0:
        raise ConfigError(
            f"input.columns.{key}: {footer.file.path} has no column {name!r}; found {', '.join(footer.schema.names)}"
        )
    kind = footer.schema.field(position).type
    if not accepts(kind):
        raise ConfigError(
            f"input.columns.{key}: column {name!r} of {footer.file.path} is {kind}; it must be {wanted}, so cast it"
        )


def _python_values(name: str, column: pa.Array, errors: dict[int, RowError]) -> list[Any]:
    """The values of a column; those that Python cannot hold become None and an error of their row."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    is_binary = any(test(column.type) for test in _BINARIES)
    try:
        values: list[Any] = column.to_pylist()
        return [value if value is None else value.decode() for value in values] if is_binary else values
    except (ValueError, OverflowError, pa.ArrowException):
        values = []
    for position, scalar in enumerate(column):
        value = None
        try:
            value = scalar.as_py()
            value = value.decode() if is_binary and value is not None else value
        except UnicodeDecodeError as exc:
            value = None
            errors.setdefault(position, ("encoding_error", f"column {name!r} is not UTF-8 at byte {exc.start}"))
        except (ValueError, OverflowError, pa.ArrowException) as exc:
            errors.setdefault(position, ("parse_error", f"column {name!r}: {' '.join(str(exc).split())}"))
        values.append(value)
    return values
