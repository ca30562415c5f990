"""What goodput does in small simulated jobs; the whole suite of workloads is a benchmark."""

from dataclasses import replace

import numpy as np
import pytest

from specrun.policies import Proposals, StepFeedback, StepState, make_policy
from specrun.policies.catch_up import CatchUp
from specrun.policies.harm_guard import BLOCK_STEPS, HarmGuard
from specrun.policies.prices import PricedStep
from specrun.policies.probes import Probes
from specrun.policies.simulator.acceptance_process import Acceptance
from specrun.policies.simulator.simulation import simulate
from specrun.policies.simulator.surface import CostSurface, DraftCost
from specrun.policies.simulator.workload import Workload

HEAD = DraftCost(kind="eagle3", per_pass_s=3e-4, per_request_s=1e-6, passes="k", catch_up_s_per_token=5e-7)
LOOK_UP = DraftCost(kind="ngram", per_request_s=1e-7, passes="none")


class Bent(CostSurface):
    """10 ms up to 64 rows, then 0.15 ms a row: small batches have room for drafts, large ones have none."""

    capture_sizes = np.zeros(0, np.int32)
    noise = 0.0

    def step_s(self, num_rows, num_requests, num_context_tokens, num_prefill_tokens, progress=0.0):
        return 0.01 + 1.5e-4 * np.maximum(np.asarray(num_rows, np.float64) - 64, 0)


def job(batch, rate, num_rows=None, output=200, draft_cost=HEAD, **changes):
    num_rows = num_rows or 3 * batch
    workload = Workload(
        name="job",
        prompt_lens=np.full(num_rows, 20, np.int32),
        output_lens=np.full(num_rows, output, np.int32),
        surface=Bent(),
        draft_cost=draft_cost,
        process=Acceptance.stationary(rate),
        max_num_seqs=batch,
        max_draft_tokens=5,
    )
    return replace(workload, **changes)


def speedup(workload, seed=0):
    never = simulate(workload, make_policy("never"), seed, load_drafter=False)
    result = simulate(workload, make_policy("goodput"), seed)
    return never.makespan_s / result.makespan_s, result


@pytest.mark.parametrize("draft_cost", [HEAD, LOOK_UP], ids=["head", "look-up"])
def test_a_small_batch_with_good_drafts_speculates(draft_cost):
    gain, result = speedup(job(4, 0.8, draft_cost=draft_cost))
    assert gain > 1.8
    assert result.is_on.mean() > 0.9


@pytest.mark.parametrize("draft_cost", [HEAD, LOOK_UP], ids=["head", "look-up"])
def test_a_large_batch_with_bad_drafts_does_not(draft_cost):
    gain, result = speedup(job(192, 0.1, draft_cost=draft_cost))
    assert gain > 0.98
    assert result.is_on.mean() < 0.1


def test_the_tail_of_a_large_batch_gets_long_drafts():
    outputs = np.full(256, 40, np.int32)
    outputs[:4] = 800
    workload = job(128, 0.75, num_rows=256, output_lens=outputs, is_stationary=False)
    gain, result = speedup(workload)
    tail = result.num_running <= 4
    assert tail.sum() > 100
    assert result.mean_draft_len[tail].mean() > 3
    assert gain > 1.5


def test_off_is_never_for_good():
    process = Acceptance.stationary(0.85).with_phases((0.3, 0.0), (0.5, 1.0))
    gain, result = speedup(job(32, 0.85, num_rows=128, process=process, is_stationary=False))
    off = (result.progress > 0.35) & (result.progress < 0.5)
    back = (result.progress > 0.56) & (result.num_running > 8)
    assert result.is_on[off].mean() < 0.1
    assert result.is_on[back].mean() > 0.9
    assert gain > 1.2


def test_mixed_requests_get_drafts_of_their_own_length():
    kinds = (np.arange(96) % 2).astype(np.int32)
    workload = job(48, 0.5, num_rows=96, process=Acceptance.by_group(kinds, (0.95, 0.05)), groups=kinds)
    policy, drafted = make_policy("goodput"), np.zeros((2, 2))
    decide = policy.decide

    def watched(state):
        decision = decide(state)
        for kind in (0, 1):
            drafted[kind] += decision.num_draft_tokens[state.groups == kind].sum(), (state.groups == kind).sum()
        return decision

    policy.decide = watched  # type: ignore[method-assign]
    simulate(workload, policy)
    lengths = drafted[:, 0] / drafted[:, 1]
    assert lengths[0] > 2 * lengths[1]


def test_changes_of_mind_are_few_at_the_edge():
    """Gain or loss of next to nothing, with a noisy clock."""
    _, result = speedup(job(80, 0.42, num_rows=320, output=150))
    assert result.num_flips <= 6 + 0.02 * result.num_steps  # three free round trips in a short job


def test_late_feedback_is_matched_with_its_step():
    gain, _ = speedup(job(8, 0.8, feedback_delay=2))
    assert gain > 1.6


def test_num_draft_tokens_limits_every_budget(make_state):
    policy = make_policy("goodput", num_draft_tokens=2)
    assert policy.decide(make_state()).num_draft_tokens.max() <= 2


def test_says_what_it_has_learned():
    policy = make_policy("goodput")
    simulate(job(4, 0.8), policy)
    facts = policy.facts()
    assert facts["cost_error_p50"] < 0.02
    assert 0.7 < facts["acceptance_p0"] < 0.9
    assert facts["predicted_off_s"] > 1.5 * facts["measured_s"]


def test_the_clock_overrules_a_wrong_idea_of_the_cost():
    guard = HarmGuard()
    for _ in range(400):
        guard.observe(3, seconds=1.0, off_s=0.9, is_on=not guard.blocks(3))
    assert guard.blocks(3)
    assert not guard.blocks(4)
    for _ in range(BLOCK_STEPS):
        guard.observe(3, seconds=1.0, off_s=1.0, is_on=False)
    assert not guard.blocks(3)


def test_the_guard_lets_good_speculation_be():
    guard = HarmGuard()
    for _ in range(2000):
        guard.observe(3, seconds=1.0, off_s=0.99, is_on=True)
    assert not guard.blocks(3)


def test_probes_are_paid_for():
    """A probe that doubles a step may come once in 250 steps, however little the policy knows."""
    probes, num_probes = Probes(), 0
    for _ in range(5000):
        if probes.is_due(is_urgent=False):
            num_probes += 1
            probes.spend(1.0)
        probes.earn(1.0, 1.0)
    assert 15 <= num_probes <= 25


def test_a_probe_that_hiccups_is_not_the_last():
    probes = Probes()
    probes.earn(0.02, 0.02)
    probes.spend(5.0)
    due = 0
    for _ in range(2500):
        due += probes.is_due(is_urgent=False)
        probes.earn(0.02, 0.02)
    assert due > 0


def test_probes_of_which_the_price_was_not_known_are_paid_for():
    """What a job may spend in advance is one plain step, those before the first plain step included."""
    probes = Probes()
    probes.earn(1.0, 0.0)
    assert probes.is_due(is_urgent=True)
    probes.spend(1.5)
    probes.earn(1.0, 1.0)
    assert not probes.is_due(is_urgent=True)


def test_a_batch_that_has_melted_is_seen_plain_once(make_state):
    """At an eighth of any batch that was seen plain, however much speculation brings there."""
    probes, references = Probes(), {64: 0, 9: 0, 8: 0}
    probes.plain_step(64)
    for num_running in references:
        step = PricedStep(make_state(num_running=num_running), 0, 0.01, 0.01)
        for _ in range(200):
            probes.earn(0.01, 0.01)
            references[num_running] += probes.is_reference(step, 1.5, is_large=True)
    assert references == {64: 0, 9: 0, 8: 2}  # in pairs: one odd step proves nothing


class Stair(CostSurface):
    """16 ms up to 128 rows and 22 ms up to 256, in sizes of 8: eight drafts cost as much as 128."""

    capture_sizes = np.arange(8, 513, 8, dtype=np.int32)
    noise = 0.0

    def step_s(self, num_rows, num_requests, num_context_tokens, num_prefill_tokens, progress=0.0):
        return 0.016 + 0.006 * np.maximum(np.ceil(np.asarray(num_rows, np.float64) / 128) - 1, 0)


def test_a_probe_across_a_stair_does_not_keep_speculation_off():
    gain, result = speedup(job(128, 0.75, surface=Stair()))
    assert gain > 1.15
    assert result.is_on.mean() > 0.8


def test_a_drafter_falls_behind_though_the_clock_is_never_at_zero(make_state):
    """A step that drafts nothing takes some microseconds of the drafting lap."""
    catch_up, none = CatchUp(), np.zeros(2, np.int32)

    def step(context, budgets):
        state = replace(make_state(num_running=2), context_lens=np.full(2, context, np.int32))
        feedback = StepFeedback(state, none, none, none, none, none + 1, 2, 3e-6, 0.02, 0.001)
        return catch_up.observe(feedback, budgets)

    assert step(100, none + 1) == 200
    for context in range(101, 150):
        step(context, None)
    assert step(150, none + 1) == 100


def test_no_confidence_is_no_harm(make_state):
    """A survival that is no number, at every step."""
    policy, state = make_policy("goodput"), make_state(num_running=4)
    for step in range(30):
        now = replace(state, step=step)
        budgets = policy.decide(now).num_draft_tokens
        survival = np.full((4, 5), np.nan, np.float32)
        verified = policy.trim(Proposals(now, budgets, budgets, survival)) if budgets.any() else budgets
        rows = 4 + int(verified.sum())
        policy.observe(
            StepFeedback(now, budgets, verified, 0 * budgets, 0 * budgets, 0 * budgets + 1, rows, 0, 0.01, 0)
        )
    assert np.isfinite(list(policy.facts().values())).all()


def test_profile_of_another_kind_is_refused():
    with pytest.raises((ValueError, KeyError, TypeError)):
        make_policy("goodput", profile={"knots": []})


def test_takes_any_mix_of_requests_in_any_step():
    """Slots, groups and sizes that jump about, as no scheduler would have them."""
    rng = np.random.default_rng(0)
    policy = make_policy("goodput")
    for step in range(200):
        size = int(rng.integers(1, 40))
        drafted = rng.integers(0, 50, size)
        state = StepState(
            step=step,
            num_running=size,
            num_scheduled=size + 1,
            num_waiting=0,
            num_prefill_tokens=int(rng.integers(0, 2) * 100),
            kv_usage=0.5,
            max_draft_tokens=5,
            drafter="ngram",
            rolling_acceptance_rate=None,
            slots=rng.permutation(64)[:size].astype(np.int32),
            context_lens=rng.integers(1, 4000, size).astype(np.int32),
            groups=rng.integers(0, 300, size).astype(np.int32),
            num_draft_tokens=drafted,
            num_accepted_tokens=drafted // 2,
        )
        budgets = policy.decide(state).num_draft_tokens
        verified = proposed = np.zeros(size, np.int32)
        if budgets.any():
            proposed = rng.integers(0, budgets + 1).astype(np.int32)
            survival = np.where(np.arange(5) < proposed[:, None], 0.5, 0).astype(np.float32)
            verified = policy.trim(Proposals(state, budgets, proposed, survival))
        assert ((verified >= 0) & (verified <= proposed)).all()
        accepted = rng.integers(0, verified + 1).astype(np.int32)
        rows = size + int(verified.sum()) + state.num_prefill_tokens
        draft_s = 0.001 * bool(budgets.any())
        policy.observe(
            StepFeedback(state, proposed, verified, accepted, accepted, accepted + 1, rows, draft_s, 0.01, 0.001)
        )
