"""Deterministic mode on a real model: not one token depends on policy, batch or chunks, in fp32 and bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specrun.engine import EngineConfig, SamplingParams
from specrun.engine.drafters.draft_model import DraftModelDrafter
from specrun.engine.drafters.hybrid import SuffixThenModel
from specrun.engine.drafters.ngram import NgramDrafter
from specrun.engine.drafters.suffix import SuffixDrafter
from specrun.engine.engine import Engine
from specrun.engine.target import Target
from specrun.policies.base import SpeculationPolicy
from tests.engine import smollm2
from tests.engine.tiny_models import Budget, OracleDrafter, RandomPolicy, make_requests, run

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


# float32 takes twice as long and differs in nothing but the matrix product.
@pytest.fixture(scope="module", params=[pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def target(request) -> Target:
    return Target(smollm2.model(DTYPES[request.param]), EngineConfig(deterministic=True))


def generate(target, prompts, max_tokens, policy: SpeculationPolicy, drafter=None, **config):
    """Token ids and log probabilities by prompt."""
    torch.set_num_threads(2)
    settings = EngineConfig(**{"deterministic": True, "num_kv_blocks": 512, **config})
    engine = Engine(target, settings, policy, drafter or NgramDrafter())
    params = [
        SamplingParams(max_tokens=max_tokens, temperature=i % 2 * 0.7, seed=i, logprobs=0) for i in range(len(prompts))
    ]
    outputs = run(engine, make_requests(prompts, params))
    return [(outputs[i].token_ids, outputs[i].logprobs) for i in range(len(prompts))]


def check(target, prompts, max_tokens, schedules, baseline) -> None:
    expected = generate(target, prompts, max_tokens, Budget(0), **baseline)
    oracle = OracleDrafter({i: token_ids for i, (token_ids, _) in enumerate(expected)}, 0.7, seed=0, vocab_size=49152)
    for policy, config in schedules:
        got = generate(target, prompts, max_tokens, policy, oracle, **config)
        for i, (tokens, logprobs) in enumerate(expected):
            assert got[i][0] == tokens, f"prompt {i} under {type(policy).__name__} {config}"
            assert got[i][1] == logprobs, f"prompt {i} under {type(policy).__name__} {config}: other rounding"


SCHEDULES: list[tuple[SpeculationPolicy, dict[str, Any]]] = [
    (RandomPolicy(0), {"max_num_seqs": 8, "max_num_batched_tokens": 37}),
    (Budget(3), {"max_num_seqs": 4, "enable_prefix_caching": False}),
]


def test_a_few_prompts(target):
    """Even the log probabilities are bit-equal, in batches of 1, 4 and 8, with drafts and with short chunks."""
    prompts = smollm2.prompts(4, longest=60)
    size = 4 if target.dtype is torch.bfloat16 else 2
    check(target, prompts[:size], 3 * size, SCHEDULES, {"max_num_seqs": 1, "enable_prefix_caching": False})


@pytest.mark.slow
def test_every_drafter(target):
    """A draft model's own rows, on the same blocks, are as little to be seen in the output as an index that grows."""
    prompts = smollm2.prompts(3, longest=60)
    expected = generate(target, prompts, 8, Budget(0), max_num_seqs=1, enable_prefix_caching=False)
    first_layers = smollm2.model(target.dtype)
    del first_layers.model.layers[15:]
    suffix = SuffixDrafter()
    suffix.seed([tokens[:6] for tokens, _ in expected])
    draft_model = DraftModelDrafter(Target(first_layers, EngineConfig()), target)
    for drafter, policy in ((suffix, Budget(3)), (SuffixThenModel(suffix, draft_model), RandomPolicy(6))):
        got = generate(target, prompts, 8, policy, drafter, max_num_seqs=2)
        assert got == expected, drafter.kind


@pytest.mark.slow
def test_many_prompts(target):
    num_prompts = 64 if target.dtype is torch.bfloat16 else 16
    schedules: list[tuple[SpeculationPolicy, dict[str, Any]]] = [
        (Budget(0), {"max_num_seqs": 8, "max_num_batched_tokens": 61}),
        (Budget(3), {"max_num_seqs": 16}),
        (RandomPolicy(2), {"max_num_seqs": 64}),
    ]
    check(target, smollm2.prompts(num_prompts, longest=120), 32, schedules, {"max_num_seqs": 16})
