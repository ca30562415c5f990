"""Moments in the life of a job, recognised by the audit events of Python that the job raises on its way.

The product has no hooks for this: it opens, maps and renames files, and Python tells.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chaos.remains import torn_parts

Handler = Callable[[Path], None]


def opened_to_write(event: str, args: tuple[Any, ...]) -> Path | None:
    """The file that is about to be opened for writing."""
    if event != "open" or isinstance(args[0], int) or args[2] & os.O_ACCMODE == os.O_RDONLY:
        return None
    return Path(os.fsdecode(args[0]))


def opened_to_append(event: str, args: tuple[Any, ...]) -> Path | None:
    """The file that is about to be opened for an append."""
    return opened_to_write(event, args) if event == "open" and args[2] & os.O_APPEND else None


class AuditPoint:
    """Calls `handler` at the nth moment (from 1) of a kind, in the thread that is there. A child has one at most.

    part_write: a part is being written and has no whole footer. rename: a part, closed, is about to get its name in
    data/. named: it has it. journal, spill: about to be opened for an append. state: another file (manifest, report,
    _SUCCESS) is about to get its name. write: any file of the output is about to be opened for writing.
    """

    KINDS = ("part_write", "rename", "named", "journal", "spill", "state", "write")

    def __init__(self, out: Path, kind: str, nth: int, handler: Handler, shard: int = 0) -> None:
        self._out = out
        self._own = f"part-{shard:05d}-"
        self._recognise = getattr(self, f"_{kind}")
        self._left = nth
        self._handler = handler
        self._target: Path | None = None
        self._inside = threading.local()

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        """The audit hook."""
        if event not in ("open", "os.rename", "mmap.__new__", "os.mkdir") or getattr(self._inside, "is", False):
            return
        self._inside.__dict__["is"] = True  # what is done here raises events of its own
        try:
            path = self._recognise(event, args)
            if path is not None:
                self._left -= 1
                if self._left == 0:
                    self._handler(path)
        finally:
            self._inside.__dict__["is"] = False

    def _part_write(self, event: str, args: tuple[Any, ...]) -> Path | None:
        if event in ("open", "mmap.__new__"):
            return next((path for path in torn_parts(self._out) if path.name.startswith(self._own)), None)
        return None

    def _rename(self, event: str, args: tuple[Any, ...]) -> Path | None:
        if event == "os.rename" and Path(os.fsdecode(args[1])).parent == self._out / "data":
            return Path(os.fsdecode(args[0]))
        return None

    def _named(self, event: str, args: tuple[Any, ...]) -> Path | None:
        named = self._target
        if event == "os.rename":
            target = Path(os.fsdecode(args[1]))
            self._target = target if target.parent == self._out / "data" else None
        elif named is not None and named.exists():
            self._target = None
            return named
        return None

    def _journal(self, event: str, args: tuple[Any, ...]) -> Path | None:
        path = opened_to_append(event, args)
        return path if path is not None and path.name == "journal.jsonl" and self._out in path.parents else None

    def _spill(self, event: str, args: tuple[Any, ...]) -> Path | None:
        path = opened_to_append(event, args)
        is_one = path is not None and path.parent.name == "spill" and path.suffix == ".jsonl"
        return path if is_one else None

    def _state(self, event: str, args: tuple[Any, ...]) -> Path | None:
        if event != "os.rename":
            return None
        path = Path(os.fsdecode(args[1]))
        return path if self._out in path.parents and path.parent != self._out / "data" else None

    def _write(self, event: str, args: tuple[Any, ...]) -> Path | None:
        path = Path(os.fsdecode(args[0])) if event == "os.mkdir" else opened_to_write(event, args)
        if path is None:
            return None
        return path if path == self._out or self._out in path.parents else None
