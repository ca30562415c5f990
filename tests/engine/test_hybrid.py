"""Two drafters in one: who is asked, who hears of it, and that it changes no output."""

from __future__ import annotations

import numpy as np
import pytest

from specrun.engine import EngineConfig, Request, SamplingParams
from specrun.engine.block_manager import BlockManager
from specrun.engine.drafters.base import DraftBatch, Drafter, Drafts
from specrun.engine.drafters.draft_model import DraftModelDrafter
from specrun.engine.drafters.hybrid import SuffixThenModel
from specrun.engine.drafters.ngram import NgramDrafter
from specrun.engine.engine import Engine
from specrun.engine.target import Target
from specrun.policies.base import Int32
from tests.engine.test_exactness import NUM_REQUESTS, PARAMS, Schedule, reference
from tests.engine.tiny_models import (
    RandomPolicy,
    build_model,
    draft_batch,
    essence,
    letters,
    make_prompts,
    make_requests,
    run,
    tiny_target,
)


class Says(Drafter):
    """Drafts what it is told for each request id, and writes down what it hears."""

    def __init__(self, kind: str, tokens: dict[int, list[int]], survival: float) -> None:
        self.kind, self.tokens, self.survival = kind, tokens, survival
        self.asked: list[list[int]] = []
        self.heard: list[tuple[list[int], list[int]]] = []
        self.forgotten: list[int] = []
        self.num_blocks = 0

    def propose(self, batch: DraftBatch, num_draft_tokens: Int32) -> Drafts:
        self.asked.append(num_draft_tokens.tolist())
        budgets = zip(batch.requests, num_draft_tokens.tolist(), strict=True)
        token_ids = [self.tokens.get(r.request_id, [])[:k] for r, k in budgets]
        width = max(map(len, token_ids))
        survival = np.array([[self.survival * (j < len(t)) for j in range(width)] for t in token_ids], np.float32)
        return Drafts(token_ids, survival.reshape(len(token_ids), width))

    def observe(self, batch: DraftBatch, num_draft_tokens: Int32, num_accepted_tokens: Int32) -> None:
        self.heard.append((num_draft_tokens.tolist(), num_accepted_tokens.tolist()))

    def forget(self, request: Request) -> None:
        self.forgotten.append(request.request_id)

    @property
    def bytes_per_block(self) -> int:
        return 100

    def allocate(self, blocks: BlockManager) -> None:
        self.num_blocks = blocks.num_blocks

    def facts(self) -> dict[str, float]:
        return {self.kind: self.survival}


def budgets(*values: int) -> Int32:
    return np.array(values, dtype=np.int32)


def test_the_second_is_asked_where_the_first_is_silent_and_each_hears_of_its_own():
    first, second = Says("suffix", {0: [7, 8, 9]}, 0.5), Says("draft_model", {0: [1], 1: [2, 3], 2: [4]}, 0.25)
    both = SuffixThenModel(first, second)
    batch = draft_batch([Request(i, [5, 6], SamplingParams()) for i in range(4)])
    drafts = both.propose(batch, budgets(2, 4, 0, 3))
    assert drafts.token_ids == [[7, 8], [2, 3], [], []]
    assert drafts.survival.tolist() == [[0.5, 0.5], [0.25, 0.25], [0, 0], [0, 0]]
    assert first.asked == [[2, 4, 0, 3]]
    assert second.asked == [[0, 4, 0, 3]]
    both.observe(batch, budgets(2, 1, 0, 0), budgets(1, 1, 0, 0))
    assert first.heard == [([2, 0, 0, 0], [1, 0, 0, 0])]
    assert second.heard == [([0, 1, 0, 0], [0, 1, 0, 0])]


def test_the_second_is_left_alone_when_the_first_speaks_for_all():
    first, second = Says("suffix", {0: [7], 1: [8]}, 0.5), Says("draft_model", {}, 0.25)
    both = SuffixThenModel(first, second)
    batch = draft_batch([Request(i, [5, 6], SamplingParams()) for i in range(3)])
    assert both.propose(batch, budgets(1, 2, 0)).token_ids == [[7], [8], []]
    both.observe(batch, budgets(1, 1, 0), budgets(0, 1, 0))
    assert second.asked == []
    assert second.heard == []


def test_the_rest_goes_to_both():
    first, second = Says("suffix", {}, 0.5), Says("draft_model", {}, 0.25)
    both = SuffixThenModel(first, second)
    assert both.kind == "suffix+draft_model"
    assert both.bytes_per_block == 200
    both.allocate(BlockManager(9, 16))
    assert (first.num_blocks, second.num_blocks) == (9, 9)
    assert both.facts() == {"suffix": 0.5, "draft_model": 0.25}
    both.forget(Request(3, [5], SamplingParams()))
    assert (first.forgotten, second.forgotten) == ([3], [3])


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("seed", range(3))
def test_output_is_the_same_with_both(kind, seed):
    family, schedule = "gemma3_text", Schedule.draw(seed)
    expected = reference(family, kind, 0)
    block_size = schedule.config["block_size"]
    target = tiny_target(family, block_size)
    model = Target(
        build_model(family, num_hidden_layers=3, layer_types=["sliding_attention"] * 2 + ["full_attention"]),
        EngineConfig(block_size=block_size),
    )
    both = SuffixThenModel(NgramDrafter(min_match=1), DraftModelDrafter(model, target))
    engine = Engine(target, EngineConfig(**schedule.config), RandomPolicy(seed), both, letters())
    outputs = run(engine, make_requests(make_prompts(NUM_REQUESTS, 0), PARAMS[kind]()))
    assert {i: essence(o) for i, o in outputs.items()} == {i: essence(o) for i, o in expected.items()}
    assert both.facts()["num_draft_model_tokens"] > 0
    assert engine.stats.num_draft_tokens > 0
    assert not both._by_second, "every request was forgotten"
