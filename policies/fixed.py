"""The two policies that look at nothing: never speculate, always speculate."""

from __future__ import annotations

from .base import SpecDecision, SpeculationPolicy, StepState
from .options import draft_length


class Never(SpeculationPolicy):
    """Plain decoding at every step."""

    def decide(self, state: StepState) -> SpecDecision:
        """0 for every request."""
        return SpecDecision.uniform(state, 0, "never")


class Always(SpeculationPolicy):
    """The same draft length for every request at every step.

    num_draft_tokens: at least 1, cut to `StepState.max_draft_tokens`; None: as many as that allows.
    Raises ValueError when it is anything else.
    """

    def __init__(self, num_draft_tokens: int | None = None) -> None:
        self._num_draft_tokens = draft_length(num_draft_tokens)

    def decide(self, state: StepState) -> SpecDecision:
        """num_draft_tokens for every request."""
        limit = state.max_draft_tokens
        budget = limit if self._num_draft_tokens is None else min(self._num_draft_tokens, limit)
        return SpecDecision.uniform(state, budget, f"always {budget}")
