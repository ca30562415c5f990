"""The job's input as rows with a prompt each, in bounded memory and in input order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from .batch_lines import REQUEST, BatchLinesReader
from .batch_lines import SCHEMA as BATCH_SCHEMA
from .columns import ColumnPlan, RowBlock, RowError, plan_columns
from .input_files import InputFile
from .input_search import find_files
from .jsonl import JsonlReader
from .messages import InvalidMessages, read_messages
from .parquet import ParquetReader
from .row_errors import EMPTY_PROMPT, INVALID_MESSAGES, NULL_PROMPT, PARSE_ERROR, TEMPLATE_ERROR
from .spec import JobSpec
from .template import PromptTemplate, RenderError


@dataclass(slots=True)
class PromptRow:
    """One row of the input. Either prompt, messages or an error is set."""

    row_index: int
    """Position over all input files."""
    id: str | None
    prompt: str | None
    """The user's text, after the template."""
    messages: list[dict[str, Any]] | None
    params: dict[str, Any]
    """The row's own sampling parameters as the file has them, nulls left out; not checked."""
    error_code: str | None
    """One of row_errors."""
    error_message: str | None
    group: Any = None
    """The value of input.columns.group, of whatever type; None without one."""


@dataclass(slots=True)
class PromptBatch:
    """Consecutive rows and the columns that they carry to the output."""

    start: int
    """row_index of the first row."""
    rows: list[PromptRow]
    passthrough: pa.RecordBatch
    """len(rows) rows; may have no columns."""


def never(start: int, stop: int) -> bool:
    """Skip nothing."""
    return False


class PromptSource:
    """The rows of a job's input.

    Building it reads the footers of Parquet files, and JSONL files once from end to end (columns, types, row count,
    hash) unless `known`, what scan() gave before, is of the very same files: path, size and time of all of them agree.
    Raises InputMissing, InputError (a file that cannot be read, a custom_id that comes twice) and ConfigError (columns,
    types, the template).
    """

    passthrough_schema: pa.Schema
    num_rows: int
    """Rows of the job, input.limit observed."""
    params: tuple[str, ...]
    """Columns that override sampling for their row; of OpenAI batch lines the parameters that some line sets."""

    def __init__(self, spec: JobSpec, known: Mapping[str, Any] | None = None) -> None:
        template = spec.prompt.template
        self._template = PromptTemplate(template) if template is not None else None
        form, files = find_files(spec.input)
        self._reader, self._kind = _open_reader(spec, form, files, known)
        self.num_rows = min(self._reader.num_rows, spec.input.limit or self._reader.num_rows)
        if isinstance(self._reader, BatchLinesReader):
            self._plan = ColumnPlan(None, None, None, (), (), tuple(BATCH_SCHEMA.names))
            self.params, self.passthrough_schema = self._reader.params, BATCH_SCHEMA
        else:
            self._plan = plan_columns(spec, self._reader.columns, self._template, spec.input.path)
            self.params = self._plan.params
            self.passthrough_schema = self._reader.use(self._plan)

    @property
    def files(self) -> list[InputFile]:
        """In the order in which rows are counted."""
        return self._reader.files

    def scan(self) -> dict[str, Any]:
        """What was found out about the files, JSON values: give it to a later attempt as `known`.

        files: path, size, mtime_ns, hash, num_rows and, of JSONL, offsets: marks of [row, byte, line]. The first call
        reads local Parquet files from end to end.
        """
        return {"kind": self._kind, **self._reader.scan()}

    def identity(self) -> list[dict[str, Any]]:
        """For each file path, size and hash of its content: a file that was copied or touched has the same hash."""
        return [{name: file[name] for name in ("path", "size", "hash")} for file in self.scan()["files"]]

    def batches(
        self, skip: Callable[[int, int], bool] = never, start: int = 0, stop: int | None = None
    ) -> Iterator[PromptBatch]:
        """Rows [start, stop) of the job in input order, row_index counting over the whole input.

        Where skip(start, stop) is true, those rows are not made and no batch is given. Raises InputError or
        StorageError naming the file when reading fails on the way.
        """
        stop = self.num_rows if stop is None else min(stop, self.num_rows)
        for block in self._reader.blocks(start, stop, skip):
            rows = _request_rows(block) if isinstance(self._reader, BatchLinesReader) else self._rows(block)
            yield PromptBatch(block.start, rows, block.passthrough)

    def _rows(self, block: RowBlock) -> list[PromptRow]:
        plan, count = self._plan, block.num_rows
        nothing: list[Any] = [None] * count
        ids = block.values[plan.id] if plan.id is not None else nothing
        if plan.messages is not None:
            prompts, conversations = nothing, self._conversations(block, plan.messages)
        else:
            prompts, conversations = self._prompts(block), nothing
        rows = [
            PromptRow(index, identifier, prompt, messages, {}, None, None, group)
            for index, identifier, prompt, messages, group in zip(
                range(block.start, block.start + count),
                _texts(ids),
                prompts,
                conversations,
                block.groups or nothing,
                strict=True,
            )
        ]
        for name in plan.params:
            for row, value in zip(rows, block.values[name], strict=True):
                if value is not None:
                    row.params[name] = value
        for position, error in block.errors.items():
            row = rows[position]
            row.prompt = row.messages = None
            row.error_code, row.error_message = error
        return rows

    def _prompts(self, block: RowBlock) -> list[str | None]:
        """The text of each row; None, and an error in the block, where there is none."""
        plan, errors = self._plan, block.errors
        given: list[Any] | None = None
        if plan.prompt is not None:
            given = block.values[plan.prompt]
            for position, text in enumerate(given):
                if text.__class__ is not str:
                    errors.setdefault(position, _no_text(plan.prompt, text))
        prompts = given if self._template is None and given is not None else self._rendered(block)
        if "" in prompts:
            for position, text in enumerate(prompts):
                if text == "":
                    errors.setdefault(position, (EMPTY_PROMPT, "the prompt is empty"))
        return prompts

    def _rendered(self, block: RowBlock) -> list[str | None]:
        assert self._template is not None, "without a template there is a prompt column"
        names = self._plan.variables
        columns = [block.values[name] for name in names]
        prompts: list[str | None] = [None] * block.num_rows
        for position in range(block.num_rows):
            if position in block.errors:
                continue
            try:
                values = {name: column[position] for name, column in zip(names, columns, strict=True)}
                prompts[position] = self._template.render(values)
            except RenderError as exc:
                block.errors[position] = (TEMPLATE_ERROR, str(exc))
        return prompts

    def _conversations(self, block: RowBlock, column: str) -> list[list[dict[str, Any]] | None]:
        conversations: list[list[dict[str, Any]] | None] = [None] * block.num_rows
        for position, value in enumerate(block.values[column]):
            if position in block.errors:
                continue
            if value is None:
                block.errors[position] = (NULL_PROMPT, f"column {column!r} is null")
                continue
            try:
                conversations[position] = read_messages(value)
            except InvalidMessages as exc:
                block.errors[position] = (INVALID_MESSAGES, str(exc))
            except RecursionError:
                block.errors[position] = (INVALID_MESSAGES, "too many lists and objects within each other")
        return conversations


def _open_reader(
    spec: JobSpec, form: str, files: list[InputFile], known: Mapping[str, Any] | None
) -> tuple[ParquetReader | JsonlReader, str]:
    """The reader and what its scan depends on besides the files."""
    served = spec.model.served_model_name or spec.model.path
    kind = f"openai-batch of {served}" if spec.input.format == "openai-batch" else form
    if known is not None and not _is_of(known, kind, files):
        known = None
    if spec.input.format == "openai-batch":
        return BatchLinesReader(files, served, known), kind
    return (ParquetReader if form == "parquet" else JsonlReader)(files, known), kind


def _is_of(known: Mapping[str, Any], kind: str, files: list[InputFile]) -> bool:
    """Whether an earlier scan was of the same files, as far as path, size and time tell."""
    states = [{name: seen[name] for name in ("path", "size", "mtime_ns")} for seen in known.get("files", ())]
    return known.get("kind") == kind and states == [file.state() for file in files]


def _request_rows(block: RowBlock) -> list[PromptRow]:
    """The rows of OpenAI batch lines."""
    rows = []
    for position, request in enumerate(block.values[REQUEST]):
        row = PromptRow(block.start + position, None, None, None, {}, *block.errors.get(position, (None, None)))
        if request is not None:
            row.id = request.custom_id
            if row.error_code is None:
                row.prompt, row.messages, row.params = request.prompt, request.messages, request.params
        rows.append(row)
    return rows


def _no_text(column: str, value: Any) -> RowError:
    if value is None:
        return NULL_PROMPT, f"column {column!r} is null"
    return PARSE_ERROR, f"{column!r} is {type(value).__name__}, not text; quote it"


def _texts(ids: list[Any]) -> list[str | None]:
    return [value if value is None or value.__class__ is str else str(value) for value in ids]
