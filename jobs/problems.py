"""What is wrong with a job's keys, in one line each."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

Path = tuple[str, ...]

_NOUNS = {
    "int": "a whole number",
    "float": "a number",
    "string": "text",
    "string_too_short": "non-empty text",
    "bool": "true or false",
    "tuple": "a list",
    "dict": "keys and values",
    "model": "keys and values",
}


def describe(
    error: ValidationError,
    model: type[BaseModel],
    file: str,
    set_paths: Sequence[Path],
    secret: Collection[Path] = (),
) -> str:
    """Lines `FILE: a.b.c: problem; mend`; a key from --set is shown as such, a secret value never."""
    problems: dict[Path, list[dict[str, Any]]] = {}
    for item in error.errors(include_url=False):
        problems.setdefault(_key_path(model, item["loc"]), []).append(dict(item))
    lines = []
    for path, items in problems.items():
        source = "--set" if any(_leads_to(path, given) for given in set_paths) else file
        text = _text(model, path, items, is_secret=any(_overlap(path, given) for given in secret))
        lines.append(": ".join(part for part in (source, ".".join(path), text) if part))
    return "\n".join(lines)


def _leads_to(path: Path, given: Path) -> bool:
    return bool(path) and _overlap(path, given)


def _overlap(one: Path, other: Path) -> bool:
    """Whether one of the keys is within the other."""
    return all(a == b for a, b in zip(one, other, strict=False))


def known_paths(model: type[BaseModel], prefix: Path = ()) -> list[Path]:
    """Every key of a model and of the models in it."""
    paths = []
    for name, field in model.model_fields.items():
        paths.append((*prefix, name))
        inner = _section(field.annotation)
        if inner is not None:
            paths += known_paths(inner, (*prefix, name))
    return paths


def _section(annotation: Any) -> type[BaseModel] | None:
    if get_origin(annotation) in (Union, UnionType, Annotated):
        return next((found for arg in get_args(annotation) if (found := _section(arg))), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _key_path(model: type[BaseModel], loc: tuple[int | str, ...]) -> Path:
    """The part of a location that a user wrote: pydantic appends the names of union branches."""
    path: list[str] = []
    section: type[BaseModel] | None = model
    for part in loc:
        path.append(str(part))
        field = section.model_fields.get(str(part)) if section is not None else None
        section = _section(field.annotation) if field is not None else None
        if section is None:
            break
    return tuple(path)


def _text(model: type[BaseModel], path: Path, items: list[dict[str, Any]], is_secret: bool) -> str:
    kinds = {item["type"] for item in items}
    if kinds & {"extra_forbidden", "invalid_key"}:
        return _unknown_key(model, path)
    if "missing" in kinds:
        return "missing; it has no default"
    # The branches of a union fail one by one: together they say what is allowed.
    allowed = " or ".join(dict.fromkeys(_allowed(item) for item in items))
    value = items[0]["input"]
    got = ", got the value of an environment variable" if is_secret else f", got {_short(value)}"
    got = "" if kinds == {"value_error"} else got
    mend = "; quote it" if "string_type" in kinds and isinstance(value, (int, float)) else ""
    return f"{allowed}{got}{mend}" if kinds == {"value_error"} else f"must be {allowed}{got}{mend}"


def _allowed(item: dict[str, Any]) -> str:
    kind = item["type"].removesuffix("_type").removesuffix("_parsing").removesuffix("_from_float")
    if kind in _NOUNS:
        return _NOUNS[kind]
    message: str = item["msg"]
    for lead in ("Value error, ", "Input should be ", "String should "):
        message = message.removeprefix(lead)
    return message.replace("match pattern", "of the form")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _unknown_key(model: type[BaseModel], path: Path) -> str:
    paths = known_paths(model)
    siblings = [known[-1] for known in paths if known[:-1] == path[:-1]]
    near = difflib.get_close_matches(path[-1], siblings, n=1)
    elsewhere = [".".join(known) for known in paths if known[-1] == path[-1]]
    if near or elsewhere:
        return f"unknown key; did you mean {(near or elsewhere)[0]}?"
    return f"unknown key; known here: {', '.join(siblings)}"
