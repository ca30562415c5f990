"""Accepted drafts against expected ones: what the acceptance model gets wrong evens out over a batch."""

from __future__ import annotations

MEMORY = 0.97
PRIOR = 20.0
"""Accepted and expected drafts of the last 30 steps or so count, and so many of each."""
LEAST, MOST = 0.8, 1.25


class Surplus:
    """Follows the ratio of the two; requests may differ more than can be known of them yet."""

    def __init__(self) -> None:
        self._accepted = self._expected = PRIOR

    @property
    def ratio(self) -> float:
        """Accepted drafts for each expected one, 0.8 to 1.25."""
        return min(max(self._accepted / self._expected, LEAST), MOST)

    def observe(self, num_accepted: float, num_expected: float) -> None:
        """A step; 0 and 0 where nothing was verified."""
        self._accepted = MEMORY * self._accepted + (1 - MEMORY) * PRIOR + num_accepted
        self._expected = MEMORY * self._expected + (1 - MEMORY) * PRIOR + num_expected
