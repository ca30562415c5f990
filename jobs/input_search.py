"""Which files a job reads, and in which order."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from pyarrow import fs

from .errors import ConfigError, InputMissing, StorageError
from .filesystem import explain, is_remote, open_filesystem, retrying, transient
from .input_files import InputFile
from .sections import InputSpec

Format = Literal["parquet", "jsonl"]

SUFFIXES: dict[Format, tuple[str, ...]] = {"parquet": (".parquet",), "jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst")}

_QUERY = re.compile(r"\?(?=[a-z_]+=)")
"""Where the options of an object store begin; any other ? stands for a character of a name."""

Matches = dict[str, Callable[[], InputFile]]
"""Path of each file behind a folder or glob, and how to look at it."""

T = TypeVar("T")


def find_files(spec: InputSpec) -> tuple[Format, list[InputFile]]:
    """The files behind input.path in natural order (part-2 before part-10) and their common format.

    A path that exists is taken as it is; a folder stands for the data files in it. Names below the fixed part of a
    glob that begin with _ or . are ignored. Raises InputMissing when nothing matches or it cannot be looked at,
    ConfigError when formats mix.
    """
    found = _remote_files(spec.path) if is_remote(spec.path) else _local_files(spec.path)
    if isinstance(found, InputFile):
        return _format_of_file(spec, found.name), [found]
    formats: tuple[Format, ...] = ("parquet", "jsonl") if spec.format == "auto" else (_lines_or_parquet(spec.format),)
    matches: dict[Format, list[Callable[[], InputFile]]] = {}
    names: dict[Format, str] = {}
    for path in sorted(found, key=_natural_key):
        form = _format_of_name(path)
        if form in formats:
            matches.setdefault(form, []).append(found[path])
            names.setdefault(form, path.rpartition("/")[2])
    if not matches:
        wanted = ", ".join("*" + suffix for form in formats for suffix in SUFFIXES[form])
        relative = "" if is_remote(spec.path) else ", which is relative to the working directory"
        raise InputMissing(
            f"input.path {spec.path!r}: no such file, and no {wanted} behind it; check the path{relative}"
        )
    if len(matches) > 1:
        raise ConfigError(
            f"input.path {spec.path!r} mixes formats ({', '.join(names.values())}); set input.format or narrow the path"
        )
    ((form, looks),) = matches.items()
    return form, [look() for look in looks]


def _lines_or_parquet(form: str) -> Format:
    return "parquet" if form == "parquet" else "jsonl"


def _format_of_name(name: str) -> Format | None:
    return next((form for form, suffixes in SUFFIXES.items() if name.endswith(suffixes)), None)


def _format_of_file(spec: InputSpec, name: str) -> Format:
    if spec.format != "auto":
        return _lines_or_parquet(spec.format)
    form = _format_of_name(name)
    if form is None:
        known = ", ".join("*" + suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
        raise ConfigError(f"input.path {spec.path!r} is none of {known}; rename it or set input.format")
    return form


def _local_files(location: str) -> InputFile | Matches:
    pattern = os.path.expanduser(location)
    if os.path.isfile(pattern):
        return InputFile.local(pattern)
    if os.path.isdir(pattern):
        pattern = os.path.join(glob.escape(pattern), "*")
    fixed = len(_fixed_parts(Path(pattern).parts))
    paths = [str(Path(path)) for path in glob.glob(pattern, recursive=True)]
    return {
        path: partial(InputFile.local, path)
        for path in paths
        if not _hidden(Path(path).parts[fixed:]) and not os.path.isdir(path)
    }


def _remote_files(location: str) -> InputFile | Matches:
    address, query = [*_QUERY.split(location, maxsplit=1), ""][:2]
    scheme, _, rest = address.partition("://")
    parts = [part for part in rest.split("/") if part]
    fixed = _fixed_parts(parts)
    pattern = parts[len(fixed) :]
    base = "/".join(fixed)
    filesystem, _ = open_filesystem(f"{scheme}://{''.join(fixed[:1])}{'?' * bool(query)}{query}")
    found: Matches = {}
    for info in _from_store(location, partial(_listed, filesystem, base, pattern)):
        path = f"{scheme}://{info.path}"
        look = partial(InputFile, path, info.size, info.mtime_ns or 0, filesystem=filesystem, key=info.path)
        if info.path == base:
            return look()
        below = info.path[len(base) + 1 :].split("/")
        if not _hidden(below) and _matches(below, pattern or ["*"]):
            found[path] = look
    return found


def _listed(filesystem: fs.FileSystem, base: str, pattern: Sequence[str]) -> list[fs.FileInfo]:
    """The file `base`, where there is no pattern, or the files under it. FileNotFoundError without the bucket."""
    info = filesystem.get_file_info(base)
    if info.type == fs.FileType.File:
        return [] if pattern else [info]
    bucket = base.partition("/")[0]
    if info.type == fs.FileType.NotFound and filesystem.get_file_info(bucket).type == fs.FileType.NotFound:
        raise FileNotFoundError(bucket)
    selector = fs.FileSelector(base, allow_not_found=True, recursive=len(pattern) > 1)
    return [info for info in filesystem.get_file_info(selector) if info.type == fs.FileType.File]


def _from_store(location: str, work: Callable[[], T]) -> T:
    try:
        return retrying(work)
    except OSError as exc:
        if isinstance(exc, FileNotFoundError):
            reason, mend = f"there is no bucket {exc}", "correct its name"
        else:
            reason, mend = explain(exc, location)
        kind = StorageError if transient(exc) else InputMissing
        raise kind(f"input.path {location!r}: {reason}; {mend}") from exc


def _fixed_parts(parts: Sequence[str]) -> list[str]:
    """The parts of a path before the first that is a pattern."""
    fixed: list[str] = []
    for part in parts:
        if glob.has_magic(part):
            break
        fixed.append(part)
    return fixed


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether the parts of a path fit those of a glob; ** fits any number of parts."""
    if not pattern or not parts:
        return not parts and all(part == "**" for part in pattern)
    if pattern[0] == "**":
        return _matches(parts, pattern[1:]) or _matches(parts[1:], pattern)
    return fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _hidden(parts: Sequence[str]) -> bool:
    return any(part.startswith(("_", ".")) for part in parts)


def _natural_key(path: str) -> tuple[list[tuple[int, int, str]], str]:
    pieces = re.split(r"([0-9]+)", path)
    return [(1, int(p), "") if p.isascii() and p.isdigit() else (0, 0, p) for p in pieces], path
