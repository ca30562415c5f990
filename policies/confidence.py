"""How far a drafter's own confidence can be believed: calibration by bins, and trust by Brier score."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .base import Float32

Float64 = NDArray[np.float64]
Intp = NDArray[np.intp]

NUM_BINS = 12
BINS_PER_UNIT, LAST_BIN = np.float32(NUM_BINS - 1 + 1e-3), np.float32(NUM_BINS - 1)
SMALLEST = np.float32(1e-6)
WINDOW = 1024.0
"""Graded trials that the bins and the scores remember."""
PRIOR_TRIALS = 4.0
MIN_TRIALS = 64.0
MARGIN = 0.98
"""Trust changes only for a Brier score at least 2 % lower, so that equal predictors do not take turns."""
TRUSTS = (0.0, 0.5, 1.0)


class Confidence:
    """Turns a drafter's conditional confidence into probabilities, and says how much weight they have earned.

    Confidence falls into 11 equal bins and one for full certainty (tokens that a grammar forces). A bin's rate is its
    successes over its trials, so a drafter that is always too sure, or never says anything, is corrected by itself.
    `trust` is the weight of the calibrated confidence against history in the logit domain: whichever of 0, 0.5 and 1
    has the lowest Brier score, all three being scored before each outcome is learned.
    """

    def __init__(self) -> None:
        centres = np.append((np.arange(NUM_BINS - 1) + 0.5) / (NUM_BINS - 1), 0.995)
        self._trials = np.full(NUM_BINS, PRIOR_TRIALS)
        self._successes = PRIOR_TRIALS * centres
        self._errors = [0.0] * len(TRUSTS)
        self._weight = 0.0
        self._trust = 0
        self._calibrate()

    @property
    def trust(self) -> float:
        """Weight of confidence against history: 0, 0.5 or 1."""
        return TRUSTS[self._trust]

    @property
    def brier(self) -> float:
        """Mean squared error of the predictions in use over the last graded trials; 0 before any."""
        return self._errors[self._trust] / self._weight if self._weight else 0.0

    def grade(self, bins: Intp, history: Float64, outcomes: Float64) -> Float64:
        """Score, then learn, N graded trials: bins of their confidence, history's probabilities, outcomes 0 or 1.

        Returns [N] squared errors of the predictions in use.
        """
        count = len(bins)
        odds = self._odds.take(bins)
        mixed = np.sqrt(odds * history / (1 - history))
        errors = [p - outcomes for p in (history, mixed / (1 + mixed), odds / (1 + odds))]
        in_use = errors[self._trust]
        kept = WINDOW / (WINDOW + count)
        self._errors = [old * kept + float(new @ new) for old, new in zip(self._errors, errors, strict=True)]
        self._weight = self._weight * kept + count
        best = min(range(len(TRUSTS)), key=self._errors.__getitem__)
        if self._weight >= MIN_TRIALS and self._errors[best] < MARGIN * self._errors[self._trust]:
            self._trust = best
        self._trials = self._trials * kept + np.bincount(bins, minlength=NUM_BINS)
        self._successes = self._successes * kept + np.bincount(bins, outcomes, NUM_BINS)
        self._calibrate()
        return in_use * in_use

    def _calibrate(self) -> None:
        rates = (self._successes + 0.02) / (self._trials + 0.04)
        self._odds = rates / (1 - rates)
        self.log_rates: Float32 = np.log(rates).astype(np.float32)
        """[12] logarithm of the calibrated rate of success by bin."""
        self.root_odds: Float32 = np.sqrt(self._odds).astype(np.float32)
        """[12] square root of its odds."""

    def forget(self) -> None:
        """Make what was learned count little: acceptance has just changed."""
        kept = PRIOR_TRIALS / np.maximum(self._trials, PRIOR_TRIALS)
        self._trials, self._successes = self._trials * kept, self._successes * kept


def bins_of(survival: Float32, before: Float32) -> Intp:
    """Bin of S_j / S_(j-1), the confidence in a draft given those before it; of one shape; overwrites `before`."""
    shares = np.maximum(before, SMALLEST, out=before)
    np.divide(survival, shares, out=shares)
    shares *= BINS_PER_UNIT
    np.fmax(shares, 0, out=shares)  # what is no number is no confidence
    return np.minimum(shares, LAST_BIN, out=shares).astype(np.intp)
