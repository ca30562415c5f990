"""The lines of a text file, plain or compressed: in one pass from its beginning, or from a mark in its middle."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, NamedTuple

import pyarrow as pa

from .errors import InputError
from .filesystem import retrying
from .input_files import InputFile, reading

CHUNK_BYTES = 1 << 20
REMOTE_CHUNK_BYTES = 8 << 20
"""A request to an object store costs tens of milliseconds whatever its size."""
MAX_LINE_BYTES = 256 << 20
MARK_ROWS = 4096
MARK_BYTES = 16 << 20
"""A mark is set at the first chunk that begins so many rows or bytes after the last mark."""

_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_BOM = b"\xef\xbb\xbf"
_BLANK = b" \t\r\n"
_MAGIC = {
    b"PAR1": "is a Parquet file; name it *.parquet",
    b"ARROW1": "is an Arrow file; write it as Parquet",
    b"\x1f\x8b": "is gzip data; name it *.jsonl.gz",
    b"\x28\xb5\x2f\xfd": "is zstd data; name it *.jsonl.zst",
    b"BZh": "is bzip2 data; pack it with gzip or zstd",
    b"\xfd7zXZ": "is xz data; pack it with gzip or zstd",
    b"PK\x03\x04": "is a zip archive; unpack it",
    b"\xff\xfe": "is UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "is UTF-16 text; save it as UTF-8",
    b"{\0": "is UTF-16 text; save it as UTF-8",
    b"\0{": "is UTF-16 text; save it as UTF-8",
}


class Mark(NamedTuple):
    """A place where a line begins."""

    row: int
    """Rows of the file before it."""
    byte: int
    """Bytes of (unpacked) text before it."""
    line: int
    """Lines before it."""


class FileScan(NamedTuple):
    """What one pass over a file found."""

    num_rows: int
    marks: list[Mark]
    """The first is the beginning of the file."""
    hash: str


def scan_lines(file: InputFile, visit: Callable[[list[bytes]], None]) -> FileScan:
    """Hand `visit` all lines that are not blank, a chunk's worth at a time; only \\n ends a line.

    Raises InputError naming a file that is not (compressed) text or that changes meanwhile.
    """
    digest = None if file.is_remote else hashlib.sha256()
    marks = [Mark(0, 0, 0)]
    num_rows = number = 0
    with reading(file.path), closing(TextStream(file, digest)) as stream:
        for byte, lines in _split(stream, None):
            last = marks[-1]
            if num_rows - last.row >= MARK_ROWS or byte - last.byte >= MARK_BYTES:
                marks.append(Mark(num_rows, byte, number))
            rows = [text for line in lines if (text := _bare(line))]
            visit(rows)
            num_rows += len(rows)
            number += len(lines)
    found = digest.hexdigest() if digest is not None else file.content_hash()
    file.check_unchanged()
    return FileScan(num_rows, marks, found)


def numbered_lines(stream: TextStream, first: Mark, stop_byte: int | None) -> Iterator[tuple[int, bytes]]:
    """Line number and bytes of the lines from a mark up to another one's byte, or to the end; blank ones left out.

    For one stream marks must come in rising order.
    """
    with reading(stream.file.path):
        stream.skip_to(first.byte)
        number = first.line
        for _, lines in _split(stream, stop_byte):
            for line in lines:
                number += 1
                if text := _bare(line):
                    yield number, text


def _bare(line: bytes) -> bytes:
    """A line without what surrounds its JSON; a byte order mark also stands where files were put together."""
    line = line.strip(_BLANK)
    return line.removeprefix(_BOM).lstrip(_BLANK) if line.startswith(_BOM) else line


def _split(stream: TextStream, stop_byte: int | None) -> Iterator[tuple[int, list[bytes]]]:
    """Whole lines, a chunk's worth at a time, with the byte at which the first of them begins.

    Of a line with more than MAX_LINE_BYTES only the beginning is given, a little more than MAX_LINE_BYTES.
    """
    start = stream.position
    pieces: list[bytes] = []
    held = 0
    while chunk := stream.read(stop_byte):
        lines = chunk.split(b"\n")
        if pieces and held <= MAX_LINE_BYTES:
            pieces.append(lines[0])
        if len(lines) == 1:
            pieces = pieces or [chunk]
            held += len(chunk)
            continue
        if pieces:
            lines[0] = b"".join(pieces)
        rest = lines.pop()
        size = held + len(chunk) - len(rest)
        pieces, held = [rest] if rest else [], len(rest)
        yield start, lines
        start += size
    if pieces:
        yield start, [b"".join(pieces)]


class TextStream:
    """The unpacked text of a file, forwards. Raises InputError for a file that is plainly no text."""

    def __init__(self, file: InputFile, digest: Any = None) -> None:
        """`digest` is a hashlib object; it is given the bytes of the file as it is, packed."""
        self.file = file
        self.position = 0
        """Bytes of text before the next one read."""
        self._chunk = REMOTE_CHUNK_BYTES if file.is_remote else CHUNK_BYTES
        # Arrow unpacks in pieces of 64 KiB; without a buffer each would be a request.
        with reading(file.path):
            self._bytes = io.BufferedReader(_ByteStream(file, digest), self._chunk)
        self._unpacked: pa.NativeFile | None = None
        compression = next((name for suffix, name in _COMPRESSIONS.items() if file.path.endswith(suffix)), None)
        if compression is not None:
            if file.size == 0:
                raise InputError(f"{file.path}: is empty, not {compression} data; write the file again or remove it")
            # Arrow's streams, unlike Python's zstandard, tell a truncated file from a finished one.
            self._unpacked = pa.CompressedInputStream(pa.PythonFile(self._bytes, mode="r"), compression)

    def read(self, stop_byte: int | None = None) -> bytes:
        """The next chunk, not beyond stop_byte; empty at the end."""
        size = self._chunk if stop_byte is None else min(self._chunk, stop_byte - self.position)
        chunk: bytes = (self._unpacked or self._bytes).read(size) if size > 0 else b""
        if self.position == 0:
            self._check_text(chunk)
        self.position += len(chunk)
        return chunk

    def skip_to(self, byte: int) -> None:
        """Go forwards to a byte of the text."""
        if self._unpacked is None:
            self.position = self._bytes.seek(byte)
        while self.position < byte and self.read(byte):
            pass

    def close(self) -> None:
        """Close the file."""
        self._bytes.close()

    def _check_text(self, chunk: bytes) -> None:
        for magic, text in _MAGIC.items():
            if chunk.startswith(magic):
                raise InputError(f"{self.file.path}: {text}")


class _ByteStream(io.RawIOBase):
    """The bytes of a file as it is, asked for again after a transient error."""

    def __init__(self, file: InputFile, digest: Any) -> None:
        super().__init__()
        self._raw = file.open()
        self._digest = digest
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_SET, "marks count from the beginning"
        self._at = offset
        return offset

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = retrying(lambda: self._raw.read_at(len(buffer), self._at))
        self._at += len(data)
        if self._digest is not None:
            self._digest.update(data)
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._raw.close()
        super().close()
