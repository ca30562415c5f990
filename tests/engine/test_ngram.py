"""Prompt lookup: longest match, latest occurrence, acceptance counted by match length."""

from __future__ import annotations

import numpy as np
import pytest

from specrun.engine import Request, SamplingParams
from specrun.engine.drafters.ngram import NgramDrafter
from tests.engine.tiny_models import draft_batch


def request(prompt, output=()) -> Request:
    return Request(0, list(prompt), SamplingParams(), output_token_ids=list(output))


def propose(drafter: NgramDrafter, *asked):
    """asked: (request, budget) pairs."""
    return drafter.propose(draft_batch([r for r, _ in asked]), np.array([k for _, k in asked], np.int32))


def draft(prompt, output=(), budget=3, **options) -> list[int]:
    drafts: list[int] = propose(NgramDrafter(**options), (request(prompt, output), budget)).token_ids[0]
    return drafts


def test_continues_the_last_match():
    assert draft([1, 2, 3, 4, 5, 1, 2]) == [3, 4, 5]
    assert draft([1, 2, 3, 9, 1, 2, 7, 8, 1, 2], budget=2) == [7, 8]


def test_prefers_the_longest_match_to_the_latest():
    assert draft([1, 2, 3, 50, 51, 2, 3, 60, 61, 1, 2, 3], budget=2) == [50, 51]
    assert draft([1, 2, 3, 50, 51, 2, 3, 60, 61, 1, 2, 3], budget=2, max_match=2) == [60, 61]


def test_matches_across_prompt_and_output():
    assert draft([1, 2, 3, 4], [9, 1, 2], budget=4) == [3, 4, 9, 1]


def test_a_loop_goes_on_looping():
    assert draft([7, 1, 2, 1, 2], budget=5) == [1, 2, 1, 2, 1]
    assert draft([4, 4, 4], budget=4) == [4, 4, 4, 4]


def test_says_nothing_without_a_match_or_a_budget():
    assert draft([1, 2, 3, 4]) == []
    assert draft([1]) == []
    assert draft([1, 2, 3, 1, 2], budget=0) == []
    assert draft([1, 2, 9, 2], budget=2) == [], "one token is too short a match"
    assert draft([1, 2, 9, 2], budget=2, min_match=1) == [9, 2]


def test_catches_up_with_tokens_that_came_while_it_was_off():
    drafter, r = NgramDrafter(), request([1, 2, 3])
    assert propose(drafter, (r, 2)).token_ids == [[]]
    r.output_token_ids += [8, 9, 5, 6, 8, 9]
    assert propose(drafter, (r, 3)).token_ids == [[5, 6, 8]]
    r.output_token_ids += [1]
    assert propose(drafter, (r, 3)).token_ids == [[]]
    r.output_token_ids += [2]
    assert propose(drafter, (r, 3)).token_ids == [[3, 8, 9]]


def test_index_agrees_with_a_plain_search():
    rng = np.random.default_rng(0)
    drafter, r = NgramDrafter(2, 4), request(rng.integers(0, 4, 10).tolist())
    for _ in range(150):
        tokens = r.prompt_token_ids + r.output_token_ids
        expected: list[int] = []
        for n in range(4, 1, -1):
            ends = [end for end in range(n, len(tokens)) if tokens[end - n : end] == tokens[-n:]]
            if ends:
                expected = tokens[ends[-1] :][:3]
                break
        if rng.random() < 0.6:
            got = propose(drafter, (r, 3)).token_ids[0]
            assert got[: len(expected)] == expected and bool(got) == bool(expected)
        r.output_token_ids += rng.integers(0, 4, rng.integers(1, 4)).tolist()


def test_requests_do_not_see_each_other():
    first, second = request([1, 2, 3, 4]), request([9, 1, 2])
    assert propose(NgramDrafter(), (first, 2), (second, 2)).token_ids == [[], []]


def test_survival_follows_the_acceptance_measured_for_the_match_length():
    drafter = NgramDrafter()
    long, short = request([1, 2, 3, 4, 5, 1, 2, 3, 4]), request([1, 2, 9, 8, 7, 1, 2])
    drafts = propose(drafter, (long, 3), (short, 2))
    assert drafts.survival.shape == (2, 3) and drafts.num_draft_tokens.tolist() == [3, 2]
    np.testing.assert_allclose(drafts.survival, [[0.5, 0.25, 0.125], [0.5, 0.25, 0]])
    drafter.observe(draft_batch([long, short]), np.array([3, 2], np.int32), np.array([3, 0], np.int32))
    drafts = propose(drafter, (long, 3), (short, 2))
    np.testing.assert_allclose(drafts.survival[:, 0], [4 / 5, 1 / 3], rtol=1e-6)


def test_forgets():
    drafter, r = NgramDrafter(), request([1, 2, 3, 1, 2])
    propose(drafter, (r, 2))
    drafter.forget(r)
    drafter.forget(r)
    assert propose(drafter, (r, 2)).token_ids == [[3, 1]]


@pytest.mark.parametrize("bounds", [(0, 3), (3, 2)])
def test_refuses_impossible_bounds(bounds):
    with pytest.raises(ValueError, match="min_match"):
        NgramDrafter(*bounds)
