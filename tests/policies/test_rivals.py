"""The rules of other engines: sequences of inputs and the draft lengths that their sources' documentation gives."""

from dataclasses import replace

import numpy as np
import pytest

from specrun.policies import make_policy
from specrun.policies.simulator.rivals import (
    RIVALS,
    SglangAdaptive,
    TensorrtGate,
    TensorrtSchedule,
    TltSwitch,
    UcbBandit,
    VllmTable,
)


@pytest.fixture
def run(make_state, make_feedback, lengths):
    """Drive a policy over `steps` with `accepted` draft tokens a request, at most what it drafts; the lengths."""

    def drive(policy, steps, batch=4, accepted=0.0, max_draft_tokens=8):
        chosen = []
        for step in range(steps):
            state = replace(make_state(batch, max_draft_tokens=max_draft_tokens), step=step)
            decision = policy.decide(state)
            drafted = decision.num_draft_tokens
            policy.observe(make_feedback(state, drafted, np.minimum(drafted, _spread(accepted, batch))))
            (length,) = set(lengths(decision))
            chosen.append(length)
        return chosen

    return drive


def _spread(mean, batch):
    """[batch] whole numbers with this mean; mean * batch has to be whole."""
    total = round(mean * batch)
    return np.array([total // batch + (i < total % batch) for i in range(batch)])


@pytest.fixture
def at(make_state, lengths):
    """The length that a policy gives for one state."""

    def length(policy, batch, **keys):
        (only,) = set(lengths(policy.decide(make_state(batch, **{"max_draft_tokens": 8, **keys}))))
        return only

    return length


@pytest.mark.parametrize("name", RIVALS)
def test_every_rival_keeps_to_the_seam(make_state, make_feedback, lengths, name):
    policy = RIVALS[name]()
    rng = np.random.default_rng(0)
    for step in range(300):
        limit = step % 4
        state = replace(make_state(int(rng.integers(1, 300)), 3, limit), step=step)
        decision = policy.decide(state)
        budgets = lengths(decision)
        assert len(budgets) == state.num_running
        assert all(0 <= budget <= limit for budget in budgets)
        assert decision.reason
        accepted = rng.integers(0, decision.num_draft_tokens + 1)
        policy.observe(make_feedback(state, decision.num_draft_tokens, accepted))


@pytest.mark.parametrize("name", RIVALS)
def test_a_job_may_name_a_rival(name):
    class_name = RIVALS[name].__name__
    assert type(make_policy(f"specrun.policies.simulator.rivals:{class_name}")) is RIVALS[name]


# vLLM's table


@pytest.mark.parametrize(
    ("batch", "length"), [(1, 3), (64, 3), (65, 1), (128, 1), (129, 0), (512, 0), (513, 0), (2048, 0)]
)
def test_vllm_example_table(at, batch, length):
    assert at(VllmTable(), batch) == length


@pytest.mark.parametrize(
    ("batch", "length"), [(1, 3), (16, 3), (17, 3), (31, 3), (32, 2), (128, 2), (129, 2), (255, 2), (256, 0)]
)
def test_vllm_gaps_carry_the_row_before(at, batch, length):
    assert at(VllmTable([[1, 16, 3], [32, 128, 2], [256, 2048, 0]]), batch) == length


def test_vllm_length_is_cut_to_the_limit(at):
    assert at(VllmTable([[1, 256, 4]]), 256, max_draft_tokens=3) == 3


def test_vllm_key_counts_prefills(at):
    assert at(VllmTable(), 64, num_prefills=1) == 1


def test_vllm_has_no_hysteresis(at):
    policy = VllmTable()
    assert [at(policy, batch) for batch in (64, 65, 64, 65, 129, 128, 64)] == [3, 1, 3, 1, 0, 1, 3]


def test_vllm_drafter_stays_ready(make_state):
    assert VllmTable().decide(make_state(200)).stand_by


def test_vllm_first_row_starts_at_one():
    with pytest.raises(ValueError, match="must start at batch size 1"):
        VllmTable([[2, 16, 3]])


# SGLang's tiers


@pytest.mark.parametrize(
    ("batch", "length"),
    [(1, 3), (7, 3), (8, 3), (30, 3), (31, 1), (32, 1), (60, 1), (61, 0), (64, 0), (1000, 0)],
)
def test_sglang_starts_in_the_slot_of_the_padded_batch(at, batch, length):
    assert at(SglangAdaptive(), batch) == length


def test_sglang_climbs_one_tier_when_all_is_accepted(run):
    # The average starts at 2. After 15 steps it is 3 - 0.8**15 > 2.5; 5 more bring 4.33, another 5 bring 4.78 > 4.5.
    assert run(SglangAdaptive(), 30, accepted=7) == [3] * 15 + [5] * 10 + [7] * 5


def test_sglang_warms_up_and_then_falls_to_the_lowest_tier_at_once(run):
    policy = SglangAdaptive()
    assert run(policy, 25, accepted=7)[-1] == 5
    # From 4.78 the average falls by a fifth at each step: 1.57 after 5 is not above 2.25, 0.51 after 10 is above 0.25.
    assert run(policy, 20, accepted=0) == [7] * 5 + [3] * 10 + [1] * 5


def test_sglang_keeps_its_tier_between_the_thresholds(run):
    assert run(SglangAdaptive(), 200, accepted=1) == [3] * 200
    assert run(SglangAdaptive(), 200, batch=16, accepted=1) == [3] * 200


def test_sglang_down_hysteresis_of_small_batches(run):
    # 0.5 is above 1 - 0.5 - 0.25 for batches up to 7; 0.4 is not above 0.5 + 0 from 8 on, which reaches tier 0.
    assert run(SglangAdaptive(), 100, batch=4, accepted=0.5)[-1] == 3
    assert run(SglangAdaptive(), 20, batch=10, accepted=0.4) == [3] * 15 + [0] * 5


def test_sglang_at_zero_always_tries_again_and_falls_back(run):
    assert run(SglangAdaptive(), 45, batch=40) == [1] * 15 + ([0] * 5 + [1] * 5) * 3


def test_sglang_average_rests_at_zero_and_a_good_try_stays(run):
    policy = SglangAdaptive()
    assert run(policy, 15, batch=40)[-1] == 1
    # 1 - 0.8**5 = 0.67 is above 0.5.
    assert run(policy, 100, batch=40, accepted=1) == [0] * 5 + [1] * 95


def test_sglang_never_drafts_from_64(run):
    assert run(SglangAdaptive(), 100, batch=64, accepted=7) == [0] * 100


def test_sglang_slots_are_independent(run, at):
    policy = SglangAdaptive()
    run(policy, 40, batch=1, accepted=7)
    assert (at(policy, 1), at(policy, 8), at(policy, 32)) == (7, 3, 1)


def test_sglang_counts_decoding_requests_only(at):
    assert at(SglangAdaptive(), 7, num_prefills=100) == 3


def test_sglang_tier_is_cut_to_the_limit(run):
    assert run(SglangAdaptive(), 60, accepted=7, max_draft_tokens=4)[-1] == 4


# TensorRT-LLM's schedule and gate


@pytest.mark.parametrize(
    ("batch", "length"), [(1, 4), (4, 4), (5, 2), (8, 2), (9, 1), (32, 1), (33, 0), (64, 0), (4096, 0)]
)
def test_tensorrt_example_schedule(at, batch, length):
    assert at(TensorrtSchedule(), batch) == length


def test_tensorrt_floor(at):
    assert [at(TensorrtSchedule(min_runtime_draft_len=1), batch) for batch in (4, 8, 32, 33)] == [4, 2, 1, 1]
    assert at(TensorrtSchedule({4: 4, 8: 0}), 8) == 0
    assert at(TensorrtSchedule({4: 4, 8: 0}, min_runtime_draft_len=1), 8) == 1


def test_tensorrt_schedule_in_any_order_with_prefills(at):
    assert at(TensorrtSchedule({8: 2, 4: 4}), 4, num_prefills=1) == 2
    assert at(TensorrtSchedule({8: 2, 4: 4}), 4, max_draft_tokens=3) == 3


@pytest.fixture
def record(make_state, make_feedback):
    """Give a gate one sample: `tenths` of ten draft tokens accepted."""

    def sample(gate, tenths):
        gate.observe(make_feedback(make_state(10), np.ones(10), np.arange(10) < tenths))

    return sample


def test_tensorrt_gate_waits_for_its_window(record, at):
    gate = TensorrtGate(3, 0.3)
    for tenths in (1, 2):
        record(gate, tenths)
        assert at(gate, 10) == 4
    record(gate, 3)
    assert at(gate, 10) == 0


def test_tensorrt_gate_drafts_as_far_as_it_may(at):
    assert at(TensorrtGate(), 300) == 4
    assert at(TensorrtGate(), 300, max_draft_tokens=3) == 3
    assert at(TensorrtGate(num_draft_tokens=None), 300) == 8


def test_tensorrt_gate_never_opens_again(record, make_state):
    gate = TensorrtGate(3, 0.3)
    for tenths in (1, 2, 3, *[10] * 50):
        record(gate, tenths)
    decision = gate.decide(make_state(10))
    assert decision.num_draft_tokens.tolist() == [0] * 10
    assert decision.reason == "disabled at 0.20 < 0.30"
    assert not decision.stand_by


def test_tensorrt_gate_rolls_its_window(record, at):
    gate = TensorrtGate(3, 0.7)
    for tenths in (9, 9, 9):
        record(gate, tenths)
    assert at(gate, 10) == 4
    record(gate, 2)  # (0.9 + 0.9 + 0.2) / 3 = 0.67
    assert at(gate, 10) == 0


def test_tensorrt_gate_stays_open_at_the_threshold(record, at):
    gate = TensorrtGate(4, 0.5)
    for tenths in (5, 5, 5, 5):
        record(gate, tenths)
    assert at(gate, 10) == 4


def test_tensorrt_gate_takes_no_sample_where_nothing_was_drafted(make_state, make_feedback, at):
    gate = TensorrtGate(2, 0.5)
    for _ in range(9):
        gate.observe(make_feedback(make_state(10), np.zeros(10), np.zeros(10)))
    assert at(gate, 10) == 4


def test_tensorrt_gate_beside_a_schedule(record, at):
    gate = TensorrtGate(1, 0.5, draft_len_schedule={4: 4, 8: 2})
    assert [at(gate, batch) for batch in (4, 5, 9)] == [4, 2, 0]
    record(gate, 0)
    assert [at(gate, batch) for batch in (4, 5, 9)] == [0, 0, 0]


# TLT's switch


def test_tlt_switches_on_after_ten_small_batches(at):
    policy = TltSwitch()
    assert [at(policy, batch) for batch in [32] * 10] == [0] * 10
    assert at(policy, 32) == 8


def test_tlt_counts_anew_after_a_large_batch(at):
    policy = TltSwitch()
    assert [at(policy, batch) for batch in [*[8] * 9, 33, *[32] * 10, 20]] == [0] * 20 + [8]


def test_tlt_stays_on(at):
    policy = TltSwitch()
    for _ in range(10):
        at(policy, 32)
    assert [at(policy, batch) for batch in (1, 300, 32, 300)] == [8] * 4
    assert at(policy, 300, max_draft_tokens=5) == 5


def test_tlt_passes_over_steps_without_decodes(make_state, at):
    policy = TltSwitch()
    for _ in range(20):
        policy.decide(make_state(0, num_prefills=2))
    assert [at(policy, 32, num_prefills=9) for _ in range(11)] == [0] * 10 + [8]


def test_tlt_lets_the_drafter_go_while_off(make_state):
    policy = TltSwitch()
    assert [policy.decide(make_state(4)).stand_by for _ in range(11)] == [False] * 10 + [True]


# UCB1


def test_ucb_tries_each_length_and_then_follows_the_bound(run):
    # One request: 1 token without a draft, 2 with one, so the normalised means are 0.5 and 1. With n0 and n1 pulls
    # the scores are 0.5 + sqrt(2 ln(n0 + n1) / n0) and 1 + sqrt(2 ln(n0 + n1) / n1).
    assert run(UcbBandit(), 8, batch=1, accepted=1, max_draft_tokens=1) == [0, 1, 1, 1, 0, 1, 1, 0]


def test_ucb_without_exploration_stays_with_the_best(run):
    assert run(UcbBandit(exploration=0), 20, batch=2, accepted=2, max_draft_tokens=3)[4:] == [2] * 16


def test_ucb_learns_for_each_group_of_batch_sizes(run):
    policy = UcbBandit(exploration=0)
    assert run(policy, 3, batch=31, accepted=1, max_draft_tokens=1) == [0, 1, 1]
    assert run(policy, 3, batch=32, accepted=0, max_draft_tokens=1) == [0, 1, 0]
    assert run(policy, 1, batch=39, max_draft_tokens=1) == [0]
    assert run(policy, 1, batch=40, max_draft_tokens=1) == [0]
    assert run(policy, 1, batch=31, max_draft_tokens=1) == [1]


def test_ucb_leaves_out_a_tenth_at_each_end(make_state, make_feedback):
    policy = UcbBandit(exploration=0)
    rates = {0: 190.0, 1: 200.0}  # tokens a second
    for step in range(30):
        state = replace(make_state(1, max_draft_tokens=1), step=step)
        drafted = policy.decide(state).num_draft_tokens
        length = int(drafted[0])
        assert length == (step > 0)
        # The 12th reward of length 1 is nearly 0; their mean with it would be 183.
        seconds = 1000.0 if step == 12 else (length + 1) / rates[length]
        policy.observe(replace(make_feedback(state, drafted, drafted), draft_s=0.0, verify_s=seconds, other_s=0.0))


def test_ucb_credits_late_feedback_to_the_arm_that_was_pulled(make_state, make_feedback):
    policy = UcbBandit(exploration=0)
    late = None
    chosen = []
    for step in range(12):
        state = replace(make_state(1, max_draft_tokens=1), step=step)
        drafted = policy.decide(state).num_draft_tokens
        chosen.append(int(drafted[0]))
        if late is not None:
            policy.observe(late)
        late = make_feedback(state, drafted, drafted)
    assert chosen == [0, 0, 1, 1, *[1] * 8]


@pytest.mark.parametrize(
    ("policy_class", "keys", "message"),
    [
        (TensorrtSchedule, {"draft_len_schedule": {}}, "draft_len_schedule must map"),
        (TensorrtSchedule, {"draft_len_schedule": {0: 3}}, "draft_len_schedule batch size must be"),
        (TensorrtSchedule, {"draft_len_schedule": {4: -1}}, r"draft_len_schedule\[4\] must be"),
        (TensorrtSchedule, {"min_runtime_draft_len": -1}, "min_runtime_draft_len must be"),
        (TensorrtGate, {"acceptance_rate_window_size": 0}, "acceptance_rate_window_size must be"),
        (TensorrtGate, {"acceptance_rate_threshold": 1.5}, "acceptance_rate_threshold must be"),
        (TensorrtGate, {"num_draft_tokens": 0}, "num_draft_tokens must be"),
        (TltSwitch, {"bs_threshold": 0}, "bs_threshold must be"),
        (TltSwitch, {"num_draft_tokens": 0}, "num_draft_tokens must be"),
        (UcbBandit, {"window": 0}, "window must be"),
        (UcbBandit, {"exploration": -1.0}, "exploration must be"),
        (UcbBandit, {"exploration": float("nan")}, "exploration must be"),
    ],
)
def test_bad_values_are_named(policy_class, keys, message):
    with pytest.raises(ValueError, match=message):
        policy_class(**keys)
