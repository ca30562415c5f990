"""Everything that a job's outputs depend on, and what of it has changed since an earlier attempt."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

import orjson

_SHOWN = 60
"""Characters shown of a value that changed."""
_HASHED = "sha256:"


class Fingerprint:
    """JSON values under keys of the form a.b.c.

    secret: keys whose values came from the environment. Only their hashes are ever stored or shown, and a value
    compares equal to its hash.
    labels: names for people in place of a key's beginning, such as a file's path for `files[0]`.
    """

    def __init__(
        self, values: Mapping[str, Any], secret: Collection[str] = (), labels: Mapping[str, str] | None = None
    ) -> None:
        self._values = _flat(orjson.loads(orjson.dumps(values)))
        self._secret = frozenset(secret)
        self._labels = dict(labels or {})
        hashes = {key: _hash(value) for key, value in self._values.items()}
        self.hash = hashlib.sha256(orjson.dumps(hashes, option=orjson.OPT_SORT_KEYS)).hexdigest()
        """Of all values, secret ones included; stands in every part's footer."""

    def to_json(self) -> dict[str, Any]:
        """What is stored."""
        return {key: self._shown(key, value) for key, value in self._values.items()}

    def changes(self, before: Mapping[str, Any]) -> list[str]:
        """One `key: old -> new` for each value that differs from a stored to_json(), long values cut."""
        keys = [
            k for k in {**before, **self._values} if not _same(before.get(k, _Absent), self._values.get(k, _Absent))
        ]
        return [f"{self._label(k)}: {_short(before.get(k, _Absent))} -> {self._new(k)}" for k in keys]

    def _new(self, key: str) -> str:
        return _short(self._shown(key, self._values[key]) if key in self._values else _Absent)

    def _shown(self, key: str, value: Any) -> Any:
        # A secret may be a part of a value (an item of a list), or what the value was taken from.
        is_secret = any(_within(key, name) or _within(name, key) for name in self._secret)
        return _HASHED + _hash(value) if is_secret else value

    def _label(self, key: str) -> str:
        for start, label in self._labels.items():
            if key.startswith(start):
                return label + key[len(start) :]
        return key


def _within(key: str, outer: str) -> bool:
    return key == outer or key.startswith((f"{outer}.", f"{outer}["))


class _Absent:
    """Stands for the value of a key that one side does not have."""


def _same(old: Any, new: Any) -> bool:
    if type(old) is type(new) and old == new:
        return True
    if _Absent in (old, new):
        return False
    return bool(_HASHED + _hash(new) == old or _HASHED + _hash(old) == new)


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        items = [_flat(child, f"{prefix}.{key}" if prefix else str(key)) for key, child in value.items()]
        return {key: child for item in items for key, child in item.items()}
    if isinstance(value, list) and any(isinstance(child, Mapping) for child in value):
        items = [_flat(child, f"{prefix}[{index}]") for index, child in enumerate(value)]
        return {key: child for item in items for key, child in item.items()}
    return {prefix: value}


def _short(value: Any) -> str:
    text = "absent" if value is _Absent else orjson.dumps(value).decode()
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _hash(value: Any) -> str:
    return hashlib.sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).hexdigest()
