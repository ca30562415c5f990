"""Arrow types of input columns: which serve as text, id or messages, what two files have in common, Python values."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from .columns import RowError
from .row_errors import ENCODING_ERROR, PARSE_ERROR

_STRINGS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
_BINARIES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
_LISTS = (
    pa.types.is_list,
    pa.types.is_large_list,
    pa.types.is_list_view,
    pa.types.is_large_list_view,
    pa.types.is_fixed_size_list,
)


def is_text(kind: pa.DataType) -> bool:
    """Text, or bytes that may be text; also as a dictionary or under an extension type such as arrow.json."""
    kind = _plain(kind)
    return pa.types.is_null(kind) or any(test(kind) for test in _STRINGS + _BINARIES)


def is_id(kind: pa.DataType) -> bool:
    """Text, integers or UUIDs."""
    is_uuid = isinstance(kind, pa.BaseExtensionType) and kind.extension_name == "arrow.uuid"
    return is_text(kind) or pa.types.is_integer(_plain(kind)) or is_uuid


def is_messages(kind: pa.DataType) -> bool:
    """A list of structs with role and content, or text."""
    if is_text(kind):
        return True
    if not any(test(kind) for test in _LISTS):
        return False
    item = kind.value_type
    return pa.types.is_struct(item) and all(item.get_field_index(name) >= 0 for name in ("role", "content"))


def _plain(kind: pa.DataType) -> pa.DataType:
    while pa.types.is_dictionary(kind) or isinstance(kind, pa.BaseExtensionType):
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind.storage_type
    return kind


def common_type(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """A type that holds every value of both as it is; None where there is none."""
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if _is_string(one) and _is_string(other) and not (pa.types.is_dictionary(one) and pa.types.is_dictionary(other)):
        return pa.large_string()
    schemas = [pa.schema([("", kind)]) for kind in (one, other)]
    try:
        unified = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
        for kind in (one, other):
            pa.array([], kind).cast(unified)
    except pa.ArrowException:
        return None
    # Arrow is permissive to the point of taking whole numbers for floating ones.
    return unified if _holds(unified, one) and _holds(unified, other) else None


def absent(num_rows: int, kind: pa.DataType) -> pa.Array:
    """Nulls of a type. Unlike pa.nulls, which puts nulls into children that must not have any."""
    try:
        return pa.array([None] * num_rows, kind)
    except pa.ArrowNotImplementedError:
        return pa.nulls(num_rows, kind)


def _is_string(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return any(test(kind) for test in _STRINGS)


def _holds(wide: pa.DataType, kind: pa.DataType) -> bool:
    """Whether values of `kind` keep their meaning to the bit when cast to `wide`."""
    if wide == kind or pa.types.is_null(kind):
        return True
    for family in (_STRINGS, _BINARIES):
        if any(test(kind) for test in family):
            return any(test(wide) for test in family)
    for same in (pa.types.is_signed_integer, pa.types.is_unsigned_integer, pa.types.is_floating):
        if same(kind):
            return bool(same(wide) and wide.bit_width >= kind.bit_width)
    if pa.types.is_dictionary(kind):
        return bool(pa.types.is_dictionary(wide) and wide.value_type == kind.value_type)
    if pa.types.is_map(kind):
        return pa.types.is_map(wide) and _holds(wide.key_type, kind.key_type) and _holds(wide.item_type, kind.item_type)
    if any(test(kind) for test in _LISTS):
        return any(test(wide) for test in _LISTS) and _holds(wide.value_type, kind.value_type)
    if pa.types.is_struct(kind) and pa.types.is_struct(wide):
        places = [wide.get_field_index(field.name) for field in kind]
        return all(
            place >= 0 and _holds(wide.field(place).type, field.type) for place, field in zip(places, kind, strict=True)
        )
    return False


def python_values(name: str, column: pa.Array, errors: dict[int, RowError]) -> list[Any]:
    """The values of a column; those that Python cannot hold become None and an error of their row."""
    column = _decoded(column)
    is_binary = any(test(column.type) for test in _BINARIES)
    try:
        values: list[Any] = column.to_pylist()
        return [value if value is None else value.decode() for value in values] if is_binary else values
    except (ValueError, OverflowError, pa.ArrowException):
        values = []
    for position, scalar in enumerate(column):
        value = None
        try:
            value = scalar.as_py()
            value = value.decode() if is_binary and value is not None else value
        except UnicodeDecodeError as exc:
            value = None
            errors.setdefault(position, (ENCODING_ERROR, f"column {name!r} is not UTF-8 at byte {exc.start}"))
        except (ValueError, OverflowError, pa.ArrowException) as exc:
            errors.setdefault(position, (PARSE_ERROR, f"column {name!r}: {' '.join(str(exc).split())}"))
        values.append(value)
    return values


def _decoded(column: pa.Array) -> pa.Array:
    """A column without dictionaries, and of extension types what they store where that is text."""
    while True:
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        elif isinstance(column.type, pa.BaseExtensionType) and is_text(column.type):
            column = column.storage
        else:
            return column
