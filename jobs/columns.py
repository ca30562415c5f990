"""Which input column serves for what, and a run of rows as the readers hand it on."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from .errors import ConfigError
from .response_format import FORMAT_KEYS
from .schema import OUTPUT_COLUMNS
from .sections import SamplingSpec
from .spec import JobSpec
from .template import PromptTemplate

SAMPLING_KEYS = FORMAT_KEYS.union(SamplingSpec.model_fields)
"""Parameters that count for their row. A column of such a name is one, also where it is carried or used by a template:
a row without what it asks for would be no better than one with another temperature.
"""

UNSUPPORTED_KEYS: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_grammar": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "max_completion_tokens": (),
    "max_new_tokens": (),
    "n": (1,),
    "prompt_logprobs": (),
    "skip_special_tokens": (True,),
    "stream": (False,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""Request parameters of vLLM and the OpenAI API that are not honoured, and the values, besides null, that ask for
nothing. A column of such a name is taken for a parameter, unless the template uses it or output.keep_columns lists it.
"""

RowError = tuple[str, str]
"""Code and message of a row that cannot run."""


@dataclass(slots=True)
class RowBlock:
    """Consecutive rows of the input."""

    start: int
    """Global index of the first row."""
    values: dict[str, list[Any]]
    """Python values of each column that is looked into."""
    errors: dict[int, RowError]
    """By position in the block: rows that could not be read."""
    passthrough: pa.RecordBatch
    groups: list[Any] | None = None
    """Values of the column that tells the groups, None for those that cannot be had; None without such a column."""

    @property
    def num_rows(self) -> int:
        return int(self.passthrough.num_rows)


@dataclass(frozen=True, slots=True)
class ColumnPlan:
    """The part that each input column plays."""

    id: str | None
    prompt: str | None
    """Text column; with a template, only where the template uses it."""
    messages: str | None
    params: tuple[str, ...]
    """Columns that override sampling for their row, those that ask for something unsupported included."""
    variables: tuple[str, ...]
    """Columns that the template uses."""
    passthrough: tuple[str, ...]
    """Columns carried to the output, in input order."""
    group: str | None = None
    """Column that tells the groups of rows; what else the column is for does not depend on it."""

    @property
    def values(self) -> list[str]:
        """Columns that are looked into because the output depends on them."""
        names = (self.id, self.prompt, self.messages, *self.params, *self.variables)
        return list(dict.fromkeys(name for name in names if name is not None))


def asks_for_nothing(name: str, value: Any) -> bool:
    """Whether an unsupported parameter has a value under which it makes no difference."""
    if isinstance(value, dict):  # a struct column gives every row every key
        value = {key: inner for key, inner in value.items() if inner is not None}
    return value is None or value in UNSUPPORTED_KEYS[name]


def plan_columns(spec: JobSpec, found: Sequence[str], template: PromptTemplate | None, where: str) -> ColumnPlan:
    """Give each found column its part. `where` names the input in messages.

    Raises ConfigError for a column that is missing or that would hide one of the output's own.
    """
    columns = spec.input.columns
    prompt = columns.prompt
    variables: tuple[str, ...] = ()
    if template is not None:
        for name in template.required:
            _require("prompt.template", name, found, where)
        variables = tuple(name for name in found if name in template.variables)
        prompt = prompt if prompt in variables else None
    used = {"id": columns.id, "prompt": prompt, "messages": columns.messages, "group": columns.group}
    for key, column in used.items():
        if column is not None:
            _require(f"input.columns.{key}", column, found, where)
    mapped = {columns.id, columns.prompt, columns.messages}
    data = {*mapped, *variables, *(spec.output.keep_columns if isinstance(spec.output.keep_columns, tuple) else ())}
    params = tuple(
        name
        for name in found
        if (name in SAMPLING_KEYS and name not in mapped) or (name in UNSUPPORTED_KEYS and name not in data)
    )
    passthrough = _passthrough(spec, found, mapped.union(params), where)
    return ColumnPlan(columns.id, prompt, columns.messages, params, variables, passthrough, columns.group)


def _passthrough(spec: JobSpec, found: Sequence[str], used: set[str | None], where: str) -> tuple[str, ...]:
    keep = spec.output.keep_columns
    if keep == "none":
        return ()
    if keep == "all":
        kept = tuple(name for name in found if name not in used)
    else:
        for name in keep:
            _require("output.keep_columns", name, found, where)
        kept = tuple(name for name in found if name in keep)
    taken = [name for name in kept if name in OUTPUT_COLUMNS]
    if taken:
        hint = "set input.columns.id: id, or " if taken == ["id"] and spec.input.columns.id is None else ""
        raise ConfigError(
            f"{where}: column {', '.join(map(repr, taken))} has a name that the output uses itself; {hint}"
            "list the columns to carry in output.keep_columns without it, or write none there"
        )
    return kept


def _require(key: str, name: str, found: Sequence[str], where: str) -> None:
    if name in found or not found:  # JSONL without a single good row shows no columns
        return
    near = difflib.get_close_matches(name, found, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(f"{key}: {where} has no column {name!r}; found {', '.join(found)}{hint}")
