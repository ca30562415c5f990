"""Which files a job reads, in which order, and how to tell that they have changed."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyarrow import fs

from .errors import InputError, InputMissing, StorageError
from .filesystem import explain, is_remote, retrying, transient

HASH_BYTES = 1 << 20

_OF_STORE = re.compile("AWS Error|google::cloud|HTTP status")


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of the input as it was when the job looked."""

    path: str
    """As a person would type it."""
    size: int
    mtime_ns: int
    num_rows: int | None = None
    """Rows in the whole file; None before it was read."""
    hash: str | None = None
    """Of the whole content; None before it was read."""
    filesystem: fs.FileSystem = field(default_factory=fs.LocalFileSystem, repr=False, compare=False)
    key: str = field(default="", repr=False, compare=False)
    """Its path in the file system."""

    @classmethod
    def local(cls, path: str) -> InputFile:
        """Raises InputMissing when the file is not there or not readable, InputError for a name that is no text."""
        try:
            path.encode()
            found = os.stat(path)
            if not stat.S_ISREG(found.st_mode):
                raise InputMissing(f"{path}: is no regular file; write its content to one")
            with open(path, "rb"):
                pass
        except UnicodeEncodeError as exc:
            raise InputError(f"{path!a}: the name of the file is not UTF-8; rename it") from exc
        except OSError as exc:
            raise InputMissing(f"{path}: {exc.strerror or exc}; check input.path and the file's permissions") from exc
        return cls(path, found.st_size, found.st_mtime_ns, key=path)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]

    @property
    def is_remote(self) -> bool:
        """Whether it lies in an object store."""
        return is_remote(self.path)

    def open(self) -> pa.NativeFile:
        """The file for reading at random places. Raises OSError; use it within reading()."""
        return retrying(lambda: self.filesystem.open_input_file(self.key))

    def state(self) -> dict[str, Any]:
        """path, size and mtime_ns: where they agree with an earlier look, so does the content."""
        return {"path": self.path, "size": self.size, "mtime_ns": self.mtime_ns}

    def check_unchanged(self) -> None:
        """Raises InputError when the file was written since the job looked: row numbers may have moved."""
        if not self.is_remote:
            now = InputFile.local(self.path)
        else:
            with reading(self.path):
                info = retrying(lambda: self.filesystem.get_file_info(self.key))
                if info.type != fs.FileType.File:
                    raise FileNotFoundError(self.path)
            now = InputFile(self.path, info.size, info.mtime_ns or 0)
        if now.state() != self.state():
            raise InputError(f"{self.path}: changed while the job reads it; run the job on a finished file")

    def content_hash(self) -> str:
        """SHA-256 of all bytes of a local file; what an object store says of its object, without reading it.

        Raises InputMissing or StorageError naming the file.
        """
        with reading(self.path), self.open() as stream:
            if self.is_remote:
                tags = {name.lower(): value for name, value in _metadata(stream).items()}
                tag = tags.get("etag", "").strip('"')
                return f"etag:{tag}" if tag else f"mtime:{self.mtime_ns}"
            digest = hashlib.sha256()
            while piece := stream.read(HASH_BYTES):
                digest.update(piece)
            return digest.hexdigest()


def _metadata(stream: pa.NativeFile) -> dict[str, str]:
    """What an object store says of an object, as text."""
    found = stream.metadata() or {}
    return {_text(name): _text(value) for name, value in found.items()}


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turns what a reader raises for `path` into a JobError that names the file."""
    try:
        yield
    except FileNotFoundError as exc:
        raise InputMissing(f"{path}: the file is gone; put it back and run again") from exc
    except (OSError, pa.ArrowException) as exc:
        text = " ".join(str(exc).split())
        # Arrow reports bad data as OSError too: without errno, and without the words of an object store.
        if isinstance(exc, OSError) and is_remote(path) and _OF_STORE.search(text) and not transient(exc):
            reason, mend = explain(exc, path)
            raise InputMissing(f"{path}: {reason}; {mend}") from exc
        if isinstance(exc, OSError) and (exc.errno is not None or (is_remote(path) and transient(exc))):
            raise StorageError(f"{path}: reading failed: {text}; run the job again") from exc
        raise InputError(f"{path}: cannot be read: {text}; write the file again or remove it") from exc
