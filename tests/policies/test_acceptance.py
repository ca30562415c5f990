"""What is learned of acceptance: by position, by group, by request, and from a drafter's confidence."""

from typing import Any

import numpy as np
import pytest

from specrun.policies.acceptance import AcceptanceModel
from specrun.policies.base import Proposals, StepFeedback, StepState

K = 4


class Job:
    """Requests that never finish, in front of a model: drafts succeed with probabilities [R, K] given those before."""

    def __init__(self, probabilities, groups=None, slots=None, seed=0):
        self.model = AcceptanceModel()
        self.probabilities = np.asarray(probabilities, dtype=float)
        self.num_running, self.width = self.probabilities.shape
        self.groups = np.zeros(self.num_running, np.int32) if groups is None else np.asarray(groups, np.int32)
        self.slots = np.arange(self.num_running, dtype=np.int32) if slots is None else np.asarray(slots, np.int32)
        self.drafted = np.zeros(self.num_running, np.int64)
        self.rng = np.random.default_rng(seed)

    @property
    def state(self):
        return StepState(
            step=0,
            num_running=self.num_running,
            num_scheduled=self.num_running,
            num_waiting=0,
            num_prefill_tokens=0,
            kv_usage=0.5,
            max_draft_tokens=self.width,
            drafter="synthetic",
            rolling_acceptance_rate=None,
            slots=self.slots,
            context_lens=np.full(self.num_running, 100, np.int32),
            groups=self.groups,
            num_draft_tokens=self.drafted.copy(),
            num_accepted_tokens=np.zeros(self.num_running, np.int64),
        )

    def step(self, budgets=None, found=None, verified=None, confidence=None):
        """One step; budgets and verified lengths are numbers or [R], confidence is conditional and [R, K]."""
        state, size = self.state, self.num_running
        self.model.expected(state, self.width)
        budgets = np.broadcast_to(self.width if budgets is None else budgets, size).astype(np.int32)
        found = np.minimum(budgets, budgets if found is None else found).astype(np.int32)
        proposals = Proposals(state, budgets, found, survival_of(found, self.width, confidence))
        survival = self.model.survival(proposals)
        kept = found if verified is None else np.minimum(found, verified).astype(np.int32)
        passes = self.rng.random((size, self.width)) < self.probabilities
        would_match = np.minimum(np.cumprod(passes, axis=1).sum(axis=1), found)
        accepted = np.minimum(would_match, kept).astype(np.int32)
        matched = np.minimum(would_match, kept + 1).astype(np.int32)
        self.model.observe(proposals, budgets, feedback_of(state, found, kept, accepted, matched))
        self.drafted += kept
        return survival

    def run(self, steps, **kwargs):
        for _ in range(steps):
            self.step(**kwargs)
        return self

    @property
    def rates(self):
        """[R, K] conditional rates that the model expects."""
        survival, available = self.model.expected(self.state, self.width)
        survival = survival / available
        return np.column_stack((survival[:, 0], survival[:, 1:] / survival[:, :-1]))


def survival_of(found, width, confidence=None):
    confidence = np.full((len(found), width), 0.5) if confidence is None else confidence
    survival = np.cumprod(confidence, axis=1).astype(np.float32)
    survival[np.arange(width) >= found[:, None]] = 0
    return survival


def feedback_of(state, proposed, drafted, accepted, matched, committed=None):
    return StepFeedback(
        state=state,
        num_proposed_tokens=np.asarray(proposed, np.int32),
        num_draft_tokens=np.asarray(drafted, np.int32),
        num_accepted_tokens=np.asarray(accepted, np.int32),
        num_matched_tokens=np.asarray(matched, np.int32),
        num_committed_tokens=np.asarray(accepted if committed is None else committed, np.int32) + (committed is None),
        num_batched_tokens=1,
        draft_s=0.001,
        verify_s=0.01,
        other_s=0.001,
    )


def alike(num_running, *rates):
    return np.tile(rates, (num_running, 1))


def test_nothing_known_is_0_6_falling_by_position():
    yields, available = AcceptanceModel().expected(Job(alike(3, 0.5, 0.5)).state, 2)
    assert yields.shape == available.shape == (3, 2)
    assert yields.dtype == available.dtype == np.float64
    assert available == pytest.approx(np.tile([0.95, 0.95**2], (3, 1)))
    assert yields / available == pytest.approx(np.tile([0.6, 0.6 * 0.6 * 0.97], (3, 1)))


def test_rates_do_not_depend_on_the_lengths_that_were_tried():
    rates = 0.8, 0.6, 0.9, 0.5
    full = Job(alike(16, *rates)).run(400)
    varying = Job(alike(16, *rates))
    for _ in range(800):
        varying.step(budgets=varying.rng.integers(0, K + 1, 16))
    for job in full, varying:
        assert job.rates.mean(axis=0) == pytest.approx(rates, abs=0.06)


def test_only_graded_trials_count():
    job = Job(alike(1, *[0.5] * K))
    state = job.state
    # The third of four fails, and nothing is known of the fourth.
    job.model.observe(None, np.array([4], np.int32), feedback_of(state, [4], [4], [2], [2]))
    assert job.model.facts()["acceptance_trials"] == 3
    # Two agree, and a stop string drops what the second would have shown.
    job.model.observe(None, np.array([4], np.int32), feedback_of(state, [4], [4], [2], [2], committed=[1]))
    assert job.model.facts()["acceptance_trials"] == 4
    # Not one was proposed.
    job.model.observe(None, np.array([4], np.int32), feedback_of(state, [0], [0], [0], [0]))
    assert job.model.facts()["acceptance_trials"] == 4


def test_drafts_that_were_cut_are_graded_by_what_decoding_gave():
    job = Job(alike(32, *[0.9] * K)).run(100, verified=0)
    assert job.model.facts()["acceptance_trials"] == 3200
    assert job.rates[0, 0] == pytest.approx(0.9, abs=0.04)
    assert "acceptance_p1" not in job.model.facts()


def test_a_position_that_was_never_tried_is_a_little_worse_than_the_one_before():
    job = Job(alike(32, 0.9, 0.3, 0.3, 0.3)).run(100, budgets=1)
    rates = job.rates[0]
    assert rates[1:] == pytest.approx(rates[:-1] * 0.97, rel=0.01)


def test_estimates_fall_with_the_position():
    job = Job(alike(8, 0.3, 0.95, 0.95, 0.95))
    for _ in range(50):
        survival = job.step(found=job.rng.integers(0, K + 1, 8))
        yields, available = job.model.expected(job.state, K)
        for falling in survival, yields, available:
            assert (np.diff(falling, axis=1) <= 0).all()
            assert ((falling >= 0) & (falling <= 1)).all()


def test_groups_are_told_apart():
    groups = np.arange(32) % 2
    job = Job(np.where(groups[:, None] == 0, 0.9, 0.1) * np.ones(K), groups).run(30)
    assert job.rates[groups == 0, 0] == pytest.approx(0.9, abs=0.07)
    assert job.rates[groups == 1, 0] == pytest.approx(0.1, abs=0.07)


def test_a_new_group_starts_from_the_pool_and_soon_has_its_own_rate():
    job = Job(alike(32, *[0.9] * K)).run(50)
    job.drafted[:] = 0
    job.groups = np.full(32, 5, np.int32)
    assert job.rates[0, 0] == pytest.approx(0.9, abs=0.05)
    job.probabilities[:] = 0.2
    job.run(8)
    job.drafted[:] = 0
    assert job.rates[0, 0] < 0.4
    job.groups[:] = 0
    assert job.rates[0, 0] > 0.8


def test_few_trials_of_a_group_move_it_little():
    job = Job(alike(32, *[0.8] * K), groups=np.r_[np.zeros(31), 1]).run(20)
    groups_differ = abs(job.rates[31] - job.rates[:31].mean(axis=0))
    assert groups_differ[0] < 0.12


def test_groups_are_bounded():
    job = Job(alike(8, *[0.1] * K), groups=[3] * 8).run(20)
    job.drafted[:] = 0
    job.groups = np.array([3, 67, 1_000_000_003, 2_000_000_000, -61, 0, 1, 2], np.int32)
    rates = job.rates[:, 0]
    assert rates[[0, 1, 4]] == pytest.approx(0.1, abs=0.1)
    assert job.run(20).rates.shape == (8, K)


def test_requests_differ_within_their_group():
    good = np.arange(32) % 2 == 0
    job = Job(np.where(good[:, None], 0.9, 0.3) * np.ones(2)).run(60)
    assert job.rates[good, 0].mean() == pytest.approx(0.9, abs=0.08)
    assert job.rates[~good, 0].mean() == pytest.approx(0.3, abs=0.1)


def test_requests_that_are_alike_stay_close_together():
    job = Job(alike(64, *[0.7] * K)).run(200)
    assert job.rates[:, 0].std() < 0.07
    assert job.model.facts()["acceptance_request_spread"] < 0.35


def test_a_request_that_is_new_in_its_slot_starts_from_its_group():
    good = np.arange(32) % 2 == 0
    job = Job(np.where(good[:, None], 0.95, 0.3) * np.ones(2), slots=np.arange(32)[::-1] * 40).run(60)
    before = job.rates[:, 0]
    assert before[0] > before[1] + 0.3
    job.drafted[:2] = 0
    after = job.rates[:, 0]
    assert after[0] == after[1]
    assert after[2:] == pytest.approx(before[2:])


@pytest.mark.parametrize("num_running", [2, 256])
@pytest.mark.parametrize(("first", "second"), [(0.85, 0.2), (0.2, 0.85)])
def test_recovers_from_a_step_change(num_running, first, second):
    misses = []
    for seed in range(3):
        job = Job(alike(num_running, *[first] * K), seed=seed).run(300 if num_running < 32 else 40)
        job.probabilities[:] = second
        job.run(64)
        misses.append(abs(job.rates - second).mean(axis=0))
    assert np.mean(misses, axis=0)[0] < 0.12
    assert np.mean(misses, axis=0)[1] < 0.2


def test_one_request_notices_a_collapse_within_64_steps():
    misses = []
    for seed in range(5):
        job = Job(alike(1, *[0.85] * K), seed=seed).run(200)
        job.probabilities[:] = 0.2
        job.run(64)
        misses.append(job.rates[0, 0] - 0.2)
    assert np.mean(misses) < 0.12
    assert np.max(misses) < 0.3


def test_no_change_is_seen_where_there_is_none(monkeypatch):
    changes = []
    monkeypatch.setattr(AcceptanceModel, "_forget", lambda model, changed: changes.append(changed))
    Job(alike(4, 0.8, 0.7, 0.6, 0.5)).run(600)
    Job(alike(128, 1.0, 0.7, 0.0, 0.5)).run(100)
    assert len(changes) <= 2


def test_availability_is_learned_by_what_was_asked_for():
    job = Job(alike(32, *[0.7] * K))
    for _ in range(150):
        has_match = job.rng.random(32) < 0.3
        job.step(budgets=job.rng.integers(0, K + 1, 32), found=np.where(has_match, 3, 0))
    _, available = job.model.expected(job.state, K)
    assert available[0, :3] == pytest.approx(0.3, abs=0.06)
    assert available[0, 3] < 0.03
    assert job.rates[0, 0] == pytest.approx(0.7, abs=0.15)


def test_availability_by_group():
    groups = np.arange(32) % 2
    job = Job(alike(32, *[0.7] * K), groups).run(40, found=np.where(groups == 0, K, 0))
    _, available = job.model.expected(job.state, K)
    assert available[groups == 0].min() > 0.9
    assert available[groups == 1].max() < 0.1


def brier_of(job, steps, confidence):
    for _ in range(steps):
        job.probabilities = confidence(job.rng)
        job.step(confidence=job.probabilities)
    return job.model.facts()


def test_exact_confidence_is_used_and_lowers_the_brier_score():
    def draw(rng):
        return rng.choice([0.1, 0.5, 0.95], (32, K))

    facts = brier_of(Job(alike(32, *[0.5] * K)), 200, draw)
    assert facts["confidence_trust"] > 0
    assert facts["acceptance_brier"] < 0.17  # of 0.21 to 0.25 without
    job = Job(draw(np.random.default_rng(1)))
    for _ in range(100):
        job.probabilities = draw(job.rng)
        survival = job.step(confidence=job.probabilities)
    assert survival[:, 0] == pytest.approx(job.probabilities[:, 0], abs=0.12)


def test_useless_confidence_does_no_harm():
    rates = 0.9, 0.5, 0.3, 0.8
    facts = Job(alike(32, *rates)).run(200).model.facts()
    noise = Job(alike(32, *rates))
    for _ in range(200):
        noise.step(confidence=noise.rng.random((32, K)))
    exact = np.mean([0.9 * 0.1, 0.5 * 0.5, 0.3 * 0.7, 0.8 * 0.2])
    assert facts["confidence_trust"] == 0
    assert facts["acceptance_brier"] < exact + 0.03
    assert noise.model.facts()["confidence_trust"] == 0


def test_overconfident_drafters_are_corrected():
    job = Job(alike(32, *[0.4] * K))
    for _ in range(100):
        survival = job.step(confidence=np.full((32, K), 0.98))
    assert survival[:, 0].mean() == pytest.approx(0.4, abs=0.08)


def test_survival_is_0_behind_a_requests_drafts():
    job = Job(alike(4, *[0.9] * K)).run(5)
    found = np.array([0, 1, 3, 4], np.int32)
    proposals = Proposals(job.state, np.full(4, K, np.int32), found, survival_of(found, K)[:, :K])
    survival = job.model.survival(proposals)
    assert (survival > 0).sum(axis=1).tolist() == found.tolist()


def test_narrow_and_empty_proposals():
    job = Job(alike(2, *[0.9] * K)).run(5)
    none = np.zeros(2, np.int32)
    for width in 0, 1:
        proposals = Proposals(job.state, np.full(2, K, np.int32), none, np.zeros((2, width), np.float32))
        assert job.model.survival(proposals).shape == (2, width)
        job.model.observe(proposals, np.full(2, K, np.int32), feedback_of(job.state, none, none, none, none))


def test_more_positions_than_before_keep_what_is_known():
    job = Job(alike(32, *[0.9] * K)).run(50)
    before = job.rates[0, :K]
    yields, available = job.model.expected(job.state, 7)
    assert yields.shape == (32, 7)
    assert (yields / available)[0, :K] == pytest.approx(np.cumprod(before), abs=0.01)


def test_a_probe_is_heard_at_once():
    """After a long silence the outcomes of one step count at the next, not some steps later."""
    job = Job(alike(64, *[0.8] * K)).run(50)
    job.run(60, budgets=0)
    job.probabilities[:] = 0.0
    job.step(budgets=np.where(np.arange(64) < 8, K, 0))
    job.drafted[:] = 0
    assert job.rates[0, 0] < 0.79


def test_a_large_batch_that_is_asked_in_every_other_step_is_learned_from():
    job = Job(alike(256, *[0.9] * K))
    for _ in range(20):
        job.step()
        job.step(budgets=0)
    assert job.model.facts()["acceptance_trials"] > 256 * 20


def test_feedback_may_come_some_steps_late(monkeypatch):
    job = Job(alike(32, 0.9, 0.5, 0.5, 0.5))
    late: list[tuple[Any, ...]] = []
    observe = job.model.observe
    monkeypatch.setattr(job.model, "observe", lambda *args: late.append(args))
    for _ in range(60):
        job.step()
        if len(late) > 2:
            observe(*late.pop(0))
    assert job.rates[:, :2].mean(axis=0) == pytest.approx([0.9, 0.5], abs=0.06)


def test_facts_are_numbers():
    facts = Job(alike(8, *[0.7] * K)).run(40).model.facts()
    assert all(isinstance(value, float) for value in facts.values())
    assert facts["acceptance_p0"] == pytest.approx(0.7, abs=0.1)
    assert facts["acceptance_brier"] == pytest.approx(0.21, abs=0.04)
    assert facts["acceptance_brier_first"] == pytest.approx(0.21, abs=0.06)
    assert facts["acceptance_available"] > 0.95


def test_no_requests():
    job = Job(np.zeros((0, K))).run(2)
    yields, available = job.model.expected(job.state, K)
    assert yields.shape == available.shape == (0, K)


def test_cost_grows_much_slower_than_the_number_of_requests(monkeypatch):
    """No loop over requests: a step of 1,024 makes as many numpy calls as one of 64."""
    calls = []
    take = np.minimum

    def counted(*args, **kwargs):
        calls.append(1)
        return take(*args, **kwargs)

    counts = []
    for num_running in 256, 1024:
        job = Job(alike(num_running, *[0.7] * K)).run(40)
        monkeypatch.setattr(np, "minimum", counted)
        calls.clear()
        job.run(32)
        counts.append(len(calls))
        monkeypatch.setattr(np, "minimum", take)
    assert counts[0] == counts[1]
