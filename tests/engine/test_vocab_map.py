"""Two vocabularies: what they have in common, and what becomes of the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specrun.engine import EngineConfig, ModelError, SamplingParams
from specrun.engine.drafters.draft_model import DraftModelDrafter
from specrun.engine.drafters.vocab_map import SameVocab, VocabMap
from specrun.engine.engine import Engine
from specrun.engine.target import Target
from tests.engine.tiny_models import (
    EOS,
    VOCAB_SIZE,
    Budget,
    RandomPolicy,
    build_model,
    essence,
    make_prompts,
    make_requests,
    one_at_a_time,
    run,
    tiny_target,
)

TARGET = [b"", b"", b"a", b"b", b" the", b"ther", b"xyz", b"\xe2\x82", b"the"]
DRAFT = [b"", b"b", b"a", b"the", b"er", b"", b"\x82", b"q"]


def between(target: list[bytes] = TARGET, draft: list[bytes] = DRAFT, unk: int = 5, **options: Any) -> VocabMap:
    found = VocabMap.between(target, draft, unk, **options)
    assert found is not None
    return found


def test_tokens_with_the_same_bytes_are_the_same():
    found = between()
    assert set(zip(found.target_ids.tolist(), found.draft_ids.tolist(), strict=True)) == {(2, 2), (3, 1), (8, 3)}


def test_draft_logits_are_laid_out_over_the_targets_ids():
    logits = torch.arange(8, dtype=torch.float64)[None] + 10
    never = torch.finfo(torch.float64).min
    laid_out = between().to_target(logits, 10)[0].tolist()
    assert laid_out == [never, never, 12, 11, never, never, never, never, 13, never]


def test_a_token_that_the_draft_model_lacks_is_fed_as_its_longest_ending():
    ids = np.array([2, 3, 8, 5, 7, 6, 4, 0, 30])
    assert between().to_draft(ids).tolist() == [2, 1, 3, 4, 6, 5, 3, 5, 5], (
        "ther -> er, half a character -> its last byte"
    )


def test_ends_are_matched_from_the_last_and_specials_as_told():
    found = between(target_eos={0, 1}, draft_eos={5})
    assert (1, 5) in set(zip(found.target_ids.tolist(), found.draft_ids.tolist(), strict=True))
    assert found.to_draft(np.array([0, 1])).tolist() == [5, 5]
    found = between(unk=7, target_eos=[1], draft_eos=[5], specials=[(0, 0)])
    assert found.to_draft(np.array([0, 1])).tolist() == [0, 5]
    assert len(found.target_ids) == 5


def test_of_several_ids_with_the_same_bytes_the_later_ones_are_matched():
    """SentencePiece has a byte <0x61> and a piece "a"; text is made of the piece."""
    found = between([b"a", b"b", b"a"], [b"b", b"a", b"a", b"c"])
    assert set(zip(found.target_ids.tolist(), found.draft_ids.tolist(), strict=True)) == {(2, 2), (0, 1), (1, 0)}
    found = between([b"a", b"b", b"a"], [b"b", b"a"])
    assert set(zip(found.target_ids.tolist(), found.draft_ids.tolist(), strict=True)) == {(2, 1), (1, 0)}
    assert found.to_draft(np.array([0])).tolist() == [1]


def test_one_vocabulary_needs_no_map():
    assert VocabMap.between(TARGET, TARGET, 0) is None
    assert VocabMap.between(TARGET, [*TARGET, b"", b""], 0) is None
    assert VocabMap.between(TARGET, TARGET[:-1], 0) is None
    logits = torch.ones(2, 4)
    assert SameVocab(4).to_target(logits, 3).shape == (2, 3)
    assert SameVocab(4).to_target(logits, 6)[:, 4:].max() == torch.finfo(torch.float32).min
    assert SameVocab(4).to_draft(np.array([0, 3, 4])).tolist() == [0, 3, 0]


def test_strangers_are_refused():
    with pytest.raises(ModelError, match=r"only 1 tokens in common; choose a draft model .* speculation\.method"):
        VocabMap.between([bytes([i]) for i in range(100)], [b"ab" * i for i in range(1, 90)] + [b"a"], 0)
    with pytest.raises(ModelError, match="only 0 tokens"):
        VocabMap.between([b"a"], [b"b"], 0)


def pieces(size: int = VOCAB_SIZE) -> list[bytes]:
    return [b"" if token < 3 else b"<%d>" % token for token in range(size)]


def shuffled(family: str, keep: int, size: int, seed: int = 0) -> tuple[Any, list[bytes]]:
    """A model whose tokens have other ids, `keep` of the target's among them, and its table of bytes."""
    rng = np.random.default_rng(seed)
    old = np.concatenate([[EOS], rng.permutation(np.arange(3, VOCAB_SIZE))[: keep - 1]])
    new = rng.permutation(size)[:keep]
    model, other = (
        build_model(family),
        build_model(family, vocab_size=size, eos_token_id=int(new[0]), pad_token_id=None),
    )
    state = other.state_dict()
    for name, weights in model.state_dict().items():
        if weights.shape == state[name].shape and weights.shape[0] != size:
            state[name].copy_(weights)
        elif weights.shape[0] == VOCAB_SIZE:
            state[name][torch.from_numpy(new)] = weights[torch.from_numpy(old)]
    other.load_state_dict(state)
    table = [b"<other %d>" % token for token in range(size)]
    for token, was in zip(new.tolist(), old.tolist(), strict=True):
        table[token] = pieces()[was]
    return other, table


def run_with(family: str, keep: int, policy: Any, prompts: list[list[int]], params: list[SamplingParams]) -> Any:
    model, table = shuffled(family, keep, 120)
    own, target = Target(model, EngineConfig()), tiny_target(family)
    vocab_map = VocabMap.between(pieces(), table, 0, target.eos_token_ids, own.eos_token_ids)
    drafter = DraftModelDrafter(own, target, vocab_map)
    engine = Engine(target, EngineConfig(num_kv_blocks=64, max_num_seqs=4), policy, drafter)
    return engine, run(engine, make_requests(prompts, params))


def params_of(num: int) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=20, temperature=(i % 3) * 0.5, seed=i, repetition_penalty=1 + i % 2 * 0.2, top_p=0.95)
        for i in range(num)
    ]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_target_under_other_ids_is_always_right(family):
    """Ids 0 and 1 alone are not known by their bytes; they are not used here."""
    prompts = make_prompts(6, 1)
    params = [SamplingParams(**{**vars_of(p), "logit_bias": {0: -1e4, 1: -1e4}}) for p in params_of(6)]
    engine, _ = run_with(family, 95, Budget(3), prompts, params)
    assert engine.stats.num_draft_tokens > 50
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens


def vars_of(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in SamplingParams.__slots__}


def test_output_is_the_same_with_part_of_the_vocabulary():
    prompts, params = make_prompts(8, 2), params_of(8)
    expected = one_at_a_time("llama", prompts, params)
    engine, outputs = run_with("llama", 60, RandomPolicy(0), prompts, params)
    assert {i: essence(o) for i, o in outputs.items()} == {i: essence(o) for i, o in expected.items()}
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens
