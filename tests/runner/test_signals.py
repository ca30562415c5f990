"""When a signal asks, and when it ends the process."""

import os
import signal

import pytest

from specrun.runner.stop import Interrupted, StopRequest


class Ended(BaseException):
    pass


def end(code):
    raise Ended(code)


def send(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


def test_a_signal_while_loading_passes_a_library_that_catches_everything():
    stop = StopRequest(20, None, lambda: 0.0)
    with stop.signals(), pytest.raises(Interrupted):
        try:
            send()
        except Exception:  # as transformers does
            pytest.fail("taken for an error of the library")
    assert stop.reason == "SIGTERM received"


def test_the_first_signal_after_the_time_limit_is_not_the_second(monkeypatch):
    monkeypatch.setattr(os, "_exit", end)
    now = [0.0]
    stop = StopRequest(20, 0.5, lambda: now[0])
    stop.start()
    now[0] = 1.0
    assert stop.poll() and stop.reason == "run.max_runtime_s is over"
    with stop.signals():
        send()
        with pytest.raises(Ended, match="143"):
            send()
