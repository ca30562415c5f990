"""Cheap children: a process that has imported everything forks one for each attempt at a job.

The zygote reads one JSON object a line from stdin and answers each with one on stdout when its child has ended. It has
one thread and uses neither pyarrow nor a thread pool before it forks.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HANGS_S = 100.0
"""A child that takes longer is killed, which nobody then expects."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended."""

    status: int
    """Exit code, or minus the signal."""
    notes: list[dict[str, Any]]
    """What it told of its death or of the fault."""
    generated: list[int]
    """Rows that its engine finished, in that order."""
    seconds: float
    log: str
    """What it printed."""


class Zygote:
    """The client: run() may be called from several threads at once."""

    def __init__(self) -> None:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=environ,
            text=True,
        )
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._mutex = threading.Lock()
        self._last = 0
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def run(self, args: list[str], out: Path, log: Path, plan: dict[str, Any], **stub: Any) -> Ended:
        """Runs the command; plan: see broken_disk.arm(), and `kill_after_s` with `signal`; stub: see ChaosBuilder."""
        answer: Future[dict[str, Any]] = Future()
        with self._mutex:
            self._last += 1
            self._waiting[self._last] = answer
            plan = {"kill_after_s": HANGS_S, **plan}
            task = {"id": self._last, "args": args, "out": str(out), "log": str(log), "plan": plan, "stub": stub}
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
        ended = answer.result()
        return Ended(**ended, log=log.read_text("utf-8", "replace"))

    def close(self) -> None:
        """Ends the zygote."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._listener.join()
        self._process.stdout.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            with self._mutex:
                future = self._waiting.pop(answer.pop("id"))
            future.set_result(answer)
        for future in self._waiting.values():
            future.set_exception(RuntimeError("the zygote has died"))


@contextmanager
def zygote() -> Iterator[Zygote]:
    """A running zygote."""
    client = Zygote()
    try:
        yield client
    finally:
        client.close()


@dataclass(slots=True)
class _Child:
    """A child as the zygote sees it. Its pipe comes to an end when it does."""

    id: int
    pid: int
    began: float
    dies_at: float | None
    signal: int
    said: bytearray = field(default_factory=bytearray)

    def answer(self, status: int) -> dict[str, Any]:
        said = [json.loads(line) for line in bytes(self.said).splitlines()]
        return {
            "id": self.id,
            "status": status,
            "notes": [note for note in said if isinstance(note, dict)],
            "generated": [note for note in said if isinstance(note, int)],
            "seconds": time.monotonic() - self.began,
        }


def serve() -> None:
    """The zygote's loop."""
    from tests.chaos import attempt  # everything that a child needs

    selector = selectors.DefaultSelector()
    selector.register(sys.stdin.fileno(), selectors.EVENT_READ, None)
    os.set_blocking(sys.stdin.fileno(), False)
    children: set[int] = set()
    unread = b""
    is_open = True
    while is_open or children:
        due = [key.data.dies_at for key in selector.get_map().values() if key.data and key.data.dies_at is not None]
        for key, _ in selector.select(max(0.0, min(due) - time.monotonic()) if due else None):
            if key.data is None:
                content = os.read(key.fd, 1 << 20)
                is_open = bool(content)
                if not is_open:
                    selector.unregister(key.fd)
                *lines, unread = (unread + content).split(b"\n")
                for line in lines:
                    pipe, child = _fork(json.loads(line), attempt.run)
                    children.add(pipe)
                    selector.register(pipe, selectors.EVENT_READ, child)
            elif content := os.read(key.fd, 1 << 20):
                key.data.said += content
            else:
                selector.unregister(key.fd)
                os.close(key.fd)
                children.discard(key.fd)
                _, status = os.waitpid(key.data.pid, 0)
                print(json.dumps(key.data.answer(os.waitstatus_to_exitcode(status))), flush=True)
        for key in selector.get_map().values():
            child = key.data
            if child and child.dies_at is not None and child.dies_at <= time.monotonic():
                child.dies_at = None
                os.kill(child.pid, child.signal)  # not reaped yet, so the number is still the child's


def _fork(task: dict[str, Any], run: Any) -> tuple[int, _Child]:
    pipe, end = os.pipe()
    plan = task["plan"]
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.close(pipe)
            code = run(task, end)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.close(end)
    now = time.monotonic()
    return pipe, _Child(task["id"], pid, now, now + plan["kill_after_s"], plan.get("signal", signal.SIGKILL))


if __name__ == "__main__":
    serve()
