"""Whole jobs from bucket to bucket, on the stub engine: what happens to them there must cost no row."""

import io
import signal
import subprocess
import tempfile
import time
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from specrun.jobs.errors import InputMissing, OutputError, StorageError, TemporaryError
from specrun.runner.cli import run_command
from specrun.runner.run import run_job
from tests.runner.bucket_jobs import assert_whole, is_success, parts, report, start, table, wait_until, written


@pytest.fixture
def remote(job, bucket, tmp_path, monkeypatch):
    """A job that writes to the bucket; temporary folders lie where the test can see them."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    job.set(output__path=f"{bucket.url}/jobs/out")
    yield job
    assert list(folder.iterdir()) == []


def test_a_job_from_bucket_to_bucket(remote, bucket):
    prompts = [f"word {i}" for i in range(250)]
    for i, stop in ((1, 100), (2, 200), (10, 250)):
        sink = io.BytesIO()
        pq.write_table(pa.table({"prompt": prompts[stop - 100 if i < 10 else 200 : stop]}), sink)
        bucket.put(f"in/part-{i}.parquet", sink.getvalue())
    bucket.put("in/_SUCCESS", b"")
    result = remote.set(input__path=f"{bucket.url}/in/*.parquet").run()
    assert result.exit_code == 0 and result.report["num_rows"] == 250
    assert_whole(bucket, 250)
    assert parts(bucket) == [f"jobs/out/data/part-00000-00000{i}.parquet" for i in range(3)]
    left = {name.removeprefix("jobs/out/") for name in bucket.names("jobs/out")}
    assert {"_SUCCESS", "manifest.json", "report.json", "job.resolved.yaml", "metrics/job.parquet"} <= left
    assert not [name for name in left if "spill" in name or "tmp" in name or name.endswith(("lock", ".guard"))]
    assert ds.dataset(f"{bucket.name}/jobs/out/data", filesystem=bucket.fs).count_rows() == 250


def test_the_output_is_that_of_a_local_job(remote, bucket):
    remote.jsonl([{"prompt": f"word {i}", "kept": [i]} for i in range(250)])
    remote.run(seed=3)
    there = table(bucket)
    remote.set(output__path=str(remote.out)).run()
    assert there.to_pylist() == remote.rows()


def test_a_finished_job_is_left_as_it_is(remote, bucket):
    remote.prompts(250).run()
    before = {name: bucket.read(name) for name in bucket.names()}
    seen = len(bucket.server.requests)
    result = remote.run()
    assert result.exit_code == 0 and result.was_done and remote.builder.num_loads == 0
    assert {method for method, _ in bucket.server.requests[seen:]} <= {"GET", "HEAD"}
    assert {name: bucket.read(name) for name in bucket.names()} == before


@pytest.mark.parametrize("if_exists", ["overwrite", "error", "skip"])
def test_what_exists(remote, bucket, if_exists):
    remote.prompts(150).run()
    bucket.put("jobs/out/notes.txt", b"mine")
    remote.prompts(120).set(output__if_exists=if_exists)
    if if_exists == "error":
        with pytest.raises(OutputError, match=f"output.path {bucket.url}/jobs/out is not empty"):
            remote.run()
        return
    result = remote.run()
    assert result.exit_code == 0 and result.was_done == (if_exists == "skip")
    assert_whole(bucket, 120 if if_exists == "overwrite" else 150)
    assert bucket.read("jobs/out/notes.txt") == b"mine"


def test_resume_after_a_kill(remote, bucket, tmp_path):
    remote.prompts(1000)
    process = start(remote, sleep_s=0.05, max_num_seqs=25)
    wait_until(lambda: len(parts(bucket)) >= 2, process)
    table(bucket)
    process.kill()
    process.communicate()
    before, seen = parts(bucket), len(bucket.server.requests)
    assert 200 <= len(table(bucket)) < 1000 and not is_success(bucket)
    for left in (tmp_path / "temporary").iterdir():  # of the killed process, which could not tidy up
        subprocess.run(["rm", "-r", left], check=True)
    result = remote.run()  # the lock's holder is dead
    assert result.exit_code == 0
    assert_whole(bucket, 1000)
    assert not written(bucket, seen) & set(before)


def test_parts_are_whole_at_every_moment(remote, bucket):
    remote.prompts(1000).set(output__rows_per_part=50)
    process = start(remote, sleep_s=0.02, max_num_seqs=20)
    seen = 0
    while process.poll() is None:
        if names := parts(bucket):
            rows = table(bucket)["row_index"].to_pylist()
            assert len(rows) >= 50 * len(names) >= seen and len(set(rows)) == len(rows)
            seen = 50 * len(names)
    assert process.returncode == 0, process.communicate()
    process.communicate()
    assert_whole(bucket, 1000)


def test_resume_after_an_exception(remote, bucket):
    remote.jsonl([{"prompt": f"word {i}" if i != 700 else "word 700 BOOM"} for i in range(1000)])
    with pytest.raises(RuntimeError):
        remote.run(raise_on="BOOM", max_num_seqs=30, sleep_s=0.001)
    assert not is_success(bucket)
    assert report(bucket)["state"] == "failed"
    before, seen = parts(bucket), len(bucket.server.requests)
    assert remote.run().exit_code == 0
    assert table(bucket)["row_index"].to_pylist() == list(range(1000)) and is_success(bucket)
    assert not written(bucket, seen) & set(before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_rows_of_unfinished_parts(remote, bucket, tmp_path, number):
    remote.prompts(1000).set(output__rows_per_part=600)
    process = start(remote, "--json", sleep_s=0.1, max_num_seqs=32)
    temporary = tmp_path / "temporary"
    wait_until(lambda: any(file.stat().st_size for file in temporary.glob("*/spill/*.jsonl")), process)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert report(bucket)["state"] == "preempted"
    done = report(bucket)["num_rows"]
    assert 0 < done < 1000 and parts(bucket) == []
    (spill,) = [name for name in bucket.names("jobs/out/.specrun") if "/spill/" in name]
    assert bucket.read(spill).count(b"\n") == done
    result = remote.run()
    assert result.exit_code == 0 and result.report["num_ok"] == 1000
    assert_whole(bucket, 1000)
    assert not [name for name in bucket.names() if "/spill/" in name]


def test_only_the_rest_is_run_after_a_stop(remote, bucket):
    remote.prompts(1000).set(output__rows_per_part=600, run__max_runtime_s=50, run__grace_s=0)
    builder = remote.stub(max_num_seqs=32)
    engines: list[Any] = []
    make = builder.engine

    def engine(*args):
        engines.append(make(*args))
        return engines[-1]

    builder.engine = engine
    first = run_job(
        remote.spec, builder=builder, clock=lambda: 100 if engines and engines[0].stats.num_steps >= 10 else 0
    )
    done = first.report["num_rows"]
    assert first.exit_code == 75 and 0 < done < 1000
    assert run_job(remote.spec, builder=builder).exit_code == 0
    assert_whole(bucket, 1000)
    assert engines[1].stats.num_prompt_tokens == 2 * (1000 - done)


@pytest.mark.parametrize("kind", ["slow", "drop"])
def test_a_store_that_is_busy_now_and_then(remote, bucket, kind):
    faults = [bucket.server.fail(kind, skip=5 * i, times=1) for i in range(60)]
    result = remote.prompts(500).set(output__rows_per_part=50).run()
    assert result.exit_code == 0
    assert sum(fault.hits for fault in faults) > 20
    assert_whole(bucket, 500)


def test_a_store_that_refuses_in_the_middle(remote, bucket):
    remote.prompts(500)
    bucket.server.fail("denied", "PUT|POST", "/data/", skip=2)
    with pytest.raises(StorageError, match=f"data/part-\\S+: access to bucket {bucket.name} is denied") as caught:
        remote.run(max_num_seqs=50)
    assert caught.value.exit_code == 74
    assert len(parts(bucket)) == 2 and report(bucket)["state"] == "failed"
    bucket.server.heal()
    assert remote.run().exit_code == 0
    assert_whole(bucket, 500)


@pytest.mark.parametrize("trouble", ["missing", "denied", "no credentials", "dead"])
def test_an_output_that_cannot_be_written_is_told_before_the_model_is_loaded(remote, bucket, monkeypatch, trouble):
    remote.prompts(10)
    match trouble:
        case "missing":
            remote.set(output__path="s3://nowhere-at-all/out")
        case "denied":
            bucket.server.fail("denied")
        case "no credentials":
            monkeypatch.delenv("AWS_ACCESS_KEY_ID")
            monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
            bucket.server.needs_credentials = True
        case "dead":
            monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(OutputError, match=f"bucket {'nowhere-at-all' if trouble == 'missing' else bucket.name}"):
        remote.run()
    assert remote.builder.num_loads == 0


def test_an_input_bucket_that_is_not_there(remote, bucket):
    remote.set(input__path="s3://nowhere-at-all/in/*.parquet")
    with pytest.raises(InputMissing, match="nowhere-at-all"):
        remote.run()
    assert bucket.names() == []


def test_a_live_holder_elsewhere_is_respected(remote, bucket):
    holder = {"pid": 7, "hostname": "elsewhere", "start_time": 0.0, "boot_id": "other", "namespace": "other"}
    bucket.put("jobs/out/.specrun/shard-00000/lock", orjson.dumps(holder))
    with pytest.raises(
        TemporaryError, match=f"{bucket.url}/jobs/out/.specrun/shard-00000/lock: process 7 on elsewhere"
    ):
        remote.prompts(10).run()
    assert remote.builder.num_loads == 0
    assert parts(bucket) == []


def test_shards_make_one_output(remote, bucket):
    remote.prompts(250)
    for i in (2, 0, 1):
        assert not is_success(bucket)
        assert remote.set(run__shard=f"{i}/3").run().exit_code == 0
    assert_whole(bucket, 250)
    assert report(bucket)["num_rows"] == 250


def test_failed_rows_are_run_again(remote, bucket):
    remote.jsonl([{"prompt": f"word {i}"} for i in range(250)])
    assert remote.run(fail_on="7").exit_code == 0
    assert bucket.read("jobs/out/errors.jsonl").count(b"\n") == 1
    result = run_job(remote.spec, builder=remote.stub(), retry_codes=())
    assert result.exit_code == 0 and result.report["num_failed"] == 0
    assert_whole(bucket, 250)
    assert "jobs/out/errors.jsonl" not in bucket.names()


def test_openai_lines_from_bucket_to_bucket(remote, bucket):
    body = {"model": "stub", "prompt": "word 1", "max_tokens": 4}
    lines = [{"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": body} for i in range(3)]
    bucket.put("in/batch.jsonl", b"".join(orjson.dumps(line) + b"\n" for line in lines))
    remote.set(input__path=f"{bucket.url}/in/batch.jsonl", input__format="openai-batch", output__format="openai-batch")
    assert remote.run().exit_code == 0
    results = [orjson.loads(line) for line in bucket.read("jobs/out/output.jsonl").splitlines()]
    assert [result["custom_id"] for result in results] == ["c0", "c1", "c2"]


def test_validate_leaves_nothing_behind(remote, bucket, capsys, monkeypatch):
    assert run_command(["validate", str(remote.prompts(10).file)], remote.stub()) == 0
    assert bucket.names() == []
    remote.set(output__path="s3://nowhere-at-all/out")
    assert run_command(["validate", str(remote.file)], remote.stub()) == 73
    assert "there is no bucket nowhere-at-all" in capsys.readouterr().err


def test_a_process_with_an_unfinished_upload_ends(remote, bucket):
    remote.prompts(300)
    bucket.server.fail("drop", "PUT|POST", "/data/")
    process = start(remote)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 74, err
    assert "cannot be reached" in err and "Error ignored" not in err
    assert parts(bucket) == []
    bucket.server.heal()
    assert remote.run().exit_code == 0
    assert_whole(bucket, 300)


def test_a_second_signal_ends_at_once_amid_an_upload(remote, bucket, tmp_path):
    remote.prompts(300)
    fault = bucket.server.fail("hang", "PUT|POST", "/data/", times=1)
    process = start(remote)
    wait_until(lambda: fault.hits, process)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)  # less than the request would take
    assert process.returncode == 143
    bucket.server.heal()
    for left in (tmp_path / "temporary").iterdir():
        subprocess.run(["rm", "-r", left], check=True)
    assert remote.run().exit_code == 0
    assert_whole(bucket, 300)
