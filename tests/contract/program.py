"""Cases the real `specrun` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.runner.conftest import Job

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120
"""For a process that hangs; none of them needs a tenth of it."""


def start(*args: str | Path, limit: Callable[[], None] | None = None, **environ: str) -> subprocess.Popen[str]:
    """Begin a command. `limit` runs in the child before it."""
    return subprocess.Popen(
        [sys.executable, "-m", "specrun.runner", *map(str, args)],
        env={**os.environ, "PYTHONPATH": str(ROOT / ".src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limit,
    )


def specrun(
    *args: str | Path, limit: Callable[[], None] | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    process = start(*args, limit=limit, **environ)
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@contextmanager
def started(job: Job, *args: str, until: Callable[[], bool]) -> Iterator[subprocess.Popen[str]]:
    """A submit that runs while `until` has come true; killed at the end where it still does."""
    process = start("submit", job.file, *args)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not until():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.communicate()


SLOW_POLICY = '''
import os, time
from specrun.policies.base import SpecDecision, SpeculationPolicy


class Slow(SpeculationPolicy):
    """No speculation, and a while in every step; tells by a file that steps are made."""

    def __init__(self, step_s, started):
        self.step_s, self.started = step_s, started

    def decide(self, state):
        open(self.started, "w").close()
        time.sleep(self.step_s)
        return SpecDecision.uniform(state, 0, "slow")


class Broken(SpeculationPolicy):
    def decide(self, state):
        raise ZeroDivisionError("a fault of its own")
'''


def write_policy(job: Job) -> Job:
    """A module user_policy beside the job file."""
    (job.folder / "user_policy.py").write_text(SLOW_POLICY)
    return job.set(speculation__method="ngram")


def slow(job: Job, step_s: float, started: Path) -> Job:
    """Have each step of the job take a while; the file `started` appears with the first."""
    started.unlink(missing_ok=True)
    policy = {"name": "user_policy:Slow", "step_s": step_s, "started": str(started)}
    return write_policy(job).set(speculation__policy=policy)
