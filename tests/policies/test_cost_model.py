"""The cost model against made-up machines, whose true seconds are known."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specrun.policies import StepFeedback, StepState
from specrun.policies.cost_model import CostModel
from specrun.policies.drifting_fit import DriftingFit

Surface = Callable[[Any, int, float, int], Any]
"""(rows, requests, context tokens, prefill tokens) -> seconds."""


def gpu(rows: Any, num_requests: int, num_context: float, num_prefill: int) -> Any:
    """6 ms, a stair of 3 ms every 64 rows past 64, 50 ns a context token."""
    return 6e-3 + 3e-3 * np.maximum(np.ceil(np.asarray(rows) / 64) - 1, 0) + 5e-8 * num_context


def cpu(rows: Any, num_requests: int, num_context: float, num_prefill: int) -> Any:
    """20 ms and 2.5 ms a row, those of prefills a fifth cheaper; 1 us a context token, 0.2 ms a request."""
    return 0.02 + 2.5e-3 * np.asarray(rows) + 1e-6 * num_context + 2e-4 * num_requests - 5e-4 * num_prefill


def state_of(num_requests: int, context: int = 300, num_prefill: int = 0, drafter: str = "ngram") -> StepState:
    zeros = np.zeros(num_requests, np.int32)
    return StepState(
        step=0,
        num_running=num_requests,
        num_scheduled=num_requests + (num_prefill > 0),
        num_waiting=0,
        num_prefill_tokens=num_prefill,
        kv_usage=0.5,
        max_draft_tokens=8,
        drafter=drafter,
        rolling_acceptance_rate=None,
        slots=np.arange(num_requests, dtype=np.int32),
        context_lens=np.full(num_requests, context, np.int32),
        groups=zeros,
        num_draft_tokens=zeros.astype(np.int64),
        num_accepted_tokens=zeros.astype(np.int64),
    )


def feedback_of(state: StepState, length: int, step_s: float, draft_s: float = 0.0) -> StepFeedback:
    """A step that drafted `length` tokens for every request."""
    drafted = np.full(state.num_running, length, np.int32)
    return StepFeedback(
        state=state,
        num_proposed_tokens=drafted,
        num_draft_tokens=drafted,
        num_accepted_tokens=0 * drafted,
        num_matched_tokens=0 * drafted,
        num_committed_tokens=0 * drafted + 1,
        num_batched_tokens=state.num_running * (1 + length) + state.num_prefill_tokens,
        draft_s=draft_s,
        verify_s=0.9 * step_s,
        other_s=0.1 * step_s,
    )


class Machine:
    """Runs steps on a surface with lognormal noise and tells the model."""

    def __init__(self, surface: Surface, model: CostModel, noise: float = 0.05, seed: int = 0) -> None:
        self.surface, self.model, self.noise = surface, model, noise
        self.rng = np.random.default_rng(seed)
        self.context = 300

    def step(self, num_requests: int, length: int, factor: float = 1.0, num_prefill: int = 0) -> None:
        state = state_of(num_requests, self.context, num_prefill)
        rows = num_requests * (1 + length) + num_prefill
        seconds = float(self.surface(np.array(rows), num_requests, num_requests * self.context, num_prefill))
        seconds *= factor * float(np.exp(self.noise * self.rng.standard_normal()))
        self.model.observe(feedback_of(state, length, seconds), np.full(num_requests, length, np.int32))

    def ratio(self, num_requests: int, lengths: list[int]) -> list[float]:
        """Predicted over true seconds."""
        rows = num_requests * (1 + np.array(lengths))
        shape = (num_requests, num_requests * self.context, 0)
        ratios: list[float] = (self.model.step_s(rows, *shape) / self.surface(rows, *shape)).tolist()
        return ratios


def test_nothing_is_known_before_the_first_step():
    model = CostModel()
    assert not model.is_ready and model.facts() == {"cost_steps": 0.0}
    assert model.step_s([1, 2], 1, 100, 0).tolist() == [0.0, 0.0]
    assert np.all(model.draft_s(np.ones(3), 4.0) == 0.0) and model.stand_by_s(4) == model.read_s(9) == 0.0
    assert model.doubt([1, 2], 1, 1, 100, 0).tolist() == [1.0, 1.0]
    model.observe(feedback_of(state_of(4), 0, 0.01))
    assert model.is_ready and model.step_s(4, 4, 1200, 0) == pytest.approx(0.01)


@pytest.mark.parametrize(("surface", "batch"), [(gpu, 1), (gpu, 16), (gpu, 64), (cpu, 1), (cpu, 4), (cpu, 32)])
@pytest.mark.parametrize(("noise", "tolerance"), [(0.05, 0.08), (0.3, 0.25)])
def test_what_is_played_is_learned(surface, batch, noise, tolerance):
    machine = Machine(surface, CostModel(), noise)
    for step in range(300):
        machine.step(batch, step % 4)
        machine.context += 1
    ratios = np.array(machine.ratio(batch, [0, 1, 2, 3]))
    assert ratios == pytest.approx(1.0, abs=tolerance + noise / 4)
    assert ratios / ratios[0] == pytest.approx(1.0, abs=tolerance)


def test_a_staircase_of_padded_sizes_is_learned_step_by_step():
    sizes = np.array([1, 2, 4, 8, 16, 32, 64], np.int32)
    model = CostModel(sizes)
    machine = Machine(lambda n, r, c, p: 1e-3 * (3 + np.searchsorted(sizes, n)), model)
    for step in range(400):
        machine.step(1 + step % 40, 0)
    seconds = model.step_s(np.arange(1, 41), 1, 300, 0)
    for low, high in ((3, 4), (5, 8), (9, 16), (17, 32)):
        assert len(set(seconds[low - 1 : high].tolist())) == 1  # whatever fits into the padding is free
    assert seconds[[0, 1, 3, 7, 15, 31]] == pytest.approx(1e-3 * np.arange(3, 9), rel=0.1)


def test_many_capture_sizes_keep_the_state_small():
    sizes = np.array([1, 2, 4, *range(8, 513, 8)], np.int32)
    machine = Machine(gpu, CostModel(sizes))
    for step in range(200):
        machine.step(64, step % 5)
    assert machine.ratio(64, [0, 1, 2, 3, 4]) == pytest.approx([1.0] * 5, abs=0.08)
    assert len(machine.model.to_json()["step"]["theta"]) < 60


def test_context_has_a_slope():
    machine = Machine(lambda n, r, c, p: 5e-3 + 1e-6 * c + 0 * n, CostModel())
    for step in range(600):
        machine.context = 200 + 5 * (step % 200)
        machine.step(16, step % 2)
    for context in (200, 600, 1200):
        assert float(machine.model.step_s(16, 16, 16 * context, 0)) == pytest.approx(5e-3 + 1.6e-5 * context, rel=0.08)


def test_prefill_rows_may_be_cheaper_and_pollute_nothing():
    machine = Machine(cpu, CostModel(), noise=0.1)
    for step in range(400):
        machine.step(8, step % 3, num_prefill=128 * (step % 4 == 0))
    assert machine.ratio(8, [0, 1, 2]) == pytest.approx([1.0] * 3, abs=0.1)
    assert float(machine.model.step_s(136, 8, 2400, 128)) == pytest.approx(float(cpu(136, 8, 2400, 128)), rel=0.15)


@pytest.mark.parametrize(
    ("kind", "cost"),
    [
        ("ngram", lambda m, k: 1e-4 + 2e-5 * m),
        ("draft_model", lambda m, k: k * (2e-3 + 1e-4 * m)),
        ("eagle3", lambda m, k: 1e-3 + 4e-4 * k),
    ],
)
def test_drafting_is_priced_by_kind_of_drafter(kind, cost):
    model, rng = CostModel(), np.random.default_rng(0)
    for _ in range(600):
        m, k = int(rng.integers(1, 33)), int(rng.integers(1, 6))
        budgets = np.where(np.arange(32) < m, k, 0).astype(np.int32)
        seconds = cost(m, k) * np.exp(0.1 * rng.standard_normal())
        model.observe(feedback_of(state_of(32, drafter=kind), 0, 0.02, seconds), budgets)
    for m, k in ((4, 1), (4, 5), (16, 3), (32, 5)):
        assert float(model.draft_s(m, k)) == pytest.approx(cost(m, k), rel=0.2)
    assert np.all(model.draft_s(np.array([0.0, 4.0]), np.array([3.0, 0.0])) == 0.0)


def test_catching_up_and_standing_by_have_their_prices():
    model, rng = CostModel(), np.random.default_rng(0)
    for step in range(400):
        state, budgets = state_of(16, drafter="draft_model"), np.full(16, 2 * (step % 2), np.int32)
        behind = float(rng.integers(0, 200)) * (step % 2)
        seconds = 4e-3 + 1e-5 * behind if step % 2 else 1.5e-3
        model.observe(feedback_of(state, 0, 0.02, seconds * np.exp(0.05 * rng.standard_normal())), budgets, behind)
    assert float(model.draft_s(16, 2)) == pytest.approx(4e-3, rel=0.1)
    assert model.read_s(400) == pytest.approx(4e-3, rel=0.25)
    assert model.stand_by_s(16) == pytest.approx(1.5e-3, rel=0.1)


def test_a_few_requests_do_not_make_the_drafting_of_all_look_dear():
    """A probe pays for a pass and for reading prompts; what a request more adds to that is next to nothing."""
    model = CostModel()
    for num_asked in (1, 5, 7, 8, 8, 8):
        budgets = (np.arange(128) < num_asked).astype(np.int32)
        behind = 100.0 * num_asked
        seconds = 6e-4 + 3e-6 * num_asked + 1e-6 * behind
        model.observe(feedback_of(state_of(128, drafter="eagle3"), 0, 0.02, seconds), budgets, behind)
    assert float(model.draft_s(128, 1)) < 3e-3  # it is 1 ms


def test_a_stair_between_two_captured_sizes_stays_between_them():
    sizes = np.array([1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)], np.int32)
    model = CostModel(sizes)
    for step in range(300):
        rows = 64 if step < 10 else 128 if step < 13 else 136
        feedback = feedback_of(state_of(64), 0, {64: 0.012, 128: 0.014, 136: 0.020}[rows])
        model.observe(replace(feedback, num_batched_tokens=rows))
    below, above = model.step_s(np.array([128, 136]), 64, 64 * 300.0, 0)
    assert below < 0.017 and above == pytest.approx(0.020, rel=0.02)  # the three looks at 128 rows still count


def test_time_spent_on_not_drafting_is_no_cost_of_standing_by():
    model = CostModel()
    for _ in range(10):
        model.observe(feedback_of(state_of(16), 0, 0.02, 2e-6), np.zeros(16, np.int32))
    assert model.stand_by_s(16) == 0.0 and float(model.draft_s(16, 2)) == 0.0


def test_a_first_call_that_compiles_is_forgotten():
    machine = Machine(gpu, CostModel())
    machine.step(16, 0, factor=100)
    for step in range(12):
        machine.step(16, step % 2)
    assert machine.ratio(16, [0, 1]) == pytest.approx([1.0] * 2, abs=0.15)


def test_first_calls_of_every_size_are_forgotten():
    machine = Machine(gpu, CostModel())
    for length in range(6):
        machine.step(16, length, factor=10)
    for step in range(60):
        machine.step(16, step % 6)
    assert machine.ratio(16, [0, 1, 2, 3, 4, 5]) == pytest.approx([1.0] * 6, abs=0.15)


def test_a_compilation_later_on_moves_nothing():
    machine = Machine(gpu, CostModel())
    for step in range(100):
        machine.step(16, step % 2)
    before = machine.ratio(16, [0, 1, 2, 5])
    machine.step(16, 1, factor=30)
    machine.step(16, 5, factor=30)
    assert machine.ratio(16, [0, 1, 2, 5]) == before


def test_spikes_do_not_move_the_level():
    machine = Machine(gpu, CostModel())
    for step in range(300):
        machine.step(16, step % 2, factor=float(machine.rng.uniform(1.5, 20)) if machine.rng.random() < 0.05 else 1.0)
    assert machine.ratio(16, [0, 1]) == pytest.approx([1.0] * 2, abs=0.08)


@pytest.mark.parametrize("sizes", [None, np.array([8, 16, 32, 64, 128], np.int32)])
def test_a_cliff_is_learned_within_ten_looks(sizes):
    """Five times as much past 128 rows, where the captured graphs end; steps below it go on in between."""
    machine = Machine(lambda n, r, c, p: gpu(n, r, c, p) * np.where(np.asarray(n) > 128, 5, 1), CostModel(sizes))
    for step in range(100):
        machine.step(64, step % 2)
    for _ in range(10):
        machine.step(64, 0)
        machine.step(64, 2)
    assert machine.ratio(64, [0, 1, 2]) == pytest.approx([1.0] * 3, abs=0.15)
    assert min(machine.ratio(64, [3, 4])) > 0.6  # and what lies further is no longer hoped for


def test_a_cliff_that_appears_is_learned_within_ten_looks():
    machine = Machine(gpu, CostModel())
    for step in range(200):
        machine.step(64, step % 3)
    for _ in range(10):
        machine.step(64, 2, factor=5)
        machine.step(64, 0)
    assert machine.ratio(64, [0, 2]) == pytest.approx([1.0, 5.0], rel=0.15)


@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_drift_of_the_whole_machine_is_followed_where_nothing_is_played(noise):
    machine = Machine(gpu, CostModel(), noise)
    for step in range(200):
        machine.step(64, step % 3)
    for step in range(400):
        machine.step(64, 0, factor=1 + 0.15 * min(step / 200, 1))
    assert machine.ratio(64, [0, 1, 2]) == pytest.approx([1.15] * 3, abs=0.05 + noise / 2)


@pytest.mark.parametrize("wrong", [0.7, 1.5])
def test_a_wrong_profile_is_repaired(wrong):
    """Everything is off, and drafts by as much again."""

    def elsewhere(n: Any, r: int, c: float, p: int) -> Any:
        return gpu(n, r, c, p) * wrong * np.where(np.asarray(n) > r, wrong, 1.0)

    first = Machine(elsewhere, CostModel())
    for step in range(300):
        first.step(64, step % 5)
    machine = Machine(gpu, CostModel.from_json(json.loads(json.dumps(first.model.to_json()))))
    for step in range(100):
        machine.step(64, step % 5)
    assert machine.ratio(64, [0, 1, 2, 3, 4]) == pytest.approx([1.0] * 5, abs=0.1)


@pytest.mark.parametrize("wrong", [0.7, 1.5])
def test_a_wrong_profile_is_repaired_by_a_few_looks(wrong):
    first = Machine(lambda n, r, c, p: gpu(n, r, c, p) * wrong, CostModel())
    for step in range(300):
        first.step(64, step % 5)
    machine = Machine(gpu, CostModel.from_json(first.model.to_json()))
    for step in range(500):
        machine.step(64, int(step % 64 == 63))
    assert machine.ratio(64, [0, 1, 3]) == pytest.approx([1.0] * 3, abs=0.15)


def test_unseen_sizes_look_cheap_but_not_free():
    model = CostModel()
    for batch in (4, 64):
        model = CostModel()
        for _ in range(50):
            model.observe(feedback_of(state_of(batch), 0, 0.01))
        seconds = model.step_s(batch * np.arange(1, 9), batch, batch * 300, 0)
        assert (np.diff(seconds) > 0).all() and seconds[1] < 1.6 * seconds[0] and seconds[7] < 8 * seconds[0]
    assert 0 < float(model.step_s(1, 1, 300, 0)) <= 0.0105


def test_far_sizes_follow_the_slope_that_was_seen():
    machine = Machine(cpu, CostModel())
    for step in range(300):
        machine.step(16, step % 6)
    ratios = machine.ratio(16, [10, 30, 100, 2000])
    assert min(ratios) > 0.5 and max(ratios) < 1.5
    assert np.isfinite(machine.model.step_s([1, 10**6], 1, 1, 0)).all()


def test_more_rows_are_not_believed_cheaper_until_seen():
    machine = Machine(lambda n, r, c, p: np.where(np.asarray(n) > 64, 2e-3, 9e-3), CostModel())
    for _ in range(50):
        machine.step(64, 0)
    machine.step(64, 1)
    assert machine.ratio(64, [1])[0] > 3.5
    for step in range(20):
        machine.step(64, step % 2)
    assert machine.ratio(64, [0, 1]) == pytest.approx([1.0] * 2, abs=0.1)


def test_doubt_is_small_where_both_sizes_were_seen():
    machine = Machine(gpu, CostModel())
    for step in range(100):
        machine.step(64, step % 2)
    doubts = machine.model.doubt(64 * np.arange(1, 6), 64, 64, 64 * 300, 0)
    assert doubts[0] == pytest.approx(0, abs=1e-6) and doubts[1] < 0.05 and doubts[4] > 3 * doubts[1]


def test_facts_tell_the_error_of_predictions_made_before():
    machine = Machine(gpu, CostModel(), noise=0.1)
    for step in range(1000):
        machine.step(16, step % 4)
    facts = machine.model.facts()
    assert facts["cost_steps"] == 1000
    # of normal noise of 10 %: the median is 0.67 and the 95th percentile 1.96 standard deviations
    assert facts["cost_error_p50"] == pytest.approx(0.067, abs=0.02)
    assert facts["cost_error_p95"] == pytest.approx(0.196, abs=0.06)


def test_json_gives_the_same_predictions():
    machine = Machine(gpu, CostModel(np.array([16, 32, 64, 128], np.int32)))
    for step in range(100):
        machine.step(16, step % 4)
    model = machine.model
    model.observe(feedback_of(state_of(16), 3, 0.01, 1e-3), np.full(16, 3, np.int32))
    again = CostModel.from_json(json.loads(json.dumps(model.to_json())))
    rows = np.arange(1, 300)
    assert again.is_ready
    assert again.step_s(rows, 16, 4000, 8) == pytest.approx(model.step_s(rows, 16, 4000, 8))
    assert again.draft_s(16.0, 3.0) == pytest.approx(model.draft_s(16.0, 3.0))
    assert not CostModel.from_json(json.loads(json.dumps(CostModel().to_json()))).is_ready


@pytest.mark.parametrize("content", [{}, {**CostModel().to_json(), "knots": [1, 2]}])
def test_json_of_another_kind_is_refused(content):
    with pytest.raises((KeyError, ValueError)):
        CostModel.from_json(content)


def test_memory_is_bounded_and_numbers_stay_sound():
    machine = Machine(gpu, CostModel(), noise=0.3)
    size = len(json.dumps(machine.model.to_json()))
    for step in range(3000):
        machine.step(1 + step % 37, step % 9, num_prefill=step % 11)
    fit = machine.model._fit
    assert fit is not None and np.isfinite(fit.theta).all() and np.linalg.eigvalsh(fit.covariance).min() > -1e-9
    assert size < len(json.dumps(machine.model.to_json())) < 60_000


def test_nothing_is_ever_predicted_to_take_less_than_no_time():
    machine = Machine(cpu, CostModel(), noise=0.4)
    for step in range(300):
        machine.step(1 + step % 8, step % 5, num_prefill=256 * (step % 3 == 0))
        assert (machine.model.step_s(np.arange(1, 400), 1 + step % 8, 2000, 300 * (step % 2)) > 0).all()


def test_a_bound_is_kept_without_losing_the_sum():
    """Two coefficients of one sum: what the one may not take goes to the other, not the wrong way."""
    fit = DriftingFit(np.array([1.0, 0.1]), np.diag([0.5, 2.0]), np.zeros(2))
    for _ in range(50):
        fit.observe(np.array([1.0, 1.0]), 0.5)
    assert fit.theta.min() >= 0 and fit.theta.sum() == pytest.approx(0.5, rel=0.05)
