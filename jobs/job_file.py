"""A job file as plain Python values: strict YAML, `--set` overrides, `${ENV}` and `{date}`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from .errors import ConfigError

DATED_KEYS = (("name",), ("model", "path"), ("input", "path"), ("output", "path"))
"""Keys in which {date} is replaced; elsewhere braces belong to templates."""

MIN_SECRET_CHARS = 4
"""What is shorter is no secret, and words of texts hold it by chance."""

KeyPath = tuple[str, ...]

_VARIABLE = re.compile(r"\$(\$?)\{([A-Za-z_][A-Za-z0-9_]*)\}")


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML in which a key given twice is an error and a date stays text."""


# An unquoted 2024-01-31 is a name or a part of a path here, never a date object.
_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _construct_mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    lines: dict[Any, int] = {}
    for key_node, _ in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(None, None, "a key must be plain text", key_node.start_mark)
        key = loader.construct_object(key_node)
        if key in lines:
            problem = f"key {key!r} is given twice (first on line {lines[key]})"
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        lines[key] = key_node.start_mark.line + 1
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_StrictLoader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def read_job_file(path: Path) -> str:
    """The text of a job file. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as exc:
        raise ConfigError(f"{path}: cannot read the job file: {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path}: the job file is not UTF-8 text (byte {exc.start}); save it as UTF-8") from exc


def parse_job(text: str, path: str) -> dict[str, Any]:
    """The mapping in a YAML text that came from `path`.

    Raises ConfigError with line and column when it is not YAML, gives a key twice or is not a mapping.
    """
    try:
        values = yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as exc:
        raise ConfigError(f"{path}: {_place(exc)}: {_reason(exc, text)}") from exc
    except yaml.YAMLError as exc:
        raise ConfigError(f"{path}: {' '.join(str(exc).split())}") from exc
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a job is a mapping of keys, not {type(values).__name__}; begin with `version: 1`")
    return values


def _place(exc: yaml.MarkedYAMLError) -> str:
    mark = exc.problem_mark or exc.context_mark
    return f"line {mark.line + 1}, column {mark.column + 1}" if mark else "somewhere"


def _reason(exc: yaml.MarkedYAMLError, text: str) -> str:
    reason = " ".join(part for part in (exc.context, exc.problem) if part) or "not valid YAML"
    line = text.splitlines()[exc.problem_mark.line :][:1] if exc.problem_mark else []
    if any(mark in part for part in line for mark in ("{date}", "${", "{{")):
        reason += '; quote a value that holds braces, as in path: "out/{date}"'
    return reason


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> list[tuple[str, ...]]:
    """Set each `a.b=c` in the mapping; returns the keys that were set. Raises ConfigError when one has no such form."""
    paths = []
    for override in overrides:
        name, equals, text = override.partition("=")
        path = tuple(part.strip() for part in name.split("."))
        if not equals or not all(path):
            raise ConfigError(f"--set {override}: write it as section.key=value")
        section = values
        for depth, part in enumerate(path[:-1]):
            inner = section.setdefault(part, {})
            if path[: depth + 1] == ("speculation", "policy") and isinstance(inner, str):
                inner = {"name": inner}
            if inner is None:
                inner = {}
            if not isinstance(inner, dict):
                raise ConfigError(f"--set {override}: {'.'.join(path[: depth + 1])} holds one value, not further keys")
            section[part] = section = inner
        section[path[-1]] = _parse_value(text)
        paths.append(path)
    return paths


def _parse_value(text: str) -> Any:
    """A YAML scalar or flow value; anything else ("Title: {{ x }}") is the text itself."""
    try:
        value = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError:
        return text
    return text if isinstance(value, (dict, list)) and not text.lstrip().startswith(("{", "[")) else value


def expand(
    values: dict[str, Any], file: str, now: datetime, environ: Mapping[str, str] | None = None
) -> dict[KeyPath, str]:
    """Replace `${NAME}` in every string (`$${NAME}` stays `${NAME}`) and `{date}` in names and paths, in place.

    Returns the text of those values that named a variable, dates replaced: what may be written down, since a variable
    may hold a secret. Raises ConfigError naming a variable that is not set, and the key that asks for it.
    """
    expansion = _Expansion(file, os.environ if environ is None else environ)
    for key, value in values.items():
        values[key] = expansion.expand(value, (str(key),))
    today = now.date().isoformat()
    for path in DATED_KEYS:
        holder: Any = values
        for section in path[:-1]:
            holder = holder.get(section) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and isinstance(holder.get(path[-1]), str):
            holder[path[-1]] = holder[path[-1]].replace("{date}", today)
        if path in expansion.templates:
            expansion.templates[path] = expansion.templates[path].replace("{date}", today)
    return expansion.templates


class _Expansion:
    """Variables put into values, and which values those were."""

    def __init__(self, file: str, environ: Mapping[str, str]) -> None:
        self.templates: dict[KeyPath, str] = {}
        self._file = file
        self._environ = environ

    def expand(self, value: Any, path: KeyPath) -> Any:
        if isinstance(value, dict):
            return {key: self.expand(inner, (*path, str(key))) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.expand(inner, (*path, str(i))) for i, inner in enumerate(value)]
        if not isinstance(value, str):
            return value
        if any(not escaped for escaped, _ in _VARIABLE.findall(value)):
            self.templates[path] = value
        return _VARIABLE.sub(lambda match: self._replacement(match, path), value)

    def _replacement(self, match: re.Match[str], path: KeyPath) -> str:
        escaped, name = match.groups()
        if escaped:
            return match.group(0)[1:]
        if name not in self._environ:
            raise ConfigError(
                f"{self._file}: {'.'.join(path)}: environment variable {name} is not set; set it, or write "
                f"$${{{name}}} for the text itself"
            )
        return self._environ[name]


def put_back(values: dict[str, Any], templates: Mapping[KeyPath, str]) -> None:
    """Replaces values by the texts that expand() found them as, in place."""
    for path, text in templates.items():
        holder: Any = values
        for depth, key in enumerate(path[:-1]):
            inner = holder.get(key) if isinstance(holder, dict) else holder[int(key)]
            if not isinstance(inner, (dict, list)):  # validation has made something else of it
                path = path[: depth + 1]
                break
            holder = inner
        if isinstance(holder, dict):
            holder[path[-1]] = text
        else:
            holder[int(path[-1])] = text


def hide(text: str, templates: Iterable[str], environ: Mapping[str, str] | None = None) -> str:
    """Puts `${NAME}` in place of each value, of MIN_SECRET_CHARS or more, of a variable that the templates name."""
    environ = os.environ if environ is None else environ
    names = {name for template in templates for escaped, name in _VARIABLE.findall(template) if not escaped}
    values = {environ[name]: name for name in names if len(environ.get(name, "")) >= MIN_SECRET_CHARS}
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, f"${{{values[value]}}}")
    return text


def escape(value: Any) -> Any:
    """The value such that expand() gives it back."""
    if isinstance(value, dict):
        return {key: escape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [escape(inner) for inner in value]
    return _VARIABLE.sub(lambda match: "$" + match.group(0), value) if isinstance(value, str) else value
