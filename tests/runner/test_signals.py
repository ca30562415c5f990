"""When a signal asks, and when it ends the process."""

import os
import signal
import time

import pytest

from specrun.runner.stop import Interrupted, StopRequest
from tests.runner.test_cli import start_stub, wait_for_rows, wait_until


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_progress(job, number):
    job.prompts(2000)
    process = start_stub(job, sleep_s=0.1, max_num_seqs=32)
    wait_for_rows(job, process)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 75, err
    assert f"stopped early: {number.name} received" in err
    assert job.report()["state"] == "preempted" and job.report()["exit_code"] == 75
    done = job.report()["num_rows"]
    assert 0 < done < 2000
    assert job.run().exit_code == 0 and len(job.rows()) == 2000
    assert job.report()["num_ok"] == 2000


def test_a_second_signal_ends_at_once(job):
    job.prompts(2000)
    process = start_stub(job, sleep_s=20, max_num_seqs=32)
    wait_until((job.out / ".specrun" / "shard-00000" / "lock").exists, process)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    started = time.monotonic()
    process.communicate(timeout=10)
    assert process.returncode == 143 and time.monotonic() - started < 5
