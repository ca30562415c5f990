"""Jobs on the stub engine that end early: in a process of their own, and what of them lies on the disk."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.contract.program import ROOT
from tests.runner.conftest import Job

STUB = f"""
import runpy, sys
from specrun.runner.cli import run_command
builder = runpy.run_path({str(ROOT / "tests/runner/conftest.py")!r}, run_name="stub")["StubBuilder"]
sys.exit(run_command(sys.argv[2:], builder(eval(sys.argv[1]))))
"""


def start_stub(job: Job, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", STUB, repr(options), "submit", str(job.file)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / '.src'}{os.pathsep}{ROOT}"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def parts(job: Job) -> list[Path]:
    data = job.out / "data"
    return sorted(data.iterdir()) if data.exists() else []


def visible_rows(job: Job) -> list[int]:
    """What a reader sees at this moment: every file in data/ is whole."""
    return [i for part in parts(job) for i in pq.read_table(part, columns=["row_index"]).column(0).to_pylist()]


def num_spilled(job: Job) -> int:
    return sum(path.read_bytes().count(b"\n") for path in job.out.rglob("spill/*.jsonl") if path.exists())


def num_secured(job: Job) -> int:
    return len(visible_rows(job)) + num_spilled(job)


def wait_for_rows(job: Job, process: subprocess.Popen[str], count: int) -> None:
    wait_until(lambda: num_secured(job) > count, process)


def wait_until(true: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not true():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def assert_whole(job: Job, num_rows: int) -> None:
    rows = job.rows()
    assert [row["row_index"] for row in rows] == list(range(num_rows))
    assert [row["text"] for row in rows] == [f"word {i}" for i in range(num_rows)]
    assert job.is_success and job.report()["num_ok"] == num_rows
    assert not list(job.out.rglob("spill/*"))


def num_run(job: Job) -> int:
    """Rows that the engine ran in the last attempt."""
    steps = pq.read_table(job.out / "metrics" / "steps").to_pylist()
    last = max(step["attempt"] for step in steps)
    return sum(step["num_running"] for step in steps if step["attempt"] == last)
