"""The job's input as rows with a prompt each, in bounded memory and in input order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from .columns import RowBlock, RowError, plan_columns
from .input_files import InputFile, find_files, identity_of
from .jsonl import JsonlReader
from .messages import InvalidMessages, read_messages
from .parquet import ParquetReader
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
    """null_prompt, empty_prompt, template_error, parse_error, invalid_messages or encoding_error."""
    error_message: str | None


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

    Building it reads the footers of Parquet files, and JSONL files once from end to end (columns, types, row count).
    Raises InputMissing, InputError (a file that cannot be read) and ConfigError (columns, types, the template).
    """

    files: list[InputFile]
    passthrough_schema: pa.Schema
    num_rows: int
    """Rows of the job, input.limit observed."""
    params: tuple[str, ...]
    """Columns that override sampling for their row."""

    def __init__(self, spec: JobSpec) -> None:
        template = spec.prompt.template
        self._template = PromptTemplate(template) if template is not None else None
        self._format, files = find_files(spec.input)
        self._reader = ParquetReader(files) if self._format == "parquet" else JsonlReader(files)
        self.files = self._reader.files
        self.num_rows = min(self._reader.num_rows, spec.input.limit or self._reader.num_rows)
        self._plan = plan_columns(spec, self._reader.columns, self._template, spec.input.path)
        self.params = self._plan.params
        self.passthrough_schema = self._reader.use(self._plan)

    def identity(self) -> list[dict[str, Any]]:
        """For each file path, size, mtime_ns and hash; input_files.identity() gives the same without reading rows."""
        return identity_of(self._format, self.files)

    def batches(self, skip: Callable[[int, int], bool] = never) -> Iterator[PromptBatch]:
        """Rows in input order. Where skip(start, stop) is true, those rows are not made and no batch is given.

        Raises InputError or StorageError naming the file when reading fails on the way.
        """
        for block in self._reader.blocks(self.num_rows, skip):
            yield PromptBatch(block.start, self._rows(block), block.passthrough)

    def _rows(self, block: RowBlock) -> list[PromptRow]:
        plan, count = self._plan, block.num_rows
        nothing: list[Any] = [None] * count
        ids = block.values[plan.id] if plan.id is not None else nothing
        if plan.messages is not None:
            prompts, conversations = nothing, self._conversations(block, plan.messages)
        else:
            prompts, conversations = self._prompts(block), nothing
        rows = [
            PromptRow(index, identifier, prompt, messages, {}, None, None)
            for index, identifier, prompt, messages in zip(
                range(block.start, block.start + count), _texts(ids), prompts, conversations, strict=True
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
                    errors.setdefault(position, ("empty_prompt", "the prompt is empty"))
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
                block.errors[position] = ("template_error", str(exc))
        return prompts

    def _conversations(self, block: RowBlock, column: str) -> list[list[dict[str, Any]] | None]:
        conversations: list[list[dict[str, Any]] | None] = [None] * block.num_rows
        for position, value in enumerate(block.values[column]):
            if position in block.errors:
                continue
            if value is None:
                block.errors[position] = ("null_prompt", f"column {column!r} is null")
                continue
            try:
                conversations[position] = read_messages(value)
            except InvalidMessages as exc:
                block.errors[position] = ("invalid_messages", str(exc))
        return conversations


def _no_text(column: str, value: Any) -> RowError:
    if value is None:
        return "null_prompt", f"column {column!r} is null"
    return "parse_error", f"{column!r} is {type(value).__name__}, not text; quote it"


def _texts(ids: list[Any]) -> list[str | None]:
    return [value if value is None or value.__class__ is str else str(value) for value in ids]
