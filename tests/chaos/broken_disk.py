"""What a child does to itself at a chosen moment: it dies, with or without a torn line, or its disk fails."""

from __future__ import annotations

import builtins
import ctypes
import errno
import io
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chaos.audit_points import AuditPoint

Note = Callable[..., None]
"""Tells the parent something, by a write that outlives the process."""


class TornFile(io.FileIO):
    """A file whose first write reaches the disk in part only."""

    def __init__(self, path: str, mode: str, fraction: float, then: Callable[[], None]) -> None:
        super().__init__(path, mode)
        self._fraction = fraction
        self._then: Callable[[], None] | None = then

    def write(self, content: Any) -> int:
        """As much of the content as there is room for, and then what happens."""
        if self._then is None:
            return super().write(content)
        then, self._then = self._then, None
        content = bytes(content)
        cut = max(1, int(len(content) * self._fraction))
        cut += content[cut - 1 : cut] == b"\n"  # a whole line is not torn
        os.write(self.fileno(), content[: min(cut, len(content) - 1)])
        then()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def die(note: Note, point: str, path: Path) -> None:
    """Leaves a note and kills the process."""
    note(killed_at=point, path=str(path))
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def arm(plan: dict[str, Any], out: Path, note: Note) -> None:
    """Makes the process do what the plan says: `point` and `nth` (see AuditPoint), and `do` at that moment.

    do: kill (`delay_s` later, where given), tear (the next write reaches the disk as far as `fraction`, then the
    process dies), half_line (the child writes half a line itself, then dies), raise (`errno`; `sticky`: from then on in
    every write), short_write (as tear, but the write fails), read_only (data/ gets no more names).
    Without a point: `fsync` (errno of a sync of a part), `file_size` (bytes that a file may have).
    """
    if plan.get("file_size"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (plan["file_size"], resource.RLIM_INFINITY))
    if plan.get("obey_permissions"):
        drop_capabilities()
    if plan.get("fsync"):
        _break_fsync(plan["fsync"], plan.get("nth", 1), note)
    if plan.get("point"):
        handler = _handler(plan, out, note)
        sys.addaudithook(AuditPoint(out, plan["point"], plan["nth"], handler, plan["shard"]))


def _handler(plan: dict[str, Any], out: Path, note: Note) -> Callable[[Path], None]:
    do, point = plan["do"], plan["point"]

    def kill(path: Path) -> None:
        if plan.get("delay_s"):
            threading.Timer(plan["delay_s"], die, (note, point, path)).start()
        else:
            die(note, point, path)

    def half_line(path: Path) -> None:
        content = path.read_bytes() if path.exists() else b""
        begin = b"\n" if content and not content.endswith(b"\n") else b""
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.write(descriptor, begin + (b'[7,"half of \xe6' if point == "spill" else b'{"name":"part-00000-0000'))
        die(note, point, path)

    def tear(path: Path) -> None:
        _tear_next_open(path, plan["fraction"], lambda: die(note, point, path))

    def short_write(path: Path) -> None:
        _tear_next_open(path, plan["fraction"], lambda: note(failed_at=point, path=str(path)))

    def fail(path: Path) -> None:
        number = getattr(errno, plan["errno"])
        note(failed_at=point, path=str(path))
        if plan.get("sticky"):
            sys.addaudithook(_FullDisk(out, number))
        raise OSError(number, os.strerror(number), str(path))

    def read_only(path: Path) -> None:
        note(failed_at=point, path=str(path))
        (out / "data").chmod(0o555)

    actions = [kill, half_line, tear, short_write, read_only]
    return {"raise": fail, **{action.__name__: action for action in actions}}[do]


class _FullDisk(AuditPoint):
    """From now on nothing can be written."""

    def __init__(self, out: Path, number: int) -> None:
        self._number = number
        super().__init__(out, "write", -1, lambda path: None)

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "os.mkdir") and self._write(event, args) is not None:
            raise OSError(self._number, os.strerror(self._number), str(args[0]))


def _tear_next_open(path: Path, fraction: float, then: Callable[[], None]) -> None:
    """The open() under way gives a file that takes its first write in part only.

    The audit hook cannot change what open() returns, so open is exchanged for the rest of the process.
    """
    torn.update(path=path, fraction=fraction, then=then)


torn: dict[str, Any] = {}
_open = builtins.open


def watched_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    """open(), for a child that tears files."""
    opened = _open(file, mode, *args, **kwargs)
    if torn and not isinstance(file, int) and Path(os.fsdecode(file)) == torn["path"]:
        fraction, then = torn["fraction"], torn["then"]
        torn.clear()
        opened.close()
        return TornFile(os.fsdecode(file), mode.replace("t", ""), fraction, then)
    return opened


def watch_open() -> None:
    """Takes the place of open()."""
    builtins.open = watched_open
    io.open = watched_open


def _break_fsync(error: str, nth: int, note: Note) -> None:
    real, left = os.fsync, nth
    number = getattr(errno, error)

    def fsync(descriptor: int) -> None:
        nonlocal left
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.name.startswith("part-") and path.suffix == ".parquet":
            left -= 1
            if left == 0:
                note(failed_at="fsync", path=str(path))
                raise OSError(number, os.strerror(number))
        real(descriptor)

    os.fsync = fsync  # type: ignore[assignment]


def drop_capabilities() -> None:
    """Root, too, then obeys the permissions of files. Elsewhere than on Linux, or not as root, nothing happens."""
    if sys.platform == "linux" and os.geteuid() == 0:
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        ctypes.CDLL(None, use_errno=True).capset(header, (ctypes.c_uint32 * 6)())
