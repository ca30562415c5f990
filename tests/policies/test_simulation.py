"""Simulated jobs against hand computation and closed forms."""

from dataclasses import replace

import numpy as np
import pytest

from specrun.policies.base import SpecDecision, SpeculationPolicy
from specrun.policies.fixed import Always, Never
from specrun.policies.simulator import Acceptance, Distorted, DraftCost, Workload, simulate, staircase

FREE = DraftCost(kind="ngram")
FLAT = staircase([1], [10.0])


def make(num_rows=4, prompt=8, output=20, rate=0.6, surface=FLAT, cost=FREE, **fields):
    """A small job; prompt and output are one length or one for each row."""
    return Workload(
        name="small",
        prompt_lens=np.broadcast_to(np.asarray(prompt, np.int32), num_rows),
        output_lens=np.broadcast_to(np.asarray(output, np.int32), num_rows),
        surface=surface,
        draft_cost=cost,
        process=rate if isinstance(rate, Acceptance) else Acceptance.stationary(rate),
        **fields,
    )


class Script(SpeculationPolicy):
    """Budgets and stand_by by step, the last for all that follow; keeps what it is told."""

    def __init__(self, *steps, keep=None):
        self.steps, self.keep, self.seen, self.states = steps, keep, [], []

    def decide(self, state):
        budget, stand_by = self.steps[min(len(self.states), len(self.steps) - 1)]
        self.states.append(state)
        return SpecDecision(np.full(state.num_running, budget, np.int32), "script", stand_by)

    def trim(self, proposals):
        return proposals.num_draft_tokens if self.keep is None else np.minimum(proposals.num_draft_tokens, self.keep)

    def observe(self, feedback):
        self.seen.append((len(self.states) - 1, feedback))


def test_never_is_what_one_reckons_by_hand():
    # 2 slots, 3 rows of 3 tokens: rows 0 and 1 prefill (16 rows) and decode twice (2 rows); row 2 the same alone
    surface = staircase([1, 2, 16], [1.0, 2.0, 16.0], kv_bytes_per_token=1e9, bandwidth=1e12)
    result = simulate(make(3, 8, 3, surface=surface, max_num_seqs=2), Never(), load_drafter=False)
    assert result.num_batched_tokens.tolist() == [16, 2, 2, 8, 1, 1]
    assert result.num_context_tokens.tolist() == [0, 18, 20, 0, 9, 10]
    assert result.seconds == pytest.approx(np.array([16, 2 + 18, 2 + 20, 2 + 6, 1 + 9, 1 + 10]) / 1e3)
    assert result.makespan_s == pytest.approx(result.seconds.sum())
    assert (result.num_tokens, result.num_draft_tokens, result.num_flips) == (9, 0, 0)


def test_drafts_that_always_come_true_divide_the_steps():
    sure = Acceptance(np.ones(1), positions=np.ones(1))
    result = simulate(make(1, 8, 1 + 4 * 50, rate=sure), Always(3))
    assert result.committed_tokens.tolist() == [1] + [4] * 50
    assert result.draft_tokens.tolist() == [0] + [3] * 50


@pytest.mark.parametrize("length", [1, 3, 5])
def test_committed_tokens_follow_the_closed_form(length):
    rate = 0.7
    job = make(64, 8, 400, rate=Acceptance.stationary(rate, decay=1.0), max_num_seqs=64)
    result = simulate(job, Always(length))
    decoding = result.num_running == 64
    per_request = result.committed_tokens[decoding].sum() / result.num_running[decoding].sum()
    assert per_request == pytest.approx((1 - rate ** (length + 1)) / (1 - rate), rel=0.01)


def test_every_policy_meets_the_same_coins():
    process = Acceptance.stationary(0.6, decay=1.0)
    lengths = np.array([50, 70], np.int32)
    guesser, other = process.begin(lengths, 1), process.begin(lengths, 2)

    def matched(guesser, row, position, length):
        where = (np.array([row]), np.array([position]), np.array([100]), np.array([length], np.int32), 0.0)
        return int(guesser.draft(*where).num_matched_tokens[0])

    for row in range(2):
        truth = [matched(guesser, row, position, 1) for position in range(50)]
        assert 20 < sum(truth) < 40
        assert truth != [matched(other, row, position, 1) for position in range(50)]
        for position in range(42):
            assert matched(guesser, row, position, 8) == [*truth[position : position + 8], 0].index(0)


def run(job, policy, **options):
    """The policy after its run."""
    simulate(job, policy, **options)
    return policy


def test_batching_conserves_tokens():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 40, (2, 50)).astype(np.int32)
    job = make(50, lengths[0], lengths[1], max_num_seqs=7, max_num_batched_tokens=30)
    for policy in (Never(), Always(2), Always(5)):
        result = simulate(job, policy)
        assert result.num_tokens == job.num_output_tokens == result.committed_tokens.sum()
        assert result.progress[0] == 0
        assert np.all(np.diff(result.progress) >= 0)
        assert result.num_running.max() <= 7
        assert (result.num_batched_tokens - result.draft_tokens).max() <= 30
        assert result.num_accepted_tokens <= result.num_draft_tokens


def test_the_last_token_needs_no_draft():
    policy = run(make(1, 8, 4), Script((5, True)))
    first = policy.seen[0][1]
    assert first.num_proposed_tokens.tolist() == [2]  # 3 tokens left, the last comes with the second
    ends_early = run(make(1, 8, 4, max_tokens=50), Script((5, True))).seen[0][1]
    assert ends_early.num_proposed_tokens.tolist() == [5]  # the engine does not know
    assert ends_early.num_committed_tokens[0] <= 3


def test_a_prompt_is_computed_in_chunks_beside_the_decodes():
    # row 0 decodes while the 100 tokens of row 1 share what is left of 16 a step
    job = make(2, [4, 100], 40, max_num_seqs=2, max_num_batched_tokens=16)
    result = simulate(job, Never())
    assert result.num_prefill_tokens[:9].tolist() == [16, *[15] * 5, 13, 0, 0]
    assert result.num_running[:9].tolist() == [0, *[1] * 6, 2, 2]


def test_rows_are_padded_to_the_sizes_that_are_captured():
    surface = staircase([1, 64], [1.0, 64.0], capture_sizes=np.array([4, 8], np.int32))
    assert surface.step_s(np.array([1, 4, 5, 8, 9]), 1, 0, 0) == pytest.approx([4e-3, 4e-3, 8e-3, 8e-3, 9e-3])
    policy = run(make(1, 4, 3, surface=surface), Script((0, True)))
    assert policy.states[0].capture_sizes.tolist() == [4, 8]
    assert [feedback.num_batched_tokens for _, feedback in policy.seen] == [1, 1]
    assert [feedback.verify_s for _, feedback in policy.seen] == pytest.approx([4e-3] * 2)


def test_what_is_trimmed_costs_no_rows_but_grades_one_more():
    sure = Acceptance(np.ones(1), positions=np.ones(1))
    policy = run(make(1, 8, 40, rate=sure), Script((4, True), keep=1))
    feedback = policy.seen[0][1]
    assert feedback.num_batched_tokens == 2
    assert feedback.num_proposed_tokens.tolist() == [4]
    assert feedback.num_draft_tokens.tolist() == feedback.num_accepted_tokens.tolist() == [1]
    assert feedback.num_matched_tokens.tolist() == feedback.num_committed_tokens.tolist() == [2]


DRAFTER = DraftCost(per_pass_s=1e-3, per_request_s=1e-4, passes="k", catch_up_s_per_token=1e-5)


def test_a_drafter_is_paid_for_its_passes():
    never_right = Acceptance.stationary(0.0)
    seconds = {}
    for passes in ("k", "one", "none"):
        cost = replace(DRAFTER, passes=passes, catch_up_s_per_token=0.0)
        policy = run(make(2, 8, 20, rate=never_right, cost=cost), Script((3, True)))
        seconds[passes] = policy.seen[0][1].draft_s
    assert seconds == pytest.approx({"k": 3 * (1e-3 + 2e-4), "one": 1.2e-3, "none": 1.2e-3})


def test_a_stale_drafter_pays_to_catch_up():
    script = Script(*[(0, False)] * 5, (1, False))
    result = simulate(make(2, 8, 20, rate=0.0, cost=DRAFTER), script)
    draft_s = [feedback.draft_s for _, feedback in script.seen]
    assert draft_s[:5] == [0] * 5
    read = 2 * (8 + 5)  # prompts, and 5 tokens each
    assert draft_s[5] == pytest.approx(1.2e-3 + read * 1e-5)
    assert draft_s[6] == pytest.approx(1.2e-3)
    assert result.num_catch_up_tokens == read


def test_a_drafter_that_stands_by_is_paid_each_step_and_is_not_behind():
    cost = replace(DRAFTER, stand_by_fraction=0.5)
    script = Script(*[(0, True)] * 5, (1, True))
    result = simulate(make(2, 8, 20, rate=0.0, cost=cost), script)
    draft_s = [feedback.draft_s for _, feedback in script.seen]
    assert draft_s[0] == pytest.approx(0.6e-3 + 16e-5)
    assert draft_s[1:6] == pytest.approx([0.6e-3] * 4 + [1.2e-3])
    assert result.num_catch_up_tokens == 16


def test_a_drafter_without_weights_is_never_behind():
    script = Script(*[(0, False)] * 5, (1, False))
    cost = DraftCost(kind="ngram", per_request_s=1e-4, catch_up_s_per_token=1.0)
    simulate(make(2, 8, 20, rate=0.0, cost=cost), script)
    assert [f.draft_s for _, f in script.seen][4:6] == pytest.approx([0, 2e-4])


def test_being_off_beside_a_loaded_drafter_may_be_taxed():
    job = make(2, 8, 20, cost=replace(FREE, off_tax=0.2))
    without = simulate(job, Never(), load_drafter=False)
    assert without.makespan_s == pytest.approx(20 * 0.01)
    assert simulate(job, Never()).makespan_s == pytest.approx(20 * 0.012)
    assert simulate(make(2, 8, 20, rate=0.0), Always(1)).seconds.max() == pytest.approx(0.01)


def test_feedback_is_late_by_as_many_steps_as_told():
    for delay in (0, 2):
        policy = run(make(2, 8, 10, feedback_delay=delay), Script((1, True)))
        steps = [(decided, feedback.state.step - policy.states[0].step) for decided, feedback in policy.seen]
        assert steps[0] == (delay, 0)
        assert all(decided - about == delay for decided, about in steps)


def test_flips_are_those_of_the_batch():
    class Some(Script):
        def __init__(self, num_drafting):
            super().__init__((0, True))
            self.num_drafting = num_drafting

        def decide(self, state):
            decision = super().decide(state)
            budgets = np.where(np.arange(state.num_running) < self.num_drafting(state.step), 2, 0)
            return replace(decision, num_draft_tokens=budgets.astype(np.int32))

    job = make(8, 8, 40, rate=0.0, max_num_seqs=8)
    probing, halving = Some(lambda step: int(step % 4 == 0)), Some(lambda step: 4)
    switching = Some(lambda step: 8 * (step // 10 % 2))
    results = [simulate(job, policy) for policy in (probing, halving, switching)]
    assert [result.num_flips for result in results] == [0, 1, 3]
    cut = simulate(make(8, 8, 40, max_num_seqs=8), Script((3, True), keep=0))
    assert cut.num_flips == 0  # whatever is proposed, nothing is verified
    lucky = Acceptance(np.array([0.5]), availability=np.array([0.2]))
    assert simulate(make(1, 8, 100, rate=lucky), Always(2)).num_flips == 1  # finding nothing is no flip


def test_noise_is_the_same_for_every_policy_and_drift_follows_progress():
    job = make(2, 8, 200, rate=0.0, surface=Distorted(FLAT, noise=0.1))
    one, other = (simulate(job, policy, seed=1).seconds for policy in (Never(), Always(2)))
    assert one == pytest.approx(other)
    assert np.std(np.log(one)) == pytest.approx(0.1, rel=0.2)
    worse = Distorted(FLAT, factor=2.0, drift=0.5, cycles=1.0, cliff=(8, 5.0))
    assert worse.step_s(np.array([8, 9]), 1, 0, 0, 0.25) == pytest.approx([0.03, 0.15])


def test_a_job_that_cannot_run_is_refused():
    with pytest.raises(ValueError, match="kv_tokens"):
        make(1, 100, 100, kv_tokens=128)
    with pytest.raises(ValueError, match="output_lens"):
        make(1, 100, 100, max_tokens=50)
    with pytest.raises(ValueError, match="at least 1"):
        make(1, 0, 100)
    with pytest.raises(ValueError, match="passes"):
        DraftCost(passes="two")
