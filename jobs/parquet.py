"""Parquet input: footers first, then rows in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from .arrow_types import absent, common_type, is_id, is_messages, is_text, python_values
from .columns import ColumnPlan, RowBlock, RowError
from .errors import ConfigError, InputError
from .filesystem import retrying
from .input_files import InputFile, reading

BATCH_ROWS = 512
BATCH_BYTES = 16 << 20
"""Fewer rows in a block where rows are long."""

REMOTE_BUFFER_BYTES = 8 << 20
"""A request to an object store costs tens of milliseconds whatever its size."""
FOOTER_THREADS = 8


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

    def __init__(self, files: Sequence[InputFile], known: Mapping[str, Any] | None = None) -> None:
        """`known` is what scan() gave for the very same files."""
        with ThreadPoolExecutor(FOOTER_THREADS) as pool:
            self._footers = list(pool.map(_read_footer, files))
        self.files = [footer.file for footer in self._footers]
        if known is not None:
            self.files = [replace(f, hash=k["hash"]) for f, k in zip(self.files, known["files"], strict=True)]
        self.columns = list(dict.fromkeys(name for footer in self._footers for name in footer.schema.names))
        self.num_rows = sum(sum(footer.row_groups) for footer in self._footers)

    def scan(self) -> dict[str, Any]:
        """Size, time, hash and rows of each file, as JSON values. The first call reads every byte of local files."""
        if any(file.is_remote for file in self.files):
            with ThreadPoolExecutor(FOOTER_THREADS) as pool:
                self.files = list(pool.map(_hashed, self.files))
        else:  # on this thread, which a signal can stop
            self.files = [_hashed(file) for file in self.files]
        return {"files": [{**f.state(), "hash": f.hash, "num_rows": f.num_rows} for f in self.files]}

    def use(self, plan: ColumnPlan) -> pa.Schema:
        """Check the types of the columns that the plan names; returns the schema of those it carries.

        Raises ConfigError naming file, column and type; InputError where two files disagree.
        """
        for footer in self._footers:
            _check_column(footer, "id", plan.id, is_id, "text or integers")
            _check_column(footer, "prompt", plan.prompt, is_text, "text")
            _check_column(footer, "messages", plan.messages, is_messages, "a list of {role, content} or JSON text")
        self._plan = plan
        self._schema = pa.schema([self._unified_field(name) for name in plan.passthrough])
        return self._schema

    def _unified_field(self, name: str) -> pa.Field:
        owner = ""
        kind: pa.DataType | None = None
        for footer in self._footers:
            position = footer.schema.get_field_index(name)
            if position < 0:
                continue
            other = footer.schema.field(position).type
            unified = other if kind is None else common_type(kind, other)
            if unified is None:
                raise InputError(
                    f"column {name!r} is {kind} in {owner} and {other} in {footer.file.path}; "
                    "write one type in all files, or leave the column out with output.keep_columns"
                )
            if unified != kind:
                owner = footer.file.path
            kind = unified
        return pa.field(name, kind)

    def blocks(self, start: int, stop: int, skip: Callable[[int, int], bool]) -> Iterator[RowBlock]:
        """Rows [start, stop) in order, without those runs for which skip(start, stop) is true."""
        first = 0
        for footer in self._footers:
            for at, row_groups in _runs(footer, first, start, stop, skip):
                yield from self._read(footer, at, row_groups, start, stop, skip)
            first += sum(footer.row_groups)

    def _read(
        self,
        footer: _Footer,
        at: int,
        row_groups: list[int],
        start: int,
        stop: int,
        skip: Callable[[int, int], bool],
    ) -> Iterator[RowBlock]:
        """The rows of some row groups, whose first row is `at`, as far as they lie in [start, stop)."""
        footer.file.check_unchanged()
        plan = self._plan
        wanted = dict.fromkeys((*plan.values, *plan.passthrough, *filter(None, [plan.group])))
        names = [name for name in wanted if name in footer.schema.names]
        end = at + sum(footer.row_groups[group] for group in row_groups)
        for batch in _batches(footer, row_groups, names):
            first, at = at, at + len(batch)
            low, high = max(first, start), min(at, stop)
            if low < high and not skip(low, high):
                yield self._block(low, batch.slice(low - first, high - low))
            if at >= stop:
                break
        if at < min(end, stop):
            raise InputError(f"{footer.file.path}: has fewer rows than its footer says; write the file again")
        footer.file.check_unchanged()

    def _block(self, start: int, batch: pa.RecordBatch) -> RowBlock:
        values: dict[str, list[Any]] = {}
        errors: dict[int, RowError] = {}
        for name in self._plan.values:
            position = batch.schema.get_field_index(name)
            values[name] = python_values(name, batch.column(position), errors) if position >= 0 else [None] * len(batch)
        groups = self._groups(batch)
        if not self._schema.names:
            return RowBlock(start, values, errors, batch.select([]), groups)
        arrays = []
        for field in self._schema:
            position = batch.schema.get_field_index(field.name)
            if position < 0 or pa.types.is_null(batch.schema.field(position).type):
                arrays.append(absent(len(batch), field.type))
                continue
            array = batch.column(position)
            arrays.append(array if array.type == field.type else array.cast(field.type))
        return RowBlock(start, values, errors, pa.RecordBatch.from_arrays(arrays, schema=self._schema), groups)

    def _groups(self, batch: pa.RecordBatch) -> list[Any] | None:
        name = self._plan.group
        if name is None:
            return None
        position = batch.schema.get_field_index(name)
        # No row fails over a value that only tells its group.
        return python_values(name, batch.column(position), {}) if position >= 0 else [None] * len(batch)


def _batches(footer: _Footer, row_groups: list[int], names: list[str]) -> Iterator[pa.RecordBatch]:
    """All rows of some row groups. After a transient error of an object store it goes on at the row it had reached."""
    batch_rows = max(1, min(BATCH_ROWS, BATCH_BYTES // max(1, footer.row_bytes)))
    done = 0
    batches: Iterator[pa.RecordBatch] | None = None
    with ExitStack() as stack:

        def advance() -> pa.RecordBatch | None:
            nonlocal batches
            try:
                if batches is None:
                    stack.pop_all().close()
                    parquet = stack.enter_context(_open(footer.file))
                    # Threads would read ahead; without them one page of each column is in memory.
                    found = parquet.iter_batches(batch_rows, row_groups=row_groups, columns=names, use_threads=False)
                    batches = _without_first(found, done)
                return next(batches, None)
            except OSError:
                batches = None
                raise

        while True:
            with reading(footer.file.path):
                batch = retrying(advance)
            if batch is None:
                return
            done += len(batch)
            yield batch


def _without_first(batches: Iterator[pa.RecordBatch], num_rows: int) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if len(batch) > num_rows:
            yield batch.slice(num_rows)
        num_rows = max(0, num_rows - len(batch))


def _open(file: InputFile) -> pq.ParquetFile:
    # Both arguments are needed to stream: with either default a whole row group is buffered.
    buffer_size = REMOTE_BUFFER_BYTES if file.is_remote else 1 << 20
    return pq.ParquetFile(
        file.key,
        filesystem=file.filesystem,
        pre_buffer=False,
        buffer_size=buffer_size,
        page_checksum_verification=True,
    )


def _read_footer(file: InputFile) -> _Footer:
    with reading(file.path), retrying(lambda: _open(file)) as parquet:
        metadata = parquet.metadata
        schema = parquet.schema_arrow
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        rows = tuple(group.num_rows for group in groups)
        size = sum(group.total_byte_size for group in groups)
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise InputError(f"{file.path}: has two columns named {twice[0]!r}; rename one")
    return _Footer(replace(file, num_rows=sum(rows)), schema, rows, size // max(1, sum(rows)))


def _hashed(file: InputFile) -> InputFile:
    if file.hash is not None:
        return file
    found = file.content_hash()
    file.check_unchanged()
    return replace(file, hash=found)


def _runs(
    footer: _Footer, first: int, start: int, stop: int, skip: Callable[[int, int], bool]
) -> Iterator[tuple[int, list[int]]]:
    """Neighbouring row groups that are needed, each run with the global index of its first row."""
    run: list[int] = []
    at = first
    for index, rows in enumerate(footer.row_groups):
        low, high = max(first, start), min(first + rows, stop)
        if low < high and not skip(low, high):
            if not run:
                at = first
            run.append(index)
        elif run and rows > 0:
            yield at, run
            run = []
        first += rows
    if run:
        yield at, run


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
