"""What steps of a job that has run tell about the cost of others."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from ..base import Int32
from .surface import NO_GRAPHS, CostSurface, Float64, pad

MAX_KNOTS = 16
"""Row counts at which the curve may bend."""
SMOOTHNESS = 1e-3
"""Weight of the bends against a step's squared error: neighbours help each other where there are few steps."""
ROUNDS = 4
"""Of weighing down steps that cost far more than predicted, such as those that compile or wait for another process."""
OUTLIER = 5.0
"""Standard errors beyond which a step counts as one at that distance."""


@dataclass(frozen=True)
class RecordedSurface(CostSurface):
    """Piecewise linear in the rows, with slopes for requests, tokens of context and prefill tokens, none negative.
    Past the last recorded row count the curve goes on by its mean slope over the upper half."""

    knots: Float64
    """[B] ascending row counts."""
    seconds: Float64
    """[B] at the knots."""
    slopes: Float64
    """[3] seconds for each decoding request, token of context and prefill token."""
    error: float = 0.0
    """Median of |fitted / recorded - 1| over the steps it was made from."""
    capture_sizes: Int32 = field(default_factory=lambda: NO_GRAPHS)
    noise: float = 0.0

    @classmethod
    def from_steps(
        cls,
        num_rows: ArrayLike,
        num_requests: ArrayLike,
        num_context_tokens: ArrayLike,
        num_prefill_tokens: ArrayLike,
        seconds: ArrayLike,
        capture_sizes: Int32 = NO_GRAPHS,
    ) -> RecordedSurface:
        """Fit the columns of metrics/steps, [S] each: num_batched_tokens, num_running, num_context_tokens,
        num_prefill_tokens, and the seconds without drafting. Raises ValueError for no step."""
        rows, measured = pad(num_rows, capture_sizes), np.asarray(seconds, np.float64)
        if not len(measured):
            raise ValueError("there is no step to learn from")
        others = [np.asarray(column, np.float64) for column in (num_requests, num_context_tokens, num_prefill_tokens)]
        knots = _knots(rows)
        curve, slopes, fitted = _solve(knots, rows, np.stack(others, axis=1), measured)
        error = float(np.median(np.abs(fitted / np.maximum(measured, 1e-12) - 1)))
        return cls(knots, curve, slopes, error, capture_sizes)

    def step_s(
        self,
        num_rows: ArrayLike,
        num_requests: ArrayLike,
        num_context_tokens: ArrayLike,
        num_prefill_tokens: ArrayLike,
        progress: float = 0.0,
    ) -> Float64:
        """As CostSurface.step_s, of one step or of many; at least a tenth of the cheapest recorded row count."""
        rows = pad(num_rows, self.capture_sizes)
        seconds = np.interp(rows, self.knots, self.seconds) + np.maximum(rows - self.knots[-1], 0) * self._last_slope
        per_request, per_token, per_prefill = self.slopes
        seconds = seconds + np.multiply(num_requests, per_request) + np.multiply(num_context_tokens, per_token)
        seconds = seconds + np.multiply(num_prefill_tokens, per_prefill)
        return np.asarray(np.maximum(seconds, 0.1 * self.seconds[0]), np.float64)

    @property
    def _last_slope(self) -> float:
        first = len(self.knots) // 2
        width = float(self.knots[-1] - self.knots[first])
        return float(self.seconds[-1] - self.seconds[first]) / width if width > 0 else 0.0


def _knots(rows: Float64) -> Float64:
    """Recorded row counts, spread so that each has as many of them around it."""
    distinct = np.unique(rows)
    if len(distinct) > MAX_KNOTS:
        places = np.linspace(0, len(distinct) - 1, MAX_KNOTS).round().astype(int)
        distinct = distinct[places]
    return distinct.astype(np.float64)


def _solve(knots: Float64, rows: Float64, others: Float64, seconds: Float64) -> tuple[Float64, Float64, Float64]:
    """[B] the curve at the knots, [3] the slopes and [S] the fitted seconds, by non-negative least squares with
    outliers weighed down. More rows never cost less."""
    widths = np.diff(knots)
    ramps = np.clip(rows[:, None] - knots[:-1], 0, widths)
    design = np.concatenate([np.ones((len(rows), 1)), ramps, others], axis=1)
    scale = np.maximum(design.max(axis=0), 1e-12)
    design = design / scale
    penalty = _bends(knots, scale[1 : len(knots)]) * np.sqrt(SMOOTHNESS * len(rows))
    penalty = np.pad(penalty, ((0, 0), (1, others.shape[1])))
    weights = np.ones(len(rows))
    for _ in range(ROUNDS):
        root = np.sqrt(weights)
        found = non_negative(
            np.concatenate([design * root[:, None], penalty]), np.append(seconds * root, np.zeros(len(penalty)))
        )
        residuals = seconds - design @ found
        spread = 1.4826 * np.median(np.abs(residuals)) + 1e-9
        weights = np.minimum(1, OUTLIER * spread / np.maximum(np.abs(residuals), 1e-12))
    fitted, found = design @ found, found / scale
    curve = found[0] + np.append(0, np.cumsum(found[1 : len(knots)] * widths))
    return curve, found[len(knots) :], fitted


def _bends(knots: Float64, scale: Float64) -> Float64:
    """[B - 2, B - 1] times the scaled slopes between the knots: how far each differs from the next, as seconds over the
    narrower of the two stretches."""
    num = max(len(knots) - 2, 0)
    bends = np.zeros((num, len(knots) - 1))
    place = np.arange(num)
    widths = np.minimum(np.diff(knots)[:-1], np.diff(knots)[1:])[:num]
    bends[place, place] = -widths
    bends[place, place + 1] = widths
    return bends / scale


def non_negative(matrix: Float64, target: Float64) -> Float64:
    """Least squares over x >= 0, by Lawson and Hanson's active set (Solving Least Squares Problems, chapter 23)."""
    square, right = matrix.T @ matrix, matrix.T @ target
    square[np.diag_indices_from(square)] += 1e-9 * max(float(np.trace(square)) / len(square), 1e-300)
    tolerance = 1e-9 * max(float(np.abs(right).max(initial=0)), 1e-300)
    x = np.zeros(len(right))
    free = np.zeros(len(right), dtype=bool)
    for _ in range(3 * len(right)):
        gradient = np.where(free, -np.inf, right - square @ x)
        if gradient.max(initial=-np.inf) <= tolerance:
            break
        free[int(gradient.argmax())] = True
        while True:
            best = np.zeros(len(right))
            best[free] = np.linalg.solve(square[np.ix_(free, free)], right[free])
            stuck = free & (best <= 0)
            if not stuck.any():
                break
            share = float((x[stuck] / np.maximum(x[stuck] - best[stuck], 1e-300)).min())
            x = x + share * (best - x)
            free &= x > 1e-15 * max(float(x.max()), 1e-300)
            x[~free] = 0
        x = best
    return x
