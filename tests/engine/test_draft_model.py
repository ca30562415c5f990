"""A draft model: its KV stays true under every schedule, its noise is the target's, and it changes no output."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from specrun.engine import EngineConfig, EngineError, Request, SamplingParams
from specrun.engine.block_manager import Admission, BlockManager
from specrun.engine.drafters.base import DraftBatch, Drafts
from specrun.engine.drafters.draft_kv import DraftKV
from specrun.engine.drafters.draft_model import DraftModelDrafter
from specrun.engine.engine import Engine
from specrun.engine.input_batch import SlotTable
from specrun.engine.target import Target
from specrun.policies.base import Int32, Proposals, SpecDecision, SpeculationPolicy, StepFeedback, StepState
from tests.engine.test_exactness import NUM_REQUESTS, PARAMS, Schedule, reference
from tests.engine.tiny_models import (
    EOS,
    FAMILIES,
    Budget,
    RandomPolicy,
    build_model,
    essence,
    letters,
    make_prompts,
    make_requests,
    perturbed,
    run,
    tiny_target,
)


def drafter_for(model: Any, family: str, block_size: int = 16, **options: Any) -> DraftModelDrafter:
    target = tiny_target(family, block_size)
    return DraftModelDrafter(Target(model, EngineConfig(block_size=block_size)), target, **options)


def engine_with(family: str, policy: SpeculationPolicy, drafter: Any, **config: Any) -> Engine:
    settings = EngineConfig(**{"num_kv_blocks": 64, "max_num_seqs": 4, **config})
    return Engine(tiny_target(family, settings.block_size), settings, policy, drafter, letters())


class Checked(DraftModelDrafter):
    """Greedy drafts, each compared with a plain forward pass of transformers over the same tokens."""

    def __init__(self, model: Any, plain: Any, family: str, block_size: int, **options: Any) -> None:
        own = Target(model, EngineConfig(block_size=block_size))
        super().__init__(own, tiny_target(family, block_size), coupled=False, **options)
        self.plain = plain
        self.num_checked = 0

    def propose(self, batch: DraftBatch, num_draft_tokens: Int32) -> Drafts:
        drafts = super().propose(batch, num_draft_tokens)
        for request, tokens, budget in zip(batch.requests, drafts.token_ids, num_draft_tokens.tolist(), strict=True):
            assert len(tokens) <= budget
            if tokens:
                held = request.prompt_token_ids + request.output_token_ids
                logits = self.plain(input_ids=torch.tensor([held + tokens[:-1]])).logits[0, len(held) - 1 :]
                assert tokens == logits.argmax(-1).tolist()
                self.num_checked += len(tokens)
        return drafts


class Pauses(RandomPolicy):
    """Random budgets, and now and then none at all for a few steps."""

    def decide(self, state: StepState) -> SpecDecision:
        decision = super().decide(state)
        if state.step % 9 < 3:
            return SpecDecision.uniform(state, 0, "pause")
        return decision


def check_drafts(family: str, seed: int, max_catch_up_tokens: int | None) -> None:
    schedule = Schedule.draw(seed)
    model, plain = perturbed(family, 0.01), perturbed(family, 0.01)
    drafter = Checked(model, plain, family, schedule.config["block_size"], max_catch_up_tokens=max_catch_up_tokens)
    engine = engine_with(family, Pauses(seed), drafter, **schedule.config)
    outputs = run(engine, make_requests(make_prompts(NUM_REQUESTS, seed % 3), PARAMS["greedy"]()))
    assert len(outputs) == NUM_REQUESTS
    assert drafter.num_checked > 50
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens
    facts = drafter.facts()
    assert facts["num_draft_model_tokens"] == drafter.num_checked
    assert facts["num_draft_model_catch_up_tokens"] > facts["num_draft_model_catch_ups"] > 0


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral"])
@pytest.mark.parametrize(("seed", "max_catch_up_tokens"), [(0, 7), (1, 20), (2, None)])
def test_drafts_are_those_of_a_plain_forward_under_every_schedule(family, seed, max_catch_up_tokens):
    """Its KV is never stale: not after refusals, trims, pauses, preemption, prefix hits or a bounded catch-up."""
    check_drafts(family, seed, max_catch_up_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 116))
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_drafts_are_those_of_a_plain_forward_under_many_schedules(family, seed):
    check_drafts(family, seed, random.Random(seed).choice([5, 17, 40, None]))


def sampling_params() -> list[SamplingParams]:
    """T = 0 and T > 0, with everything that changes a row's logits and nothing that ends it early."""
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": -0.9}
    kinds: list[dict[str, Any]] = [
        {},
        penalties,
        {"temperature": 1.0, "seed": 5},
        {"temperature": 1.0, "seed": -7, **penalties},
        {"temperature": 0.8, "seed": 2**63 + 9, "top_k": 7, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 1.5, "seed": 11, "logit_bias": {17: -4.0, 40: 2.0}, "min_tokens": 12},
        {"temperature": 1.0, "seed": 15, "top_p": 0.5},
        {"frequency_penalty": 1.5, "logprobs": 0},
    ]
    return [SamplingParams(**{"max_tokens": 21, "ignore_eos": True, **kind}) for kind in kinds]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_target_itself_as_draft_model_is_always_right(family):
    """The strongest test of coupling: same logits, same noise, same settings, hence the same tokens."""
    drafter = drafter_for(build_model(family), family)
    engine = engine_with(family, Budget(4), drafter, max_num_seqs=8)
    requests = make_requests(make_prompts(8, 1), sampling_params())
    outputs = run(engine, requests)
    assert engine.stats.num_draft_tokens > 100
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens
    assert all(len(output.token_ids) == 21 for output in outputs.values())


def acceptance(coupled: bool, temperature: float) -> float:
    drafter = drafter_for(perturbed("llama", 0.02), "llama", coupled=coupled)
    engine = engine_with("llama", Budget(1), drafter, max_num_seqs=8)
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=40, ignore_eos=True) for i in range(8)]
    run(engine, make_requests(make_prompts(8, 2), params))
    return engine.stats.num_accepted_tokens / engine.stats.num_draft_tokens


def test_shared_noise_beats_greedy_drafts_when_sampling():
    assert acceptance(True, temperature=1.5) > acceptance(False, temperature=1.5) + 0.1
    assert acceptance(True, temperature=0.0) == acceptance(False, temperature=0.0)


def check_outputs(family: str, kind: str, seed: int) -> None:
    expected = reference(family, kind, 0)
    schedule = Schedule.draw(seed)
    model = perturbed(family, 0.005 if family == "llama" else 0.02)
    drafter = drafter_for(model, family, schedule.config["block_size"], max_catch_up_tokens=16)
    engine = engine_with(family, RandomPolicy(seed), drafter, **schedule.config)
    requests = make_requests(make_prompts(NUM_REQUESTS, 0), PARAMS[kind]())
    random.Random(seed).shuffle(requests)
    outputs = run(engine, requests)
    assert {i: essence(o) for i, o in outputs.items()} == {i: essence(o) for i, o in expected.items()}
    assert engine.stats.num_accepted_tokens > 0
    assert engine.blocks.num_free == engine.blocks.num_blocks


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize("seed", range(2))
def test_output_is_the_same_with_a_draft_model(family, kind, seed):
    check_outputs(family, kind, seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(100, 103))
def test_output_is_the_same_with_a_draft_model_under_many_schedules(family, kind, seed):
    check_outputs(family, kind, seed)


class Watched(DraftModelDrafter):
    """Counts the rows of each pass."""

    def _forward(self, batch: DraftBatch, *arrays: Any) -> Any:
        self.rows = [*getattr(self, "rows", []), int(arrays[1].sum())]
        return super()._forward(batch, *arrays)


def watched(family: str = "llama", **options: Any) -> Watched:
    return Watched(Target(build_model(family), EngineConfig()), tiny_target(family), **options)


def long_params(num: int, **others: Any) -> list[SamplingParams]:
    return [SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **others}) for _ in range(num)]


def test_two_tokens_are_read_after_all_drafts_were_accepted():
    drafter = watched()
    run(engine_with("llama", Budget(3), drafter), make_requests([[5, 6, 7]], long_params(1)))
    assert drafter.rows[:3] == [4, 1, 1], "the prompt and the first token, then draft by draft"
    assert drafter.rows[3:6] == [2, 1, 1], "the last draft and the target's own token"


def test_a_pause_is_caught_up_in_one_pass():
    drafter = watched()

    class Late(SpeculationPolicy):
        def decide(self, state: StepState) -> SpecDecision:
            return SpecDecision.uniform(state, 2 if state.step in (1, 2) or state.step > 12 else 0, "late")

    run(engine_with("llama", Late(), drafter), make_requests([[5, 6, 7]], long_params(1)))
    assert drafter.rows[:4] == [4, 1, 2, 1]
    assert drafter.rows[4:6] == [1 + 10 + 1, 1], "one draft, ten steps without, and the newest token"
    assert drafter.facts()["num_draft_model_catch_ups"] == 1


def test_catching_up_is_bounded_and_the_others_draft_on():
    drafter = watched(max_catch_up_tokens=16)
    prompts = [[9, 8, 7], list(range(3, 63))]
    engine = engine_with("llama", Budget(2), drafter)
    run(engine, make_requests(prompts, long_params(2)))
    assert drafter.rows[:2] == [4 + 16, 1], "the short one drafts while the long one is read"
    assert drafter.facts()["num_draft_model_catch_ups"] == 4, "60 tokens in shares of 16"
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens


def test_what_a_sibling_has_read_is_not_read_again():
    """Three requests on the same three blocks: the draft model reads them once, in whatever step they come."""
    drafter = watched()
    head = list(range(3, 51))
    prompts = [[*head, 60], [*head, 61], [*head, 62]]
    engine = engine_with("llama", Budget(2), drafter, max_num_seqs=2)
    run(engine, make_requests(prompts, long_params(3)))
    assert sum(drafter.rows) < 48 + 3 * (2 + 24 * 2)
    assert drafter.facts()["num_draft_model_catch_up_tokens"] == 50
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens


@pytest.mark.parametrize("lender", [False, True])
def test_guesses_in_a_block_that_was_given_back_do_not_count(lender):
    """Two right guesses were written to a block of their own, but not verified; meanwhile the block was lent."""
    blocks = BlockManager(4, block_size=4)
    request = Request(0, [5, 6, 7, 8], SamplingParams(), slot=0)
    table = SlotTable(1, 16, 4)
    kv = DraftKV(blocks)
    assert blocks.admit(request) is Admission.ADMITTED
    blocks.grow(request, 4 + 3)
    table.load([request])
    assert kv.num_computed(request, table) == 0
    kv.extend(request, table, 4)
    kv.guess(request, table, [9, 10])
    blocks.commit(request)
    assert len(request.block_table) == 1
    if lender:  # the request goes on in another block
        assert blocks.admit(Request(1, [1, 2, 3], SamplingParams())) is Admission.ADMITTED
    request.output_token_ids += [9, 10]
    blocks.grow(request, 6)
    table.load([request])
    assert kv.num_computed(request, table) == 4


def test_requests_beyond_its_context_get_no_drafts():
    model = build_model("llama", max_position_embeddings=32)
    drafter = drafter_for(model, "llama")
    engine = engine_with("llama", Budget(4), drafter)
    outputs = run(engine, make_requests([[5, 6, 7], list(range(3, 43))], long_params(2, max_tokens=60)))
    assert all(len(output.token_ids) == 60 for output in outputs.values())
    assert 20 < outputs[0].num_draft_tokens < 60
    assert outputs[1].num_draft_tokens == 0


def test_nothing_is_drafted_after_the_end():
    bias = {EOS: 100.0}
    drafter = watched()
    params = [SamplingParams(max_tokens=9, min_tokens=3, logit_bias=bias)]
    outputs = run(engine_with("llama", Budget(5), drafter), make_requests([[5, 6, 7]], params))
    assert len(outputs[0].token_ids) == 4
    assert drafter.facts()["num_draft_model_tokens"] == 3, "two that may not end, and the end"


class Records(Budget):
    """Keeps (survival, accepted) of every first draft."""

    def __init__(self) -> None:
        super().__init__(1)
        self.seen: list[tuple[float, int]] = []

    def trim(self, proposals: Proposals) -> Int32:
        self.survival = proposals.survival[:, 0]
        return super().trim(proposals)

    def observe(self, feedback: StepFeedback) -> None:
        if (drafted := feedback.num_draft_tokens > 0).any():
            accepted = feedback.num_accepted_tokens[drafted]
            self.seen += zip(self.survival[drafted].tolist(), accepted.tolist(), strict=True)


def test_survival_is_what_was_measured():
    drafter, policy = drafter_for(perturbed("llama", 0.01), "llama"), Records()
    params = long_params(16, max_tokens=80, presence_penalty=2.0)
    run(engine_with("llama", policy, drafter, max_num_seqs=8), make_requests(make_prompts(16, 3), params))
    survival, accepted = np.array(policy.seen[len(policy.seen) // 2 :]).T
    order = np.argsort(survival, kind="stable")
    least, most = accepted[order[: len(order) // 4]].mean(), accepted[order[-len(order) // 4 :]].mean()
    assert most > least + 0.1, "it tells good drafts from bad ones"
    assert abs(survival.mean() - accepted.mean()) < 0.1


def resized(model: Any, size: int, family: str = "llama") -> Any:
    """The same model with rows cut from, or random ones added to, its embedding and its head."""
    other = build_model(family, vocab_size=size)
    state = other.state_dict()
    for name, old in model.state_dict().items():
        rows = min(len(old), len(state[name]))
        state[name][:rows] = old[:rows]
    other.load_state_dict(state)
    return other


@pytest.mark.parametrize("size", [80, 128])
def test_padding_of_either_vocabulary_does_not_matter(size):
    """Ids from 80 on are never used here, so that a model without them is as good."""
    drafter = drafter_for(resized(build_model("llama"), size), "llama")
    engine = engine_with("llama", Budget(3), drafter)
    unused = dict.fromkeys(range(80, 97), -10000.0)
    prompts = [[3 + i, 70 - i, 40] for i in range(4)]
    run(engine, make_requests(prompts, long_params(4, temperature=1.0, logit_bias=unused)))
    assert engine.stats.num_draft_tokens > 30
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens


def test_ids_that_the_draft_model_lacks_do_no_harm():
    drafter = drafter_for(resized(build_model("llama"), 50), "llama")
    engine = engine_with("llama", Budget(3), drafter)
    prompts = make_prompts(4, 1)
    outputs = run(engine, make_requests(prompts, long_params(4)))
    assert max(map(max, prompts)) >= 50
    assert max(max(output.token_ids) for output in outputs.values()) >= 50


def test_kv_is_sized_and_blocks_must_agree():
    drafter = drafter_for(build_model("llama", num_hidden_layers=2), "llama")
    assert drafter.bytes_per_block * 2 == tiny_target("llama").kv_layout.bytes_per_block(16)
    with pytest.raises(EngineError, match=r"16 tokens.*8; give both the same engine\.block_size"):
        drafter.allocate(BlockManager(4, block_size=8))
