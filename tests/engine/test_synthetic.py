"""Replay of recorded outputs: acceptance is what was set, under any policy, and nothing else changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from specrun.engine import FinishReason, Request, RequestOutput, SamplingParams
from specrun.engine.drafters.base import DraftBatch, Drafts
from specrun.engine.drafters.synthetic import AcceptanceRates, SyntheticDrafter
from specrun.engine.engine import Engine
from specrun.policies.base import Int32, SpeculationPolicy
from tests.engine.tiny_models import (
    VOCAB_SIZE,
    Budget,
    RandomPolicy,
    draft_batch,
    essence,
    make_prompts,
    make_requests,
    run,
    tiny_engine,
)

NUM_REQUESTS = 32
ALL = range(NUM_REQUESTS)
MAX_TOKENS = 72
STANDARD_ERRORS = 4
CONFIG: dict[str, Any] = {"max_num_seqs": 16, "num_kv_blocks": 160, "max_num_batched_tokens": 256}


def params() -> list[SamplingParams]:
    """Sampled, of several lengths, some ended by a stop token."""
    return [
        SamplingParams(
            max_tokens=MAX_TOKENS - i % 7,
            ignore_eos=True,
            temperature=1.0,
            seed=i,
            stop_token_ids=(7, 70) if i % 4 == 1 else (),
        )
        for i in ALL
    ]


def requests() -> list[Request]:
    return make_requests(make_prompts(NUM_REQUESTS, seed=3, longest=24), params())


@cache
def plain() -> dict[int, RequestOutput]:
    """What the model writes without speculation."""
    return run(tiny_engine("llama", **CONFIG), requests())


def recording() -> dict[int, np.ndarray]:
    return {i: np.array(output.token_ids, np.int32) for i, output in plain().items()}


class Watched(SyntheticDrafter):
    """Remembers the draft that it made for each output position, and counts those that it made otherwise before."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.drafted: dict[tuple[int, int], int] = {}
        self.num_changed = 0

    def propose(self, batch: DraftBatch, num_draft_tokens: Int32) -> Drafts:
        drafts = super().propose(batch, num_draft_tokens)
        for request, tokens in zip(batch.requests, drafts.token_ids, strict=True):
            for position, token in enumerate(tokens, start=len(request.output_token_ids)):
                self.num_changed += self.drafted.get((request.request_id, position), token) != token
                self.drafted[request.request_id, position] = token
        return drafts


def drafter_of(seed: int = 0, confidence: str = "exact", **rates: Any) -> Watched:
    return Watched(recording(), AcceptanceRates.parse(rates), seed, confidence)


def engine_of(policy: SpeculationPolicy, drafter: SyntheticDrafter) -> Engine:
    return tiny_engine("llama", policy, drafter, **CONFIG)


def replay(policy: SpeculationPolicy, drafter: SyntheticDrafter) -> dict[int, RequestOutput]:
    """Runs the job and checks that nothing but its speed has changed."""
    outputs = run(engine_of(policy, drafter), requests())
    assert {i: essence(o) for i, o in outputs.items()} == {i: essence(o) for i, o in plain().items()}
    assert drafter.facts()["forked_requests"] == 0
    return outputs


def assert_within(num_right: float, num_trials: float, rate: float) -> None:
    """Within binomial error."""
    error = STANDARD_ERRORS * math.sqrt(rate * (1 - rate) * num_trials) + 1e-9
    assert abs(num_right - rate * num_trials) <= error, f"{num_right} of {num_trials} at a rate of {rate}"


def assert_realised(drafter: SyntheticDrafter, least: int = 30) -> None:
    """By draft position, what was realised is what was set."""
    facts = drafter.facts()
    checked = 0
    for position in range(5):
        num_trials = facts.get(f"graded_drafts_pos_{position}", 0)
        if num_trials >= least:
            realised = facts[f"realised_acceptance_rate_pos_{position}"] * num_trials
            assert_within(realised, num_trials, facts[f"set_acceptance_rate_pos_{position}"])
            checked += 1
    assert checked >= 1


@pytest.mark.parametrize("policy", [Budget(1), Budget(3), Budget(5), RandomPolicy(1)], ids=["1", "3", "5", "random"])
def test_realises_the_rates_by_draft_position(policy):
    drafter = drafter_of(acceptance_rates=[0.9, 0.7, 0.5])
    outputs = replay(policy, drafter)
    assert_realised(drafter)
    facts = drafter.facts()
    for position, rate in enumerate([0.9, 0.7, 0.5, 0.5, 0.5]):
        if facts.get(f"graded_drafts_pos_{position}"):
            assert facts[f"set_acceptance_rate_pos_{position}"] == pytest.approx(rate)
    num_accepted = sum(
        facts[f"realised_acceptance_rate_pos_{position}"] * facts[f"graded_drafts_pos_{position}"]
        for position in range(5)
        if facts.get(f"graded_drafts_pos_{position}")
    )
    assert num_accepted == pytest.approx(sum(output.num_accepted_tokens for output in outputs.values()))


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_never_and_always_are_exact(rate):
    outputs = replay(Budget(4), drafter_of(acceptance_rates=[rate]))
    for output in outputs.values():
        assert output.num_accepted_tokens == rate * output.num_draft_tokens
        assert output.num_draft_tokens > 0


@pytest.mark.parametrize(("rows_per_group", "num_kinds"), [(1, 2), (8, 3), (None, 2)])
def test_groups_of_rows_have_rates_of_their_own(rows_per_group, num_kinds):
    factors = [0.9, 0.2, 0.6][:num_kinds]
    drafter = drafter_of(acceptance_rates=[1.0], groups={"factors": factors, "rows_per_group": rows_per_group})
    job = requests()
    for request in job:
        request.group = request.request_id // 3
    outputs = run(engine_of(Budget(1), drafter), job)
    for kind, factor in enumerate(factors):
        mine = [o for i, o in outputs.items() if i // (rows_per_group or 3) % num_kinds == kind]
        num_drafts = sum(output.num_draft_tokens for output in mine)
        assert num_drafts > 200
        assert_within(sum(output.num_accepted_tokens for output in mine), num_drafts, factor)
    assert_realised(drafter)


def test_acceptance_collapses_and_recovers_on_the_clock_of_generated_tokens():
    total = sum(len(output.token_ids) for output in plain().values())
    first, last = round(0.3 * total), round(0.7 * total)
    line = [[first, 1.0], [first, 0.1], [last, 0.1], [last, 1.0]]
    drafter = drafter_of(acceptance_rates=[0.9], over_time=line)
    engine, seen = engine_of(Budget(1), drafter), [np.zeros(2, int) for _ in range(3)]
    num_generated = 0

    def on_step(record: Any) -> None:
        nonlocal num_generated
        phase = (num_generated >= first) + int(num_generated >= last)
        seen[phase] += record.num_accepted_tokens, record.num_draft_tokens
        num_generated += record.num_generation_tokens

    engine.on_step = on_step
    run(engine, requests())
    for (num_accepted, num_drafts), rate in zip(seen, (0.9, 0.09, 0.9), strict=True):
        assert num_drafts > 200
        assert_within(num_accepted, num_drafts, rate)
    assert_realised(drafter)


def test_the_clock_runs_on_while_the_drafter_is_not_asked():
    drafter = drafter_of(acceptance_rates=[1.0], over_time=[[50, 1.0], [50, 0.0]])
    finished, running = (Request(i, [5], SamplingParams()) for i in range(2))
    finished.output_token_ids = plain()[0].token_ids[:40]
    drafter.forget(finished)
    running.output_token_ids = plain()[1].token_ids[:9]
    assert drafter.propose(draft_batch([running]), np.array([1], np.int32)).survival.tolist() == [[1.0]]
    running.output_token_ids = plain()[1].token_ids[:10]
    assert drafter.propose(draft_batch([running]), np.array([1], np.int32)).survival.tolist() == [[0.0]]


def test_acceptance_decays_with_context():
    drafter = drafter_of(acceptance_rates=[0.9], by_context=[[20, 1.0], [80, 0.0]])
    replay(Budget(2), drafter)
    assert_realised(drafter)
    right: dict[bool, list[bool]] = {False: [], True: []}
    for (request_id, position), token in drafter.drafted.items():
        right[position >= MAX_TOKENS // 2].append(token == plain()[request_id].token_ids[position])
    assert np.mean(right[False]) > np.mean(right[True]) + 0.3
    late = [key for key in drafter.drafted if key[1] + len(requests()[key[0]].prompt_token_ids) >= 80]
    assert late and not any(drafter.drafted[key] == plain()[key[0]].token_ids[key[1]] for key in late)


def test_coins_and_wrong_tokens_are_the_same_under_every_policy():
    options: dict[str, Any] = {"acceptance_rates": [0.6]}
    drafters = [drafter_of(**options) for _ in range(3)]
    for policy, drafter in zip([Budget(5), Budget(2), RandomPolicy(4)], drafters, strict=True):
        replay(policy, drafter)
        assert drafter.num_changed == 0
    first = drafters[0].drafted
    for other in (drafter.drafted for drafter in drafters[1:]):
        shared = first.keys() & other.keys()
        assert len(shared) > 500
        assert all(first[key] == other[key] for key in shared)
    redrawn = drafter_of(seed=1, **options)
    replay(Budget(5), redrawn)
    assert any(first[key] != redrawn.drafted[key] for key in first.keys() & redrawn.drafted.keys())


def test_a_higher_rate_keeps_the_right_drafts_right():
    low, high = drafter_of(acceptance_rates=[0.4]), drafter_of(acceptance_rates=[0.8])
    replay(Budget(5), low)
    replay(Budget(5), high)
    for (i, position), token in low.drafted.items():
        if token == plain()[i].token_ids[position]:
            assert high.drafted.get((i, position), token) == token


def test_wrong_tokens_are_others_of_the_vocabulary():
    recorded = {i: np.arange(VOCAB_SIZE, dtype=np.int32) for i in range(4)}
    drafter = SyntheticDrafter(recorded, AcceptanceRates([0.0]))
    batch = draft_batch([Request(i, [1], SamplingParams()) for i in range(4)])
    drafts = np.array(drafter.propose(batch, np.full(4, VOCAB_SIZE, np.int32)).token_ids)
    assert (drafts != np.arange(VOCAB_SIZE)).all()
    assert drafts.min() >= 0 and drafts.max() < VOCAB_SIZE and len(np.unique(drafts)) > VOCAB_SIZE / 2
    only_zero = SyntheticDrafter({0: [0, 0, 0]}, AcceptanceRates([0.0]))
    batch = draft_batch([Request(0, [1], SamplingParams())])
    assert only_zero.propose(batch, np.array([3], np.int32)).token_ids == [[1, 1, 1]]


def test_survival_is_the_product_of_the_set_probabilities_or_flat():
    job = [Request(i, [1, 2], SamplingParams()) for i in range(3)]
    recorded: dict[int, Sequence[int]] = {0: [5, 6, 7, 8], 1: [5, 6]}
    rates = AcceptanceRates.parse(
        {"acceptance_rates": [0.8, 0.5], "groups": {"factors": [1, 0.5], "rows_per_group": 1}}
    )
    budgets = np.array([3, 3, 3], np.int32)
    drafts = SyntheticDrafter(recorded, rates).propose(draft_batch(job), budgets)
    assert drafts.num_draft_tokens.tolist() == [3, 2, 0]
    np.testing.assert_allclose(
        drafts.survival, np.array([[0.8, 0.4, 0.2], [0.4, 0.1, 0.0], [0.0, 0.0, 0.0]]), rtol=1e-6
    )
    drafts = SyntheticDrafter(recorded, rates, confidence="none").propose(draft_batch(job), budgets)
    assert drafts.survival.tolist() == [[0.5, 0.5, 0.5], [0.5, 0.5, 0], [0, 0, 0]]


def test_what_a_policy_cuts_is_not_graded():
    job = [Request(0, [1], SamplingParams())]
    drafter = SyntheticDrafter({0: [5, 6, 7, 8, 9]}, AcceptanceRates([1.0]))
    drafter.propose(draft_batch(job), np.array([4], np.int32))
    job[0].output_token_ids = [5, 6, 7]
    drafter.observe(draft_batch(job), np.array([2], np.int32), np.array([2], np.int32))
    facts = drafter.facts()
    assert [facts[f"graded_drafts_pos_{j}"] for j in range(4)] == [1, 1, 0, 0]
    assert "realised_acceptance_rate_pos_2" not in facts


@pytest.mark.parametrize(("rate", "output", "graded"), [(1.0, [5, 9], [1, 0, 0]), (0.0, [9], [0, 0, 0])])
def test_what_another_text_has_refused_is_not_graded(rate, output, graded):
    job = [Request(0, [1], SamplingParams())]
    drafter = SyntheticDrafter({0: [5, 6, 7, 8, 9]}, AcceptanceRates([rate]))
    drafter.propose(draft_batch(job), np.array([3], np.int32))
    job[0].output_token_ids = output
    drafter.observe(draft_batch(job), np.array([3], np.int32), np.array([len(output) - 1], np.int32))
    facts = drafter.facts()
    assert [facts[f"graded_drafts_pos_{j}"] for j in range(3)] == graded
    assert drafter.propose(draft_batch(job), np.array([3], np.int32)).token_ids == [[]]
    assert drafter.facts()["forked_requests"] == 1


def test_drafts_of_somebody_else_are_not_graded():
    job = [Request(0, [1], SamplingParams())]
    drafter = SyntheticDrafter({0: [5, 6, 7]}, AcceptanceRates([0.0]))
    drafter.propose(draft_batch(job), np.array([2], np.int32))
    job[0].output_token_ids = [5, 6]
    drafter.observe(draft_batch(job), np.array([1], np.int32), np.array([1], np.int32))
    assert drafter.facts()["graded_drafts_pos_0"] == 0


def test_coins_of_neighbours_are_independent():
    num_requests, num_tokens, rate = 128, 400, 0.7
    drafter = SyntheticDrafter(dict.fromkeys(range(num_requests), [5] * num_tokens), AcceptanceRates([rate]))
    batch = draft_batch([Request(i, [1], SamplingParams()) for i in range(num_requests)], max_model_len=8)
    drafts = drafter.propose(batch, np.full(num_requests, num_tokens, np.int32)).token_ids
    right = np.array(drafts) == 5
    assert_within(right.sum(), right.size, rate)
    for both in (right[1:] & right[:-1], right[:, 1:] & right[:, :-1], right[1:, 1:] & right[:-1, :-1]):
        assert abs(both.mean() - rate**2) < 0.01


def test_requests_without_a_recording_get_no_drafts_and_are_counted():
    recorded = {i: tokens for i, tokens in recording().items() if i % 4}
    recorded[1] = recorded[1][:10]
    drafter = SyntheticDrafter(recorded, AcceptanceRates([1.0]))
    outputs = replay(Budget(3), drafter)
    assert all(bool(output.num_draft_tokens) == bool(i % 4) for i, output in outputs.items())
    assert 0 < outputs[1].num_draft_tokens < 10, "a recording may end early"
    facts = drafter.facts()
    assert facts["requests_without_recording"] == NUM_REQUESTS / 4
    assert facts["replayed_requests"] == NUM_REQUESTS * 3 / 4
    assert_realised(drafter)


def test_forks_are_counted_and_leave_the_rates_alone():
    recorded = recording()
    for i in range(0, NUM_REQUESTS, 2):
        recorded[i][20 + i :] = (recorded[i][20 + i :] + 1) % VOCAB_SIZE
    drafter = SyntheticDrafter(recorded, AcceptanceRates([0.8]))
    outputs = run(engine_of(Budget(3), drafter), requests())
    assert {i: essence(o) for i, o in outputs.items()} == {i: essence(o) for i, o in plain().items()}
    facts = drafter.facts()
    assert facts["forked_requests"] == NUM_REQUESTS / 2 and facts["forked_fraction"] == 0.5
    for i in range(0, NUM_REQUESTS, 2):
        assert outputs[i].num_accepted_tokens < 20 + i
        assert outputs[i].num_draft_tokens < 3 * (20 + i), "no drafts once an output has left its recording"
    assert_realised(drafter)


def test_forks_show_when_the_drafter_was_never_asked():
    drafter = SyntheticDrafter({0: [1, 2, 3], 1: [1, 2, 3]}, AcceptanceRates([0.8]))
    for i, output in enumerate([[1, 2, 9, 9], [1, 2, 3, 9]]):
        request = Request(i, [1], SamplingParams(), output_token_ids=output)
        request.finish_reason = FinishReason.LENGTH
        drafter.forget(request)
    assert drafter.facts()["forked_requests"] == 1, "an output may go on past the end of its recording"


def test_survives_preemption():
    drafter = drafter_of(acceptance_rates=[0.8])
    engine = tiny_engine("llama", RandomPolicy(2), drafter, max_num_seqs=8, num_kv_blocks=12, block_size=16)
    outputs = run(engine, requests())
    assert engine.stats.num_preemptions > 0
    assert {i: essence(o) for i, o in outputs.items()} == {i: essence(o) for i, o in plain().items()}
    assert_realised(drafter)


def test_refuses_an_unknown_confidence():
    with pytest.raises(ValueError, match="confidence must be one of exact, none, got 'some'"):
        SyntheticDrafter({}, AcceptanceRates([0.5]), confidence="some")
