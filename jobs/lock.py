"""One job at a time in an output: a lock file that names its holder and is kept fresh while the holder lives."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
import psutil

from .errors import StorageError, TemporaryError
from .filesystem import storage_errors
from .object_store import ObjectStore
from .store import Store

HEARTBEAT_S = 20.0
STALE_S = 120.0
"""A holder that cannot be looked up is dead when its heartbeat is older than this."""
_START_TOLERANCE_S = 1.0
"""psutil derives start times from the boot time, which moves a little when the clock is set."""
_JOIN_S = 10.0
"""A heartbeat that is under way to a store that does not answer is not waited for longer."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a lock. A pid alone may have been given to another process since.

    `boot_id` and `namespace` tell whether a pid of this host's name is a pid of ours: hosts are started anew, and
    containers share the name of their host. They are empty on systems that have none.
    """

    pid: int
    hostname: str
    start_time: float
    boot_id: str
    namespace: str

    @classmethod
    def current(cls) -> Holder:
        boot_id = namespace = ""
        with suppress(OSError):
            boot_id = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        with suppress(OSError):
            namespace = os.readlink("/proc/self/ns/pid")
        return cls(os.getpid(), socket.gethostname(), psutil.Process().create_time(), boot_id, namespace)

    def is_alive(self, heartbeat_age_s: float) -> bool:
        """Looks the process up where its pid means something here; elsewhere only the heartbeat tells."""
        here = Holder.current()
        if self.hostname == here.hostname and self.boot_id != here.boot_id:
            return False
        if (self.hostname, self.namespace) != (here.hostname, here.namespace):
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


class Lock(ABC):
    """Held between acquire() and release(). Advisory: part names are deterministic, so parts are safe without it."""

    def __init__(self, path: str) -> None:
        self._where = path
        self._me: Holder | None = None
        self._released = threading.Event()
        self._heartbeat: threading.Thread | None = None

    def acquire(self) -> None:
        """Takes the lock, from a dead holder too. Raises TemporaryError while another process lives that holds it."""
        me = Holder.current()
        with self._exclusive():
            holder = self._holder()
            if holder is not None and holder.is_alive(self._age_s()):
                raise TemporaryError(
                    f"{self._where}: process {holder.pid} on {holder.hostname} is writing to this output; "
                    "wait for it, stop it, or choose another output.path"
                )
            self._put(me)
        self._me = me
        self._released.clear()
        self._heartbeat = threading.Thread(target=self._beat, name="specrun-lock", daemon=True)
        self._heartbeat.start()

    def check(self) -> None:
        """Raises TemporaryError when another process has taken the lock, as after a long suspension of this one."""
        holder = self._holder()
        if self._me is None or holder != self._me:
            by = f"process {holder.pid} on {holder.hostname}" if holder else "someone"
            raise TemporaryError(f"{self._where}: {by} has taken over this output; leave it to them or submit again")

    def release(self) -> None:
        """Gives the lock up if it is still ours; safe to call twice."""
        self._released.set()
        if self._heartbeat is not None:
            self._heartbeat.join(_JOIN_S)
            self._heartbeat = None
        if self._me is None:
            return
        with suppress(OSError, StorageError), self._exclusive():
            if self._holder() == self._me:
                self._remove()
        self._me = None

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_S):
            with suppress(OSError, StorageError):  # the next beat may get through
                if self._holder() != self._me:
                    return  # taken over: check() tells the writer, and the new holder's heartbeat is its own
                self._refresh()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Keeps two processes from both finding a holder dead and both taking over, where the store can."""
        yield

    def _holder(self) -> Holder | None:
        content = self._content()
        try:
            return Holder(**orjson.loads(content)) if content else None
        except (ValueError, TypeError):
            return None

    @abstractmethod
    def _content(self) -> bytes | None:
        """What stands in the lock; None without one."""

    @abstractmethod
    def _age_s(self) -> float:
        """How old the last heartbeat is, by the one clock of whoever keeps the file."""

    @abstractmethod
    def _put(self, holder: Holder) -> None: ...

    @abstractmethod
    def _refresh(self) -> None: ...

    @abstractmethod
    def _remove(self) -> None: ...


class FolderLock(Lock):
    """A lock in a local or mounted folder, taken under flock of a guard file beside it."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path
        self._guard = path.with_name(path.name + ".guard")

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        with storage_errors(self._path), open(self._guard, "wb") as guard:
            with suppress(OSError):  # a file system without flock: the lock stays advisory
                fcntl.flock(guard, fcntl.LOCK_EX)
            os.utime(self._guard)
            yield

    def _content(self) -> bytes | None:
        try:
            return self._path.read_bytes()
        except OSError:
            return None

    def _age_s(self) -> float:
        # The guard was touched a moment ago: both times come from the file server's clock, whatever ours says.
        return self._guard.stat().st_mtime - self._path.stat().st_mtime

    def _put(self, holder: Holder) -> None:
        tmp = self._path.with_name(f"{self._path.name}.{holder.pid}")
        tmp.write_bytes(orjson.dumps(asdict(holder)))
        os.replace(tmp, self._path)

    def _refresh(self) -> None:
        os.utime(self._path)

    def _remove(self) -> None:
        self._path.unlink()


class ObjectLock(Lock):
    """A lock in an object store, which has no exclusion: of two that take over at once, check() stops the first."""

    def __init__(self, store: ObjectStore, name: str, tmp: Path) -> None:
        super().__init__(store.path(name))
        self._store = store
        self._name = name
        self._tmp = tmp

    def _content(self) -> bytes | None:
        return self._store.read(self._name)

    def _age_s(self) -> float:
        guard = f"{self._name}.guard"
        self._store.write(guard, b"", self._tmp)
        now, beat = self._store.modified(guard), self._store.modified(self._name)
        return (now - beat).total_seconds() if now and beat else STALE_S

    def _put(self, holder: Holder) -> None:
        self._store.write(self._name, orjson.dumps(asdict(holder)), self._tmp)

    def _refresh(self) -> None:
        if self._me is not None:
            self._put(self._me)

    def _remove(self) -> None:
        self._store.delete(self._name)


def open_lock(store: Store, name: str, tmp: Path) -> Lock:
    """The lock of that name in a store, not yet taken; its folder has been created, `tmp` is a local folder."""
    return ObjectLock(store, name, tmp) if isinstance(store, ObjectStore) else FolderLock(Path(store.path(name)))
