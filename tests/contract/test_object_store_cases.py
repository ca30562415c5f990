"""Case t41, and t47 where it speaks of buckets: jobs in an object store, over real HTTP on loopback."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specrun.jobs.errors import InputMissing, OutputError
from tests.contract.program import ROOT
from tests.contract.stub_jobs import STUB
from tests.jobs.object_store import Bucket, ObjectServer, environment
from tests.runner.conftest import Job


def to_bucket(job: Job, bucket: Bucket, num_rows: int) -> Job:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"prompt": [f"word {i}" for i in range(num_rows)], "num": range(num_rows)}), buffer)
    bucket.put("in/a.parquet", buffer.getvalue())
    job.config["input"]["path"] = f"{bucket.url}/in/*.parquet"
    return job.set(output__path=f"{bucket.url}/out", output__rows_per_part=20, run__order="input")


def rows(bucket: Bucket) -> list[dict[str, Any]]:
    """What a reader sees at this moment: every object in data/ is whole."""
    names = [name for name in bucket.names("out/data") if name.startswith("out/data/")]
    tables = [pq.read_table(io.BytesIO(bucket.read(name))) for name in names]
    found: list[dict[str, Any]] = [row for table in tables for row in table.to_pylist()]
    return found


def assert_whole(bucket: Bucket, num_rows: int) -> None:
    found = rows(bucket)
    assert [row["row_index"] for row in found] == [row["num"] for row in found] == list(range(num_rows))
    assert [row["text"] for row in found] == [f"word {i}" for i in range(num_rows)]
    assert "out/_SUCCESS" in bucket.names("out")


def test_t41_from_bucket_to_bucket(job: Job, bucket: Bucket) -> None:
    assert to_bucket(job, bucket, 90).run(seed=1, max_num_seqs=7).exit_code == 0
    assert_whole(bucket, 90)
    assert job.run().was_done


def test_t41_an_exception_in_the_writer_publishes_nothing(
    job: Job, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = pq.ParquetWriter.write_table
    calls = []

    def fail(self: pq.ParquetWriter, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("a fault in the writer")

    to_bucket(job, bucket, 90)
    with monkeypatch.context() as patch:
        patch.setattr(pq.ParquetWriter, "write_table", fail)
        with pytest.raises(RuntimeError, match="a fault in the writer"):
            job.run(max_num_seqs=7)
    assert [row["row_index"] for row in rows(bucket)] == list(range(40))
    assert job.run().exit_code == 0
    assert_whole(bucket, 90)


def start_stub(job: Job, server: ObjectServer, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", STUB, repr(options), "submit", str(job.file)]
    paths = {"PYTHONPATH": f"{ROOT / '.src'}{os.pathsep}{ROOT}"}
    environ = {**os.environ, **environment(server), **paths}
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_parts(bucket: Bucket, process: subprocess.Popen[str], count: int) -> None:
    while len(rows(bucket)) < 20 * count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def test_t41_sigterm(job: Job, bucket: Bucket, server: ObjectServer) -> None:
    """What is finished is uploaded, and the process comes to its end."""
    to_bucket(job, bucket, 400)
    process = start_stub(job, server, sleep_s=0.05, max_num_seqs=7)
    wait_for_parts(bucket, process, 2)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    seen = rows(bucket)
    assert [row["row_index"] for row in seen] == list(range(len(seen))) and len(seen) % 20 == 0
    assert job.run().exit_code == 0
    assert_whole(bucket, 400)


def test_t41_sigkill(job: Job, bucket: Bucket, server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    to_bucket(job, bucket, 400)
    process = start_stub(job, server, sleep_s=0.05, max_num_seqs=7)
    wait_for_parts(bucket, process, 2)
    process.kill()
    process.communicate()
    seen = rows(bucket)
    assert [row["row_index"] for row in seen] == list(range(len(seen))) and len(seen) % 20 == 0
    assert job.run().exit_code == 0
    assert_whole(bucket, 400)


def test_t47_a_bucket_that_is_not_there(job: Job, bucket: Bucket) -> None:
    job.prompts(3).set(output__path="s3://no-such-bucket/out")
    with pytest.raises(OutputError, match="no-such-bucket"):
        job.run()
    assert job.builder.num_loads == 0
    job.config["input"]["path"] = "s3://no-such-bucket/in/*.parquet"
    with pytest.raises(InputMissing, match="no-such-bucket"):
        job.run()
