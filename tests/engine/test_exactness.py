"""The first promise: neither policy, drafts, chunks, slots, preemption nor sharing changes an output."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from specrun.engine import FinishReason, RequestOutput, SamplingParams
from tests.engine.tiny_models import (
    EOS,
    FAMILIES,
    OracleDrafter,
    RandomPolicy,
    essence,
    letters,
    make_prompts,
    make_requests,
    one_at_a_time,
    run,
    tiny_engine,
)

NUM_REQUESTS = 12
MAX_TOKENS = 16
LOGPROB_TOLERANCE = 1e-9
"""transformers computes norms in fp32, so an fp64 rounding error can show as an fp32 one; it does not here."""


def greedy_params() -> list[SamplingParams]:
    """Nothing but argmax: the sampler's short path."""
    return [SamplingParams(max_tokens=MAX_TOKENS - i % 5, ignore_eos=bool(i % 2)) for i in range(NUM_REQUESTS)]


def mixed_params() -> list[SamplingParams]:
    """Every kind of request in one batch, at T = 0 and T > 0."""
    base: dict[str, Any] = {"max_tokens": MAX_TOKENS, "logprobs": 0}
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": -0.9}
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 5},
        {**penalties},
        {"temperature": 1.0, "seed": -7, **penalties},
        {"temperature": 0.8, "seed": 2**63 + 9, "top_k": 7, "top_p": 0.9, "min_p": 0.02, "stop": ("abca", "cbb")},
        {"frequency_penalty": 1.5, "stop": ("aab", "cca"), "min_tokens": 4},
        {"temperature": 1.5, "seed": 11, "logit_bias": {EOS: 3.0, 17: -4.0, 40: 2.0}},
        {"temperature": 1.0, "seed": 12, "logit_bias": {EOS: 9.0}, "min_tokens": 6, **penalties},
        {"temperature": 1.0, "seed": 13, "logit_bias": {EOS: 4.0}, "ignore_eos": True, "stop": ("abcabc",)},
        {"temperature": 1.2, "seed": 14, "stop_token_ids": tuple(range(3, 97, 6)), "min_tokens": 3},
        {"presence_penalty": 2.0, "repetition_penalty": 0.7, "logit_bias": {9: 1.5}},
        {"temperature": 1.0, "seed": 15, "top_p": 0.5, "stop": ("a", "b", "c"), "min_tokens": 5},
        {"temperature": 1.0, "seed": 16, "max_tokens": 1, "stop": ("ab",)},
    ]
    return [SamplingParams(**{**base, **kind}) for kind in kinds]


PARAMS = {"greedy": greedy_params, "mixed": mixed_params}


@cache
def reference(family: str, kind: str, prompts_seed: int) -> dict[int, RequestOutput]:
    """One-at-a-time plain decoding."""
    return one_at_a_time(family, make_prompts(NUM_REQUESTS, prompts_seed), PARAMS[kind]())


@dataclass(frozen=True)
class Schedule:
    """One way to run the requests, drawn from a seed."""

    seed: int
    config: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def draw(cls, seed: int) -> Schedule:
        rng = random.Random(seed)
        block_size = (4, 16)[seed % 2]
        longest = -(-(40 + MAX_TOKENS) // block_size)
        config = {
            "block_size": block_size,
            "max_num_seqs": rng.randint(1, 8) if seed % 3 else rng.randint(3, 8),
            "max_num_batched_tokens": rng.randint(3, 40),
            "num_kv_blocks": (longest, longest + rng.randint(1, 8), 8 * longest)[seed % 3],
            "enable_prefix_caching": seed % 4 < 3,
        }
        return cls(seed, config)


def check(family: str, kind: str, schedule: Schedule, prompts_seed: int = 0) -> tuple[int, int]:
    """Run the requests under the schedule and compare; returns preemptions and cached tokens."""
    expected = reference(family, kind, prompts_seed)
    rng = random.Random(schedule.seed)
    drafter = OracleDrafter({i: o.token_ids for i, o in expected.items()}, rng.choice([0.3, 0.7, 1.0]), schedule.seed)
    engine = tiny_engine(family, RandomPolicy(schedule.seed), drafter, letters(), **schedule.config)
    requests = make_requests(make_prompts(NUM_REQUESTS, prompts_seed), PARAMS[kind]())
    rng.shuffle(requests)
    outputs = run(engine, requests)
    assert outputs.keys() == expected.keys()
    for i, want in expected.items():
        assert essence(outputs[i]) == essence(want), f"{family} {kind} request {i} under {schedule}"
        for got, exact in zip(outputs[i].logprobs or [], want.logprobs or [], strict=True):
            assert math.isclose(got, exact, abs_tol=LOGPROB_TOLERANCE)
    assert engine.stats.num_accepted_tokens > 0
    assert engine.blocks.num_free == engine.blocks.num_blocks
    return engine.stats.num_preemptions, engine.stats.num_cached_tokens


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_output_is_the_same_under_every_schedule(family, kind):
    found = [check(family, kind, Schedule.draw(seed)) for seed in (0, 1)]
    assert sum(preemptions for preemptions, _ in found) > 0
    assert sum(cached for _, cached in found) > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_output_is_the_same_under_many_schedules(family, kind):
    found = [check(family, kind, Schedule.draw(seed), prompts_seed=seed % 3) for seed in range(100, 124)]
    assert sum(preemptions for preemptions, _ in found) > 20
    assert sum(cached for _, cached in found) > 20


def test_the_reference_ends_in_every_way():
    """Otherwise the comparisons above would say nothing about stops."""
    ends = [o for family in FAMILIES for o in reference(family, "mixed", 0).values()]
    assert {"abca", "aab"} & {o.stop_reason for o in ends}, "a stop string longer than any token"
    assert any(o.stop_reason and o.stop_reason.isdigit() for o in ends)
    assert any(o.finish_reason is FinishReason.STOP and o.stop_reason is None for o in ends), "end of sequence"
    assert any(o.finish_reason is FinishReason.LENGTH for o in ends)
    assert all(len(o.token_ids) >= 6 for i, o in ((o.request_id, o) for o in ends) if i == 6), "min_tokens"
