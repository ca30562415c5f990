"""`specrun retry`: failed rows run again, all others stay as they are, whatever happens on the way."""

import json
import signal
from collections import Counter

import pyarrow.parquet as pq
import pytest

from specrun.engine.errors import ModelError
from specrun.jobs.errors import ConfigError, InputMissing, TemporaryError
from specrun.runner.cli import run_command
from tests.runner.failed_jobs import BOOM, NULL, NUM_ROWS, assert_merged, fill
from tests.runner.test_cli import start_stub, wait_until


@pytest.fixture
def failed(job):
    return fill(job)


def parts(job):
    return {path.name: path.read_bytes() for path in (job.out / "data").iterdir()}


def test_failed_rows_run_again_and_no_others(failed):
    assert failed.run(fail_on="BOOM").exit_code == 2 and not failed.is_success
    before = failed.rows()
    result = failed.retry()
    assert (result.exit_code, result.state, result.was_done) == (0, "done", False)
    assert sorted(failed.builder.ran) == BOOM  # a null prompt never reaches the engine
    assert_merged(failed)
    assert failed.is_success and {line["error_code"] for line in failed.error_lines()} == {"null_prompt"}
    for old, new in zip(before, failed.rows(), strict=True):
        assert new == old or old["error_code"] == "engine_error"
    report = failed.report()
    assert report == result.report and report["attempt"] == 2
    assert report["error_codes"] == {"null_prompt": 2} and report["finish_reasons"] == {"stop": 498, "error": 2}
    steps = pq.read_table(failed.out / "metrics" / "steps").to_pylist()
    assert sum(s["num_generation_tokens"] for s in steps) == report["num_generation_tokens"] == 2 * 498


def test_no_failed_row_is_left(failed):
    failed.jsonl([{"prompt": f"BOOM {i}" if i in BOOM else f"word {i}"} for i in range(NUM_ROWS)])
    failed.run(fail_on="BOOM")
    assert (failed.out / "errors.jsonl").exists() and "errors" in failed.report()["files"]
    assert failed.retry().exit_code == 0
    assert_merged(failed, num_failed=0)
    assert failed.is_success and not (failed.out / "errors.jsonl").exists() and "errors" not in failed.report()["files"]


def test_parts_without_failed_rows_are_not_touched(failed):
    failed.jsonl([{"prompt": "BOOM 7" if i in (7, 300) else f"word {i}"} for i in range(NUM_ROWS)])
    failed.run(fail_on="BOOM")
    before = parts(failed)
    failed.retry()
    changed = {name for name, content in parts(failed).items() if content != before[name]}
    assert changed == {"part-00000-000000.parquet", "part-00000-000005.parquet"}


def test_rows_that_fail_again_stay_failed(failed):
    failed.run(fail_on="BOOM")
    before = failed.rows()
    result = failed.retry(fail_on="BOOM")
    assert result.exit_code == 2 and not failed.is_success and failed.rows() == before
    assert_merged(failed, num_failed=len(BOOM) + len(NULL))


def test_only_rows_of_a_code(failed, capsys):
    failed.run(fail_on="BOOM")
    assert failed.retry("null_prompt").exit_code == 2
    assert failed.builder.ran == [] and len(failed.error_lines()) == len(BOOM) + len(NULL)
    failed.retry("engine_error", "timeout")
    assert sorted(failed.builder.ran) == BOOM
    assert_merged(failed)


def test_nothing_to_retry(failed, capsys):
    failed.run(fail_on="BOOM")
    files = {path: path.stat().st_mtime_ns for path in failed.out.rglob("*")}
    builder = failed.stub()
    assert run_command(["retry", str(failed.out), "--code", "timeout"], builder) == 0
    assert "no such rows have failed; nothing was run" in capsys.readouterr().err
    failed.retry("engine_error")
    failed.jsonl([{"prompt": "a"}]).set(output__path=str(failed.folder / "good")).run()
    assert run_command(["retry", str(failed.folder / "good"), "--json"], builder) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["was_done"] is True and json.loads(out)["num_ok"] == 1 and "nothing was run" in err
    assert builder.num_loads == 0 and files


def test_other_limits_for_the_second_try(job):
    job.jsonl([{"prompt": f"SLOW {i}" if i in (5, 77) else f"word {i}"} for i in range(100)])
    job.set(run__timeout_s=0.03, errors__max_failed_fraction=1.0)
    slow = {"slow_on": "SLOW", "slow_steps": 40, "sleep_s": 0.002, "max_num_seqs": 32}
    job.run(**slow)
    assert [(line["row_index"], line["error_code"]) for line in job.error_lines()] == [(5, "timeout"), (77, "timeout")]
    assert job.retry("timeout", overrides=("run.timeout_s=60",), **slow).exit_code == 0
    assert sorted(job.builder.ran) == [5, 77] and job.error_lines() == []
    assert [job.rows()[i]["text"] for i in (5, 77)] == ["SLOW 5", "SLOW 77"]


def test_another_sampling_is_another_job(failed):
    failed.run(fail_on="BOOM")
    before = parts(failed)
    with pytest.raises(ConfigError, match=r"sampling\.max_tokens: 16 -> 5"):
        failed.retry(overrides=("sampling.max_tokens=5",))
    assert parts(failed) == before
    assert failed.retry().exit_code == 0


@pytest.mark.parametrize("how", ["crash", "preempted", "aborted"])
def test_a_job_that_is_not_finished(failed, how):
    if how == "crash":
        with pytest.raises(RuntimeError):
            failed.run(fail_on="BOOM", raise_on="400", max_num_seqs=16)
    elif how == "preempted":
        assert failed.preempt(30, fail_on="BOOM", max_num_seqs=16).exit_code == 75
    else:
        failed.set(errors__abort_after_consecutive=1)
        assert failed.run(fail_on="BOOM", max_num_seqs=16).state == "aborted"
    before = parts(failed)
    with pytest.raises(TemporaryError, match=r"is not finished .* submit the job again first"):
        failed.retry()
    assert parts(failed) == before and failed.builder.num_loads == 0
    failed.set(errors__abort_after_consecutive=100)
    failed.run(fail_on="BOOM")
    assert failed.retry().exit_code == 0
    assert_merged(failed)


def test_what_is_no_job(job):
    with pytest.raises(InputMissing, match="holds no job"):
        job.retry()
    assert not job.out.exists()


@pytest.mark.parametrize("goes_on", ["retry", "submit"])
@pytest.mark.parametrize("how", ["crash", "preempted"])
def test_a_retry_that_stopped_half_way_goes_on(failed, how, goes_on):
    failed.run(fail_on="BOOM")
    if how == "crash":
        with pytest.raises(RuntimeError):
            failed.retry(raise_on="307", max_num_seqs=4)
        assert failed.report()["state"] == "failed"
    else:
        result = failed.preempt(6, is_retry=True, max_num_seqs=3)
        assert (result.exit_code, result.state) == (75, "preempted")
    first = list(failed.builder.ran)
    assert first and not failed.is_success
    # Readers see every row all the time.
    assert [row["row_index"] for row in failed.rows()] == list(range(NUM_ROWS))
    result = failed.retry() if goes_on == "retry" else failed.run()
    assert result.exit_code == 0 and failed.is_success
    assert_merged(failed)
    twice = [row for row, times in Counter([*first, *failed.builder.ran]).items() if times > 1]
    assert set(failed.builder.ran) | set(first) == set(BOOM) and len(twice) <= 4  # what was in flight


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("goes_on", ["retry", "submit"])
def test_a_retry_that_was_killed_goes_on(failed, number, goes_on):
    failed.run(fail_on="BOOM")
    journal = failed.out / ".specrun" / "shard-00000" / "journal.jsonl"
    num_commits = journal.read_bytes().count(b'"name"')
    args = "retry", str(failed.out), "--set", "run.order=input"
    process = start_stub(failed, *args, sleep_s=0.1, max_num_seqs=1)
    wait_until(lambda: journal.read_bytes().count(b'"name"') > num_commits + 1, process)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (75 if number == signal.SIGTERM else -number), err
    assert [row["row_index"] for row in failed.rows()] == list(range(NUM_ROWS)) and not failed.is_success
    result = failed.retry() if goes_on == "retry" else failed.run()
    assert result.exit_code == 0 and len(failed.builder.ran) < len(BOOM)
    assert_merged(failed)


def test_codes_of_a_later_retry(failed):
    """One that was begun ends first, so that no row is taken for run again."""
    failed.run(fail_on="BOOM")
    with pytest.raises(ModelError):
        failed.retry("null_prompt", load_error="no device is free")
    for codes in ((), ("engine_error",)):
        with pytest.raises(ConfigError, match="a retry of null_prompt that was begun and not ended"):
            failed.retry(*codes)
    assert failed.retry("null_prompt").exit_code == 2 and failed.builder.ran == []
    assert failed.retry().exit_code == 0 and sorted(failed.builder.ran) == BOOM
    assert_merged(failed)


def test_the_command(failed, capsys):
    assert run_command(["submit", str(failed.file)], failed.stub(fail_on="BOOM")) == 2
    capsys.readouterr()
    assert run_command(["retry", str(failed.out), "--json", "--code", "engine_error"], failed.stub()) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["num_failed"] == 2 and json.loads(out)["was_done"] is False
    assert all(" rows · " in line or line == "loading the model" for line in err.splitlines())
