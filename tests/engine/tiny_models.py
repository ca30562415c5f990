"""Tiny random models in fp64, one a family, and drafters, policies and requests that try to upset the engine."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specrun.engine import EngineConfig, Request, RequestOutput, SamplingParams
from specrun.engine.drafters.base import DraftBatch, Drafter, Drafts
from specrun.engine.engine import Engine
from specrun.engine.input_batch import SlotTable
from specrun.engine.target import Target
from specrun.policies.base import Int32, Proposals, SpecDecision, SpeculationPolicy, StepState

VOCAB_SIZE = 97
EOS = 2
MAX_MODEL_LEN = 128
SLIDING = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3_ROPE},
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8, "layer_types": SLIDING},
    "mistral": {"sliding_window": 6},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


def build_model(family: str, dtype: torch.dtype = torch.float64, **overrides: Any) -> Any:
    """A causal LM with random weights, random norms included, so that a bug anywhere shows in the logits."""
    config = AutoConfig.for_model(family, **{**BASE, **FAMILIES.get(family, {}), **overrides})
    config._experts_implementation = "eager"  # the grouped product knows no fp64
    generator = torch.Generator().manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.3
            weight.copy_(noise + (1.0 if weight.ndim == 1 else 0.0))
    return model.requires_grad_(False)


def perturbed(family: str, scale: float, seed: int = 1, **overrides: Any) -> Any:
    """The tiny model of a family with noise on its weights: a draft model that is often right."""
    model = build_model(family, **overrides)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator, dtype=torch.float64), alpha=scale)
    return model


@cache
def tiny_target(family: str, block_size: int = 16, dtype: torch.dtype = torch.float64) -> Target:
    """Built once; each new engine gives it a new KV cache."""
    return Target(build_model(family, dtype), EngineConfig(block_size=block_size))


def tiny_engine(
    family: str,
    policy: SpeculationPolicy | None = None,
    drafter: Drafter | None = None,
    token_bytes: Sequence[bytes] | None = None,
    **config: Any,
) -> Engine:
    """An engine with 64 KV blocks, if `config` says nothing else. Only the newest engine of a target may run."""
    settings = EngineConfig(**{"num_kv_blocks": 64, "max_num_seqs": 4, **config})
    return Engine(tiny_target(family, settings.block_size), settings, policy or Budget(0), drafter, token_bytes)


def letters(vocab_size: int = VOCAB_SIZE) -> list[bytes]:
    """Token id -> one or two letters of "abc", so that stop strings of three letters lie across tokens."""
    pieces = [b"a", b"b", b"c", b"ab", b"bc", b"ca", b"aa", b"cb"]
    return [b"" if token < 3 else pieces[token % len(pieces)] for token in range(vocab_size)]


class Budget(SpeculationPolicy):
    """The same draft budget for every request."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens

    def decide(self, state: StepState) -> SpecDecision:
        return SpecDecision.uniform(state, self.num_draft_tokens, "budget")


class RandomPolicy(SpeculationPolicy):
    """0 to 5 drafts, request by request and step by step; half the time it trims at random too."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def decide(self, state: StepState) -> SpecDecision:
        return SpecDecision(self._rng.integers(0, 6, state.num_running).astype(np.int32), "random")

    def trim(self, proposals: Proposals) -> Int32:
        if self._rng.random() < 0.5:
            return proposals.num_draft_tokens
        return self._rng.integers(0, proposals.num_draft_tokens + 1).astype(np.int32)


class OracleDrafter(Drafter):
    """Knows how each request goes on, and says so with some probability for each token; otherwise it makes one up."""

    kind = "oracle"

    def __init__(self, outputs: dict[int, list[int]], p: float, seed: int, vocab_size: int = VOCAB_SIZE) -> None:
        self._outputs, self._p, self._vocab_size = outputs, p, vocab_size
        self._rng = random.Random(seed)

    def propose(self, batch: DraftBatch, num_draft_tokens: Int32) -> Drafts:
        token_ids = [self._guess(r, k) for r, k in zip(batch.requests, num_draft_tokens.tolist(), strict=True)]
        width = max(map(len, token_ids), default=0)
        return Drafts(token_ids, np.full((len(token_ids), width), 0.5, np.float32))

    def _guess(self, request: Request, budget: int) -> list[int]:
        known = self._outputs.get(request.request_id, [])
        start = len(request.output_token_ids)
        right = [self._rng.random() < self._p for _ in range(budget)]
        made_up = [self._rng.randrange(self._vocab_size) for _ in range(budget)]
        return [known[start + j] if right[j] and start + j < len(known) else made_up[j] for j in range(budget)]

    def observe(self, batch: DraftBatch, num_draft_tokens: Int32, num_accepted_tokens: Int32) -> None:
        assert (num_accepted_tokens <= num_draft_tokens).all()

    def forget(self, request: Request) -> None:
        return None


def draft_batch(requests: Sequence[Request], max_model_len: int = 1024, block_size: int = 16) -> DraftBatch:
    """What a drafter sees of these requests, as an engine would load them; gives slots to those that have none."""
    table = SlotTable(len(requests), max_model_len, block_size)
    for slot, request in enumerate(requests):
        request.slot = slot
    return DraftBatch(requests, table.load(list(requests)), table)


def make_prompts(num: int, seed: int, longest: int = 40) -> list[list[int]]:
    """Random prompts, most of which begin with a part of one of two long heads; the last equals the first."""
    rng = random.Random(seed)
    heads = [[rng.randrange(3, VOCAB_SIZE) for _ in range(36)] for _ in range(2)]
    prompts: list[list[int]] = []
    for _ in range(num - 1):
        head = rng.choice(heads)[: rng.choice([0, rng.randrange(36), 36])]
        tail = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 12))]
        prompts.append((head + tail)[:longest])
    return [*prompts, list(prompts[0])]


def make_requests(prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Request]:
    """Fresh requests: an engine writes into the ones it is given."""
    return [Request(i, list(p), s) for i, (p, s) in enumerate(zip(prompts, params, strict=True))]


def run(engine: Engine, requests: Iterable[Request]) -> dict[int, RequestOutput]:
    """Outputs by request id."""
    return {output.request_id: output for output in engine.run(requests)}


def one_at_a_time(
    family: str, prompts: Sequence[list[int]], params: Sequence[SamplingParams], **config: Any
) -> dict[int, RequestOutput]:
    """The reference: plain decoding, each request alone, its prompt in one chunk, nothing shared."""
    engine = tiny_engine(
        family,
        token_bytes=letters(),
        **{"max_num_seqs": 1, "max_num_batched_tokens": 4096, "enable_prefix_caching": False, **config},
    )
    return run(engine, make_requests(prompts, params))


def essence(output: RequestOutput) -> tuple[list[int], str, str | None, int, str | None]:
    """What speculation and scheduling may not change."""
    return output.token_ids, output.finish_reason, output.stop_reason, output.num_prompt_tokens, output.error
