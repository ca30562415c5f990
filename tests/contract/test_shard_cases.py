"""Case t56: a job in shards. And what else runs rows in another way and must give the same: order, retry."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from specrun.jobs.errors import ConfigError, OutputError, TemporaryError
from specrun.runner.cli import run_command
from specrun.runner.run import JobResult, run_job
from tests.runner.conftest import Job

NUM_ROWS = 203


@pytest.fixture
def sharded(job: Job) -> Job:
    return job.prompts(NUM_ROWS).set(output__rows_per_part=10)


def run_shard(job: Job, index: int, count: int, **options: Any) -> JobResult:
    job.set(run__shard=f"{index}/{count}")
    result = job.run(**options)
    del job.config["run"]["shard"]
    return result


def expected(index: int, count: int, num_rows: int = NUM_ROWS) -> range:
    return range(num_rows * index // count, num_rows * (index + 1) // count)


def rows_of_shard(job: Job, index: int) -> list[int]:
    parts = sorted((job.out / "data").glob(f"part-{index:05d}-*.parquet"))
    return [i for part in parts for i in pq.read_table(part).column("row_index").to_pylist()]


def state_of(folder: Path) -> dict[Path, tuple[int, int]]:
    return {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.rglob("*") if p.is_file()}


def assert_whole(job: Job, num_rows: int = NUM_ROWS) -> None:
    assert job.is_success
    assert [row["row_index"] for row in job.rows()] == list(range(num_rows))
    assert [row["text"] for row in job.rows()] == [f"word {i}" for i in range(num_rows)]
    assert job.report()["num_rows"] == num_rows and job.report()["state"] == "done"


def test_t56_shards_cover_all_rows_and_the_last_one_finishes_the_job(sharded: Job) -> None:
    order = random.Random(0).sample(range(8), 8)
    for count, index in enumerate(order, start=1):
        before = state_of(sharded.out)
        assert run_shard(sharded, index, 8, seed=index, max_num_seqs=7).exit_code == 0
        assert rows_of_shard(sharded, index) == list(expected(index, 8))
        after = state_of(sharded.out)
        own = f"{index:05d}"
        touched = {path for path in before if before[path] != after.get(path)}
        shared = {path.name for path in touched if own not in str(path.relative_to(sharded.out))}
        # Only what stands for the whole job, once all of it is there, and what every shard writes alike.
        assert shared <= ({"job.resolved.yaml"} if count < 8 else {"job.resolved.yaml", "job.parquet", "metrics.prom"})
        assert sharded.is_success == (count == 8)
    assert_whole(sharded)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 300])
def test_t56_any_number_of_shards_gives_the_same(sharded: Job, count: int) -> None:
    """300 shards of 203 rows: some have none."""
    if count == 300:
        sharded.prompts(20)
    num_rows = 20 if count == 300 else NUM_ROWS
    shards = range(40) if count == 300 else range(count)
    for index in shards:
        assert run_shard(sharded, index, len(shards)).exit_code == 0
        assert rows_of_shard(sharded, index) == list(expected(index, len(shards), num_rows))
    assert_whole(sharded, num_rows)


def test_t56_shards_at_the_same_time(sharded: Job) -> None:
    specs = []
    for index in range(4):
        sharded.set(run__shard=f"{index}/4")
        specs.append(sharded.spec)
    codes: dict[int, int] = {}

    def run(index: int) -> None:
        builder = sharded.stub(seed=index, max_num_seqs=5, sleep_s=0.001)
        codes[index] = run_job(specs[index], builder=builder).exit_code

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == dict.fromkeys(range(4), 0)
    assert_whole(sharded)


def test_t56_a_job_without_rows(sharded: Job) -> None:
    sharded.jsonl([])
    for index in range(3):
        assert run_shard(sharded, index, 3).exit_code == 0
    assert_whole(sharded, 0)
    assert len(list((sharded.out / "data").iterdir())) == 1


def test_t56_the_index_of_a_kubernetes_job(sharded: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_COMPLETIONS", "2")
    for index in (1, 0):
        monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
        assert sharded.run().exit_code == 0
        assert rows_of_shard(sharded, index) == list(expected(index, 2))
    assert_whole(sharded)


@pytest.mark.parametrize("environ", [{"JOB_COMPLETION_INDEX": "3"}, {"JOB_COMPLETIONS": "3"}])
def test_t56_half_of_an_index_is_refused(
    sharded: Job, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="JOB_COMPLETION_INDEX"):
        sharded.run()


@pytest.mark.parametrize("shard", ["8/8", "9/8", "-1/8", "1", "a/b", "1/0"])
def test_t56_a_shard_that_is_none_is_refused(sharded: Job, capsys: pytest.CaptureFixture[str], shard: str) -> None:
    assert run_command(["submit", str(sharded.file), f"--shard={shard}"], sharded.stub()) == 78
    assert "run.shard" in capsys.readouterr().err and not sharded.out.exists()


def test_t56_the_command(sharded: Job, capsys: pytest.CaptureFixture[str]) -> None:
    for index in range(3):
        code = run_command(["submit", str(sharded.file), "--shard", f"{index}/3"], sharded.stub())
        assert code == 0
        capsys.readouterr()
        if index < 2:
            # Not done yet, and nothing to worry about.
            assert run_command(["finalize", str(sharded.out)]) == 75
            assert f"{index + 1} of 3 shards are done" in capsys.readouterr().err
            assert not sharded.is_success
    assert_whole(sharded)
    content = {path: path.read_bytes() for path in sharded.out.glob("data/*")}
    assert run_command(["finalize", str(sharded.out)]) == 0
    assert_whole(sharded)
    assert content == {path: path.read_bytes() for path in sharded.out.glob("data/*")}


def test_t56_another_number_of_shards_is_refused(sharded: Job) -> None:
    run_shard(sharded, 0, 2)
    with pytest.raises(ConfigError, match=r"2 shard"):
        run_shard(sharded, 0, 3)
    with pytest.raises(ConfigError, match=r"2 shard"):
        sharded.run()
    run_shard(sharded, 1, 2)
    assert_whole(sharded)


def test_t56_a_shard_that_crashed_goes_on(sharded: Job) -> None:
    run_shard(sharded, 0, 2)
    with pytest.raises(RuntimeError):
        run_shard(sharded, 1, 2, raise_on="150", max_num_seqs=4, seed=0)
    with pytest.raises(TemporaryError):
        raise_of_finalize(sharded)
    assert run_shard(sharded, 1, 2).exit_code == 0
    assert_whole(sharded)


def raise_of_finalize(job: Job) -> None:
    from specrun.jobs.finished import FinishedJob
    from specrun.jobs.folder import OutputFolder

    FinishedJob.gather(OutputFolder(str(job.out)))


@pytest.mark.parametrize(("fraction", "code"), [(0.2, 0), (0.05, 2)])
def test_t56_failed_rows_are_judged_for_the_whole_job(job: Job, fraction: float, code: int) -> None:
    """All failed rows are in one shard, of which they are two thirds."""
    job.jsonl([{"prompt": None if i < 20 else f"word {i}"} for i in range(120)])
    job.set(errors__max_failed_fraction=fraction, output__rows_per_part=10)
    codes = [run_shard(job, index, 4).exit_code for index in range(4)]
    assert codes == [0, 0, 0, code] and job.is_success == (code == 0)
    assert job.report()["num_failed"] == 20 and job.report()["exit_code"] == code
    failed = [json.loads(line)["row_index"] for line in (job.out / "errors.jsonl").read_text().splitlines()]
    assert failed == list(range(20))


def test_t56_a_part_that_is_gone_is_told(sharded: Job) -> None:
    run_shard(sharded, 0, 2)
    next((sharded.out / "data").glob("part-00000-*")).unlink()
    with pytest.raises(OutputError, match=r"part-00000-.* submit its shard \(0/2\) again"):
        run_shard(sharded, 1, 2)
    assert not sharded.is_success
    assert run_shard(sharded, 0, 2).exit_code == 0
    assert_whole(sharded)


@pytest.mark.parametrize("order", ["auto", "input"])
def test_t49_the_order_of_running_is_not_that_of_the_output(job: Job, order: str) -> None:
    rng = random.Random(0)
    heads = [" ".join(f"{name}{i}" for i in range(60)) for name in "ab"]
    prompts = [f"{rng.choice(heads)} " * rng.randrange(2) + f"word {i} " * rng.randrange(1, 30) for i in range(700)]
    job.jsonl([{"prompt": prompt, "num": i} for i, prompt in enumerate(prompts)]).set(run__order=order)
    assert job.set(sampling__max_tokens=300).run(max_num_seqs=16, seed=1).exit_code == 0
    assert [(row["row_index"], row["num"]) for row in job.rows()] == [(i, i) for i in range(700)]
    assert [row["text"] for row in job.rows()] == [" ".join(prompt.split()) for prompt in prompts]


def test_t36_retry_runs_the_failed_rows_again(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.jsonl([{"prompt": "BOOM" if i % 50 == 7 else None if i == 3 else f"word {i}"} for i in range(250)])
    assert run_command(["submit", str(job.file)], job.stub(fail_on="BOOM")) == 2
    before = job.rows()
    assert run_command(["retry", str(job.out), "--code", "engine_error"], job.stub()) == 0
    after = job.rows()
    assert [row["row_index"] for row in after] == list(range(250))
    for old, new in zip(before, after, strict=True):
        if old["error_code"] == "engine_error":
            assert (new["text"], new["error_code"]) == ("BOOM", None)
        else:
            assert new == old
    assert job.is_success and job.report()["num_failed"] == 1
    capsys.readouterr()
    assert run_command(["retry", str(job.out), "--code", "engine_error"], job.stub()) == 0
    assert "nothing was run" in capsys.readouterr().err
