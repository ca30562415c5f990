"""The ladder against looking at every set of drafts."""

import itertools

import numpy as np
import pytest

from specrun.policies.ladder import BINS, Ladder


def survival_of(rng, num_requests, num_positions):
    """[R, K] falling in j."""
    return np.multiply.accumulate(rng.uniform(0.3, 1.0, (num_requests, num_positions)), axis=1)


def tokens_of(survival, lengths):
    """R exp(mean log E) with so many drafts of each request."""
    expected = 1 + (survival * (np.arange(survival.shape[1]) < np.asarray(lengths)[:, None])).sum(axis=1)
    return len(survival) * np.exp(np.log(expected).mean())


@pytest.mark.parametrize("seed", range(5))
def test_the_best_rung_is_as_good_as_any_lengths(seed):
    """But for the rounding of worths to 1/64."""
    survival = survival_of(np.random.default_rng(seed), 4, 4)

    def seconds(rows):
        return 1.0 + 0.05 * rows + 0.4 * (rows > 5)  # a stair, so that the goodput has several peaks

    ladder = Ladder(survival)
    best = ladder.best(seconds, edges=np.array([5.0]))
    found = tokens_of(survival, ladder.lengths(best.num_rows)) / seconds(np.array(best.num_rows))
    every = itertools.product(range(5), repeat=4)
    most = max(tokens_of(survival, lengths) / seconds(np.array(sum(lengths))) for lengths in every)
    assert found == pytest.approx(most, rel=0.01)
    assert best.goodput == pytest.approx(found, rel=0.01)


@pytest.mark.parametrize("num_rows", range(25))
def test_lengths_are_the_worthiest_prefixes(num_rows):
    survival = survival_of(np.random.default_rng(7), 6, 4)
    worth = survival / (1 + np.cumsum(survival, axis=1) - survival)
    lengths = Ladder(survival).lengths(num_rows)
    assert lengths.sum() == min(num_rows, np.count_nonzero(worth >= 1 / BINS))
    taken, left = worth[np.arange(4) < lengths[:, None]], worth[np.arange(4) >= lengths[:, None]]
    assert taken.size == 0 or left.size == 0 or taken.min() >= left.max() - 1 / BINS


def test_equal_requests_count_their_tokens():
    survival = np.full((10, 3), 0.8) ** np.arange(1.0, 4.0)
    assert Ladder(survival).tokens[-1] == pytest.approx(10 * (1 + 0.8 + 0.64 + 0.512), rel=0.02)


def test_a_slow_request_is_worth_more_than_a_fast_one():
    """Its steps are what the job waits for: the same chance of a token more saves it a greater share of them."""
    survival = np.array([[0.9, 0.85, 0.5], [0.5, 0.0, 0.0]])
    assert Ladder(survival).lengths(3).tolist() == [2, 1]


def test_a_rung_stops_where_the_padding_is_full():
    """With 4 rows at hand and 8 paid for, four more drafts are free."""
    survival = np.full((4, 8), 0.5) ** np.arange(1.0, 9.0)
    edges = np.array([4.0, 12.0])

    def padded(rows):
        return np.where(rows <= 4, 1.0, 10.0)

    best = Ladder(survival).best(padded, edges=edges)
    assert best.num_rows == 4
    assert Ladder(survival).lengths(4).tolist() == [1, 1, 1, 1]


def test_tokens_that_are_worth_nothing_are_not_bought():
    ladder = Ladder(np.full((4, 3), 0.9))
    assert ladder.best(lambda rows: 1 + 0.01 * rows, token_s=1e-12).num_rows == 0
    assert ladder.best(lambda rows: 1 + 0.01 * rows, token_s=1.0).num_rows == 12


def test_the_first_rung_can_be_prescribed():
    ladder = Ladder(np.full((4, 1), 0.1))
    assert ladder.best(lambda rows: 1 + rows).num_rows == 0
    assert ladder.best(lambda rows: 1 + rows, first=int(np.searchsorted(ladder.rows, 1))).num_rows == 4


def test_weights_count_drafts_that_may_not_be_there():
    survival, weights = np.full((10, 2), 0.8), np.full((10, 2), 0.25)
    ladder = Ladder(survival, weights)
    assert ladder.rows[-1] == pytest.approx(5)
    assert 10 * np.exp(0.25 * np.log(2.6)) < ladder.tokens[-1] < 10 * 1.4


def test_drafting_and_longest_follow_the_rungs():
    ladder = Ladder(np.array([[0.9, 0.5, 0.2], [0.6, 0.1, 0.05]]))
    for rung in range(BINS):
        lengths = ladder.lengths_down_to(rung)
        assert ladder.drafting[rung] == np.count_nonzero(lengths)
        assert ladder.longest[rung] == lengths.max()
        assert ladder.rows[rung] == lengths.sum()
