"""Which drafts come true: acceptance processes, and the coins that are the same under every policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..base import Float32, Int32, Int64

Float64 = NDArray[np.float64]
CONFIDENCES = ("exact", "mean", "none")
_NO_CONFIDENCE = 0.5
_LONGEST_DRAFT = 64
"""Coins past a row's end, for drafts that reach there."""


def _decaying(decay: float) -> Float64:
    """[J] decay ** j."""
    return np.power(float(decay), np.arange(_LONGEST_DRAFT, dtype=np.float64))


@dataclass(frozen=True, slots=True)
class Guesses:
    """What a drafter found for the R decoding requests of a step."""

    num_proposed_tokens: Int32
    """[R] at most the budget."""
    num_matched_tokens: Int32
    """[R] leading proposals that the target would say itself."""
    survival: Float32
    """[R, K] estimated probability that draft j and all before it are accepted; 0 past a request's drafts."""


class Guesser(Protocol):
    """One run of a process."""

    def draft(
        self, requests: Int64, num_outputs: Int64, context_lens: Int64, budgets: Int32, progress: float
    ) -> Guesses:
        """Propose behind num_outputs[i] written tokens of row requests[i]; all arrays are [R].

        progress: share of the job's tokens that are done, 0 to 1.
        """
        ...

    def expected(
        self, requests: Int64, num_outputs: Int64, context_lens: Int64, progress: float, num_positions: int
    ) -> tuple[Float64, Float64]:
        """[R, K] probability that position j is proposed and accepted with all before it, and [R] that anything is
        proposed: what an oracle knows, the coins apart."""
        ...

    def finish(self, request: int) -> None:
        """A row has ended: a drafter that learns from outputs may now use it."""
        return None


class AcceptanceProcess(Protocol):
    """Begins runs; holds no state of its own."""

    def begin(self, output_lens: Int32, seed: int) -> Guesser:
        """A run over rows of these output lengths; another seed is another draw of the same process."""
        ...


@dataclass(frozen=True)
class Acceptance(AcceptanceProcess):
    """Coins with known odds. Position j of a draft, given that those before it were right, is right with probability

        rates[row] * positions[j] * phase(progress) * 2 ** (-context / context_half_life), at most 1,

    times 1 +- spread (of what is left to 0 or 1, whichever is nearer) by the difficulty of the token itself. Raises
    ValueError naming the field that is wrong.
    """

    rates: Float64
    """[N] conditional acceptance of each row's first draft, 0 to 1; or [1], the same for all."""
    positions: Float64 = field(default_factory=lambda: _decaying(0.95))
    """[J] factor by position of the draft; the last holds for all that follow."""
    phases: tuple[tuple[float, float], ...] = ()
    """(progress, factor) ascending: the factor holds from there on; before the first it is 1."""
    is_ramp: bool = False
    """Whether the factor goes from each phase to the next in a straight line instead."""
    context_half_life: float | None = None
    """Tokens of context that halve acceptance; None: it does not matter."""
    availability: Float64 = field(default_factory=lambda: np.ones(1))
    """[N] or [1] probability that the drafter finds anything at all, as an n-gram drafter may not."""
    spread: float = 0.0
    """0 to 1: how far single tokens are easier or harder than the mean; what a confidence can know."""
    confidence: str = "none"
    """Drafts.survival: "exact", by the odds of each token; "mean", by the odds without spread; "none", 0.5 for all."""

    def __post_init__(self) -> None:
        if self.confidence not in CONFIDENCES:
            raise ValueError(f"confidence must be one of {', '.join(CONFIDENCES)}, got {self.confidence!r}")
        for name in ("rates", "availability"):
            values = getattr(self, name)
            if not len(values) or np.min(values) < 0 or np.max(values) > 1:
                raise ValueError(f"{name} must be probabilities")
        if not 0 <= self.spread <= 1:
            raise ValueError(f"spread must be 0 to 1, got {self.spread}")
        if [start for start, _ in self.phases] != sorted({start for start, _ in self.phases}):
            raise ValueError("phases must ascend")

    @classmethod
    def stationary(cls, rate: float, decay: float = 0.95) -> Acceptance:
        """rate * decay ** j at position j, for every row."""
        return cls(np.array([rate]), positions=_decaying(decay))

    @classmethod
    def by_group(cls, groups: Int32, rates: Sequence[float], decay: float = 0.95) -> Acceptance:
        """rates[g] for the rows of group g."""
        return cls(np.asarray(rates, np.float64)[groups], positions=_decaying(decay))

    @classmethod
    def blocks(cls, num_rows: int, size: int, rates: Sequence[float], decay: float = 0.95) -> Acceptance:
        """Data sets behind each other: `size` rows of each rate in turn, over and over."""
        return cls.by_group((np.arange(num_rows) // size % len(rates)).astype(np.int32), rates, decay)

    @classmethod
    def beta(cls, num_rows: int, mean: float, concentration: float, seed: int = 0, decay: float = 0.95) -> Acceptance:
        """Every row its own rate, drawn from a beta distribution: the smaller the concentration, the wider."""
        drawn = np.random.default_rng(seed).beta(mean * concentration, (1 - mean) * concentration, num_rows)
        return cls(drawn, positions=_decaying(decay))

    def with_phases(self, *phases: tuple[float, float], is_ramp: bool = False) -> Acceptance:
        """The same with factors over the job's progress."""
        return replace(self, phases=phases, is_ramp=is_ramp)

    def begin(self, output_lens: Int32, seed: int) -> Guesser:
        """Toss the coins of all output positions."""
        return _CoinGuesser(self, output_lens, seed)

    def factor(self, progress: float) -> float:
        """Of the phase that the job is in."""
        if not self.phases:
            return 1.0
        starts, factors = zip(*self.phases, strict=True)
        if self.is_ramp:
            return float(np.interp(progress, starts, factors))
        index = int(np.searchsorted(starts, progress, side="right"))
        return float(factors[index - 1]) if index else 1.0


class _CoinGuesser(Guesser):
    """One coin for each output position of each row: a position is graded at most once, so whichever draft gets there
    meets a fresh coin, and the same one under every policy."""

    def __init__(self, process: Acceptance, output_lens: Int32, seed: int) -> None:
        self._process = process
        num_rows = len(output_lens)
        self._rates = np.zeros(num_rows, np.float32) + np.asarray(process.rates, np.float32)
        self._availability = np.zeros(num_rows) + process.availability
        self._may_miss = bool(np.min(process.availability) < 1)
        self._positions = np.empty(_LONGEST_DRAFT, np.float32)
        known = np.asarray(process.positions)[:_LONGEST_DRAFT]
        self._positions[: len(known)], self._positions[len(known) :] = known, known[-1]
        self._may_exceed = bool(process.phases) or float(np.max(self._positions)) > 1
        lengths = np.asarray(output_lens, np.int64) + _LONGEST_DRAFT
        self._starts = np.cumsum(lengths) - lengths
        num_coins = int(lengths.sum())
        self._coins = np.random.default_rng([seed, 0]).random(num_coins, dtype=np.float32)
        if process.spread:
            self._is_hard = np.random.default_rng([seed, 1]).random(num_coins, dtype=np.float32) < 0.5
        if self._may_miss:
            self._finds = np.random.default_rng([seed, 2]).random(num_coins, dtype=np.float32)

    def draft(
        self, requests: Int64, num_outputs: Int64, context_lens: Int64, budgets: Int32, progress: float
    ) -> Guesses:
        """As Guesser.draft."""
        num_positions = int(budgets.max(initial=1))
        first = self._starts[requests] + num_outputs
        proposed = budgets
        if self._may_miss:
            proposed = np.where(self._finds[first] < self._availability[requests], budgets, np.int32(0))
        index = first[:, None] + np.arange(num_positions)
        mean = odds = self._odds(requests, context_lens, progress, num_positions)
        if self._process.spread:
            swing = self._process.spread * np.minimum(mean, 1 - mean)
            odds = mean + np.where(self._is_hard[index], -swing, swing)
        is_wrong = np.empty((len(requests), num_positions + 1), np.bool_)
        is_wrong[:, -1] = True  # so that there is always a first one
        np.greater_equal(self._coins[index], odds, out=is_wrong[:, :-1])
        matched = np.minimum(is_wrong.argmax(axis=1), proposed).astype(np.int32)
        return Guesses(proposed, matched, self._survival(mean, odds, proposed))

    def expected(
        self, requests: Int64, num_outputs: Int64, context_lens: Int64, progress: float, num_positions: int
    ) -> tuple[Float64, Float64]:
        """As Guesser.expected."""
        available = self._availability[requests]
        odds = self._odds(requests, context_lens, progress, num_positions)
        return np.cumprod(odds, axis=1, dtype=np.float64) * available[:, None], available

    def _odds(self, requests: Int64, context_lens: Int64, progress: float, num_positions: int) -> Float32:
        """[R, K] mean conditional acceptance."""
        rates = self._rates[requests]
        if self._process.phases:
            rates *= np.float32(self._process.factor(progress))
        if self._process.context_half_life is not None:
            rates *= np.exp2(-context_lens / self._process.context_half_life).astype(np.float32)
        odds = rates[:, None] * self._positions[:num_positions]
        return np.minimum(odds, 1, out=odds) if self._may_exceed else odds

    def _survival(self, mean: Float32, odds: Float32, proposed: Int32) -> Float32:
        if self._process.confidence == "none":
            known = np.full(odds.shape, _NO_CONFIDENCE, np.float32)
        else:
            known = np.cumprod(odds if self._process.confidence == "exact" else mean, axis=1)
        if np.min(proposed, initial=odds.shape[1]) < odds.shape[1]:
            known *= np.arange(odds.shape[1]) < proposed[:, None]
        return known
