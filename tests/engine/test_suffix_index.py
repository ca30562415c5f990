"""The suffix index against a plain search, at its limits, and through its file form."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrun.engine.drafters import suffix_index
from specrun.engine.drafters.suffix_index import MAX_CONTINUATION, MAX_MATCH, NO_TOKEN, SEPARATOR, SuffixIndex

ROWS = st.lists(st.lists(st.integers(0, 4), max_size=25), max_size=12)


def contexts(*texts: Sequence[int]):
    out = np.full((len(texts), MAX_MATCH + 1), NO_TOKEN, dtype=np.int32)
    for row, text in zip(out, texts, strict=True):
        tail = list(text)[-MAX_MATCH:]
        row[len(row) - len(tail) :] = tail
    return out


def found(index: SuffixIndex, text: Sequence[int], num_next: int = 4) -> list[tuple[int, tuple[int, ...]]]:
    """(match length, continuation) of every candidate, sorted."""
    match_lens, places = index.lookup(contexts(text))
    nexts = index.continuations(places, num_next)
    candidates = []
    for match_len, tokens in zip(match_lens[0].tolist(), nexts[0].tolist(), strict=True):
        if match_len:
            end = tokens.index(SEPARATOR) if SEPARATOR in tokens else num_next
            candidates.append((match_len, tuple(tokens[:end])))
    return sorted(candidates)


def searched(rows: Sequence[Sequence[int]], text: Sequence[int], least: int, num_next: int = 4):
    """What `found` should find if no bucket were ever full."""
    candidates = []
    for row in rows:
        for end in range(1, len(row)):
            length = 0
            while length < min(end, len(text), MAX_MATCH) and row[end - 1 - length] == text[-1 - length]:
                length += 1
            if length >= least:
                candidates.append((length, tuple(row[end : end + num_next])))
    return sorted(candidates)


def split(tokens, starts) -> list[list[int]]:
    return [part.tolist() for part in np.split(tokens, starts[1:])] if len(starts) else []


@settings(max_examples=150, deadline=None)
@given(ROWS, st.lists(st.integers(0, 4), min_size=1, max_size=25), st.sampled_from([(1,), (2, 5), (1, 3, 8), (3,)]))
def test_finds_what_a_plain_search_finds(rows, text, anchors):
    index = SuffixIndex(2_000, anchors, ways=64)
    index.append(rows)
    got, expected = set(found(index, text)), set(searched(rows, text, anchors[0]))
    assert got == expected if index._num_placed.max() <= 64 else got <= expected


@settings(max_examples=150, deadline=None)
@given(st.lists(ROWS, max_size=4), st.lists(st.integers(0, 4), min_size=1, max_size=20), st.integers(MAX_MATCH, 70))
def test_a_small_ring_keeps_the_newest_and_finds_nothing_else(batches, text, capacity):
    index = SuffixIndex(capacity)
    everything: list[list[int]] = []
    for rows in batches:
        index.append(rows)
        everything += [row[-(capacity - 1) :] for row in rows if row]
    kept = split(*index.rows())
    assert index.num_tokens == sum(map(len, kept)) < capacity and index.num_rows == len(kept)
    if kept:  # the newest rows, the oldest of which may have lost its beginning
        assert kept[1:] == everything[len(everything) - len(kept) + 1 :]
        assert everything[-len(kept)][-len(kept[0]) :] == kept[0]
    valid = searched(kept, text, least=1)
    assert set(found(index, text)) <= set(valid)


def test_the_latest_places_of_a_bucket_stay():
    index = SuffixIndex(1_000, anchors=(2,), ways=4)
    for token in range(10, 20):
        index.append([[1, 2, token]])
    assert found(index, [1, 2]) == [(2, (16,)), (2, (17,)), (2, (18,)), (2, (19,))]
    batched = SuffixIndex(1_000, anchors=(2,), ways=4)
    batched.append([[1, 2, token] for token in range(10, 20)])
    assert found(batched, [1, 2]) == found(index, [1, 2])


def test_no_match_and_no_continuation_runs_across_rows():
    index = SuffixIndex(100)
    index.append([[1, 2, 3], [4, 5, 6]])
    assert found(index, [9, 2, 3]) == []
    assert found(index, [3, 4]) == [(1, (5, 6))]
    assert found(index, [1, 2]) == [(2, (3,))]


def test_collisions_are_told_apart():
    index = SuffixIndex(MAX_MATCH * 4, anchors=(2,), ways=64)  # two buckets
    assert len(index._places) == 2
    index.append([[1, 2, 7, 3, 4, 8, 5, 6, 9]])
    assert found(index, [3, 4], 1) == [(2, (8,))]
    assert found(index, [5, 6], 1) == [(2, (9,))]
    assert found(index, [2, 1], 1) == []


def test_a_match_is_as_long_as_it_is():
    row = list(range(30))
    index = SuffixIndex(100)
    index.append([row])
    assert found(index, row[:20], 3) == [(MAX_MATCH, (20, 21, 22))]
    assert found(index, [99, *row[4:9]], 3) == [(5, (9, 10, 11))]
    assert found(index, row[:2], 3) == [(2, (2, 3, 4))]
    assert found(index, row, 3) == [], "nothing follows the last token"
    assert index.continuations(np.array([[1]]), MAX_CONTINUATION).tolist() == [
        [[*row[1:], SEPARATOR, SEPARATOR, SEPARATOR]]
    ]


def test_rows_that_do_not_fit_before_the_end_start_the_ring_anew():
    index = SuffixIndex(20)
    index.append([[1] * 8, [2] * 8])
    index.append([[3] * 5])
    assert split(*index.rows()) == [[1, 1], [2] * 8, [3] * 5]
    index.append([[4] * 50])
    assert split(*index.rows()) == [[4] * 19]


@pytest.mark.parametrize("block", [1 << 18, 50])
def test_saved_and_loaded_it_answers_the_same(block, monkeypatch):
    monkeypatch.setattr(suffix_index, "BLOCK", block)
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 6, rng.integers(1, 30)).tolist() for _ in range(100)]
    index = SuffixIndex(5_000)
    for row in rows:
        index.append([row])
    tokens, starts = index.rows()
    assert split(tokens, starts) == rows and tokens.dtype == np.int32 and starts.dtype == np.int64
    loaded = SuffixIndex(5_000)
    loaded.extend(tokens, starts)
    assert split(*loaded.rows()) == rows
    for text in rows:
        assert found(loaded, text[:-1]) == found(index, text[:-1])


def test_memory_does_not_grow():
    index = SuffixIndex(1_000)
    before = index.nbytes
    for seed in range(20):
        index.append([np.random.default_rng(seed).integers(0, 50, 400).tolist()])
    assert index.nbytes == before and index.num_tokens < 1_000


def test_nothing_is_nothing():
    index = SuffixIndex(100)
    assert index.is_empty and index.num_tokens == 0 and index.num_rows == 0
    index.append([])
    index.append([[], []])
    assert index.is_empty and split(*index.rows()) == []
    assert found(index, [1, 2, 3]) == []


@pytest.mark.parametrize(
    ("tokens", "starts"), [([1, 2], []), ([1, 2], [1]), ([1, 2], [0, 3]), ([1, 2, 3], [0, 2, 1]), ([1, -1], [0])]
)
def test_refuses_rows_that_make_no_sense(tokens, starts):
    with pytest.raises(ValueError, match="row"):
        SuffixIndex(100).extend(np.array(tokens, dtype=np.int32), np.array(starts, dtype=np.int64))


@pytest.mark.parametrize(
    "options", [{"anchors": ()}, {"anchors": (3, 2)}, {"anchors": (1, 17)}, {"ways": 3}, {"capacity_tokens": 3}]
)
def test_refuses_impossible_settings(options):
    with pytest.raises(ValueError, match=r"anchors|ways|capacity_tokens"):
        SuffixIndex(**({"capacity_tokens": 100} | options))
