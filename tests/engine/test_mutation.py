"""Seeded faults: the exactness check is worth something only if it sees each of them."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache

import pytest

from specrun.engine import FinishReason, Request, RequestOutput, SamplingParams
from specrun.engine import engine as engine_module
from specrun.engine import sampler as sampler_module
from specrun.engine.block_manager import ROOT, BlockManager
from specrun.engine.engine import Engine
from specrun.engine.input_batch import SlotTable
from specrun.engine.noise import row_key
from specrun.engine.sampler import LogitRow, Sampler
from tests.engine.tiny_models import (
    OracleDrafter,
    RandomPolicy,
    essence,
    letters,
    make_requests,
    one_at_a_time,
    run,
    tiny_engine,
)

A, B, X, Y = [3, 4, 5, 6], [7, 8, 9, 10], [11, 12, 13, 14], [15, 16, 17, 18]
PROMPTS = [[*A, *X, 20], [*B, *Y, 21], [*A, *Y, 22], [*B, *X, 23], [30, 31, 32], [33, *A], [34], [*A, *X, *Y, 24]]
PARAMS = [
    SamplingParams(max_tokens=14, temperature=1.0, seed=1),
    SamplingParams(max_tokens=14, repetition_penalty=1.5, frequency_penalty=1.0),
    SamplingParams(max_tokens=14, temperature=1.0, seed=2, presence_penalty=2.0, frequency_penalty=2.0),
    SamplingParams(max_tokens=14, stop=("abca", "ccb", "bab"), temperature=1.3, seed=3),
    SamplingParams(max_tokens=14),
    SamplingParams(max_tokens=14, temperature=1.0, seed=4, stop_token_ids=tuple(range(3, 97, 4))),
    SamplingParams(max_tokens=14, repetition_penalty=2.0),
    SamplingParams(max_tokens=14, temperature=1.0, seed=5),
]


@cache
def reference() -> dict[int, RequestOutput]:
    return one_at_a_time("llama", PROMPTS, PARAMS)


@pytest.fixture(autouse=True)
def expected() -> dict[int, RequestOutput]:
    """Computed before any fault is planted."""
    return reference()


def differing() -> list[int]:
    """A compact exactness check: the requests whose output depends on the schedule."""
    drafter = OracleDrafter({i: o.token_ids for i, o in reference().items()}, 0.7, seed=0)
    config = {"max_num_seqs": 3, "max_num_batched_tokens": 9, "num_kv_blocks": 24, "block_size": 4}
    engine = tiny_engine("llama", RandomPolicy(0), drafter, letters(), **config)
    outputs = run(engine, make_requests(PROMPTS, PARAMS))
    return [i for i, want in reference().items() if essence(outputs[i]) != essence(want)]


def test_without_a_fault_nothing_differs():
    assert differing() == []
    assert any(o.finish_reason is FinishReason.STOP for o in reference().values())


def test_sees_an_accepted_length_that_is_one_too_long(monkeypatch):
    right = sampler_module.count_accepted
    monkeypatch.setattr(engine_module, "count_accepted", lambda d, s: min(right(d, s) + 1, len(d)))
    assert differing()


def test_sees_noise_keyed_by_slot(monkeypatch):
    def position(row):
        return row.request.num_tokens + len(row.drafts) + 1000 * row.request.slot

    monkeypatch.setattr(LogitRow, "position", property(position))
    assert differing()


def test_sees_noise_from_a_generator_with_state(monkeypatch):
    draws = itertools.count()
    monkeypatch.setattr(sampler_module, "row_key", lambda seed, position: row_key(seed, next(draws)))
    assert differing()


def test_sees_noise_keyed_without_the_drafts_before_it(monkeypatch):
    monkeypatch.setattr(LogitRow, "position", property(lambda row: row.request.num_tokens))
    assert differing()


def test_sees_a_penalty_that_ignores_the_drafts_before_it(monkeypatch):
    monkeypatch.setattr(sampler_module, "history", lambda row: row.request.output_token_ids)
    assert differing()


def test_sees_a_penalty_that_counts_a_refused_draft(monkeypatch):
    sample = Sampler.sample
    drafts_of: dict[Request, list[int]] = {}

    def remember(self, logits, requests, drafts):
        drafts_of.update(zip(requests, drafts, strict=True))
        return sample(self, logits, requests, drafts)

    monkeypatch.setattr(Sampler, "sample", remember)
    monkeypatch.setattr(sampler_module, "history", lambda row: row.request.output_token_ids + drafts_of[row.request])
    assert differing()


def test_sees_a_stop_check_after_the_whole_step(monkeypatch):
    def append(self, request, token_ids, logprobs):
        request.output_token_ids.extend(token_ids)
        request.finish_reason = self.stop.check(request)
        return len(token_ids)

    monkeypatch.setattr(Engine, "_append", append)
    assert differing()


def test_sees_a_kv_slot_that_is_one_off_after_a_rollback(monkeypatch):
    gather = SlotTable.gather

    def shifted(self, batch, slots):
        inputs = gather(self, batch, slots)
        slot_mapping = inputs.slot_mapping.copy()
        for i, request in enumerate(batch.decodes):
            if request.num_draft_tokens > request.num_accepted_tokens:
                slot_mapping[inputs.cu_seqlens[i] : inputs.cu_seqlens[i + 1]] -= 1
        return dataclasses.replace(inputs, slot_mapping=slot_mapping.clip(0))

    monkeypatch.setattr(SlotTable, "gather", shifted)
    assert differing()


def test_sees_block_tables_from_before_the_drafts(monkeypatch):
    """Drafts may grow into a new block after the tables of the step were loaded."""
    draft = Engine.draft

    def stale(self, state, decision, batch):
        with monkeypatch.context() as patch:
            patch.setattr(SlotTable, "refresh_blocks", lambda self, request: None)
            return draft(self, state, decision, batch)

    monkeypatch.setattr(Engine, "draft", stale)
    assert differing()


def test_sees_a_prefix_key_without_its_parent(monkeypatch):
    def key(self, ids, tokens, index):
        start = index * self.block_size
        return ROOT, tuple(tokens[start : start + self.block_size])

    monkeypatch.setattr(BlockManager, "_key", key)
    assert differing()
