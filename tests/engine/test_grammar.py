"""Outputs that follow a grammar: always legal, the same under every schedule; its failures are one request's own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from specrun.engine import FinishReason, Request, RequestOutput, SamplingParams
from specrun.engine.drafters.ngram import NgramDrafter
from specrun.engine.grammar import Grammar, GrammarError
from tests.engine.test_exactness import NUM_REQUESTS, PARAMS, Schedule
from tests.engine.tiny_models import (
    EOS,
    VOCAB_SIZE,
    Budget,
    OracleDrafter,
    RandomPolicy,
    essence,
    letters,
    make_prompts,
    run,
    tiny_engine,
)

Rule = Callable[[list[int]], set[int]]
"""Output tokens -> the ids that may come next; may raise GrammarError."""
HEAD, TAIL, STOP_WORD = [10, 11, 12], [7, 8], 9
WORDS = set(range(40, 70))


class RuleGrammar(Grammar):
    """A grammar over token ids, written out as what may follow each output."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._output: list[int] = []

    def mask(self, drafts: Sequence[int]) -> Any:
        bits = np.zeros(-(-VOCAB_SIZE // 32) * 32, dtype=bool)
        bits[sorted(self._rule(self._output + list(drafts)))] = True
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def num_legal(self, drafts: Sequence[int]) -> int:
        for count, token in enumerate(drafts):
            if token not in self._rule(self._output + list(drafts[:count])):
                return count
        return len(drafts)

    def forced(self, limit: int) -> list[int]:
        found: list[int] = []
        while len(found) < limit and len(only := self._rule(self._output + found)) == 1:
            found += only
        return found

    def accept(self, token: int) -> None:
        if token not in self._rule(self._output):
            raise GrammarError(f"token {token} is not legal after {len(self._output)} tokens")
        self._output.append(token)


def form(output: list[int]) -> set[int]:
    """Three fixed tokens, one to four words and the token that ends them, two fixed tokens, the end."""
    if EOS in output:
        return set()
    if len(output) < len(HEAD):
        return {HEAD[len(output)]}
    if STOP_WORD in output:
        rest = [*TAIL, EOS][len(output) - output.index(STOP_WORD) - 1 :]
        return set(rest[:1])
    num_words = len(output) - len(HEAD)
    return (WORDS if num_words < 4 else set()) | ({STOP_WORD} if num_words else set())


def even(output: list[int]) -> set[int]:
    """Any letters but "cc"; complete when their number is even."""
    if EOS in output:
        return set()
    pieces = letters()
    text = b"".join(pieces[token] for token in output)
    found = {token for token, piece in enumerate(pieces) if piece and b"cc" not in text[-1:] + piece}
    return found | ({EOS} if len(text) % 2 == 0 else set())


def dead_end(output: list[int]) -> set[int]:
    """Four words, and then nothing, not even the end."""
    return WORDS if len(output) < 4 else set()


def broken(output: list[int]) -> set[int]:
    """Raises after five words."""
    if len(output) >= 5:
        raise GrammarError("too complex after five tokens")
    return WORDS


RULES: list[Rule | None] = [form, even, None, form, even, dead_end, form, even, broken, form, None, even]


def with_grammars(prompts: list[list[int]], params: list[SamplingParams], rules: list[Rule | None]) -> list[Request]:
    """Fresh requests with fresh grammars."""
    return [
        Request(i, list(p), s, grammar=RuleGrammar(rule) if rule else None)
        for i, (p, s, rule) in enumerate(zip(prompts, params, rules, strict=True))
    ]


def requests(kind: str) -> list[Request]:
    return with_grammars(make_prompts(NUM_REQUESTS, 0), PARAMS[kind](), RULES)


@cache
def reference(family: str, kind: str) -> dict[int, RequestOutput]:
    """Plain decoding, each request alone."""
    engine = tiny_engine(
        family, token_bytes=letters(), max_num_seqs=1, max_num_batched_tokens=4096, enable_prefix_caching=False
    )
    return run(engine, requests(kind))


def assert_legal(output: RequestOutput, rule: Rule) -> None:
    for place, token in enumerate(output.token_ids):
        assert token in rule(output.token_ids[:place]), f"token {place} of request {output.request_id}"


@pytest.mark.parametrize("kind", PARAMS)
def test_outputs_are_legal(kind):
    outputs = reference("llama", kind)
    for i, rule in enumerate(RULES):
        if rule is not None:
            assert_legal(outputs[i], rule)
    ends = {rule: {outputs[i].finish_reason for i, r in enumerate(RULES) if r is rule} for rule in RULES if rule}
    assert FinishReason.STOP in ends[form]
    assert ends[dead_end] == ends[broken] == {FinishReason.ERROR}


@pytest.mark.parametrize("drafter_name", ["oracle", "ngram"])
@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_output_is_the_same_under_every_schedule(family, kind, drafter_name):
    expected = reference(family, kind)
    num_preemptions = 0
    for seed in (0, 1, 2):
        schedule = Schedule.draw(seed)
        known = {i: o.token_ids for i, o in expected.items()}
        drafter = OracleDrafter(known, 0.8, seed) if drafter_name == "oracle" else NgramDrafter()
        engine = tiny_engine(family, RandomPolicy(seed), drafter, letters(), **schedule.config)
        todo = requests(kind)
        random.Random(seed).shuffle(todo)
        outputs = run(engine, todo)
        for i, want in expected.items():
            assert essence(outputs[i]) == essence(want), f"request {i} under {schedule}"
        assert engine.stats.num_accepted_tokens > 0
        assert engine.blocks.num_free == engine.blocks.num_blocks
        num_preemptions += engine.stats.num_preemptions
    assert num_preemptions > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_tokens_are_accepted_drafts(temperature):
    """The drafter knows nothing, so what is accepted is what the grammar forces."""
    prompts, params = make_prompts(3, 4), [SamplingParams(max_tokens=16, temperature=temperature, seed=3)] * 3
    engine = tiny_engine("llama", Budget(4), OracleDrafter({}, 0, 1, 3), letters())
    outputs = run(engine, with_grammars(prompts, params, [form] * 3))
    for output in outputs.values():
        assert output.finish_reason is FinishReason.STOP
        assert output.token_ids[:3] == HEAD and output.token_ids[-3:] == [*TAIL, EOS]
        # The first token comes with the prompt; the drafter's own, ids below 3, are cut before they are verified.
        num_words = len(output.token_ids) - len(HEAD) - len([STOP_WORD, *TAIL, EOS])
        num_forced = len(HEAD) - 1 + len([*TAIL, EOS]) + (num_words == 4)
        assert output.num_draft_tokens == output.num_accepted_tokens == num_forced


def test_illegal_drafts_are_not_verified():
    """An oracle that is always wrong: it proposes tokens that the grammar forbids."""
    prompts, params = make_prompts(2, 4), [SamplingParams(max_tokens=8, temperature=1.0)] * 2
    drafter = OracleDrafter({i: [EOS + 1] * 20 for i in range(2)}, 1.0, 0)
    outputs = run(tiny_engine("llama", Budget(3), drafter, letters()), with_grammars(prompts, params, [broken, None]))
    assert outputs[0].num_draft_tokens == 0 < outputs[1].num_draft_tokens
    assert outputs[0].finish_reason is FinishReason.ERROR


def test_a_grammar_that_fails_ends_its_request_only():
    rules: list[Rule | None] = [None, dead_end, None, broken, form]
    params = [SamplingParams(max_tokens=12, temperature=0.7, seed=i, ignore_eos=i % 2 == 0 and i < 4) for i in range(5)]
    prompts = make_prompts(5, 2)
    outputs = run(tiny_engine("llama", Budget(2), NgramDrafter(), letters()), with_grammars(prompts, params, rules))
    plain = run(tiny_engine("llama"), with_grammars(prompts, params, [None] * 5))
    assert essence(outputs[0]) == essence(plain[0]) and essence(outputs[2]) == essence(plain[2])
    assert outputs[1].finish_reason is outputs[3].finish_reason is FinishReason.ERROR
    assert len(outputs[1].token_ids) == 4 and len(outputs[3].token_ids) == 5
    assert outputs[1].error and outputs[3].error == "too complex after five tokens"
    assert outputs[4].finish_reason is FinishReason.STOP


def test_max_tokens_cuts_a_form():
    params = [SamplingParams(max_tokens=4)]
    outputs = run(tiny_engine("llama", token_bytes=letters()), with_grammars(make_prompts(2, 1)[:1], params, [form]))
    assert outputs[0].finish_reason is FinishReason.LENGTH and outputs[0].token_ids[:3] == HEAD


def test_the_end_of_a_form_comes_before_min_tokens():
    """Where a grammar leaves only the end, min_tokens cannot hold it back."""
    params = [SamplingParams(max_tokens=30, min_tokens=20)]
    outputs = run(tiny_engine("llama", token_bytes=letters()), with_grammars(make_prompts(2, 1)[:1], params, [form]))
    assert_legal(outputs[0], form)
    assert outputs[0].token_ids.count(EOS) == 1
    assert outputs[0].finish_reason is FinishReason.STOP


def test_a_stop_string_ends_an_output_before_its_grammar_does():
    params = [SamplingParams(max_tokens=30, temperature=1.0, stop=("ab", "ca"), seed=i) for i in range(4)]
    outputs = run(tiny_engine("llama", token_bytes=letters()), with_grammars(make_prompts(4, 1), params, [even] * 4))
    assert any(output.stop_reason in ("ab", "ca") for output in outputs.values())
    for output in outputs.values():
        assert_legal(output, even)
