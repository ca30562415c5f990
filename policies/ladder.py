"""Which drafts of a batch are worth their place in the forward pass: the worthiest first, as far as the step gains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import Int32, Int64

Float64 = NDArray[np.float64]
BINS = 64
"""Worths are told apart in steps of 1/64; drafts worth less than that are never verified."""
_WORTHS = np.log1p((np.arange(BINS - 1, 0, -1) + 0.5) / BINS)


@dataclass(frozen=True, slots=True)
class Rung:
    """The best place to stop on a ladder."""

    rung: int
    """Its number, of the ladder's own rungs; 64 and above stop at an edge."""
    num_rows: int
    """Draft tokens above it; 0 where no draft is worth it."""
    tokens: float
    """Worth of the step in tokens: 1 for each request without drafts."""
    seconds: float
    """Of the step, by the cost that was given."""

    @property
    def goodput(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


class Ladder:
    """The drafts of R requests by worth: all that are worth so much or more, for each of 63 worths.

    A request with E expected tokens in a step takes a share of 1/E of its steps, and the slower the more steps it stays
    in the batch. So what counts over a job is not the sum of E but the geometric mean, R exp(mean log E) (for equal
    requests they are the same): log E is what each request's slot adds to the logarithm of the job's tokens a second.
    A draft of survival S behind others with E expected tokens is worth log(1 + S / E). It falls along a request, so
    whatever lies above a rung is a prefix of each request's drafts.
    """

    def __init__(self, survival: NDArray[np.floating], weights: Float64 | None = None, scale: float = 1.0) -> None:
        """survival: [R, K] probability that draft j and all before it are accepted, 0 where there is none. weights:
        [R, K] expected share of each draft that will be there at all; None: 1. scale: accepted drafts for each that
        survival lets expect."""
        expected = survival if weights is None else survival * weights
        before = expected @ _before(survival.shape[1])
        before += 1
        self._shares = np.divide(survival, before, out=before)
        self._shares *= BINS - 1e-6
        self._weights, self._scale = weights, scale
        self.num_requests = len(survival)

    @cached_property
    def _bins(self) -> Int64:
        """[R, K] worth of each draft: BINS - 1 goes first, 0 is never verified."""
        bins: Int64 = self._shares.astype(np.int64)
        return bins

    @cached_property
    def _counts(self) -> NDArray[np.number]:
        """[63] drafts between a rung and the next, the worthiest first."""
        return np.bincount(self._bins.ravel(), None if self._weights is None else self._weights.ravel(), BINS)[:0:-1]

    @cached_property
    def rows(self) -> Float64:
        """[64] draft rows down to each rung; rung 0 is none."""
        rows = np.zeros(BINS)
        self._counts.cumsum(out=rows[1:])
        return rows

    @cached_property
    def tokens(self) -> Float64:
        """[64] R exp(mean log E) down to each rung."""
        worth = np.zeros(BINS)
        np.cumsum(self._counts * (self._scale / max(self.num_requests, 1) * _WORTHS), out=worth[1:])
        return np.asarray(self.num_requests * np.exp(worth))

    @cached_property
    def drafting(self) -> Int64:
        """[64] requests with any draft down to each rung."""
        requests = np.zeros(BINS, np.int64)
        np.bincount(self._bins[:, 0], minlength=BINS)[:0:-1].cumsum(out=requests[1:])
        return requests

    @property
    def longest(self) -> Int64:
        """[64] the longest draft down to each rung."""
        depth = BINS - self._bins.max(axis=0)
        return np.searchsorted(np.maximum.accumulate(depth), np.arange(BINS), side="right")

    def best(
        self,
        seconds: Callable[[Float64], Float64],
        token_s: float = 0.0,
        first: int = 0,
        edges: Float64 | None = None,
    ) -> Rung:
        """The rung with the most tokens a second.

        seconds: [N] draft rows -> [N] seconds of the step, called once with the rows of the candidates. token_s: if
        not 0, the seconds that a token is worth: the rung that saves most is the best. first: no rung above this one.
        edges: draft rows at which the step fills its padding: stopping there is looked at too.
        """
        rows, tokens = self.rows, self.tokens
        if edges is not None and len(inside := edges[(edges > rows[first]) & (edges < rows[-1])]):
            rows = np.concatenate((rows, np.floor(inside)))
            tokens = np.concatenate((tokens, np.interp(rows[BINS:], self.rows, self.tokens)))
        step_s = seconds(rows)
        worth = tokens * token_s - step_s if token_s else tokens / step_s
        best = first + int(np.argmax(worth[first:]))
        return Rung(best, round(float(rows[best])), float(tokens[best]), float(step_s[best]))

    def lengths(self, num_rows: int) -> Int32:
        """[R] how many drafts of each request are among the num_rows worthiest, ties going to the shorter drafts.

        For a ladder without weights.
        """
        rung = int(np.searchsorted(self.rows, num_rows, side="right")) - 1
        lengths = self.lengths_down_to(rung)
        missing = num_rows - int(self.rows[rung])
        if missing > 0 and rung < BINS - 1:
            last = np.flatnonzero(self._bins.T.ravel() == BINS - 1 - rung)[:missing]
            lengths += np.bincount(last % self.num_requests, minlength=self.num_requests).astype(np.int32)
        return lengths

    def lengths_down_to(self, rung: int) -> Int32:
        """[R] drafts of each request that are above a rung."""
        is_above = self._shares >= BINS - rung
        # numpy's sum goes through requests one by one; a matrix product raises stray floating-point warnings.
        lengths: Int32 = np.einsum("rk->r", is_above.astype(np.int32))
        return lengths


@cache
def prefixes(num_positions: int, dtype: type[Any] = np.float64) -> NDArray[Any]:
    """[K + 1, K] 1 at the first 0, 1, ... K positions."""
    return np.tri(num_positions + 1, num_positions, -1, dtype)


@cache
def _before(num_positions: int) -> Float64:
    """[K, K] that sums, for each position, what is before it."""
    return np.triu(np.ones((num_positions, num_positions)), 1)
