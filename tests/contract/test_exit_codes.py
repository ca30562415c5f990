"""Each exit code of the manual, reached by the real program on a tiny model."""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.contract.program import slow, specrun, started, write_policy
from tests.runner.conftest import Job


@pytest.fixture
def real(model_job: Job) -> Job:
    return model_job.set(output__token_ids=False, sampling__max_tokens=4, errors__max_failed_fraction=0.01)


PROGRESS = re.compile(r"loading the model|[\d,]+/[\d,?]+ rows · .*")


def error_of(result: subprocess.CompletedProcess[str]) -> str:
    """What the program complained about: lines on stderr, and nothing else there but progress."""
    lines = [line for line in result.stderr.splitlines() if not PROGRESS.fullmatch(line)]
    assert all(line.startswith("specrun: ") for line in lines), result.stderr
    return "\n".join(lines)


def assert_whole(job: Job, num_rows: int) -> None:
    rows = job.rows()
    assert [row["row_index"] for row in rows] == list(range(num_rows))
    assert all(row["text"] is not None and row["error_code"] is None for row in rows)
    assert job.is_success and job.report()["num_ok"] == num_rows


@pytest.fixture(scope="module")
def done(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, subprocess.CompletedProcess[str]]:
    """A job that is done, and how its command ended."""
    job = Job(tmp_path_factory.mktemp("done")).prompts(20)
    job.set(model__path=str(tiny_model), engine__device="cpu", sampling__max_tokens=4)
    return job, specrun("submit", job.file, "--json")


def test_exit_0_done_and_done_before(done: tuple[Job, subprocess.CompletedProcess[str]]) -> None:
    job, result = done
    assert result.returncode == 0 and error_of(result) == ""
    report = json.loads(result.stdout)
    assert (report["num_ok"], report["exit_code"], report["state"]) == (20, 0, "done")
    assert_whole(job, 20)
    files = {path: path.stat().st_mtime_ns for path in job.out.rglob("*")}
    again = specrun("submit", job.file)
    assert again.returncode == 0 and "nothing was run" in error_of(again)
    assert files == {path: path.stat().st_mtime_ns for path in job.out.rglob("*")}


def test_exit_2_too_many_rows_failed(real: Job) -> None:
    result = specrun("submit", real.jsonl([{"prompt": "a"}, {"prompt": None}]).file)
    assert result.returncode == 2 and "1 of 2 rows failed" in error_of(result)
    assert real.report()["exit_code"] == 2 and not real.is_success
    assert [row["error_code"] for row in real.rows()] == [None, "null_prompt"]


@pytest.mark.parametrize("args", [["submti"], ["submit"], ["submit", "job.yaml", "--no-such-option"]])
def test_exit_64_usage(args: list[str]) -> None:
    result = specrun(*args)
    assert result.returncode == 64 and result.stdout == "" and "Usage: specrun" in result.stderr


def test_exit_65_input_that_cannot_be_read(real: Job) -> None:
    (real.folder / "in.parquet").write_bytes(b"PAR1 and no more")
    real.config["input"]["path"] = str(real.folder / "in.parquet")
    result = specrun("submit", real.file)
    assert result.returncode == 65 and "in.parquet" in error_of(result)


def test_exit_66_input_that_is_not_there(real: Job) -> None:
    result = specrun("submit", real.file)
    assert result.returncode == 66 and "in.jsonl" in error_of(result)


def test_exit_69_no_such_model(real: Job) -> None:
    real.prompts(1).set(model__path="./no-such-model")
    result = specrun("submit", real.file)
    assert result.returncode == 69 and "no-such-model" in error_of(result)


def test_exit_69_no_such_device(real: Job) -> None:
    result = specrun("submit", real.prompts(1).file, "--set", "engine.device=cuda:7", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 69 and "cuda" in error_of(result)
    assert real.report()["state"] == "failed" and real.report()["exit_code"] == 69


def test_exit_70_a_fault_inside(real: Job) -> None:
    write_policy(real).prompts(3).set(speculation__policy="user_policy:Broken")
    result = specrun("submit", real.file)
    assert result.returncode == 70
    assert "internal error: ZeroDivisionError: a fault of its own" in error_of(result)
    assert real.report()["state"] == "failed" and real.report()["exit_code"] == 70


def test_exit_73_output_that_cannot_be_made(real: Job) -> None:
    (real.folder / "file").write_text("")
    real.prompts(1).set(output__path=str(real.folder / "file" / "out"))
    for command in ("validate", "submit"):
        result = specrun(command, real.file)
        assert result.returncode == 73 and "cannot be written" in error_of(result)


def test_exit_73_output_that_must_not_exist(real: Job) -> None:
    real.out.mkdir()
    (real.out / "mine").write_text("")
    result = specrun("submit", real.prompts(1).set(output__if_exists="error").file)
    assert result.returncode == 73 and "is not empty" in error_of(result)


def no_large_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, 64 << 10))


def test_exit_74_no_room_in_the_middle(real: Job) -> None:
    rows = [{"prompt": f"word {i}", "note": f"{i} " + "x" * 5000} for i in range(40)]
    result = specrun("submit", real.jsonl(rows).file, limit=no_large_files)
    assert result.returncode == 74, result.stderr
    assert str(real.out) in error_of(result) and "submit again" in result.stderr
    assert not real.is_success and not list((real.out / "data").iterdir())
    again = specrun("submit", real.file)
    assert again.returncode == 0, again.stderr
    assert_whole(real, 40)
    assert [row["note"] for row in real.rows()] == [row["note"] for row in rows]


def test_exit_75_the_time_is_over(real: Job) -> None:
    real.prompts(400).set(run__max_runtime_s=3.0, engine__max_num_seqs=2)
    slow(real, 0.05, real.folder / "started")
    result = specrun("submit", real.file)
    assert result.returncode == 75 and "run.max_runtime_s is over" in error_of(result)
    assert "run the same command again to go on" in result.stderr
    assert real.report()["state"] == "preempted" and real.report()["exit_code"] == 75


def test_exit_75_and_128_signals_and_a_lock_that_is_held(real: Job) -> None:
    real.prompts(60).set(engine__max_num_seqs=4, run__grace_s=10.0)
    marker = real.folder / "started"
    slow(real, 0.05, marker)
    with started(real, until=lambda: bool(list(real.out.rglob("spill/*.jsonl")))) as first:
        other = specrun("submit", real.file)
        assert other.returncode == 75 and f"process {first.pid}" in error_of(other)
        first.send_signal(signal.SIGTERM)
        _, err = first.communicate(timeout=60)
        assert first.returncode == 75 and "SIGTERM received" in err
    assert real.report()["state"] == "preempted" and 0 < real.report()["num_rows"] < 60
    for number in (signal.SIGTERM, signal.SIGINT):
        slow(real, 2.0, marker)
        with started(real, until=marker.exists) as process:
            process.send_signal(number)
            time.sleep(0.5)  # two of a kind that come together are one
            assert process.poll() is None
            process.send_signal(number)
            process.communicate(timeout=60)
            assert process.returncode == 128 + number
    real.config["speculation"] = {"method": "none"}
    last = specrun("submit", real.file)
    assert last.returncode == 0, last.stderr
    assert_whole(real, 60)
    steps = pq.read_table(real.out / "metrics" / "steps").to_pylist()
    assert max(step["attempt"] for step in steps) >= 4


def test_exit_78_a_job_that_is_wrong(real: Job, tmp_path: Path) -> None:
    result = specrun("submit", real.prompts(1).set(sampling__max_tokns=3).file)
    assert result.returncode == 78 and "did you mean max_tokens?" in error_of(result)
    (tmp_path / "list.yaml").write_text("- a\n")
    for file in ("list.yaml", "no-such.yaml"):
        assert specrun("validate", tmp_path / file).returncode == 78


def test_exit_78_another_configuration_in_the_output(done: tuple[Job, subprocess.CompletedProcess[str]]) -> None:
    job, _ = done
    result = specrun("submit", job.file, "--set", "sampling.seed=1")
    assert result.returncode == 78 and "sampling.seed: 0 -> 1" in error_of(result)
    assert_whole(job, 20)
