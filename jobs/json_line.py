"""One line of JSONL: its object, or what is wrong with it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from . import lines
from .columns import RowError
from .input_files import InputFile
from .row_errors import ENCODING_ERROR, PARSE_ERROR

MAX_DEPTH = 100
"""Lists and objects within each other; far below what Python's stack holds."""


json_text = json.JSONEncoder(ensure_ascii=False).encode
"""A value as JSON text."""


def parse_lines(
    file: InputFile, numbered: Sequence[tuple[int, bytes]]
) -> tuple[list[dict[str, Any]], dict[int, RowError]]:
    """The object of each numbered line, {} for a bad one, and the errors by position."""
    records: list[dict[str, Any]] = []
    errors: dict[int, RowError] = {}
    for position, (number, line) in enumerate(numbered):
        record, error = parse_line(line)
        if error is not None:
            code, message = error
            errors[position] = (code, f"line {number} of {file.name}: {message}")
        records.append(record or {})
    return records, errors


def parse_line(line: bytes) -> tuple[dict[str, Any] | None, RowError | None]:
    """The object of a line, or why there is none."""
    if len(line) > lines.MAX_LINE_BYTES:
        return None, (PARSE_ERROR, f"more than {lines.MAX_LINE_BYTES} bytes; split the row")
    try:
        record = _decode(line.decode())
        if b"\\u" in line and (b"\\ud" in line or b"\\uD" in line):
            # An escaped half of a surrogate pair is JSON but not text: nothing could write it.
            json_text(record).encode()
        if line.count(b"[") + line.count(b"{") > MAX_DEPTH and _is_deep(record):
            raise ValueError(f"more than {MAX_DEPTH} lists and objects within each other")
    except UnicodeDecodeError as exc:
        return None, (ENCODING_ERROR, f"not UTF-8 at byte {exc.start}")
    except UnicodeEncodeError:
        return None, (ENCODING_ERROR, "holds half of a surrogate pair (\\ud800 to \\udfff)")
    except RecursionError:
        return None, (PARSE_ERROR, f"not JSON: more than {MAX_DEPTH} lists and objects within each other")
    except json.JSONDecodeError as exc:
        return None, (PARSE_ERROR, f"not JSON: {exc.msg} at character {exc.pos + 1}")
    except ValueError as exc:
        reason = "a number has too many digits" if "int_max_str_digits" in str(exc) else str(exc)
        return None, (PARSE_ERROR, f"not JSON: {reason}")
    if not isinstance(record, dict):
        return None, (PARSE_ERROR, f"not a JSON object but {type(record).__name__}")
    return record, None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        # Readers differ in which value they take.
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return found


def _number(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"the number {digits[:30]} is too large")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_number)
_scan = _DECODER.scan_once  # type: ignore[attr-defined]


def _decode(text: str) -> Any:
    # decode() looks for blanks on both sides first, which costs as much as a short line.
    try:
        value, end = _scan(text, 0)
        if end == len(text):
            return value
    except StopIteration:
        pass
    return _DECODER.decode(text)  # says what is wrong


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        inside = (inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer))
        level = [inner for inner in inside if isinstance(inner, list | dict)]
    return bool(level)


def as_written(name: str, value: Any, line: bytes) -> str:
    """The text of an id that is no string; a number keeps the digits of the file (1.50 stays 1.50)."""
    if isinstance(value, float):
        value = json.loads(line, parse_float=str, parse_constant=str)[name]
        return str(value)
    return json_text(value)
