"""One job at a time in an output folder: a lock file that names its holder and is kept fresh while the holder lives."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
import psutil

from .errors import TemporaryError
from .folder import storage_errors

HEARTBEAT_S = 20.0
STALE_S = 300.0
"""A holder on another host is dead when its heartbeat is older than this."""
_START_TOLERANCE_S = 1.0
"""psutil derives start times from the boot time, which moves a little when the clock is set."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a lock. A pid alone may have been given to another process since."""

    pid: int
    hostname: str
    start_time: float

    @classmethod
    def current(cls) -> Holder:
        return cls(os.getpid(), socket.gethostname(), psutil.Process().create_time())

    def is_alive(self, heartbeat_age_s: float) -> bool:
        """Looks the process up on its own host; elsewhere only the heartbeat tells."""
        if self.hostname != socket.gethostname():
            return heartbeat_age_s < STALE_S
        try:
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.start_time) > _START_TOLERANCE_S:
                return False
            return bool(process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:
            return True


class FolderLock:
    """Held between acquire() and release(). Advisory: part names are deterministic, so parts are safe without it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._guard = path.with_name(path.name + ".guard")
        self._me: Holder | None = None
        self._released = threading.Event()
        self._heartbeat: threading.Thread | None = None

    def acquire(self) -> None:
        """Takes the lock, from a dead holder too. Raises TemporaryError while another process lives that holds it."""
        with self._exclusive():
            holder = self._holder()
            if holder is not None and holder.is_alive(self._age_s()):
                raise TemporaryError(
                    f"{self._path}: process {holder.pid} on {holder.hostname} is writing to this output; "
                    "wait for it, stop it, or choose another output.path"
                )
            me = Holder.current()
            tmp = self._path.with_name(f"{self._path.name}.{me.pid}")
            tmp.write_bytes(orjson.dumps(asdict(me)))
            os.replace(tmp, self._path)
        self._me = me
        self._released.clear()
        self._heartbeat = threading.Thread(target=self._beat, name="specrun-lock", daemon=True)
        self._heartbeat.start()

    def check(self) -> None:
        """Raises TemporaryError when another process has taken the lock, as after a long suspension of this one."""
        holder = self._holder()
        if self._me is None or holder != self._me:
            by = f"process {holder.pid} on {holder.hostname}" if holder else "someone"
            raise TemporaryError(f"{self._path}: {by} has taken over this output; leave it to them or submit again")

    def release(self) -> None:
        """Gives the lock up if it is still ours; safe to call twice."""
        self._released.set()
        if self._heartbeat is not None:
            self._heartbeat.join()
            self._heartbeat = None
        if self._me is None:
            return
        with suppress(OSError), self._exclusive():
            if self._holder() == self._me:
                self._path.unlink()
        self._me = None

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_S):
            if self._holder() != self._me:
                return  # taken over: check() tells the writer, and the new holder's heartbeat is its own
            with suppress(OSError):
                os.utime(self._path)

    def _holder(self) -> Holder | None:
        try:
            return Holder(**orjson.loads(self._path.read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def _age_s(self) -> float:
        # The guard was touched a moment ago: both times come from the file server's clock, whatever ours says.
        return self._guard.stat().st_mtime - self._path.stat().st_mtime

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Holds the guard file, so that two processes cannot both find a holder dead and both take over."""
        with storage_errors(self._path), open(self._guard, "wb") as guard:
            with suppress(OSError):  # a file system without flock: the lock stays advisory
                fcntl.flock(guard, fcntl.LOCK_EX)
            os.utime(self._guard)
            yield
