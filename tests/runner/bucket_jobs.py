"""Jobs whose output is jobs/out in a bucket: what lies there, and the real process that writes it."""

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).parent.parent.parent
STUB = f"""
import functools, runpy, sys
from specrun.jobs import filesystem
from specrun.runner import cli
filesystem.FIRST_PAUSE_S, filesystem.REQUEST_TRIES = 0.0, 1
builder = runpy.run_path({str(ROOT / "tests/runner/conftest.py")!r}, run_name="stub")["StubBuilder"]
cli.run_command = functools.partial(cli.run_command, sys.argv[2:], builder(eval(sys.argv[1])))
cli.main()
"""


def start(job, *args, **options):
    """The real process, on the stub engine."""
    command = [sys.executable, "-c", STUB, repr(options), "submit", str(job.file), *args]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".src")}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_until(condition, process):
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def parts(bucket):
    return bucket.names("jobs/out/data")


def table(bucket):
    """All rows in data/; every part there must be whole."""
    tables = [pq.read_table(io.BytesIO(bucket.read(name))) for name in parts(bucket)]
    return pa.concat_tables(tables)


def report(bucket):
    return json.loads(bucket.read("jobs/out/report.json"))


def written(bucket, since=0):
    """Names of what has been put after so many requests."""
    requests = bucket.server.requests[since:]
    return {target.partition("?")[0].removeprefix(f"/{bucket.name}/") for method, target in requests if method == "PUT"}


def is_success(bucket):
    return "jobs/out/_SUCCESS" in bucket.names()


def assert_whole(bucket, num_rows):
    rows = table(bucket)
    assert rows["row_index"].to_pylist() == list(range(num_rows))
    assert rows["text"].to_pylist() == [f"word {i}" for i in range(num_rows)]
    assert is_success(bucket)
