"""A job in shards: whatever happens to each of them, together they are the job as one process runs it."""

import json
import random
import signal

import pyarrow.parquet as pq
import pytest

from specrun.jobs.errors import ConfigError, OutputError, TemporaryError
from specrun.jobs.spec import JobSpec
from specrun.runner.cli import run_command
from specrun.runner.run import run_job
from tests.runner.conftest import Job
from tests.runner.test_cli import start_stub, wait_for_rows


def fill(job, num_rows):
    """Rows of which each eighth fails: before the engine, or in it."""
    prompts = [None if i % 16 == 3 else f"BOOM {i}" if i % 16 == 11 else f"word {i}" for i in range(num_rows)]
    job.jsonl([{"doc": f"d{i}", "prompt": prompt, "lang": "en"} for i, prompt in enumerate(prompts)])
    job.config["input"]["columns"] = {"id": "doc", "prompt": "prompt"}
    return job.set(errors__max_failed_fraction=1.0, output__rows_per_part=40)


def run_interrupted(job, index, count, rng):
    """A shard that crashes, is preempted, or neither, and then goes on."""
    start, stop = (json.loads((job.folder / "num_rows").read_text()) * i // count for i in (index, index + 1))
    how = rng.choice(["crash", "preempt", "nothing"])
    options = {"fail_on": "BOOM", "seed": index, "max_num_seqs": 7}
    if how == "crash" and start < stop:
        row = rng.randrange(start, stop)
        try:
            job.run_shard(index, count, raise_on=str(row), **options)
        except RuntimeError as error:
            assert f"request {row} " in str(error)
        else:
            assert row % 16 == 3
    elif how == "preempt":
        result = job.preempt(rng.randrange(1, 60), f"run.shard={index}/{count}", **options)
        assert result.exit_code in (0, 75)
    result = job.run_shard(index, count, **options)
    assert result.exit_code == 0
    return result


@pytest.fixture(scope="module")
def unsharded(tmp_path_factory):
    """Number of rows -> the rows of a job that one process ran undisturbed."""
    rows = {}
    for num_rows in (0, 1, 5, 1000):
        job = fill(Job(tmp_path_factory.mktemp(f"rows{num_rows}")), num_rows)
        assert job.run(fail_on="BOOM").exit_code == 0
        rows[num_rows] = job.rows(), job.error_lines()
    return rows


@pytest.mark.parametrize("num_rows", [0, 1, 5, 1000])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_interrupted_shards_in_any_order_give_the_same_rows(job, unsharded, count, num_rows):
    fill(job, num_rows)
    (job.folder / "num_rows").write_text(str(num_rows))
    rng = random.Random(100 * count + num_rows)
    for place, index in enumerate(rng.sample(range(count), count), start=1):
        result = run_interrupted(job, index, count, rng)
        assert job.is_success == (place == count)
        assert (result.waits_for is None) == (place == count)
    rows, error_lines = unsharded[num_rows]
    assert job.rows() == rows and job.error_lines() == error_lines
    assert job.report()["num_rows"] == num_rows and job.report()["num_failed"] == len(error_lines)
    assert not [*job.out.rglob("spill/*"), *job.out.rglob("tmp/*")]


def test_killed_shards_go_on(job, unsharded):
    fill(job, 1000)
    for index in (2, 0, 1):
        process = start_stub(
            job, "submit", str(job.file), "--shard", f"{index}/3", fail_on="BOOM", sleep_s=0.05, max_num_seqs=16
        )
        wait_for_rows(job, process)
        process.kill()
        process.communicate()
        assert job.run_shard(index, 3, fail_on="BOOM").exit_code == 0
        assert len(job.builder.ran) < 333 and job.is_success == (index == 1)
    assert (job.rows(), job.error_lines()) == unsharded[1000]


def test_a_signal_stops_one_shard_and_the_same_command_goes_on(job):
    job.prompts(300)
    process = start_stub(job, "submit", str(job.file), "--shard", "1/2", sleep_s=0.1, max_num_seqs=8)
    wait_for_rows(job, process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75 and "stopped early: SIGTERM received" in err, err
    table = dict(line.split(None, 1) for line in out.splitlines())
    assert 0 < int(table["rows"]) < 150
    assert job.run_shard(0, 2).exit_code == 0 and not job.is_success
    assert job.run_shard(1, 2).exit_code == 0 and job.is_success
    assert len(job.builder.ran) == 150 - int(table["rows"])


def test_a_shard_with_failed_rows_is_done_and_the_last_one_says_the_verdict(job, capsys):
    job.jsonl([{"prompt": None if i < 20 else f"word {i}"} for i in range(100)])
    for index in (0, 1):
        assert run_command(["submit", str(job.file), "--shard", f"{index}/3"], job.stub()) == 0
        out, err = capsys.readouterr()
        assert "this shard is done; the last one finalizes the job" in err and "missing" in err
        assert dict(line.split(None, 1) for line in out.splitlines())["rows"] in ("33", "34")
    assert run_command(["submit", str(job.file), "--shard", "2/3"], job.stub()) == 2
    assert "20 of 100 rows failed, more than errors.max_failed_fraction allows" in capsys.readouterr().err
    assert not job.is_success and len(job.error_lines()) == 20
    assert job.report()["exit_code"] == 2 and job.report()["state"] == "done"


def test_a_shard_that_aborts_says_so_itself(job):
    job.jsonl([{"prompt": None}] * 20_000)
    result = job.run_shard(0, 2)
    assert (result.exit_code, result.state) == (2, "aborted")
    assert 100 <= result.report["num_failed"] < 10_000 and not (job.out / "report.json").exists()


@pytest.mark.parametrize("shard", ["8/8", "3/0", "x", "", "1", "-1/2", "1/2/3", "1.0/2", " 1/2"])
def test_a_shard_that_is_none(job, capsys, shard):
    job.prompts(2)
    assert run_command(["submit", str(job.file), f"--shard={shard}"], job.stub()) == 78
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "run.shard" in err and not job.out.exists()


def test_another_number_of_shards(job, capsys):
    job.prompts(30)
    job.run_shard(0, 2)
    assert run_command(["submit", str(job.file), "--shard", "0/3"], job.stub()) == 78
    assert "was begun with 2 shard(s), this run says 0/3; keep the number of shards" in capsys.readouterr().err
    assert run_command(["submit", str(job.file)], job.stub()) == 78
    assert "was begun with 2 shard(s), this run says 0/1" in capsys.readouterr().err


def test_the_option_wins_over_the_environment(job, monkeypatch):
    job.prompts(30)
    monkeypatch.setenv("JOB_COMPLETIONS", "5")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "4")
    for index in (0, 1):
        assert run_command(["submit", str(job.file), "--shard", f"{index}/2"], job.stub()) == 0
    assert job.is_success and len(job.rows()) == 30
    assert sorted(path.name for path in (job.out / ".specrun").glob("shard-*")) == ["shard-00000", "shard-00001"]


@pytest.mark.parametrize("environ", [{"JOB_COMPLETIONS": "2", "JOB_COMPLETION_INDEX": "2"}, {"JOB_COMPLETIONS": "x"}])
def test_an_environment_that_makes_no_sense(job, capsys, monkeypatch, environ):
    for name, value in {"JOB_COMPLETION_INDEX": "0", **environ}.items():
        monkeypatch.setenv(name, value)
    assert run_command(["submit", str(job.prompts(2).file)], job.stub()) == 78
    err = capsys.readouterr().err
    assert "2/2 is out of range" in err or "JOB_COMPLETION_INDEX must be a number" in err


def test_a_job_that_is_not_indexed_is_one_shard(job, monkeypatch):
    """Kubernetes sets the index for every indexed job, those of one completion included."""
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    assert job.prompts(3).run().exit_code == 0 and job.is_success


def test_a_report_while_shards_are_missing(job, capsys):
    job.prompts(90)
    job.run_shard(2, 3)
    assert job.preempt(8, "run.shard=0/3", max_num_seqs=4).exit_code == 75
    num_done = json.loads((job.out / ".specrun" / "shard-00000" / "report.json").read_bytes())["num_rows"]
    assert run_command(["report", str(job.out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_rows"], report["state"]) == (30 + num_done, "1 of 3 shards done")
    assert run_command(["report", str(job.out)]) == 0
    assert "1 of 3 shards done" in capsys.readouterr().out


def test_metrics_of_all_shards_and_attempts_are_one_jobs(job):
    fill(job, 1000)
    options = {"fail_on": "BOOM", "num_draft_tokens": 2, "max_num_seqs": 16}
    for index in (1, 2, 0):
        assert job.preempt(20, f"run.shard={index}/3", **options).exit_code == 75
        job.run_shard(index, 3, **options)
    steps = pq.read_table(job.out / "metrics" / "steps").to_pylist()
    assert {(step["shard"], step["attempt"]) for step in steps} == {
        (i, attempt) for i in range(3) for attempt in (1, 2)
    }
    (totals,) = pq.read_table(job.out / "metrics" / "job.parquet").to_pylist()
    assert totals["shards"] == 3 and totals["attempt"] == 2 and totals["num_rows"] == 1000
    assert totals["num_steps"] == len(steps)
    for name in ("num_generation_tokens", "num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert totals[name] == sum(step[name] for step in steps), name
    good = [row for row in job.rows() if row["error_code"] is None]
    assert totals["num_ok"] == totals["num_drafts"] == len(good) and totals["num_failed"] == 1000 - len(good)
    assert totals["num_output_tokens"] == totals["num_generation_tokens"] == sum(row["output_tokens"] for row in good)
    shards = [json.loads(path.read_bytes()) for path in sorted(job.out.glob(".specrun/shard-*/report.json"))]
    assert totals["total_s"] == pytest.approx(sum(shard["total_s"] for shard in shards))
    assert totals["num_rows"] == sum(shard["num_rows"] for shard in shards)


def test_overwrite_does_not_go_with_shards(job):
    job.prompts(30)
    for index in (0, 1):
        job.run_shard(index, 2)
    rows = job.rows()
    job.set(output__if_exists="overwrite")
    with pytest.raises(ConfigError, match="overwrite does not go with shards"):
        job.run_shard(0, 2)
    assert job.rows() == rows and job.is_success


def test_overwrite_does_not_go_with_shards_that_have_not_begun(job):
    job.prompts(30).set(output__if_exists="overwrite")
    with pytest.raises(ConfigError, match="overwrite does not go with shards"):
        job.run_shard(0, 2)


def test_error_lets_the_shards_of_one_job_begin_and_go_on(job):
    job.prompts(30).set(output__if_exists="error")
    for index in (1, 1, 0):
        assert job.run_shard(index, 2).exit_code == 0
    assert job.is_success and len(job.rows()) == 30
    for index in (0, 1):
        with pytest.raises(OutputError, match="is not empty"):
            job.run_shard(index, 2)
    job.set(sampling__max_tokens=3)
    with pytest.raises(OutputError, match="is not empty"):
        job.run_shard(0, 2)


def test_skip_takes_any_finished_job(job):
    job.prompts(30).set(output__if_exists="skip")
    for index in (1, 0):
        assert job.run_shard(index, 2).exit_code == 0
    job.set(sampling__max_tokens=3)
    for index in (0, 1):
        result = job.run_shard(index, 2)
        assert (result.exit_code, result.was_done, job.builder.num_loads) == (0, True, 0)


def test_a_finished_job_is_not_run_again(job):
    job.prompts(30)
    for index in (1, 0):
        job.run_shard(index, 2)
    files = {path: path.stat().st_mtime_ns for path in job.out.rglob("*")}
    for index in (0, 1):
        result = job.run_shard(index, 2)
        assert (result.exit_code, result.was_done, job.builder.num_loads) == (0, True, 0)
        assert result.report == job.report()
    assert files == {path: path.stat().st_mtime_ns for path in job.out.rglob("*")}


def test_a_finished_shard_runs_nothing_while_others_are_missing(job):
    job.prompts(30)
    job.run_shard(1, 2)
    data = {path: path.stat().st_mtime_ns for path in (job.out / "data").iterdir()}
    result = job.run_shard(1, 2)
    assert (result.exit_code, job.builder.num_loads) == (0, 0) and result.waits_for is not None
    assert data == {path: path.stat().st_mtime_ns for path in (job.out / "data").iterdir()}


def test_one_process_a_shard(job):
    job.prompts(30)
    process = start_stub(job, "submit", str(job.file), "--shard", "0/2", sleep_s=0.2, max_num_seqs=1)
    try:
        wait_for_rows(job, process)
        with pytest.raises(TemporaryError, match=r"shard-00000"):
            job.run_shard(0, 2)
        assert job.run_shard(1, 2).exit_code == 0
    finally:
        process.kill()
        process.communicate()


def test_another_input_is_refused_to_a_shard_that_comes_late(job):
    job.prompts(30)
    spec = JobSpec.load(job.file, ["run.shard=0/2"])
    assert run_job(spec, builder=job.stub()).exit_code == 0
    job.prompts(31)
    with pytest.raises(ConfigError, match="another configuration: input file"):
        job.run_shard(1, 2)
