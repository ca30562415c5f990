"""Greedy tokens equal those of transformers.generate in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specrun.engine import EngineConfig, SamplingParams
from specrun.engine.drafters.ngram import NgramDrafter
from specrun.engine.engine import Engine
from specrun.engine.target import Target
from tests.engine import smollm2
from tests.engine.tiny_models import (
    FAMILIES,
    Budget,
    OracleDrafter,
    RandomPolicy,
    build_model,
    make_prompts,
    make_requests,
    run,
    tiny_engine,
)


def generate(model: Any, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """Greedy, as one batch padded on the left; outputs end with their end-of-sequence, as the engine's do."""
    eos: int = model.generation_config.eos_token_id
    longest = max(map(len, prompts))
    padded = torch.tensor([[eos] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    with torch.inference_mode():
        out = model.generate(
            input_ids=padded, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=eos
        )
    rows: list[list[int]] = out[:, longest:].tolist()
    return [row[: row.index(eos) + 1] if eos in row else row for row in rows]


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models(family):
    prompts = make_prompts(8, seed=4)
    model = build_model(family)
    expected = [generate(model, [prompt], 24)[0] for prompt in prompts]
    drafter = OracleDrafter(dict(enumerate(expected)), 0.7, seed=0)
    engine = tiny_engine(family, RandomPolicy(0), drafter, max_num_batched_tokens=24)
    outputs = run(engine, make_requests(prompts, [SamplingParams(max_tokens=24)] * len(prompts)))
    assert [outputs[i].token_ids for i in range(len(prompts))] == expected


def check(num_prompts: int, max_tokens: int, longest: int) -> None:
    """generate first; then the same model, with our attention, through the engine."""
    torch.set_num_threads(2)
    prompts = smollm2.prompts(num_prompts, longest)
    model = smollm2.model(torch.float64)
    expected = generate(model, prompts, max_tokens)
    config = EngineConfig(max_num_seqs=8, num_kv_blocks=256, block_size=8)
    engine = Engine(Target(model, config), config, Budget(3), NgramDrafter())
    outputs = run(engine, make_requests(prompts, [SamplingParams(max_tokens=max_tokens)] * num_prompts))
    assert [outputs[i].token_ids for i in range(num_prompts)] == expected
    assert engine.stats.num_accepted_tokens > 0


def test_smollm2():
    check(4, 12, longest=60)


@pytest.mark.slow
def test_smollm2_on_many_prompts():
    check(32, 32, longest=120)
