"""The acceptance of a drafter that cannot be run again, from the steps of a job in which it ran."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..engine.drafters.acceptance_rates import AcceptanceRates
from .recorded import RecordedShard
from .recorded_steps import Steps

Float64 = NDArray[np.float64]

DRAFTS_PER_POINT = 256
"""Verified drafts that a point of the course over time rests on, at least;"""
MAX_POINTS = 32
"""and most points."""
BISECTIONS = 40


def recorded_rates(shard: RecordedShard) -> AcceptanceRates | None:
    """Rates by draft position and their course over the tokens that the shard generated; None without any draft.

    Position j is reached where j drafts were accepted and a longer one was verified: accepted there / reached. All
    requests of a step count as having drafts of the step's longest length, which is so under uniform draft lengths.
    """
    steps = shard.steps
    if not steps["num_draft_tokens"].any():
        return None
    rates = _by_position(steps, shard.report.get("num_accepted_tokens_per_pos") or [])
    return AcceptanceRates(rates, over_time=_over_time(steps, np.array(rates)))


def _by_position(steps: Steps, accepted: Sequence[int]) -> list[float]:
    """P(draft j is right | those before it are), of each position that was reached."""
    drafts, lengths = steps["num_drafts"], steps["max_draft_len"]
    rates: list[float] = []
    reached = drafts.sum()
    for position in range(int(lengths.max())):
        longer = drafts[lengths > position].sum()
        trials = reached * longer / max(drafts[lengths >= position].sum(), 1.0)
        right = accepted[position] if position < len(accepted) else 0
        if trials < 1:
            break
        rates.append(float(min(1.0, right / trials)))
        reached = float(right)
    return rates or [0.0]


def _over_time(steps: Steps, rates: Float64) -> list[list[float]]:
    """Points [generated tokens, factor] that make the predicted acceptance of each stretch the recorded one."""
    drafts = steps["num_drafts"]
    num_points = int(min(MAX_POINTS, drafts.sum() // DRAFTS_PER_POINT))
    if num_points < 2:
        return []
    generated = np.cumsum(steps["num_generation_tokens"])
    stretch = np.minimum((np.cumsum(drafts) - 1) * num_points // drafts.sum(), num_points - 1).astype(int)
    points = []
    for number in range(num_points):
        inside = stretch == number
        if drafts[inside].any():
            weights = drafts[inside]
            accepted = steps["num_accepted_tokens"][inside].sum()
            factor = _factor(rates, weights, steps["max_draft_len"][inside], accepted)
            points.append([float(np.average(generated[inside], weights=weights)), factor])
    return points


def _factor(rates: Float64, drafts: Float64, lengths: Float64, accepted: float) -> float:
    """What to multiply all rates by so that so many drafts of these lengths are accepted."""
    width = int(lengths.max())
    rates = np.append(rates, np.full(max(0, width - len(rates)), rates[-1]))[:width]
    at_length = np.bincount(lengths.astype(int), drafts, minlength=width + 1)
    low, high = 0.0, 1.0 / max(float(rates.min()), 1e-3)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        by_length = np.append(0.0, np.cumsum(np.cumprod(np.minimum(rates * middle, 1.0))))
        low, high = (middle, high) if (at_length * by_length).sum() < accepted else (low, middle)
    return low
