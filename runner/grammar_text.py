"""A response format in the words of the library that follows it, and that library's errors in ours.

JSON has no blanks before or after it; between its parts it may have one blank, or a line break and indentation. So it
can be as json.dumps writes it, with or without indent, and never loops in whitespace. `"x-guidance":
{"whitespace_flexible": false}` in a schema asks for none at all. Keys come in the order of the schema.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any

from ..jobs.response_format import ResponseFormat

WHITESPACE = r" |\r?\n[ \t]{0,40}"
MAX_MULTIPLE = 10_000
"""Largest multipleOf as a reduced fraction's numerator, and for all of a schema together ten times that: each remainder
is a state of the library, and no limit of its own covers the time to build them."""
MENDS = {
    r"Unimplemented keys: \[(.*)\]": r"\1: not supported; remove it",
    "oneOf constraints": "oneOf: its alternatives may overlap; use anyOf, or a property with another const in each",
    "Unknown format: (.*)": r'format "\1" is not known; remove it or give a pattern',
    "Unsatisfiable schema: (.*)": r"no value is valid: \1; correct it",
    "schema too large|Grammar too large": r"\g<0>; make it smaller",
    "Unable to determine": "its patterns are too complex together; simplify them",
    "NoExtension": "no text can follow it; correct it",
}
"""Beginning of an error of the library -> what to say instead."""


def grammar_text(format: ResponseFormat) -> str:
    """The format in the library's own terms; ValueError where it has none."""
    from llguidance import LLMatcher

    if format.type == "regex":
        return LLMatcher.grammar_from_regex(format.value)
    if format.type == "choice":  # a rule of its own for each would come to a limit at 2000
        return LLMatcher.grammar_from_regex("|".join(map(re.escape, json.loads(format.value))))
    text = format.value if format.type == "json_schema" else '{"type":"object"}'
    _check_multiples(schema := json.loads(text))
    own = schema.get("x-guidance")
    has_own = isinstance(own, dict) and not own.keys().isdisjoint(("whitespace_flexible", "whitespace_pattern"))
    return LLMatcher.grammar_from_json_schema(text, {} if has_own else {"whitespace_pattern": WHITESPACE})


def _check_multiples(schema: Any) -> None:
    """ValueError for a multipleOf that takes too long to build."""
    together = 1
    for value in _values(schema, "multipleOf"):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value == 0:
            continue  # the library says what is wrong with it
        multiple = abs(Fraction(str(value)).numerator)
        together = math.lcm(together, multiple)
        if multiple > MAX_MULTIPLE or together > 10 * MAX_MULTIPLE:
            raise ValueError(f"multipleOf {value} is too large to be followed; remove it")


def _values(schema: Any, key: str) -> Iterator[Any]:
    """Everything under this key in a schema, at any depth."""
    for name, value in schema.items() if isinstance(schema, dict) else ():
        if name == key:
            yield value
    for value in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _values(value, key)


def parts_of(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Schemas right within a schema, with the end of their JSON pointer."""
    for key, value in schema.items():
        inner: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, dict):
            if key not in ("properties", "patternProperties", "$defs", "definitions"):
                yield f"/{key}", value
                continue
            inner = value.items()
        elif isinstance(value, list):
            inner = enumerate(value)
        for name, part in inner:
            if isinstance(part, dict):
                yield f"/{key}/{name}", part


def one_line(error: str) -> str:
    """The reason in an error of the library, which may be a drawing of several lines."""
    if found := re.search(r"^error: (.+)", error, re.MULTILINE):
        return found.group(1)
    error = re.sub(r"^at \d+\(\d+\): invalid regex .* \(in regex\): ", "", error.strip())
    return error.splitlines()[0][:200] if error else "unknown error"


def advice(error: str) -> str:
    """What is wrong with a format and what to do about it."""
    for pattern, text in MENDS.items():
        if found := re.match(pattern, error):
            return found.expand(text)
    return f"{error}; correct it"
