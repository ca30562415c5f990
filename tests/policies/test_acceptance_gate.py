"""The 60/70 % gate: verdicts, probes, recovery."""

from itertools import pairwise

import numpy as np
import pytest

from specrun.policies.acceptance_gate import PROBE_STEPS, AcceptanceGate


@pytest.fixture
def run(make_state, make_feedback):
    """Drive a gate for `steps` with a constant share of draft tokens accepted; the decisions."""

    def drive(gate, steps, rate, num_running=10, has_drafts=True):
        decisions = []
        for _ in range(steps):
            state = make_state(num_running)
            decision = gate.decide(state)
            drafted = decision.num_draft_tokens if has_drafts else np.zeros(num_running, dtype=np.int32)
            gate.observe(make_feedback(state, drafted, np.round(drafted * rate)))
            decisions.append(decision)
        return decisions

    return drive


def is_full(decision):
    return bool((decision.num_draft_tokens > 0).all())


def tokens(decisions):
    return [int(decision.num_draft_tokens.sum()) for decision in decisions]


def test_starts_on(run):
    (decision,) = run(AcceptanceGate(), 1, 1.0)
    assert decision.num_draft_tokens.tolist() == [5] * 10
    assert decision.reason == "no verdict yet"


def test_stays_on_inside_the_band(run):
    decisions = run(AcceptanceGate(), 300, 0.6)
    assert all(map(is_full, decisions))
    assert decisions[-1].reason == "acceptance 0.60 >= 0.60"


def test_goes_off_below_low_once_a_quarter_of_the_window_is_graded(run):
    decisions = run(AcceptanceGate(window=128), 8, 0.4)
    assert list(map(is_full, decisions)) == [True] * 4 + [False] * 4  # 10 drafts a step, 32 needed
    assert decisions[-1].reason == "acceptance 0.40 < 0.60"
    assert tokens(decisions[4:]) == [0] * 4


def test_old_drafts_leave_the_window(run):
    gate = AcceptanceGate(window=50)
    run(gate, 1000, 1.0)
    decisions = run(gate, 10, 0.2)
    # Of the last 50 drafts, 30 fresh ones at 0.2 bring the rate to 0.52.
    assert list(map(is_full, decisions)) == [True] * 3 + [False] * 7


def test_probes_are_few_spread_and_moving(run):
    gate = AcceptanceGate(probe_every=8, probe_requests=3)
    decisions = run(gate, 40, 0.2, num_running=64)
    probes = [d for d in decisions if d.reason.startswith("probe 3/64")]
    assert probes
    chosen = [np.flatnonzero(d.num_draft_tokens).tolist() for d in probes]
    assert all(len(picked) == 3 for picked in chosen)
    assert all(max(np.diff(picked)) <= 22 for picked in chosen)
    assert len({tuple(picked) for picked in chosen}) == len(chosen)


def test_a_probe_covers_a_batch_smaller_than_itself(run):
    decisions = run(AcceptanceGate(probe_every=4, probe_requests=4), 60, 0.2, num_running=2)
    assert any(d.reason == "probe 2/2" and d.num_draft_tokens.tolist() == [5, 5] for d in decisions)


def test_recovers_after_a_collapse(run):
    gate = AcceptanceGate()
    run(gate, 50, 0.8)
    assert not is_full(run(gate, 50, 0.2)[-1])
    decisions = run(gate, 200, 0.8)
    back = next(i for i, d in enumerate(decisions) if is_full(d))
    assert decisions[back].reason == "probe 0.80 > 0.70"
    assert all(map(is_full, decisions[back:]))


def test_inside_the_band_a_gate_that_is_off_stays_off(run):
    gate = AcceptanceGate(low=0.6, high=0.8)
    run(gate, 50, 0.2)
    decisions = run(gate, 1000, 0.8)
    assert not any(map(is_full, decisions))
    assert any(d.reason == "probe 0.80 <= 0.80" for d in decisions)


def test_never_latches_and_probes_back_off(run):
    gate = AcceptanceGate(probe_every=64, max_probe_every=256)
    run(gate, 50, 0.0)
    decisions = run(gate, 3000, 0.0)
    steps = [i for i, spent in enumerate(tokens(decisions)) if spent]
    starts = [step for before, step in pairwise([-9, *steps]) if step > before + 1]
    pauses = np.diff(starts).tolist()
    assert pauses[0] >= 64
    assert pauses[-1] <= 256 + PROBE_STEPS
    assert pauses == sorted(pauses)
    share_drafted = sum(tokens(decisions)) / (3000 * 10 * 5)
    assert share_drafted < 0.02
    assert any(map(is_full, run(gate, 300, 1.0)))


def test_probing_ends_when_the_drafter_finds_nothing(run):
    gate = AcceptanceGate(probe_every=8, max_probe_every=8)
    run(gate, 4, 0.0)
    decisions = run(gate, 200, 0.0, has_drafts=False)
    assert sum(d.num_draft_tokens.any() for d in decisions) <= 200 * PROBE_STEPS / (8 + PROBE_STEPS) + PROBE_STEPS
    assert any(d.reason == "probe found no drafts" for d in decisions)
    assert any(map(is_full, run(gate, 30, 1.0)))


def test_drafts_that_never_come_keep_it_on(run):
    assert all(map(is_full, run(AcceptanceGate(), 500, 0.0, has_drafts=False)))


def test_steps_without_decodes_do_not_bring_a_probe_nearer(run):
    gate = AcceptanceGate(probe_every=8)
    run(gate, 4, 0.0)
    assert all(d.num_draft_tokens.shape == (0,) for d in run(gate, 100, 0.0, num_running=0))
    assert tokens(run(gate, 8, 0.0)) == [0] * 8
    assert tokens(run(gate, 1, 0.0)) == [4 * 5]


def test_engine_figure_is_not_trusted(run, make_state):
    gate = AcceptanceGate()
    assert is_full(gate.decide(make_state(10, rolling_acceptance_rate=0.0)))
    run(gate, 50, 0.0)
    assert not is_full(gate.decide(make_state(10, rolling_acceptance_rate=1.0)))


def test_own_lengths_are_cut_to_the_limit(run, make_state):
    gate = AcceptanceGate(num_draft_tokens=9, probe_tokens=2, probe_every=2)
    assert gate.decide(make_state(1, max_draft_tokens=3)).num_draft_tokens.tolist() == [3]
    decisions = run(gate, 40, 0.2)
    assert max(d.num_draft_tokens.max() for d in decisions if d.reason.startswith("probe 4/10")) == 2


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"low": 0.8}, "low must not be above high, got 0.8 and 0.7"),
        ({"low": 60}, "low must be a number from 0 to 1, got 60"),
        ({"high": True}, "high must be a number"),
        ({"window": 0}, "window must be"),
        ({"probe_every": 0}, "probe_every must be"),
        ({"max_probe_every": 8}, "max_probe_every must be a whole number of at least 64, got 8"),
        ({"probe_requests": 0}, "probe_requests must be"),
        ({"probe_tokens": 0}, "probe_tokens must be"),
        ({"num_draft_tokens": 1.5}, "num_draft_tokens must be"),
    ],
)
def test_bad_values_are_named(keys, message):
    with pytest.raises(ValueError, match=message):
        AcceptanceGate(**keys)
