"""Types of single values in a job file."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema


def _no_bool(value: Any) -> Any:
    # Python and pydantic take true for 1; in a job it is a slip (YAML reads yes and on as true).
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _local(value: str) -> str:
    if "://" in value:
        raise ValueError("must be a local path; copy or mount the files, remote stores are not read or written")
    return value


Int = Annotated[int, BeforeValidator(_no_bool)]
Float = Annotated[float, BeforeValidator(_no_bool)]
Text = Annotated[str, Field(min_length=1)]
LocalPath = Annotated[Text, AfterValidator(_local)]
Strings = Annotated[
    tuple[str, ...],
    BeforeValidator(_one_or_many),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
"""One string or a list of them."""
