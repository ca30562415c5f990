"""Ending a run before its end: signals, the time limit, and the grace in which work under way may finish."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(BaseException):
    """A stop was asked for while nothing was running yet.

    No Exception, since a signal may raise it amid a library's `except Exception`, which would take it for a failure.
    """


class GraceOver(Exception):
    """A stop was asked for and what was running has not finished in time."""


class StopRequest:
    """Whether, why and until when to stop. Safe to ask from every thread.

    The first SIGTERM or SIGINT (or the end of max_runtime_s) asks for a stop; a second signal ends the process at once
    with 128 + its number, since whoever sends two does not want to wait. One that comes after max_runtime_s is the
    first.
    """

    def __init__(self, grace_s: float, max_runtime_s: float | None, clock: Callable[[], float]) -> None:
        self._grace_s = grace_s
        self._clock = clock
        self._ends_at = clock() + max_runtime_s if max_runtime_s is not None else None
        self._gives_up_at: float | None = None
        self._is_running = False
        self._is_signalled = False
        self.reason: str | None = None
        """Why, once a stop is asked for; None before."""

    def request(self, reason: str) -> None:
        """Ask for a stop."""
        if self.reason is None:
            self._gives_up_at = self._clock() + self._grace_s
            self.reason = reason

    def poll(self) -> bool:
        """Whether to admit nothing more."""
        if self.reason is None and self._ends_at is not None and self._clock() >= self._ends_at:
            self.request("run.max_runtime_s is over")
        return self.reason is not None

    def check(self) -> None:
        """Raise GraceOver when a stop was asked for longer than the grace ago."""
        if self.poll() and self._gives_up_at is not None and self._clock() >= self._gives_up_at:
            raise GraceOver

    def start(self) -> None:
        """From now on a signal lets work finish; Interrupted when one came already."""
        self._is_running = True
        if self.poll():
            raise Interrupted

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Listen to SIGTERM and SIGINT within; outside the main thread Python lets nobody listen."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_signalled:
            os._exit(128 + number)
        self._is_signalled = True
        self.request(f"{signal.Signals(number).name} received")
        if not self._is_running:
            raise Interrupted
