"""Every error_code that the code writes stands in the table, and every one of the table is written somewhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from specrun.jobs import row_errors
from specrun.jobs.row_errors import ROW_ERRORS

ROOT = Path(__file__).parent.parent.parent
CODE = re.compile(r"[a-z]+(_[a-z]+)+|timeout")
RAISERS = {"RowFailure", "error_row"}
CONSTANTS = {name: value for name, value in vars(row_errors).items() if name.isupper() and isinstance(value, str)}


def is_text(node: ast.expr) -> bool:
    """Whether it reads like a message: a literal, an f-string, or literals and calls put together."""
    if isinstance(node, ast.BinOp):
        return is_text(node.left) or is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and " " in str(node.value))


def literal_codes(source: str) -> set[str]:
    """Codes written out: in a pair of code and message, as the code of a failure, as error_code=..., or compared."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        places: list[ast.expr] = []
        if isinstance(node, ast.Tuple) and len(node.elts) == 2 and is_text(node.elts[1]):
            places = node.elts[:1]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func).split(".")[-1]
            places = node.args[:2] if name in RAISERS else []
            places += [k.value for k in node.keywords if k.arg in ("code", "error_code")]
        elif isinstance(node, ast.Compare) and "error_code" in ast.unparse(node.left):
            places = node.comparators
        found |= {str(p.value) for p in places if isinstance(p, ast.Constant) and CODE.fullmatch(str(p.value))}
    return found


def sources() -> Iterator[tuple[str, str]]:
    for folder in ("jobs", "runner", "engine"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name != "row_errors.py":
                yield str(path.relative_to(ROOT)), path.read_text()


def test_no_code_stands_outside_the_table():
    for name, source in sources():
        assert literal_codes(source) <= ROW_ERRORS.keys(), name


def test_every_code_is_used():
    text = "\n".join(source for _, source in sources())
    unused = [v for name, v in CONSTANTS.items() if not re.search(rf"\b{name}\b|\"{v}\"", text)]
    assert not unused


def test_the_table_is_whole_and_readable():
    assert set(CONSTANTS.values()) == ROW_ERRORS.keys() and len(CONSTANTS) == len(ROW_ERRORS)
    assert all(meaning.endswith(".") and "\n" not in meaning for meaning in ROW_ERRORS.values())
    assert all(CODE.fullmatch(code) for code in ROW_ERRORS)


def test_these_checks_can_fail():
    source = """
raise RowFailure("bad_luck", "x")
errors[0] = ("bad_day", f"column {name}")
row = OutputRow(0, error_code="bad_end")
error_row(row, "bad_row", str(exc))
result = "bad_hour", "was " + str(name)
if row.error_code == "bad_year": ...
pairs = ("not_code", other)
"""
    assert literal_codes(source) == {
        "bad_luck",
        "bad_day",
        "bad_end",
        "bad_row",
        "bad_hour",
        "bad_year",
    }
