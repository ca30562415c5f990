"""Success rates by group and position that forget slowly and notice at once when something has changed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import Int32

Float64 = NDArray[np.float64]
Intp = NDArray[np.intp]

ACCEPTANCE, AVAILABILITY = 0, 1
WINDOW = 1024.0
"""Trials that a position remembers: n trials more scale the old ones by WINDOW / (WINDOW + n)."""
SHIFT = 1.2
"""Change of the log odds, up and down, that the test for a change looks for; less than half of it is ignored."""
SHIFTS = np.array([SHIFT, -SHIFT])
EXPM1_SHIFTS = np.expm1(SHIFTS)
ALARM = 7.0
"""Log likelihood ratio at which the test believes in a change: some 12 trials after 0.85 fell to 0.2."""
MIN_TRIALS = 16.0
"""Trials from before a change without which it is none."""
PRIOR, PRIOR_TRIALS, DECAY = 0.6, 4.0, 0.97
"""Acceptance of the first position before any trial, its weight, and rate of a position over that of the one before
it where only that one has been tried."""
AVAILABILITY_PRIOR, AVAILABILITY_TRIALS = 0.95, 2.0
LEVEL_TRIALS, SHAPE_TRIALS = 10.0, 50.0
"""Weight of the pool against a group's own trials: for how good the group is over all positions, and for how its rate
falls from one to the next."""
LOWEST, EDGE = 0.002, 0.01


class Rates:
    """Conditional success rates of two kinds, acceptance and availability, for G groups and K positions.

    Both are hazards: of the requests that got as far as position j, how many passed it. A step's outcome is a code
    for each request, trials + successes, where successes are trials or trials - 1. So one histogram holds all of it.

    Old trials fade exponentially. A two-sided CUSUM test (Page 1954) on each rate runs beside: where it finds that
    the log odds have moved, the rate starts again from the trials since the move. Positions behind the one that moved
    keep the weight of one old trial, since they may have to wait long for new ones.

    The last row of each array is the pool of all groups; with one group it is that group's own.
    """

    def __init__(self) -> None:
        self._num_groups = self._num_positions = 0
        self._memory: Float64 = np.zeros((2, 1, 0, 2))  # kind, row, position; trials and successes
        self._since: Float64 = np.zeros((2, 1, 0, 2, 2))  # the same since the rate may have risen, or fallen
        self._ratio: Float64 = np.zeros((2, 1, 0, 2))  # log likelihood ratio of either
        self.rates: Float64 = np.zeros((2, 1, 0))
        """[2, rows, K] shrunk success rates, inside 0.002 to 0.998."""
        self.lean: Float64 = np.zeros((1, 1, 0))
        """[1, rows, K] mean offset of the requests in the acceptance trials."""
        self.has_news = False
        self.num_graded = 0
        """Acceptance trials so far, those that are not yet folded left out."""

    @property
    def trials(self) -> Float64:
        """[2, rows, K] trials that are remembered."""
        return self._memory[..., 0]

    def resize(self, num_groups: int, num_positions: int) -> None:
        """Make room, keeping what is known."""
        if self.has_news:
            self.fold()
        num_rows = num_groups + (num_groups > 1)
        self._memory = _resized(self._memory, num_rows, num_positions)
        self._since = _resized(self._since, num_rows, num_positions)
        self._ratio = _resized(self._ratio, num_rows, num_positions)
        self.lean = _resized(self.lean, num_rows, num_positions)
        self._num_groups, self._num_positions = num_groups, num_positions
        self._num_codes = 2 * num_positions + 1
        self._counts = np.zeros(2 * num_groups * self._num_codes, np.int64)
        self._leaning = np.zeros(num_groups * self._num_codes)
        self._shrink()

    def count(self, accepted: Int32, found: Int32, offsets: Float64, groups: Intp | None) -> None:
        """Add [R] codes of acceptance and of availability, with the requests' offsets; groups None where all are 0."""
        size = len(accepted)
        codes = np.concatenate((accepted, found))
        codes[size:] += self._num_groups * self._num_codes
        if groups is not None:
            groups = groups * self._num_codes
            codes[:size] += groups
            codes[size:] += groups
        self._counts += np.bincount(codes, minlength=len(self._counts))
        self._leaning += np.bincount(codes[:size], offsets, len(self._leaning))
        self.has_news = True

    def fold(self) -> NDArray[np.bool_] | None:
        """Turn the counts into rates. Returns [rows], whether acceptance has changed there; None if nowhere."""
        news = self._at_least(self._counts, 2).reshape(self._memory.shape)
        leaning = self._at_least(self._leaning, 1)[..., ::2]
        self._memory *= WINDOW / (WINDOW + news[..., :1])
        self._memory += news
        graded = news[:1, :, :, 0]
        self.lean += (leaning - graded * self.lean) / np.maximum(self._memory[:1, :, :, 0], 1)
        changed = self._test(news)
        self.num_graded += int(news[ACCEPTANCE, -1, :, 0].sum())
        self._counts.fill(0)
        self._leaning.fill(0)
        self.has_news = False
        self._shrink()
        return changed

    def _at_least(self, sums: NDArray[Any], num_kinds: int) -> Float64:
        """[kinds, rows, 2K] sums over the codes from each one on (0 left out), the pool's row added behind."""
        by_code = sums.reshape(num_kinds, self._num_groups, self._num_codes)
        at_least: Float64 = np.add.accumulate(by_code[..., :0:-1], axis=2, dtype=np.float64)[..., ::-1]
        if self._num_groups == 1:
            return at_least
        return np.concatenate((at_least, at_least.sum(1, keepdims=True)), axis=1)

    def _test(self, news: Float64) -> NDArray[np.bool_] | None:
        """Move the CUSUM statistics, and start anew what they say has changed."""
        self._ratio += SHIFTS * news[..., 1:] - news[..., :1] * np.log1p(self.rates[..., None] * EXPM1_SHIFTS)
        self._since += news[..., None, :]
        is_open = self._ratio > 0
        # A rate that is at its bound already would look for ever as if it rose above it.
        is_open[..., 0] &= self.rates < 1 - EDGE
        is_open[..., 1] &= self.rates > EDGE
        self._ratio *= is_open
        self._since *= is_open[..., None]
        if self._ratio.size == 0 or self._ratio.max() <= ALARM:
            return None
        above = self._ratio > ALARM
        # Nothing has changed where all that is known dates from after the supposed change.
        found = above & (self.trials[..., None] - self._since[..., 0] > MIN_TRIALS)
        for kind, row, j, side in np.argwhere(found):
            if self._ratio[kind, row, j, side] == 0:  # it lies behind one that has moved
                continue
            self._memory[kind, row, j] = self._since[kind, row, j, side]
            behind, recent = self._memory[kind, row, j + 1 :], news[kind, row, j + 1 :]
            behind -= recent
            behind /= np.maximum(behind[:, :1], 1)
            behind += recent
            self._since[kind, row, j:] = self._ratio[kind, row, j:] = 0
        self._since[above] = self._ratio[above] = 0
        changed: NDArray[np.bool_] = np.logical_or.reduce(found[ACCEPTANCE], axis=(1, 2))
        self.lean[:, changed] = 0
        return changed if changed.any() else None

    def _shrink(self) -> None:
        """Rates from counts: the pool's to the prior and the position before, the groups' to the pool's."""
        self.rates = np.empty(self._memory.shape[:-1])
        trials, successes = self._memory[..., 0], self._memory[..., 1]
        pool = (successes[AVAILABILITY, -1] + AVAILABILITY_TRIALS * AVAILABILITY_PRIOR) / (
            trials[AVAILABILITY, -1] + AVAILABILITY_TRIALS
        )
        self.rates[AVAILABILITY, -1] = pool
        self.rates[ACCEPTANCE, -1] = _chained(trials[ACCEPTANCE, -1].tolist(), successes[ACCEPTANCE, -1].tolist())
        if self._num_groups > 1:
            own = trials[AVAILABILITY, :-1] + LEVEL_TRIALS
            self.rates[AVAILABILITY, :-1] = (successes[AVAILABILITY, :-1] + LEVEL_TRIALS * pool) / own
            self.rates[ACCEPTANCE, :-1] = _shrunk(
                trials[ACCEPTANCE, :-1], successes[ACCEPTANCE, :-1], self.rates[ACCEPTANCE, -1]
            )
        np.maximum(self.rates, LOWEST, out=self.rates)
        np.minimum(self.rates, 1 - LOWEST, out=self.rates)


def _chained(trials: list[float], successes: list[float]) -> list[float]:
    """The pool's acceptance by position: each shrunk to 0.97 of the one before it, the first to the prior."""
    rates, before = [], PRIOR
    for count, passed in zip(trials, successes, strict=True):
        rate = (passed + PRIOR_TRIALS * before) / (count + PRIOR_TRIALS)
        rates.append(min(max(rate, LOWEST), 1 - LOWEST))
        before = rate * DECAY
    return rates


def _shrunk(trials: Float64, successes: Float64, pool: Float64) -> Float64:
    """[G, K]: the pool's rates [K], moved by each group's odds ratio, then by its own trials [G, K] at the position."""
    total, passed, expected = trials.sum(1), successes.sum(1), trials @ pool
    ratio = (passed + LEVEL_TRIALS) * (total - expected + LEVEL_TRIALS)
    ratio /= (total - passed + LEVEL_TRIALS) * (expected + LEVEL_TRIALS)
    odds = pool / (1 - pool) * ratio[:, None]
    shrunk: Float64 = (successes + SHAPE_TRIALS * odds / (1 + odds)) / (trials + SHAPE_TRIALS)
    return shrunk


def _resized(array: Float64, num_rows: int, num_positions: int) -> Float64:
    """[kinds, rows, K, ...] with more rows and positions, zeros where new; the pool's row stays the last.

    Where one group becomes several, its row is both the first group's and the pool's.
    """
    num_kinds, rows, positions = array.shape[:3]
    num_groups = rows - (rows > 1)
    larger = np.zeros((num_kinds, num_rows, num_positions, *array.shape[3:]))
    larger[:, :num_groups, :positions] = array[:, :num_groups]
    larger[:, -1, :positions] = array[:, -1]
    return larger
