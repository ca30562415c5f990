"""Suffix drafts: where they come from, how long they are, and what the drafter learns."""

from __future__ import annotations

import numpy as np
import pytest

from specrun.engine import Request, SamplingParams
from specrun.engine.drafters import suffix
from specrun.engine.drafters.base import DraftBatch
from specrun.engine.drafters.calibration import Calibration
from specrun.engine.drafters.suffix import SuffixDrafter
from specrun.engine.drafters.suffix_index import MAX_MATCH
from specrun.engine.input_batch import SlotTable
from specrun.engine.request import FinishReason
from tests.engine.tiny_models import (
    Budget,
    RandomPolicy,
    essence,
    letters,
    make_prompts,
    make_requests,
    one_at_a_time,
    run,
    tiny_engine,
)

ROWS = 8


def request(prompt, output=()) -> Request:
    return Request(0, list(prompt), SamplingParams(), output_token_ids=list(output))


class Table:
    """The engine's table, with each request in the slot that it is given."""

    def __init__(self, max_model_len: int = 200) -> None:
        self.table = SlotTable(ROWS, max_model_len, 16)
        self.table.token_ids[:] = 7  # what other requests have left there

    def batch(self, *requests: Request, slots=None) -> DraftBatch:
        for slot, r in enumerate(requests):
            r.slot = slots[slot] if slots else slot
        return DraftBatch(list(requests), self.table.load(list(requests)), self.table)


def propose(drafter: SuffixDrafter, *asked, slots=None):
    """asked: (request, budget) pairs."""
    batch = Table().batch(*(r for r, _ in asked), slots=slots)
    return drafter.propose(batch, np.array([k for _, k in asked], dtype=np.int32))


def draft(prompt, output=(), budget=3, drafter=None) -> list[int]:
    drafts: list[int] = propose(drafter or SuffixDrafter(0), (request(prompt, output), budget)).token_ids[0]
    return drafts


def finish(drafter: SuffixDrafter, output, reason=FinishReason.STOP) -> None:
    done = request([0], output)
    done.finish_reason = reason
    drafter.forget(done)


@pytest.fixture
def bold(monkeypatch):
    """Every continuation is proposed to its end."""
    monkeypatch.setattr(Calibration, "rates", lambda self: np.full_like(self._prior, 0.9))


def test_continues_the_request_s_own_text(bold):
    assert draft([1, 2, 3, 4, 5, 1, 2]) == [3, 4, 5]
    assert draft([1, 2, 3, 4], [9, 1, 2], budget=4) == [3, 4, 9, 1]
    assert draft([5, 6, 8, 5], budget=2) == [6, 8], "one token, where there is no match of two"
    assert draft([5, 6, 8, 9, 6, 1, 9, 6], budget=2) == [1, 9], "the last two tokens, where they match"


def test_prefers_the_longest_match_to_the_latest(bold):
    assert draft([1, 2, 3, 50, 51, 2, 3, 60, 61, 1, 2, 3], budget=2) == [50, 51]


def test_of_equal_matches_most_votes_win(bold):
    text = [1, 2, 3, 3, 1, 2, 9, 4, 1, 2, 9, 5, 1, 2, 8, 8, 1, 2]
    assert draft(text, budget=1) == [9]


def test_a_loop_goes_on_looping(bold):
    assert draft([8, 1, 2, 1, 2], budget=5) == [1, 2, 1, 2, 1]
    assert draft([4, 4, 4], budget=4) == [4, 4, 4, 4]


def test_says_nothing_without_a_match_or_a_budget(bold):
    assert draft([1, 2, 3, 4]) == []
    assert draft([1]) == []
    assert draft([1, 2, 3, 1, 2], budget=0) == []


def test_learns_finished_outputs_of_the_job(bold):
    drafter = SuffixDrafter(1_000)
    finish(drafter, [11, 12, 13, 14, 15])
    assert draft([1, 11, 12, 13], drafter=drafter) == [14, 15]
    finish(drafter, [21, 22, 23, 24], FinishReason.LENGTH)
    finish(drafter, [31, 32, 33, 34], FinishReason.ERROR)
    finish(drafter, [41, 42, 43, 44], FinishReason.TIMEOUT)
    assert draft([21, 22], drafter=drafter) == [23, 24]
    assert draft([31, 32], drafter=drafter) == [] == draft([41, 42], drafter=drafter)
    facts = drafter.facts()
    assert (facts["index_tokens"], facts["index_rows"], facts["seeded_tokens"]) == (9, 2, 0)


def test_without_an_index_it_learns_nothing(bold):
    drafter = SuffixDrafter(0)
    drafter.seed([[11, 12, 13]])
    finish(drafter, [11, 12, 13])
    assert draft([11, 12], drafter=drafter) == [] and drafter.facts()["index_tokens"] == 0


def test_drafts_from_earlier_jobs(bold):
    drafter = SuffixDrafter(1_000)
    drafter.seed([[11, 12, 13, 14], np.array([21, 22, 23])])
    assert draft([11, 12], drafter=drafter) == [13, 14]
    assert draft([21, 22], drafter=drafter) == [23]
    facts = drafter.facts()
    assert (facts["index_tokens"], facts["index_rows"], facts["seeded_tokens"]) == (7, 2, 7)


def test_own_text_comes_before_the_index_where_matches_are_equally_long(bold):
    drafter = SuffixDrafter(1_000)
    drafter.seed([[1, 2, 8, 8], [5, 1, 2, 9, 9]])
    assert draft([1, 2, 3, 4, 1, 2], budget=2, drafter=drafter) == [3, 4]
    assert draft([1, 2, 3, 4, 5, 1, 2], budget=2, drafter=drafter) == [9, 9], "a longer match in the index wins"


def test_requests_do_not_see_each_other_and_keep_their_budgets(bold):
    looping, alone, cut = request([1, 2, 3, 1, 2]), request([9, 1, 2]), request([4, 5, 6, 4, 5])
    drafts = propose(SuffixDrafter(0), (looping, 3), (alone, 3), (cut, 1), (request([1, 2, 3, 1, 2]), 0))
    assert drafts.token_ids == [[3, 1, 2], [], [6], []]
    assert drafts.survival.shape == (4, 3) and drafts.survival.dtype == np.float32
    assert (drafts.survival > 0).tolist() == [[True] * 3, [False] * 3, [True, False, False], [False] * 3]
    assert (np.diff(drafts.survival, axis=1) <= 0).all()


def test_is_deterministic_and_does_not_depend_on_slots_or_company(bold):
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 9, rng.integers(1, 90)).tolist() for _ in range(ROWS)]
    corpus = [rng.integers(0, 9, 40).tolist() for _ in range(50)]

    def drafts(slots):
        drafter = SuffixDrafter(1_500)
        drafter.seed(corpus)
        return propose(drafter, *((request(text), 8) for text in texts), slots=slots)

    ours, theirs = drafts(None), drafts(rng.permutation(ROWS).tolist())
    assert ours.token_ids == theirs.token_ids and (ours.survival == theirs.survival).all()
    drafter = SuffixDrafter(1_500)
    drafter.seed(corpus)
    assert [draft(text, budget=8, drafter=drafter) for text in texts] == ours.token_ids


def test_a_preempted_request_goes_on_in_another_slot(bold):
    table, drafter, r = Table(), SuffixDrafter(1_000), request([1, 2, 3, 4], [1, 2])
    budget = np.array([2], dtype=np.int32)
    assert drafter.propose(table.batch(r), budget).token_ids == [[3, 4]]
    r.output_token_ids += [3, 5, 1, 2, 3]
    r.num_preemptions += 1
    drafter.observe(table.batch(r, slots=[3]), budget, np.array([1], dtype=np.int32))
    assert drafter.propose(table.batch(r, slots=[5]), budget).token_ids == [[5, 1]]


def test_a_scan_is_bounded_and_sees_the_newest(bold, monkeypatch):
    text = [1, 2, 3, *range(20, 60), 4, 5, 6, *range(60, 70)]
    assert draft([*text, 1, 2], budget=1) == [3]
    monkeypatch.setattr(suffix, "MAX_SCANNED_TOKENS", 30)
    assert draft([*text, 1, 2], budget=1) == []
    assert draft([*text, 4, 5], budget=1) == [6]


def plain_draft(text: list[int]) -> list[int]:
    """Longest match of the last tokens in the text itself, for one token."""
    longest, follower = 0, -1
    for end in range(1, len(text)):
        length = 0
        while length < min(end, MAX_MATCH) and text[end - 1 - length] == text[-1 - length]:
            length += 1
        if length and length >= longest:
            longest, follower = length, text[end]
    return [follower] if longest else []


def test_own_text_agrees_with_a_plain_search(bold, monkeypatch):
    monkeypatch.setattr(suffix, "MAX_SCAN_HITS", 1_000)
    monkeypatch.setattr(suffix, "NUM_VOTERS", 1)
    rng = np.random.default_rng(0)
    for _ in range(100):
        text = rng.integers(0, 5, rng.integers(1, 60)).tolist()
        assert draft(text, budget=1) == plain_draft(text)


def grade(drafter: SuffixDrafter, prompt, came, budget=4) -> None:
    """Propose for a prompt, then let these tokens come."""
    table, r = Table(), request(prompt)
    batch = table.batch(r)
    drafts = drafter.propose(batch, np.array([budget], dtype=np.int32))
    r.output_token_ids += came
    drafter.observe(batch, drafts.num_draft_tokens, np.array([0], dtype=np.int32))


def test_draft_length_follows_what_was_accepted_before():
    prompt = [1, 2, 3, 4, 5, 6, 1, 2]
    right, wrong = SuffixDrafter(0), SuffixDrafter(0)
    for _ in range(200):
        grade(right, prompt, [3, 4, 5, 6, 1])
        grade(wrong, prompt, [9])
    assert draft(prompt, budget=8, drafter=right) == [3, 4, 5, 6, 1, 2, 3, 4]
    assert draft(prompt, budget=8, drafter=wrong) == []
    few = SuffixDrafter(0)
    for _ in range(30):
        grade(few, prompt, [3, 9])
    assert 1 <= len(draft(prompt, budget=8, drafter=few)) < 8


def test_proposes_nothing_that_is_less_likely_than_asked_for():
    prompt = [1, 2, 3, 4, 5, 6, 1, 2]
    lengths = [len(draft(prompt, budget=8, drafter=SuffixDrafter(0, least))) for least in (0.01, 0.1, 0.3, 0.9)]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[2] > lengths[3] == 0


def test_survival_is_what_was_measured():
    drafter, prompt = SuffixDrafter(0), [1, 2, 3, 4, 5, 6, 1, 2]
    rng = np.random.default_rng(0)
    for _ in range(3_000):
        grade(drafter, prompt, [3, 4] if rng.random() < 0.7 else [9], budget=1)
    survival = propose(drafter, (request(prompt), 1)).survival
    assert survival.shape == (1, 1) and 0.65 < survival[0, 0] < 0.75


def test_grades_by_what_came_not_by_what_was_verified():
    drafter, prompt = SuffixDrafter(0), [1, 2, 3, 4, 5, 6, 1, 2]
    before = drafter._calibration.rates().copy()
    table, r = Table(), request(prompt)
    batch = table.batch(r)
    drafter.propose(batch, np.array([4], dtype=np.int32))
    r.output_token_ids += [9, 9, 9]  # other tokens were verified, and accepted
    drafter.observe(batch, np.array([2], dtype=np.int32), np.array([2], dtype=np.int32))
    changed = drafter._calibration.rates() - before
    assert (changed <= 0).all() and np.count_nonzero(changed) == 1
    drafter.observe(batch, np.array([2], dtype=np.int32), np.array([2], dtype=np.int32))
    assert (drafter._calibration.rates() - before == changed).all(), "nothing is graded twice"


def test_outputs_wait_in_bounded_number_where_no_drafts_are_asked_for():
    drafter = SuffixDrafter(10_000)
    for _ in range(500):
        finish(drafter, [1, 2, 3])
        assert len(drafter._learned) <= suffix.MAX_LEARNED_ROWS
    assert drafter.facts()["index_rows"] == 500
    bytes_before = drafter.facts()["index_bytes"]
    for _ in range(20):
        finish(drafter, range(5_000))
    assert drafter.facts()["index_tokens"] <= 10_000 and drafter.facts()["index_bytes"] == bytes_before


def test_calibration_converges_to_the_rate_of_each_bin():
    rng = np.random.default_rng(0)
    calibration, rates = Calibration([0.5, 0.5, 0.9]), np.array([0.2, 0.8])
    for _ in range(300):
        bins = rng.integers(0, 2, 20)
        calibration.observe(bins, rng.random(20) < rates[bins])
    np.testing.assert_allclose(calibration.rates()[:2], rates, atol=0.03)
    assert calibration.rates()[2] == 0.9, "never tried: the prior"


def test_calibration_forgets():
    calibration = Calibration([0.5, 0.5], weight=2, decay=0.99)
    calibration.observe(np.zeros(200, dtype=np.int64), np.zeros(200, dtype=bool))
    assert calibration.rates()[0] < 0.02
    for _ in range(10):
        calibration.observe(np.ones(100, dtype=np.int64), np.ones(100, dtype=bool))
    assert calibration.rates()[0] > 0.45 and calibration.rates()[1] > 0.95


def test_calibration_counts():
    calibration = Calibration([0.5], weight=2, decay=1)
    calibration.observe(np.array([0, 0]), np.array([True, True]))
    assert calibration.rates().tolist() == [0.75]
    calibration.observe(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool))
    assert calibration.rates().tolist() == [0.75]


@pytest.mark.parametrize("arguments", [([1.5],), ([[0.5]],), ([0.5], 0), ([0.5], 1, 0), ([0.5], 1, 1.1)])
def test_calibration_refuses_what_is_no_rate(arguments):
    with pytest.raises(ValueError, match=r"rate|weight"):
        Calibration(*arguments)


def test_in_an_engine_it_changes_no_output_and_saves_steps():
    """Random budgets and trims, preemption, and then the same job again with what it has learned."""
    params = [SamplingParams(max_tokens=24, temperature=i % 2, seed=i) for i in range(12)]
    prompts = make_prompts(12, seed=3)
    expected = {i: essence(output) for i, output in one_at_a_time("llama", prompts, params).items()}
    drafter = SuffixDrafter(2_000)
    for policy in (RandomPolicy(0), Budget(5)):
        engine = tiny_engine("llama", policy, drafter, letters(), num_kv_blocks=9)
        outputs = run(engine, make_requests(prompts, params))
        assert {i: essence(output) for i, output in outputs.items()} == expected
    assert engine.stats.num_preemptions
    num_tokens = sum(len(output.token_ids) for output in outputs.values())
    assert sum(output.num_accepted_tokens for output in outputs.values()) > num_tokens / 2
    assert drafter.facts()["index_rows"] == 24
