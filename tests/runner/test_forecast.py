"""The makespan is foreseen from a pilot, with speculation and without."""

from __future__ import annotations

import numpy as np
import pytest

from specrun.engine.request import FinishReason, Request, RequestOutput, SamplingParams
from specrun.engine.trace import EngineStats
from specrun.policies.base import SpeculationPolicy
from specrun.policies.fixed import Never
from specrun.policies.registry import make_policy
from specrun.policies.simulator import Acceptance, DraftCost, Workload, h100, simulate
from specrun.runner import forecast
from specrun.runner.forecast import Forecaster, live_rows, output_lengths, policy_facts
from specrun.runner.report import full_lines
from specrun.runner.row_lengths import RowLengths
from tests.runner.simulated_pilots import foresee, last_record


def workload(outputs, rate=0.75, max_num_seqs=64, max_tokens=None):
    prompts = np.random.default_rng(1).integers(100, 300, len(outputs)).astype(np.int32)
    return Workload(
        "pilot",
        prompts,
        np.asarray(outputs, np.int32),
        h100(),
        DraftCost(kind="ngram"),
        Acceptance.stationary(rate),
        max_num_seqs=max_num_seqs,
        max_tokens=max_tokens,
    )


CONSTANT = workload([120] * 400)
RANDOM = workload(np.clip(np.random.default_rng(2).exponential(120, 700), 1, 480), max_tokens=480)


@pytest.mark.parametrize("name", ["always", "goodput"])
@pytest.mark.parametrize(("job", "error"), [(CONSTANT, 0.05), (RANDOM, 0.2)])
def test_what_is_foreseen_comes(name, job, error):
    found, result = foresee(job, make_policy(name, num_draft_tokens=3))
    assert found is not None and found.at_step == 200 < result.num_steps
    assert abs(found.seconds / result.makespan_s - 1) < error
    assert found.never_seconds > found.seconds


def test_without_drafts_both_are_the_same():
    found, result = foresee(CONSTANT, Never(), load_drafter=False)
    assert found is not None
    for seconds in (found.seconds, found.never_seconds):
        assert abs(seconds / result.makespan_s - 1) < 0.05


def test_what_never_would_take_is_foreseen_from_a_pilot_with_drafts():
    never_s = simulate(CONSTANT, Never(), load_drafter=False).makespan_s
    found, _ = foresee(CONSTANT, make_policy("always", num_draft_tokens=1))
    assert found is not None and abs(found.never_seconds / never_s - 1) < 0.1


def test_a_short_job_has_none():
    found, result = foresee(workload([30] * 64), Never())
    assert found is None and result.num_steps < 200


def test_a_pilot_waits_for_rows_that_finish(monkeypatch):
    monkeypatch.setattr(forecast, "MAX_PILOT_STEPS", 300)
    found, _ = foresee(workload([260] * 80, max_num_seqs=8), Never())
    assert found is not None and found.at_step >= 260
    found, _ = foresee(workload([400] * 20, max_num_seqs=8), Never())
    assert found is not None and found.at_step == 300


def test_nothing_is_foreseen_twice_and_nothing_is_kept():
    record = last_record(simulate(workload([5] * 4), Never()))
    lengths = RowLengths()
    lengths.expect([Request(0, [1], SamplingParams())])
    forecaster = Forecaster(Never(), 10, 4, lengths, foreseeable())
    found = [forecaster.add(record) for _ in range(2 * forecast.MAX_PILOT_STEPS)]
    assert sum(one is not None for one in found) == 1 and not forecaster._records


def foreseeable():
    return EngineStats(busy_s=1.0)


def finished(outputs, limit=100, num_running=0):
    lengths = RowLengths()
    lengths.expect([Request(i, [1], SamplingParams(max_tokens=limit)) for i in range(len(outputs) + num_running)])
    for i, num_tokens in enumerate(outputs):
        reason = FinishReason.LENGTH if num_tokens == limit else FinishReason.STOP
        lengths.add(RequestOutput(i, [0] * num_tokens, reason))
    return lengths


def test_lengths_that_are_only_known_in_part():
    assert set(output_lengths(50, 4000, 64, finished([], num_running=64))) == {100.0}
    assert set(output_lengths(50, 4000, 4, finished([100] * 20))) == {100.0}
    # 10 rows have ended after 200 tokens in all, 600 more are those of rows that still run
    found = output_lengths(2000, 800, 64, finished([20] * 10, limit=10_000))
    assert found.mean() == pytest.approx(80, rel=0.01) and np.median(found) == pytest.approx(80 * np.log(2), rel=0.01)
    found = output_lengths(2000, 1000, 4, finished([20, 40] * 20, limit=10_000))
    assert set(found.round(6)) == {found.min().round(6), found.max().round(6)} and found.max() == 2 * found.min()
    assert len(output_lengths(0, 0, 0, finished([]))) == 0


def test_live_rows_are_those_of_a_list_schedule():
    outputs = np.random.default_rng(3).integers(1, 30, 50).astype(float)
    full, clock, live = live_rows(outputs, 50, 8)
    assert 8 * full + clock @ live == pytest.approx(outputs.sum())
    ends = [0.0] * 8
    for output in outputs:
        started = min(ends)
        ends[ends.index(started)] += output
    assert (full, full + clock.sum()) == (started, max(ends)) and live.tolist() == [8, 7, 6, 5, 4, 3, 2, 1]
    more, after, _ = live_rows(outputs, 90, 8)
    assert more - full == pytest.approx(40 * outputs.mean() / 8) and (after == clock).all()
    full, clock, live = live_rows(outputs[:3], 3, 8)
    assert full == 0 and clock.sum() == max(outputs[:3]) and live.tolist() == [3, 2, 1]
    assert len(live_rows(outputs[:0], 0, 8)[1]) == 0


def test_rows_that_never_come_to_the_engine_take_no_time():
    record = last_record(simulate(workload([5] * 4), Never()))
    seconds = []
    for num_refused in (0, 50):
        lengths = finished([20] * 50)
        lengths.expect([], num_refused)
        forecaster = Forecaster(Never(), 1000, 4, lengths, foreseeable())
        found = [forecaster.add(record) for _ in range(forecast.PILOT_STEPS)][-1]
        assert found is not None
        seconds.append(found.seconds - 1.0)
    assert 2 < seconds[0] / seconds[1] < 2.2


class Broken(SpeculationPolicy):
    decide = Never.decide

    def facts(self):
        raise KeyError("gone")


class Odd(Broken):
    def facts(self):
        return {"good": np.float32(1.5), "bad": float("nan"), 3: 4}


def test_facts_of_a_users_own_policy_cost_no_job():
    assert policy_facts(Broken()) == {} and policy_facts(Never()) == {}
    assert policy_facts(Odd()) == {"good": 1.5, "3": 4.0}


def test_a_job_says_what_was_foreseen_and_what_came(job):
    job.prompts(600).set(output__rows_per_part=1000)
    assert job.run(max_num_seqs=2, num_draft_tokens=2).exit_code == 0
    report = job.report()
    assert report["forecast_at_step"] == 200 and report["forecast_s"] > 0
    lines = dict(full_lines({**report, "forecast_s": 120.4, "forecast_never_s": 4180.0, "busy_s": 0.0123}))
    assert lines["forecast"] == "at step 200: 120 s; took 0.0123 s"
    facts = {"cost_error_p50": 0.021, "cost_error_p95": 0.2, "acceptance_brier": 0.2, "predicted_off_s": 180.0}
    facts |= {"measured_s": 120.0, "num_probes": 3.0, "trust": 0.5}
    lines = dict(
        full_lines({**report, "method": "suffix", "forecast_s": 99.96, "state": "preempted", "policy_facts": facts})
    )
    assert lines["forecast"].startswith("at step 200: 100 s with speculation, ")
    assert lines["forecast"].endswith(" without; not done yet")
    assert lines["without drafts"] == "180 s by the cost model, 120 s taken: 1.50 times as fast with them"
    assert lines["cost model's error"] == "2.1% of a step in the median, 20.0% at the 95th percentile"
    assert lines["acceptance model"] == "Brier score 0.200 of its chances, 0 being certain and right"
    assert lines["policy's facts"] == "probes 3, trust 0.5"
    assert "forecast" not in dict(full_lines({**report, "forecast_s": None}))
