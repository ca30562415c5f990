"""How sure a drafter may be: acceptance counted by bin, so that a policy reads probabilities that this job measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class Calibration:
    """Measured acceptance by bin: P(draft token accepted | all before it were, bin).

    Old evidence fades with every trial of any bin. A bin that is no longer tried, because its rate looks too low to
    draft, so drifts back to its prior and is tried again: the job may have changed meanwhile.
    """

    def __init__(self, prior: Sequence[float] | NDArray[np.float64], weight: float = 2.0, decay: float = 1 - 2**-15):
        """prior: [B] rate that each bin starts from, worth `weight` trials. Each trial multiplies what was counted by
        decay.

        Raises ValueError.
        """
        self._prior = np.array(prior, dtype=np.float64)
        if self._prior.ndim != 1 or not ((self._prior >= 0) & (self._prior <= 1)).all():
            raise ValueError("prior must be a list of rates, each from 0 to 1")
        if weight <= 0 or not 0 < decay <= 1:
            raise ValueError(f"need weight > 0 and 0 < decay <= 1, got {weight} and {decay}")
        self._weight, self._decay = weight, decay
        self._accepted = np.zeros_like(self._prior)
        self._graded = np.zeros_like(self._prior)
        self._rates: NDArray[np.float64] | None = self._prior

    def rates(self) -> NDArray[np.float64]:
        """[B] acceptance of each bin; not to be written to."""
        if self._rates is None:
            self._rates = (self._accepted + self._weight * self._prior) / (self._graded + self._weight)
        return self._rates

    def observe(self, bins: NDArray[np.integer], accepted: NDArray[np.bool_]) -> None:
        """Count trials: bins [N] and whether each draft token was accepted [N].

        Give graded ones only: none after the first refusal of its request.
        """
        if not len(bins):
            return
        fade = self._decay ** len(bins)
        self._accepted *= fade
        self._graded *= fade
        self._graded += np.bincount(bins, minlength=len(self._prior))
        self._accepted += np.bincount(bins[accepted], minlength=len(self._prior))
        self._rates = None
