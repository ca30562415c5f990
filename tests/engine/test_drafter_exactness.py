"""The first promise for every drafter that ships, and for changing from one to another in flight."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from specrun.engine import EngineConfig
from specrun.engine.block_manager import BlockManager
from specrun.engine.drafters.acceptance_rates import AcceptanceRates
from specrun.engine.drafters.base import DraftBatch, Drafter, Drafts
from specrun.engine.drafters.draft_model import DraftModelDrafter
from specrun.engine.drafters.hybrid import SuffixThenModel
from specrun.engine.drafters.ngram import NgramDrafter
from specrun.engine.drafters.suffix import SuffixDrafter
from specrun.engine.drafters.synthetic import SyntheticDrafter
from specrun.engine.engine import Engine
from specrun.engine.request import Request
from specrun.engine.target import Target
from specrun.policies.base import Int32
from tests.engine.test_exactness import NUM_REQUESTS, PARAMS, Schedule, reference
from tests.engine.tiny_models import (
    RandomPolicy,
    essence,
    letters,
    make_prompts,
    make_requests,
    perturbed,
    run,
    tiny_target,
)

FEW_FAMILIES = ("llama", "gemma3_text")


def recorded(family: str, kind: str) -> dict[int, list[int]]:
    return {i: output.token_ids for i, output in reference(family, kind, 0).items()}


@cache
def draft_target(family: str, block_size: int) -> Target:
    """The tiny model with noise on its weights: often right, never always."""
    return Target(perturbed(family, 0.01, seed=3), EngineConfig(block_size=block_size))


def ngram(family: str, kind: str, block_size: int) -> Drafter:
    return NgramDrafter(min_match=1)


def suffix(family: str, kind: str, block_size: int) -> Drafter:
    """Half of the answers are known from yesterday, the others come up as rows finish."""
    drafter = SuffixDrafter(index_tokens=4096)
    drafter.seed([tokens for i, tokens in recorded(family, kind).items() if i % 2])
    return drafter


def draft_model(family: str, kind: str, block_size: int) -> Drafter:
    return DraftModelDrafter(draft_target(family, block_size), tiny_target(family, block_size))


def suffix_then_model(family: str, kind: str, block_size: int) -> Drafter:
    return SuffixThenModel(suffix(family, kind, block_size), draft_model(family, kind, block_size))


def synthetic(family: str, kind: str, block_size: int) -> Drafter:
    return SyntheticDrafter(recorded(family, kind), AcceptanceRates((0.8, 0.6)), seed=1)


class Switching(Drafter):
    """Another one of its drafters at each step; the others hear nothing of it."""

    kind = "switching"

    def __init__(self, drafters: list[Drafter], seed: int) -> None:
        self._drafters = drafters
        self._rng = random.Random(seed)
        self._now = drafters[0]

    def propose(self, batch: DraftBatch, num_draft_tokens: Int32) -> Drafts:
        self._now = self._rng.choice(self._drafters)
        return self._now.propose(batch, num_draft_tokens)

    def observe(self, batch: DraftBatch, num_draft_tokens: Int32, num_accepted_tokens: Int32) -> None:
        self._now.observe(batch, num_draft_tokens, num_accepted_tokens)

    def forget(self, request: Request) -> None:
        for drafter in self._drafters:
            drafter.forget(request)

    def allocate(self, blocks: BlockManager) -> None:
        for drafter in self._drafters:
            drafter.allocate(blocks)


KINDS: dict[str, Callable[[str, str, int], Drafter]] = {
    "ngram": ngram,
    "suffix": suffix,
    "draft_model": draft_model,
    "suffix+draft_model": suffix_then_model,
    "synthetic": synthetic,
}


def switching(family: str, kind: str, block_size: int) -> Drafter:
    made = [make(family, kind, block_size) for name, make in KINDS.items() if "+" not in name]
    return Switching(made, seed=7)


def check(family: str, kind: str, make: Callable[[str, str, int], Drafter], seed: int) -> int:
    """Run the requests under the schedule of this seed; returns accepted drafts."""
    schedule = Schedule.draw(seed)
    expected = reference(family, kind, 0)
    config = EngineConfig(**schedule.config)
    drafter = make(family, kind, config.block_size)
    engine = Engine(tiny_target(family, config.block_size), config, RandomPolicy(seed), drafter, letters())
    requests = make_requests(make_prompts(NUM_REQUESTS, 0), PARAMS[kind]())
    random.Random(seed).shuffle(requests)
    outputs = run(engine, requests)
    assert outputs.keys() == expected.keys()
    for i, want in expected.items():
        assert essence(outputs[i]) == essence(want), f"{family} {kind} request {i} under {schedule}"
        assert np.allclose(outputs[i].logprobs or [], want.logprobs or [], rtol=0, atol=1e-9)
    assert engine.blocks.num_free == engine.blocks.num_blocks
    return engine.stats.num_accepted_tokens


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("name", [*KINDS, "switching"])
def test_output_is_the_same_with_every_drafter(name, kind):
    make = KINDS.get(name, switching)
    assert sum(check(family, kind, make, seed) for family in FEW_FAMILIES for seed in (0, 1)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("name", [*KINDS, "switching"])
def test_output_is_the_same_with_every_drafter_under_many_schedules(name, kind):
    make = KINDS.get(name, switching)
    assert sum(check(family, kind, make, seed) for family in FEW_FAMILIES for seed in range(200, 203)) > 0
