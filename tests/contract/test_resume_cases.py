"""Cases t36 to t40, t47 and t49: rows that fail, runs that end early, and what the next one makes of it."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specrun.engine.testing import StubEngine
from specrun.jobs.errors import OutputError
from specrun.jobs.spec import JobSpec
from specrun.policies.base import SpeculationPolicy
from specrun.runner.run import run_job
from tests.contract.stub_jobs import (
    assert_whole,
    num_run,
    num_secured,
    num_spilled,
    parts,
    start_stub,
    visible_rows,
    wait_for_rows,
    wait_until,
)
from tests.runner.conftest import Job, StubBuilder


@pytest.mark.parametrize(("num_poison", "exit_code"), [(1, 0), (10, 0), (11, 2), (20, 2)])
def test_t36_poison_rows(job: Job, num_poison: int, exit_code: int) -> None:
    poison = {500 + 20 * i for i in range(num_poison)}
    job.jsonl([{"prompt": "BOOM" if i in poison else f"word {i}"} for i in range(1000)])
    result = job.run(fail_on="BOOM")
    assert (result.exit_code, result.state, job.is_success) == (exit_code, "done", exit_code == 0)
    rows = job.rows()
    assert [row["row_index"] for row in rows] == list(range(1000))
    assert {row["row_index"] for row in rows if row["error_code"] == "engine_error"} == poison
    assert job.report()["num_failed"] == num_poison and job.report()["exit_code"] == exit_code
    failed = [json.loads(line) for line in (job.out / "errors.jsonl").read_text().splitlines()]
    assert {line["row_index"] for line in failed} == poison
    assert all(line["error_code"] == "engine_error" and line["error_message"] for line in failed)


def test_t37_a_systematic_failure_stops_the_job(job: Job) -> None:
    job.jsonl([{"prompt": f"word {i}"} for i in range(250)] + [{"prompt": "BOOM"}] * 5000)
    job.set(errors__max_failed_fraction=1.0, output__rows_per_part=100)
    result = job.run(fail_on="BOOM", max_num_seqs=50)
    assert (result.exit_code, result.state, job.is_success) == (2, "aborted", False)
    assert 100 <= job.report()["num_failed"] < 1000 and job.report()["num_ok"] == 250
    assert visible_rows(job)[:200] == list(range(200))
    # With the failure mended the job goes on; failed rows keep their errors, since they have their result.
    failed = job.report()["num_failed"]
    assert job.run().exit_code == 0
    assert len(job.rows()) == 5250 and job.report()["num_failed"] == failed


def test_t37_every_row_fails(job: Job) -> None:
    job.jsonl([{"prompt": "BOOM"}] * 5000).set(errors__abort_after_consecutive=20)
    assert job.run(fail_on="BOOM", max_num_seqs=4).exit_code == 2
    assert not job.is_success and 20 <= job.report()["num_failed"] < 1000


def test_t38_kill_at_any_moment(job: Job) -> None:
    num_rows = 3000
    job.prompts(num_rows).set(output__rows_per_part=100)
    seen: set[int] = set()
    for attempt in range(4):
        process = start_stub(job, sleep_s=0.02, max_num_seqs=32, seed=attempt)
        wait_for_rows(job, process, num_secured(job) + 150 + 37 * attempt)
        process.kill()
        process.communicate()
        rows = visible_rows(job)
        assert rows == sorted(set(rows)) and seen <= set(rows)
        seen = set(rows)
    num_done = num_secured(job)
    assert 600 < num_done < num_rows
    # The lock of a process that is gone is taken over at once.
    assert job.run(max_num_seqs=32, seed=9).exit_code == 0
    assert num_run(job) == num_rows - num_done
    assert_whole(job, num_rows)


def test_t39_a_signal_secures_finished_rows_in_the_spill(job: Job) -> None:
    job.prompts(2000).set(output__rows_per_part=100, run__grace_s=20.0)
    process = start_stub(job, sleep_s=0.05, max_num_seqs=37)
    wait_until(lambda: len(parts(job)) >= 2 and num_spilled(job) > 0, process)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    report = job.report()
    assert (report["state"], report["exit_code"]) == ("preempted", 75) and not job.is_success
    # No short part: a range of rows is in data/ whole or not at all.
    assert all(pq.read_metadata(part).num_rows == 100 for part in parts(job))
    assert report["num_rows"] == num_secured(job)
    assert job.run().exit_code == 0
    assert num_run(job) == 2000 - report["num_rows"]
    assert_whole(job, 2000)


@pytest.mark.parametrize("method", ["write_table", "close"])
def test_t40_an_exception_while_a_part_is_written(job: Job, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    original = getattr(pq.ParquetWriter, method)
    calls = []

    def fail(self: pq.ParquetWriter, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        calls.append(method)
        if len(calls) > 1:
            raise RuntimeError("a fault in the writer")

    job.prompts(300).set(run__order="input")
    with monkeypatch.context() as patch:
        patch.setattr(pq.ParquetWriter, method, fail)
        with pytest.raises(RuntimeError, match="a fault in the writer"):
            job.run()
    assert visible_rows(job) == list(range(100))
    assert not list(job.out.rglob("tmp/*.parquet")) and not job.is_success
    assert job.run().exit_code == 0
    assert_whole(job, 300)


def test_t40_a_finished_job_leaves_no_work_behind(job: Job) -> None:
    job.prompts(250).run()
    assert not [*job.out.rglob("spill/*"), *job.out.rglob("tmp/*")]


@pytest.mark.parametrize("where", ["file/out", "file", "/proc/nothing/out"])
def test_t47_an_output_that_cannot_be_written_loads_no_model(job: Job, where: str) -> None:
    (job.folder / "file").write_text("mine")
    job.prompts(3).set(output__path=str(job.folder / where))
    with pytest.raises(OutputError, match=r"output\.path"):
        job.run()
    assert job.builder.num_loads == 0 and (job.folder / "file").read_text() == "mine"


@pytest.mark.parametrize("name", ["mine.parquet", "part-00000-000000.parquet", "notes.txt"])
def test_t47_files_of_others_in_data_are_not_touched(job: Job, name: str) -> None:
    (job.out / "data").mkdir(parents=True)
    pq.write_table(pa.table({"a": [1]}), job.out / "data" / name)
    for if_exists in ("resume", "skip"):
        with pytest.raises(OutputError, match=name):
            job.prompts(3).set(output__if_exists=if_exists).run()
    assert pq.read_table(job.out / "data" / name).column("a").to_pylist() == [1]


class SlowBuilder(StubBuilder):
    """A stub in which a row that holds the word SLOW takes many steps."""

    def engine(self, spec: JobSpec, tokenizer: Any, policy: SpeculationPolicy) -> StubEngine:
        self.num_loads += 1
        slow_on = tokenizer.token_id("SLOW")
        return StubEngine(**self.options, slow_on=slow_on, request_timeout_s=spec.run.timeout_s)


def test_t49_a_slow_row_holds_up_nothing_but_its_part(job: Job) -> None:
    num_rows = 5000
    job.jsonl([{"prompt": "SLOW word"}] + [{"prompt": f"word {i}"} for i in range(1, num_rows)])
    builder = SlowBuilder({"slow_steps": 400, "max_num_seqs": 32})
    assert run_job(job.spec, builder=builder).exit_code == 0
    rows = job.rows()
    assert [row["row_index"] for row in rows] == list(range(num_rows))
    assert [row["text"] for row in rows] == ["SLOW word", *(f"word {i}" for i in range(1, num_rows))]
    steps = pq.read_table(job.out / "metrics" / "steps").to_pydict()
    # The others go on beside the slow one, and are through long before it.
    others = [step for step, running in enumerate(steps["num_running"]) if running > 0]
    assert len(others) < 300 and others[-1] >= 399
    assert others[-2] < 350, "others had to wait for the slow row"


def test_t49_a_row_that_takes_too_long_fails(job: Job) -> None:
    job.jsonl([{"prompt": "SLOW word"}] + [{"prompt": f"word {i}"} for i in range(1, 300)])
    job.set(run__timeout_s=0.05)
    builder = SlowBuilder({"slow_steps": 10**6, "max_num_seqs": 8, "sleep_s": 0.005})
    assert run_job(job.spec, builder=builder).exit_code == 0
    rows = job.rows()
    assert (rows[0]["error_code"], rows[0]["finish_reason"], rows[0]["text"]) == ("timeout", "error", None)
    assert "0.05" in rows[0]["error_message"] and "run.timeout_s" in rows[0]["error_message"]
    assert [row["text"] for row in rows[1:]] == [f"word {i}" for i in range(1, 300)]
    assert job.report()["error_codes"] == {"timeout": 1}
