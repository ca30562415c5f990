"""Totals, rates, merging of attempts, and the files they are written to."""

import time
from dataclasses import asdict
from datetime import UTC, datetime

import orjson
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from specrun.engine.trace import EngineStats, StepRecord
from specrun.jobs import metrics as metrics_module
from specrun.jobs.counts import RowCounts
from specrun.jobs.errors import StorageError
from specrun.jobs.folder import OutputFolder
from specrun.jobs.metrics import JobMetrics, StepWriter, read_report, write_job_metrics, write_report
from specrun.jobs.schema import JOB_SCHEMA, STEP_SCHEMA

BEGAN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture
def folder(tmp_path):
    folder = OutputFolder(tmp_path)
    folder.create()
    return folder


def sample(**changes):
    values = {
        **{"job": "nightly", "state": "done", "exit_code": 0, "started_at": BEGAN, "finished_at": BEGAN},
        **{"model": "tiny", "versions": {"torch": "2.8", "pyarrow": "17"}, "total_s": 10.0, "load_s": 1.0},
        **{"rows": RowCounts(8, 2, 100, 50, {"null_prompt": 2}, {"stop": 8, "error": 2}), "peak_rss_bytes": 100},
    }
    metrics = JobMetrics(**{**values, **changes})
    metrics.add_stats(asdict(stats()))
    return metrics


def stats():
    return EngineStats(
        num_steps=20,
        num_prompt_tokens=100,
        num_cached_tokens=30,
        num_generation_tokens=60,
        num_drafts=10,
        num_draft_tokens=40,
        num_accepted_tokens=25,
        num_accepted_tokens_per_pos=[9, 8, 8],
        num_preemptions=1,
        spec_on_s=3.0,
        spec_off_s=1.0,
        busy_s=5.0,
        input_wait_s=0.5,
        num_running=7,
    )


def record(step, **changes):
    values: dict[str, object] = {name: 1 for name in STEP_SCHEMA.names if name != "attempt"}
    values.update(step=step, start_s=0.5, kv_usage=0.25, rolling_acceptance_rate=None, reason="off", policy_s=1e-4)
    values.update(changes)
    return StepRecord(**values)  # type: ignore[arg-type]


def test_rates_follow_from_the_counters():
    metrics = sample()
    assert metrics.acceptance_rate == 25 / 40
    assert metrics.mean_acceptance_length == 1 + 25 / 10
    assert metrics.spec_on_fraction == 0.75
    assert metrics.output_tokens_per_s == 12
    assert metrics.rows_per_s == 1
    assert metrics.failed_fraction == 0.2


def test_rates_of_nothing_are_none():
    row = JobMetrics().to_row()
    rates = ("acceptance_rate", "mean_acceptance_length", "spec_on_fraction", "output_tokens_per_s", "failed_fraction")
    assert all(row[name] is None for name in rates)


def test_job_parquet_is_one_row_of_the_whole_schema(folder):
    write_job_metrics(folder, JobMetrics())
    assert pq.read_table(folder.job_parquet).schema.equals(JOB_SCHEMA)
    write_job_metrics(folder, sample())
    (row,) = pq.read_table(folder.job_parquet).to_pylist()
    assert row["started_at"] == BEGAN
    assert row["num_rows"] == 10
    assert row["error_codes"] == [{"name": "null_prompt", "value": 2}]
    assert row["versions"] == [{"name": "pyarrow", "value": "17"}, {"name": "torch", "value": "2.8"}]
    assert row["num_accepted_tokens_per_pos"] == [9, 8, 8]
    assert row["acceptance_rate"] == 0.625
    assert not any(folder.tmp.iterdir())


def test_report_says_the_same(folder):
    assert read_report(folder) is None
    write_report(folder, sample())
    report = orjson.loads(folder.report.read_bytes())
    assert report == read_report(folder)
    assert set(report) == {*JOB_SCHEMA.names, "files"}
    assert report["finish_reasons"] == {"stop": 8, "error": 2}
    assert report["started_at"] == "2026-01-02T03:04:05+00:00"
    assert report["files"]["data"] == str(folder.data)
    assert folder.report.read_bytes().count(b"\n") > 40


def test_a_broken_report_is_an_error(folder):
    folder.report.write_bytes(b"{")
    with pytest.raises(StorageError, match=r"report.json cannot be read"):
        read_report(folder)


def test_attempts_add_up(folder):
    write_report(folder, sample(attempt=1))
    later = sample(attempt=2, started_at=datetime(2026, 1, 3, tzinfo=UTC), peak_rss_bytes=50)
    later.num_accepted_tokens_per_pos = [1]
    merged = later.merge(read_report(folder))
    assert (merged.attempt, merged.started_at, merged.peak_rss_bytes) == (2, BEGAN, 100)
    assert (merged.num_steps, merged.num_draft_tokens, merged.busy_s, merged.total_s) == (40, 80, 10, 20)
    assert merged.num_accepted_tokens_per_pos == [10, 8, 8]
    assert merged.num_preemptions == 2
    assert merged.rows.num_rows == 10
    assert merged.acceptance_rate == 0.625
    assert later.num_steps == 20
    assert later.merge(None) is later


def test_step_files_are_named_by_attempt_and_roll(folder, monkeypatch):
    monkeypatch.setattr(metrics_module, "STEPS_PER_PART", 3)
    first = StepWriter(folder, attempt=1)
    for step in range(7):
        first.append(record(step))
        assert all(pq.read_table(path).num_rows == 3 for path in folder.steps.iterdir())
    first.flush()
    first.flush()
    second = StepWriter(folder, attempt=2)
    second.append(asdict(record(0, rolling_acceptance_rate=0.5)))
    second.flush()
    assert sorted(path.name for path in folder.steps.iterdir()) == [
        *[f"part-00000-0001-00000{i}.parquet" for i in range(3)],
        "part-00000-0002-000000.parquet",
    ]
    table = ds.dataset(folder.steps, format="parquet").to_table()
    assert table.schema.equals(STEP_SCHEMA)
    assert table.column("step").to_pylist() == [*range(7), 0]
    assert table.column("attempt").to_pylist() == [1] * 7 + [2]
    assert table.column("rolling_acceptance_rate").to_pylist() == [None] * 7 + [0.5]
    assert table.column("reason").to_pylist() == ["off"] * 8


def test_step_files_roll_by_time(folder, monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    writer = StepWriter(folder, attempt=1)
    writer.append(record(0))
    now = 61.0
    assert not any(folder.steps.iterdir())
    writer.append(record(1))
    assert len(list(folder.steps.iterdir())) == 1


def test_a_step_file_that_fails_leaves_nothing_visible(folder, monkeypatch):
    def fail(table, path, **kwargs):
        path.write_bytes(b"PAR1")
        raise OSError(28, "No space left on device")

    writer = StepWriter(folder, attempt=1)
    writer.append(record(0))
    monkeypatch.setattr(pq, "write_table", fail)
    with pytest.raises(StorageError, match=r"part-00000-0001-000000.parquet: No space left"):
        writer.flush()
    assert not any(folder.steps.iterdir())
