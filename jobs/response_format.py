"""What an output must look like, as jobs, rows and OpenAI bodies spell it, read into one form.

`response_format` is the API's key, `structured_outputs` and `guided_*` are vLLM's. A row may use one of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from .row_errors import INVALID_RESPONSE_FORMAT, UNSUPPORTED_PARAMETER, RowFailure, name_of, shown

RESPONSE_FORMAT = "response_format"
MAX_DEPTH = 100
"""Lists and objects within each other in a schema; the limit of JSONL lines as well."""

_TYPES = ("text", "json_object", "json_schema", "regex", "choice")
_NOT_OURS = ("grammar", "structural_tag")
_SCHEMA_KEYS: dict[str, type] = {"name": str, "description": str, "strict": bool}
_SAFE = "give it as JSON text"


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """A form that outputs are held to; hashable, since rows share few of them."""

    type: Literal["json_object", "json_schema", "regex", "choice"]
    value: str = ""
    """The schema as JSON text, the regular expression, the choices as a JSON list, or nothing for json_object.

    Keys of a schema keep their order: it is the order in which an output has them.
    """


class InvalidResponseFormat(RowFailure):
    """A response format of a wrong shape. `plain` is the text without the value, which may be a secret of a job."""

    def __init__(self, where: str, problem: str, *got: Any, mend: str = "") -> None:
        mend = f"; {mend}" if mend else ""
        value = f", got {shown(got[0])}" if got else ""
        super().__init__(INVALID_RESPONSE_FORMAT, f"{where}: {problem}{value}{mend}")
        self.plain = f"{where}: {problem}{mend}"


def parse_response_format(value: Any, from_column: bool = False) -> ResponseFormat | None:
    """The format in the value of a key `response_format`: an object, that as JSON text, or one that is read already.

    None for null and for type text. from_column: an object may be an Arrow struct, which has every key of every row,
    so nulls in a schema are taken for absent keys; in JSON text they never are.
    Raises RowFailure, its message naming the key: invalid_response_format, or unsupported_parameter for a type that
    others have.
    """
    if value is None or isinstance(value, ResponseFormat):
        return value
    if isinstance(value, str):
        return _parse_text(value)
    return _parse_object(_object(RESPONSE_FORMAT, value), from_column)


def check_response_format(value: dict[str, Any]) -> dict[str, Any]:
    """The value itself, if it is well formed; ValueError, which does not show the value."""
    try:
        parse_response_format(value)
    except RowFailure as exc:
        text = exc.plain if isinstance(exc, InvalidResponseFormat) else str(exc)
        raise ValueError(text.removeprefix(RESPONSE_FORMAT).lstrip(".: ")) from None
    return value


def read_format(params: Mapping[str, Any], from_column: bool = False) -> dict[str, ResponseFormat | None]:
    """{"response_format": what the parameters of a row ask for}, None being plain text; {} where they say nothing.

    from_column and errors as in parse_response_format. Two keys that ask for a form are an error too.
    """
    said: dict[str, ResponseFormat | None] = {}
    for key, read in _READERS.items():
        if key in params and not _is_blank(params[key], from_column):
            found = read(params[key], from_column)
            if found is not None or key == RESPONSE_FORMAT:
                said[key] = found
    asking = [key for key, found in said.items() if found is not None]
    if len(asking) > 1:
        raise InvalidResponseFormat(asking[1], f"a second format beside {asking[0]}", mend="give one of them")
    if not said:
        return {}
    return {RESPONSE_FORMAT: said[asking[0]] if asking else None}


@lru_cache(maxsize=64)
def _parse_text(text: str) -> ResponseFormat | None:
    return _parse_object(_object(RESPONSE_FORMAT, _json(RESPONSE_FORMAT, text)), False)


def _parse_object(value: dict[str, Any], from_column: bool) -> ResponseFormat | None:
    given = _without_blanks(value, from_column)
    if from_column and value and not given:
        return None
    kind = given.pop("type", None)
    if kind in _NOT_OURS:
        raise RowFailure(
            UNSUPPORTED_PARAMETER, f"response_format.type: {kind} is not supported; use {', '.join(_TYPES[2:])}"
        )
    if kind not in _TYPES:
        raise InvalidResponseFormat("response_format.type", f"must be one of {', '.join(_TYPES)}", kind)
    inner = given.pop(kind, None)
    for key in given:
        flat = key == "schema" or key in _SCHEMA_KEYS
        mend = "write type: json_schema, json_schema: {name: ..., schema: ...}" if flat else "remove it"
        raise InvalidResponseFormat(f"response_format.{name_of(key)}", f"does not go with type {kind}", mend=mend)
    where = f"response_format.{kind}"
    if kind == "json_schema":
        return _of_json_schema(where, inner, from_column)
    if kind in ("regex", "choice"):
        return _of_regex(where, inner) if kind == "regex" else _of_choice(where, inner)
    if inner is not None:
        raise InvalidResponseFormat(where, f"does not go with type {kind}", mend="remove it")
    return ResponseFormat("json_object") if kind == "json_object" else None


def _of_json_schema(where: str, value: Any, from_column: bool) -> ResponseFormat:
    if not isinstance(value, dict):
        raise InvalidResponseFormat(where, "must be {name: ..., schema: ...}", value)
    given = {key: inner for key, inner in value.items() if inner is not None}
    if "schema" not in given:
        raise InvalidResponseFormat(f"{where}.schema", "is missing", mend="put the JSON schema there")
    for key, inner in given.items():
        if key == "schema":
            continue
        place = f"{where}.{name_of(key)}"
        if key not in _SCHEMA_KEYS:
            raise InvalidResponseFormat(place, "is not known", mend="a schema belongs into json_schema.schema")
        if not isinstance(inner, _SCHEMA_KEYS[key]):
            noun = "text" if _SCHEMA_KEYS[key] is str else "true or false"
            raise InvalidResponseFormat(place, f"must be {noun}", inner)
    return _of_schema(f"{where}.schema", given["schema"], from_column)


def _of_schema(where: str, value: Any, from_column: bool) -> ResponseFormat:
    if isinstance(value, str):
        value, from_column = _json(where, value), False
    if not isinstance(value, dict):
        raise InvalidResponseFormat(where, "must be a JSON schema, an object or that as JSON text", value)
    return ResponseFormat("json_schema", _canonical(where, _clean(where, value, from_column)))


def _of_regex(where: str, value: Any) -> ResponseFormat:
    if not isinstance(value, str) or not value:
        raise InvalidResponseFormat(where, "must be a regular expression", value)
    _canonical(where, value)
    return ResponseFormat("regex", value)


def _of_choice(where: str, value: Any) -> ResponseFormat:
    if not isinstance(value, (list, tuple)) or not value:
        raise InvalidResponseFormat(where, "must be a list of at least one text", value)
    for position, text in enumerate(value):
        if not isinstance(text, str):
            mend = "" if text is None else "quote it"
            raise InvalidResponseFormat(f"{where}[{position}]", "must be text", text, mend=mend)
    return ResponseFormat("choice", _canonical(where, list(value)))


def _of_structured_outputs(value: Any, from_column: bool) -> ResponseFormat | None:
    where = "structured_outputs"
    if isinstance(value, str):
        value, from_column = _json(where, value), False
    # false asks for nothing: json_object, disable_any_whitespace and the like.
    given = {
        key: inner for key, inner in _without_blanks(_object(where, value), from_column).items() if inner is not False
    }
    for key in given:
        if key not in ("json", "json_object", "regex", "choice"):
            mend = "use json, json_object, regex or choice"
            raise RowFailure(UNSUPPORTED_PARAMETER, f"{where}.{name_of(key)}: is not supported; {mend}")
    if len(given) > 1:
        raise InvalidResponseFormat(where, f"{' and '.join(given)} exclude each other", mend="give one of them")
    for key, inner in given.items():
        place = f"{where}.{key}"
        if key == "json_object":
            if inner is not True:
                raise InvalidResponseFormat(place, "must be true or false", inner)
            return ResponseFormat("json_object")
        if key == "json":
            return _of_schema(place, inner, from_column)
        return _of_regex(place, inner) if key == "regex" else _of_choice(place, inner)
    return None


_READERS: dict[str, Callable[[Any, bool], ResponseFormat | None]] = {
    RESPONSE_FORMAT: parse_response_format,
    "structured_outputs": _of_structured_outputs,
    "guided_json": lambda value, from_column: _of_schema("guided_json", value, from_column),
    "guided_regex": lambda value, _: _of_regex("guided_regex", value),
    # A list column of rows without choices may hold empty lists instead of nulls.
    "guided_choice": lambda value, _: _of_choice("guided_choice", value) if value != [] else None,
}
FORMAT_KEYS = frozenset(_READERS)
"""Parameters that say what an output must look like."""

FORMAT_JSON_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["type"],
    "additionalProperties": False,
    "properties": {
        "type": {"enum": list(_TYPES)},
        "json_schema": {
            "type": "object",
            "required": ["schema"],
            "additionalProperties": False,
            "properties": {
                "name": {"type": "string"},
                "description": {"type": "string"},
                "strict": {"type": "boolean"},
                "schema": {"type": ["object", "string"]},
            },
        },
        "regex": {"type": "string", "minLength": 1},
        "choice": {"type": "array", "items": {"type": "string"}, "minItems": 1},
    },
}
"""The JSON Schema of a response_format, for editors of job files."""


def _object(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidResponseFormat(where, "must be an object or that as JSON text", value)
    return value


def _is_blank(value: Any, from_column: bool) -> bool:
    """Whether it is null or, in a column, a struct without any value."""
    if not from_column or not isinstance(value, dict) or value == {"const": None}:
        return value is None
    return bool(value) and all(_is_blank(inner, True) for inner in value.values())


def _without_blanks(value: dict[str, Any], from_column: bool) -> dict[str, Any]:
    """An object without the keys that a struct column gives to every row."""
    return {key: inner for key, inner in value.items() if not _is_blank(inner, from_column)}


def _clean(where: str, value: Any, drop_nulls: bool, depth: int = 0) -> Any:
    """A copy of a schema, checked for what JSON cannot be; with drop_nulls without the keys whose value is null."""
    if depth > MAX_DEPTH:
        raise InvalidResponseFormat(where, f"has more than {MAX_DEPTH} lists and objects within each other")
    if isinstance(value, (list, tuple)):
        return [_clean(where, inner, drop_nulls, depth + 1) for inner in value]
    if not isinstance(value, dict):
        return value
    if drop_nulls and value == {"const": None}:
        mend = f'write "type": "null", or {_SAFE}'
        raise InvalidResponseFormat(where, "const: null alone reads like an empty field", mend=mend)
    found = {}
    for key, inner in value.items():
        if not isinstance(key, str):
            raise InvalidResponseFormat(where, "every key must be text", key, mend="quote it")
        if inner is not None or not drop_nulls:
            found[key] = _clean(where, inner, drop_nulls, depth + 1)
    return found


def _canonical(where: str, value: Any) -> str:
    """JSON text without blanks."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        raise InvalidResponseFormat(where, "holds half of a surrogate pair (\\ud800 to \\udfff)") from None
    except (TypeError, ValueError):
        raise InvalidResponseFormat(where, "holds a value that JSON does not know", mend=_SAFE) from None
    return text


def _json(where: str, text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique)
    except json.JSONDecodeError as exc:
        raise InvalidResponseFormat(where, f"is not JSON: {exc.msg} at character {exc.pos + 1}") from None
    except (ValueError, RecursionError) as exc:
        problem = "too many lists and objects within each other" if isinstance(exc, RecursionError) else str(exc)
        raise InvalidResponseFormat(where, f"is not JSON: {problem}") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):  # readers differ in which value they take
        raise ValueError("a key stands twice in one object")
    return found
