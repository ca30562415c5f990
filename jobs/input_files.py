"""Which files a job reads, in which order, and how to tell that they have changed."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from .errors import ConfigError, InputError, InputMissing, StorageError
from .spec import InputSpec

Format = Literal["parquet", "jsonl"]

SUFFIXES: dict[Format, tuple[str, ...]] = {"parquet": (".parquet",), "jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst")}


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of the input as it was when the job looked."""

    path: Path
    size: int
    mtime_ns: int
    num_rows: int | None = None
    """Rows in the whole file; None before it was read."""

    @classmethod
    def look(cls, path: Path) -> InputFile:
        """Raises InputMissing when the file is not there or not readable."""
        try:
            stat = path.stat()
            with path.open("rb"):
                pass
        except OSError as exc:
            raise InputMissing(f"{path}: {exc.strerror or exc}; check input.path and the file's permissions") from exc
        return cls(path, stat.st_size, stat.st_mtime_ns)

    def check_unchanged(self) -> None:
        """Raises InputError when the file was written since the job looked: row numbers may have moved."""
        now = InputFile.look(self.path)
        if (now.size, now.mtime_ns) != (self.size, self.mtime_ns):
            raise InputError(f"{self.path}: changed while the job reads it; run the job on a finished file")


def find_files(spec: InputSpec) -> tuple[Format, list[InputFile]]:
    """The files behind input.path in natural order (part-2 before part-10) and their common format.

    A path that exists is taken as it is; a folder stands for the data files in it. Names below the fixed part of a
    glob that begin with _ or . are ignored. Raises InputMissing when nothing matches, ConfigError when formats mix.
    """
    pattern = os.path.expanduser(spec.path)
    if os.path.isfile(pattern):
        return _format_of_file(spec, Path(pattern)), [InputFile.look(Path(pattern))]
    if os.path.isdir(pattern):
        pattern = os.path.join(glob.escape(pattern), "*")
    formats: tuple[Format, ...] = ("parquet", "jsonl") if spec.format == "auto" else (spec.format,)
    found: dict[Format, list[Path]] = {}
    for path in map(Path, set(glob.glob(pattern, recursive=True))):
        form = _format_of_name(path.name)
        if form in formats and path.is_file() and not _hidden(path, pattern):
            found.setdefault(form, []).append(path)
    if not found:
        wanted = ", ".join("*" + suffix for form in formats for suffix in SUFFIXES[form])
        raise InputMissing(
            f"input.path {spec.path!r}: no such file, and no {wanted} behind it; check the path, which is relative to "
            "the working directory"
        )
    if len(found) > 1:
        one, other = (paths[0].name for paths in found.values())
        raise ConfigError(
            f"input.path {spec.path!r} mixes formats ({one}, {other}); set input.format or narrow the path"
        )
    ((form, paths),) = found.items()
    return form, [InputFile.look(path) for path in sorted(paths, key=_natural_key)]


def _format_of_name(name: str) -> Format | None:
    return next((form for form, suffixes in SUFFIXES.items() if name.endswith(suffixes)), None)


def _format_of_file(spec: InputSpec, path: Path) -> Format:
    if spec.format != "auto":
        return spec.format
    form = _format_of_name(path.name)
    if form is None:
        known = ", ".join("*" + suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
        raise ConfigError(f"input.path {spec.path!r} is none of {known}; rename it or set input.format")
    return form


def _hidden(path: Path, pattern: str) -> bool:
    fixed = 0
    for part in Path(pattern).parts:
        if glob.has_magic(part):
            break
        fixed += 1
    return any(part.startswith(("_", ".")) for part in path.parts[fixed:])


def _natural_key(path: Path) -> tuple[list[tuple[int, int, str]], str]:
    pieces = re.split(r"([0-9]+)", str(path))
    return [(1, int(p), "") if p.isascii() and p.isdigit() else (0, 0, p) for p in pieces], str(path)


def identity(spec: InputSpec) -> list[dict[str, Any]]:
    """For each file of the input: path, size, mtime_ns and hash, without reading rows.

    The hash is that of the footer of a Parquet file, and of all (compressed) bytes of a JSONL file.
    """
    form, files = find_files(spec)
    return identity_of(form, files)


def identity_of(form: Format, files: Sequence[InputFile]) -> list[dict[str, Any]]:
    """As identity(), for files that were found before."""
    return [
        {"path": str(file.path), "size": file.size, "mtime_ns": file.mtime_ns, "hash": _hash(form, file.path)}
        for file in files
    ]


def _hash(form: Format, path: Path) -> str:
    with reading(path), path.open("rb") as stream:
        if form == "jsonl":
            return hashlib.file_digest(stream, "sha256").hexdigest()
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - 8))
        length = int.from_bytes(stream.read(4), "little")
        stream.seek(max(0, size - 8 - length))
        return hashlib.sha256(stream.read()).hexdigest()


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns what a reader raises for `path` into a JobError that names the file."""
    try:
        yield
    except FileNotFoundError as exc:
        raise InputMissing(f"{path}: the file is gone; put it back and run again") from exc
    except (OSError, pa.ArrowException) as exc:
        reason = " ".join(str(exc).split())
        if isinstance(exc, OSError) and exc.errno is not None:  # Arrow reports bad data as OSError too, without errno
            raise StorageError(f"{path}: reading failed: {reason}; run the job again") from exc
        raise InputError(f"{path}: cannot be read: {reason}; write the file again or remove it") from exc
