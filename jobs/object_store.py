"""Files by name under a prefix of a bucket. The names and promises are those of the Store protocol in store.py."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import cast

import pyarrow as pa
from pyarrow import fs

from .errors import OutputError
from .filesystem import explain, open_filesystem, retrying, storage_errors

Names = list[str]  # "list" is a method within the class

_unfinished: list[pa.NativeFile] = []
"""Uploads that failed, for good: at the end of the process pyarrow no longer sends anything for them."""


class ObjectStore:
    """A prefix of a bucket. An object appears when its upload is complete, in place of one of that name."""

    def __init__(self, location: str) -> None:
        self.location = location.rstrip("/")
        self._base = location.partition("?")[0].rstrip("/")
        self._fs, self._prefix = open_filesystem(location)

    def path(self, name: str) -> str:
        return f"{self._base}/{name}".rstrip("/")

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}".rstrip("/")

    def read(self, name: str) -> bytes | None:
        with storage_errors(self.path(name)):
            try:
                return retrying(lambda: self._download(name))
            except FileNotFoundError:
                return None

    def _download(self, name: str) -> bytes:
        with self._fs.open_input_file(self._key(name)) as file:
            content: bytes = file.read()
            return content

    def open(self, name: str) -> pa.NativeFile:
        with storage_errors(self.path(name)):
            try:
                return retrying(lambda: self._fs.open_input_file(self._key(name)))
            except FileNotFoundError:
                pass
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path(name))

    def list(self, folder: str) -> dict[str, int]:
        return {info.base_name: info.size for info in self._entries(folder) if info.type == fs.FileType.File}

    def folders(self, folder: str) -> Names:
        return [info.base_name for info in self._entries(folder) if info.type == fs.FileType.Directory]

    def _entries(self, folder: str) -> Sequence[fs.FileInfo]:
        with storage_errors(self.path(folder)):
            return sorted(self._infos(folder), key=lambda info: str(info.base_name))

    def _infos(self, folder: str) -> Sequence[fs.FileInfo]:
        selector = fs.FileSelector(self._key(folder), allow_not_found=True)
        infos: Sequence[fs.FileInfo] = retrying(lambda: self._fs.get_file_info(selector))
        return infos

    def exists(self, name: str) -> bool:
        with storage_errors(self.path(name)):
            return bool(self._info(name).type == fs.FileType.File)

    def modified(self, name: str) -> datetime | None:
        """When an object was put, by the store's clock; None when it is not there."""
        with storage_errors(self.path(name)):
            return cast("datetime | None", self._info(name).mtime)

    def _info(self, name: str) -> fs.FileInfo:
        return retrying(lambda: self._fs.get_file_info(self._key(name)))

    def put(self, tmp: Path, name: str) -> None:
        with storage_errors(self.path(name)):
            size = tmp.stat().st_size
            if size:
                with pa.memory_map(str(tmp)) as source:
                    self._upload(source.read_buffer(size), name)
            else:
                self._upload(pa.py_buffer(b""), name)  # nothing cannot be mapped
            arrived = self._info(name).size
            if arrived != size:
                retrying(lambda: self._fs.delete_file(self._key(name)))
                raise OSError(f"{arrived} of {size} bytes arrived")
            tmp.unlink()

    def write(self, name: str, content: bytes, tmp: Path) -> None:
        with storage_errors(self.path(name)):
            self._upload(pa.py_buffer(content), name)

    def _upload(self, content: pa.Buffer, name: str) -> None:
        retrying(lambda: self._send(content, name))

    def _send(self, content: pa.Buffer, name: str) -> None:
        stream = self._fs.open_output_stream(self._key(name))
        # Closing a stream publishes what has arrived, and so does forgetting it: until all has, it is kept from both.
        _unfinished.append(stream)
        stream.write(content)
        stream.close()
        _unfinished.remove(stream)

    def delete(self, name: str) -> None:
        with storage_errors(self.path(name)), suppress(FileNotFoundError):
            retrying(lambda: self._fs.delete_file(self._key(name)))

    def delete_folder(self, folder: str) -> None:
        with storage_errors(self.path(folder)), suppress(FileNotFoundError):
            retrying(lambda: self._fs.delete_dir(self._key(folder)))

    def check(self) -> None:
        probe = f".specrun-{uuid.uuid4().hex}"
        try:
            self._upload(pa.py_buffer(bytes(16)), probe)
            retrying(lambda: self._download(probe))
            self._infos("")
            with suppress(FileNotFoundError):
                retrying(lambda: self._fs.delete_file(self._key(probe)))
        except OSError as error:
            reason, mend = explain(error, self._base)
            raise OutputError(f"output.path {self.location} cannot be written: {reason}; {mend}") from error

    def create(self, folders: Sequence[str]) -> None:
        self.check()  # folders are parts of names here
