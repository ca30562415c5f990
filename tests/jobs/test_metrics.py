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
from specrun.jobs.folder import JOB_PARQUET, REPORT, OutputFolder
from specrun.jobs.metrics import JobMetrics, StepWriter, read_report, write_job_metrics, write_report
from specrun.jobs.schema import JOB_SCHEMA, STEP_SCHEMA
from specrun.jobs.shard import Shard

BEGAN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture
def folder(tmp_path):
    folder = OutputFolder(str(tmp_path)).shard(Shard())
    folder.create()
    return folder


def steps_of(folder):
    return folder.store.root / "metrics" / "steps"


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
    values: dict[str, object] = {name: 1 for name in STEP_SCHEMA.names if name not in ("shard", "attempt")}
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
    assert pq.read_table(folder.store.root / JOB_PARQUET).schema.equals(JOB_SCHEMA)
    write_job_metrics(folder, sample())
    (row,) = pq.read_table(folder.store.root / JOB_PARQUET).to_pylist()
    assert row["started_at"] == BEGAN
    assert row["num_rows"] == 10
    assert row["error_codes"] == [{"name": "null_prompt", "value": 2}]
    assert row["versions"] == [{"name": "pyarrow", "value": "17"}, {"name": "torch", "value": "2.8"}]
    assert row["num_accepted_tokens_per_pos"] == [9, 8, 8]
    assert row["acceptance_rate"] == 0.625
    assert not any(folder.tmp.iterdir())


def test_report_says_the_same(folder):
    assert read_report(folder.store) is None
    written = write_report(folder, REPORT, sample())
    content = (folder.store.root / "report.json").read_bytes()
    report = orjson.loads(content)
    assert report == read_report(folder.store) == written
    assert set(report) == {*JOB_SCHEMA.names, "files"}
    assert report["finish_reasons"] == {"stop": 8, "error": 2}
    assert report["started_at"] == "2026-01-02T03:04:05+00:00"
    root = folder.store.root
    assert report["files"] == {
        "data": str(root / "data"),
        "job_metrics": str(root / "metrics" / "job.parquet"),
        "step_metrics": str(root / "metrics" / "steps"),
        "errors": str(root / "errors.jsonl"),
    }
    assert content.count(b"\n") > 40
    assert not any(folder.tmp.iterdir())


def test_report_names_errors_only_where_there_are_some(folder):
    good = write_report(folder, REPORT, sample(rows=RowCounts(8)))
    assert "errors" not in good["files"]


def test_the_report_of_a_shard_is_its_own(tmp_path):
    folder = OutputFolder(str(tmp_path)).shard(Shard(1, 3))
    folder.create()
    report = write_report(folder, folder.report, sample(), folder.errors)
    assert report["files"]["errors"] == str(tmp_path / ".specrun" / "shard-00001" / "errors.jsonl")
    assert read_report(folder.store) is None
    assert read_report(folder.store, folder.report) == report


def test_a_broken_report_is_an_error(folder):
    (folder.store.root / REPORT).write_bytes(b"{")
    with pytest.raises(StorageError, match=r"report.json cannot be read.*; remove it and submit again"):
        read_report(folder.store)


def test_attempts_add_up(folder):
    write_report(folder, REPORT, sample(attempt=1))
    later = sample(attempt=2, started_at=datetime(2026, 1, 3, tzinfo=UTC), peak_rss_bytes=50)
    later.num_accepted_tokens_per_pos = [1]
    merged = later.merge(read_report(folder.store))
    assert (merged.attempt, merged.started_at, merged.peak_rss_bytes) == (2, BEGAN, 100)
    assert (merged.num_steps, merged.num_draft_tokens, merged.busy_s, merged.total_s) == (40, 80, 10, 20)
    assert merged.num_accepted_tokens_per_pos == [10, 8, 8]
    assert merged.num_preemptions == 2
    assert merged.rows.num_rows == 10
    assert merged.acceptance_rate == 0.625
    assert later.num_steps == 20
    assert later.merge(None) is later


def test_facts_are_those_of_the_last_attempt_and_counts_are_of_all(folder):
    write_report(folder, REPORT, sample(drafter_facts={"num_hits": 3, "index_tokens": 70, "gone": 1.5}))
    before = read_report(folder.store) or {}
    later = sample(drafter_facts={"num_hits": 4, "index_tokens": 90})
    assert later.merge(before).drafter_facts == {"num_hits": 7, "index_tokens": 90}
    assert sample(drafter_facts={}).merge(before).drafter_facts == {"num_hits": 3, "index_tokens": 70, "gone": 1.5}
    shards = [before, write_report(folder, REPORT, later), write_report(folder, REPORT, sample())]
    metrics = JobMetrics.of_shards(shards, RowCounts(8))
    assert metrics.drafter_facts == {"num_hits": 7, "index_tokens": 90}
    write_job_metrics(folder, metrics)
    (row,) = pq.read_table(folder.store.root / JOB_PARQUET).to_pylist()
    assert row["drafter_facts"] == [{"name": "index_tokens", "value": 90.0}, {"name": "num_hits", "value": 7.0}]


def test_seconds_that_the_policy_tells_add_up(folder):
    before = write_report(folder, REPORT, sample(policy_facts={"predicted_off_s": 3.0, "cost_error_p50": 0.1}))
    later = sample(policy_facts={"predicted_off_s": 4.0, "cost_error_p50": 0.2})
    assert later.merge(before).policy_facts == {"predicted_off_s": 7.0, "cost_error_p50": 0.2}
    shards = [before, write_report(folder, REPORT, later)]
    assert JobMetrics.of_shards(shards, RowCounts(8)).policy_facts == {"predicted_off_s": 7.0, "cost_error_p50": 0.2}


def test_a_later_attempt_foresees_its_own_part_of_the_job(folder):
    """busy_s of an attempt is 5."""
    first = sample(forecast_s=20.0, forecast_never_s=30.0, forecast_at_step=200)
    before = write_report(folder, REPORT, first)
    merged = sample(forecast_s=6.0, forecast_never_s=9.0, forecast_at_step=250).merge(before)
    assert (merged.forecast_s, merged.forecast_never_s, merged.forecast_at_step) == (11.0, 14.0, 250)
    short = sample().merge(before)
    assert (short.forecast_s, short.forecast_never_s, short.forecast_at_step) == (20.0, 30.0, 200)


def test_forecasts_of_shards_add_up(folder):
    foreseen = sample(forecast_s=6.0, forecast_never_s=9.0, forecast_at_step=250)
    reports = [write_report(folder, REPORT, foreseen), write_report(folder, REPORT, sample()), {}]
    metrics = JobMetrics.of_shards(reports, RowCounts(8))
    assert (metrics.forecast_s, metrics.forecast_never_s, metrics.forecast_at_step) == (11.0, 14.0, 250)
    metrics = JobMetrics.of_shards(reports[1:], RowCounts(8))
    assert metrics.forecast_s is metrics.forecast_never_s is metrics.forecast_at_step is None


def test_a_report_of_an_earlier_version_is_taken_up(folder):
    """It says nothing about drafts."""
    old = write_report(folder, REPORT, sample())
    for name in ("content_hash", "method_reason", "draft_model", "draft_content_hash", "drafter_facts"):
        del old[name]
    for name in ("policy_facts", "forecast_s", "forecast_never_s", "forecast_at_step"):
        del old[name]
    assert sample(drafter_facts={"a": 1}).merge(old).drafter_facts == {"a": 1}
    metrics = JobMetrics.of_shards([old], RowCounts(8))
    assert (metrics.model, metrics.draft_model, metrics.drafter_facts) == ("tiny", None, {})
    assert (metrics.policy_facts, metrics.forecast_s, sample().merge(old).forecast_s) == ({}, None, None)


def test_shards_add_up(folder):
    """Counters and seconds of all, the first start, the last end, the rows that the parts count."""
    late = datetime(2026, 1, 4, tzinfo=UTC)
    reports = [
        write_report(folder, REPORT, sample(attempt=3, peak_rss_bytes=70)),
        {},  # a crash left none
        write_report(folder, REPORT, sample(started_at=late, finished_at=late, num_accepted_tokens_per_pos=[])),
    ]
    rows = RowCounts(29, 1)
    metrics = JobMetrics.of_shards(reports, rows)
    assert (metrics.shards, metrics.rows) == (3, rows)
    assert (metrics.started_at, metrics.finished_at) == (BEGAN, late)
    assert (metrics.attempt, metrics.peak_rss_bytes) == (3, 100)
    assert (metrics.num_steps, metrics.num_accepted_tokens, metrics.busy_s, metrics.total_s) == (40, 50, 10, 20)
    assert metrics.num_accepted_tokens_per_pos == [18, 16, 16]
    assert (metrics.job, metrics.model, metrics.versions["torch"]) == ("nightly", "tiny", "2.8")
    assert metrics.failed_fraction == 1 / 30
    write_job_metrics(folder, metrics)
    (row,) = pq.read_table(folder.store.root / JOB_PARQUET).to_pylist()
    assert (row["shards"], row["num_rows"], row["started_at"]) == (3, 30, BEGAN)


def test_shards_without_any_report(folder):
    metrics = JobMetrics.of_shards([{}, {}], RowCounts(2))
    assert (metrics.shards, metrics.rows.num_rows, metrics.started_at) == (2, 2, None)
    write_job_metrics(folder, metrics)
    write_report(folder, REPORT, metrics)


def test_step_files_are_named_by_attempt_and_roll(folder, monkeypatch):
    monkeypatch.setattr(metrics_module, "STEPS_PER_PART", 3)
    first = StepWriter(folder, Shard(2, 4), attempt=1)
    for step in range(7):
        assert first.append(record(step)) == (step in (2, 5))
        assert all(pq.read_table(path).num_rows == 3 for path in steps_of(folder).iterdir())
    first.flush()
    first.flush()
    second = StepWriter(folder, Shard(2, 4), attempt=2)
    second.append(asdict(record(0, rolling_acceptance_rate=0.5)))
    second.flush()
    assert sorted(path.name for path in steps_of(folder).iterdir()) == [
        *[f"part-00002-0001-00000{i}.parquet" for i in range(3)],
        "part-00002-0002-000000.parquet",
    ]
    table = ds.dataset(steps_of(folder), format="parquet").to_table()
    assert table.schema.equals(STEP_SCHEMA)
    assert table.column("step").to_pylist() == [*range(7), 0]
    assert table.column("shard").to_pylist() == [2] * 8
    assert table.column("attempt").to_pylist() == [1] * 7 + [2]
    assert table.column("rolling_acceptance_rate").to_pylist() == [None] * 7 + [0.5]
    assert table.column("reason").to_pylist() == ["off"] * 8


def test_step_files_roll_by_time(folder, monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    writer = StepWriter(folder, Shard(2, 4), attempt=1)
    writer.append(record(0))
    now = 61.0
    assert not any(steps_of(folder).iterdir())
    writer.append(record(1))
    assert len(list(steps_of(folder).iterdir())) == 1


def test_a_step_file_that_fails_leaves_nothing_visible(folder, monkeypatch):
    def fail(table, path, **kwargs):
        path.write_bytes(b"PAR1")
        raise OSError(28, "No space left on device")

    writer = StepWriter(folder, Shard(2, 4), attempt=1)
    writer.append(record(0))
    monkeypatch.setattr(pq, "write_table", fail)
    with pytest.raises(StorageError, match=r"part-00002-0001-000000.parquet: No space left"):
        writer.flush()
    assert not any(steps_of(folder).iterdir())
