"""Files by name under an output location, on a local disk or in an object store; each is whole or not there."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Protocol

import pyarrow as pa

from .errors import OutputError
from .filesystem import is_remote
from .filesystem import storage_errors as storage_errors
from .object_store import ObjectStore

Names = list[str]  # "list" is a method within the classes


class Store(Protocol):
    """Named files under a location; names are relative and use "/", as in data/part-00000-000000.parquet.

    Errors of the disk or the network come out as StorageError.
    """

    location: str
    """As the user wrote it, without a trailing slash."""

    def path(self, name: str) -> str:
        """What a person would type to find a file; for messages."""

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None when it is not there."""

    def open(self, name: str) -> pa.NativeFile:
        """A file for reading at random places; FileNotFoundError when it is not there."""

    def list(self, folder: str) -> dict[str, int]:
        """Name, without the folder, -> size of the files directly in a folder, by name; {} for a missing folder."""

    def folders(self, folder: str) -> Names:
        """Names of the folders directly in a folder, sorted."""

    def exists(self, name: str) -> bool:
        """Whether a file is there."""

    def put(self, tmp: Path, name: str) -> None:
        """Publishes a closed local file, whole and durably, in place of one of that name; `tmp` is gone afterwards."""

    def write(self, name: str, content: bytes, tmp: Path) -> None:
        """Writes a small file so that readers see the old one or the new one; `tmp` is a local folder."""

    def delete(self, name: str) -> None:
        """Removes a file if it is there."""

    def delete_folder(self, folder: str) -> None:
        """Removes a folder with all in it if it is there."""

    def check(self) -> None:
        """Raises OutputError when create() could not do its work; leaves nothing behind."""

    def create(self, folders: Sequence[str]) -> None:
        """Makes the folders and proves that they can be written; OutputError when they cannot."""


def open_store(location: str) -> Store:
    """The store of a location; nothing is read or written yet. ConfigError for a broken URI."""
    return ObjectStore(location) if is_remote(location) else LocalStore(location)


def sync(path: Path) -> None:
    """fsync of a file or folder; some file systems have none for folders."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if path.is_dir():
            with suppress(OSError):
                os.fsync(descriptor)
        else:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LocalStore:
    """A folder. A file gets its name by a rename, so `tmp` files must lie on the same file system."""

    def __init__(self, location: str) -> None:
        self.location = location.rstrip("/") or "/"
        self.root = Path(location).expanduser()

    def path(self, name: str) -> str:
        return str(self.root / name)

    def read(self, name: str) -> bytes | None:
        with storage_errors(self.root / name):
            try:
                return (self.root / name).read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def open(self, name: str) -> pa.NativeFile:
        path = self.root / name
        with storage_errors(path):
            found = path.exists()
            if found:
                return pa.OSFile(str(path))
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    def list(self, folder: str) -> dict[str, int]:
        sizes = {}
        for entry in self._entries(folder):
            with suppress(FileNotFoundError):  # gone since
                if entry.is_file():
                    sizes[entry.name] = entry.stat().st_size
        return sizes

    def folders(self, folder: str) -> Names:
        return [entry.name for entry in self._entries(folder) if entry.is_dir()]

    def _entries(self, folder: str) -> Sequence[os.DirEntry[str]]:
        with storage_errors(self.root / folder):
            try:
                with os.scandir(self.root / folder) as entries:
                    return sorted(entries, key=lambda entry: entry.name)
            except FileNotFoundError:
                return []

    def exists(self, name: str) -> bool:
        with storage_errors(self.root / name):
            return (self.root / name).is_file()

    def put(self, tmp: Path, name: str) -> None:
        final = self.root / name
        with storage_errors(final):
            sync(tmp)
            os.replace(tmp, final)
            sync(final.parent)

    def write(self, name: str, content: bytes, tmp: Path) -> None:
        beside = tmp / name.replace("/", "_")
        with storage_errors(self.root / name):
            beside.write_bytes(content)
        self.put(beside, name)

    def delete(self, name: str) -> None:
        with storage_errors(self.root / name):
            (self.root / name).unlink(missing_ok=True)

    def delete_folder(self, folder: str) -> None:
        with storage_errors(self.root / folder), suppress(FileNotFoundError):
            shutil.rmtree(self.root / folder)

    def check(self) -> None:
        try:
            above = next(folder for folder in (self.root, *self.root.absolute().parents) if folder.exists())
            with TemporaryDirectory(prefix=".specrun-", dir=above):
                return
        except OSError as error:
            raise self._unwritable(error) from error

    def create(self, folders: Sequence[str]) -> None:
        try:
            made = [self.root / folder for folder in folders]
            for folder in (self.root, *made):
                folder.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile(prefix=".specrun-", dir=self.root) as probe:
                probe.write(bytes(4096))
                probe.flush()
                os.fsync(probe.fileno())
            between = {above for folder in made for above in folder.parents if above.is_relative_to(self.root)}
            for folder in (self.root, *made, *sorted(between)):
                if not os.access(folder, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> OutputError:
        return OutputError(
            f"output.path {self.root} cannot be written: {error.strerror} ({error.filename or self.root}); "
            "choose another output.path or mend its permissions"
        )
