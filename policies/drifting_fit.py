"""Linear regression that goes on for ever: a Kalman filter over a machine's clock, which drifts, jumps and hiccups."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]

DRIFT = 0.005
"""Standard deviation, in a step, by which the whole machine gets slower or faster: a hot chip, a busy neighbour."""
LOCAL_DRIFT = 0.001
"""The same for one coefficient alone."""
FIRST_NOISE = 0.2
LEAST_NOISE, MOST_NOISE = 0.01, 0.5
NOISE_STEP = 1.06
"""Factor by which an observation moves the noise up or down."""
CLIP = 2.5
"""An observation pulls no harder than one that is off by so many standard deviations."""
ALWAYS_ODD = 3.0
"""So many times what was predicted is odd however little is known: compilation costs far more than that."""
ODD_IN_A_ROW = 3
"""Odd slow observations of one place that make a new level. Nothing is fast by accident, so that takes fewer."""
FAST_IN_A_ROW = 2
LEVEL_SHARES = {True: 0.3, False: 3.0}
"""The doubt that a slow or a fast new level casts on everything, against that on this place and those above it alone.
What has become slower may be a limit passed, such as the last captured graph; what has become faster was measured in a
bad moment, and so was the rest."""


class DriftingFit:
    """seconds = x . theta + noise, with noise in proportion to the seconds, learned one observation at a time.

    theta [d] in seconds drifts, mostly all at once, so the filter's covariance grows along theta itself in each step
    (a random walk of the level, Kalman 1960). Innovations are clipped as Huber's estimator does it. What is odd is
    left aside until it comes several times in a row at one place (a size of step), and then believed.
    """

    def __init__(self, theta: Float64, covariance: Float64, lower: Float64, num_places: int = 1) -> None:
        """Prior mean [d] and covariance [d, d] in seconds and seconds squared; lower [d] bounds theta from below."""
        self.theta, self.covariance, self.lower = theta, np.ascontiguousarray(covariance), lower
        self._diagonal = self.covariance.reshape(-1)[:: len(theta) + 1]  # a view
        self._left, self._right = np.empty((2, len(theta))), np.empty((2, len(theta)))
        self.noise = FIRST_NOISE
        """Relative standard deviation of an observation."""
        self.num_observed = 0
        self._odd: list[list[float]] = [[] for _ in range(num_places)]  # seconds / predicted, the last few of a place

    def observe(
        self, x: Float64, seconds: float, place: int = 0, tail: slice = slice(None), doubt: float = 1.0
    ) -> float:
        """Learn from x [d] having taken so many seconds; doubt multiplies its noise. Returns what was
        predicted.

        place: which size of step this is; tail: the coefficients on which a new level there would bear.
        """
        theta = self.theta
        predicted = max(float(x @ theta), 1e-12)
        noise_var = (self.noise * doubt * predicted) ** 2
        gain = self._gain(x, predicted)
        model_var = float(x @ gain)
        miss = seconds - predicted
        limit = CLIP * (model_var + noise_var) ** 0.5
        if abs(miss) <= limit and seconds <= ALWAYS_ODD * predicted:
            self._odd[place].clear()
        elif (level := self._level(place, seconds / predicted)) is not None:
            miss = level * predicted - predicted
            self._expect(x, miss, tail)
            gain = self._gain(x, predicted)
            model_var = float(x @ gain)
        elif seconds > ALWAYS_ODD * predicted:
            return predicted
        else:
            miss = math.copysign(limit, miss)
        self._update(x, gain, miss, model_var + noise_var)
        self.num_observed += 1
        # The noise moves until half of all misses are within 0.67 of it, as of a normal one; a spike counts once.
        is_within = abs(miss) < 0.67 * (model_var + noise_var) ** 0.5
        self.noise = min(max(self.noise * NOISE_STEP ** (-1 if is_within else 1), LEAST_NOISE), MOST_NOISE)
        return predicted

    def _gain(self, x: Float64, predicted: float) -> Float64:
        """[d] the covariance, as it will have grown by drift, times x."""
        gain = self.covariance @ x
        gain += self.theta * (DRIFT * DRIFT * predicted)
        return gain

    def _update(self, x: Float64, gain: Float64, miss: float, total_var: float) -> None:
        """Kalman's update; growth by drift and loss by what is learned are one product of rank 2."""
        left, right = self._left, self._right
        np.multiply(self.theta, DRIFT, out=left[0])
        np.multiply(gain, total_var**-0.5, out=left[1])
        right[0] = left[0]
        np.negative(left[1], out=right[1])
        self.covariance += left.T @ right
        self._diagonal += (LOCAL_DRIFT * x * self.theta) ** 2
        self.theta += gain * (miss / total_var)
        self._bound()

    def _bound(self) -> None:
        """Keep theta above its bounds by the least change in the metric of the covariance: to cut one alone would
        undo what was learned of its sum with others."""
        for _ in range(3):
            short = self.theta - self.lower
            worst = int(short.argmin())
            if short[worst] >= 0:
                return
            column = self.covariance[:, worst]
            self.theta -= column * (short[worst] / column[worst])
        np.maximum(self.theta, self.lower, out=self.theta)

    def _level(self, place: int, ratio: float) -> float | None:
        """The new level, as a ratio to what is predicted, once odd ratios on one side of 1 have come often enough."""
        odd = self._odd[place]
        if odd and (odd[-1] > 1) != (ratio > 1):
            odd.clear()
        odd.append(ratio)
        if len(odd) < (ODD_IN_A_ROW if ratio > 1 else FAST_IN_A_ROW):
            return None
        level = min(odd) if ratio > 1 else max(odd)
        odd.clear()
        return level

    def _expect(self, x: Float64, miss: float, tail: slice) -> None:
        """Widen the covariance so that a miss of so many seconds is no surprise, on the tail."""
        theta, covariance = self.theta, self.covariance
        local = np.zeros(len(theta))
        local[tail] = theta[tail]
        for direction, share in ((local, 1.0), (theta, LEVEL_SHARES[miss > 0])):
            along = float(x @ direction)
            if along > 0:
                covariance += np.multiply.outer(direction * (share * miss / along) ** 2, direction)

    def loosen(self, share: float) -> None:
        """Doubt everything by this share: what was learned elsewhere or earlier may not hold."""
        spread = share * self.theta
        self.covariance += np.multiply.outer(spread, spread)
        self.covariance += np.diag((spread / 2) ** 2)

    def to_json(self) -> dict[str, Any]:
        """All that is learned, in JSON types."""
        return {
            "theta": self.theta.tolist(),
            "covariance": self.covariance.tolist(),
            "lower": self.lower.tolist(),
            "noise": self.noise,
            "num_observed": self.num_observed,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any], num_places: int = 1) -> DriftingFit:
        """What to_json gave."""
        theta, covariance, lower = (np.array(content[key], np.float64) for key in ("theta", "covariance", "lower"))
        fit = cls(theta, covariance, lower, num_places)
        fit.noise, fit.num_observed = float(content["noise"]), int(content["num_observed"])
        return fit
