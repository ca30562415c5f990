"""Types of single values in a job file."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

REMOTE_SCHEMES = ("s3", "gs")
_SECRET_OPTION = re.compile(r"[?&][^=&]*(key|secret|token|password|signature|credential)[^=&]*=", re.IGNORECASE)


def _no_bool(value: Any) -> Any:
    # Python and pydantic take true for 1; in a job it is a slip (YAML reads yes and on as true).
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def check_location(value: str) -> str:
    """A local path or the URI of an object store without credentials; ValueError, which does not show the value."""
    scheme, separator, rest = value.partition("://")
    if separator and scheme not in REMOTE_SCHEMES:
        raise ValueError(f"must be a local path or one of {', '.join(s + '://' for s in REMOTE_SCHEMES)}")
    if separator and ("@" in rest or _SECRET_OPTION.search(rest)):
        raise ValueError("must not hold credentials; give them in the environment, as in AWS_ACCESS_KEY_ID")
    return value


Int = Annotated[int, BeforeValidator(_no_bool)]
Float = Annotated[float, BeforeValidator(_no_bool)]
Text = Annotated[str, Field(min_length=1)]
Location = Annotated[Text, AfterValidator(check_location)]
Strings = Annotated[
    tuple[str, ...],
    BeforeValidator(_one_or_many),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
"""One string or a list of them."""
