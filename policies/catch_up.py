"""How far a drafter has fallen behind the requests that it was not asked about."""

from __future__ import annotations

import numpy as np

from .base import Int32, StepFeedback, StepState
from .cost_model import stood_by


class CatchUp:
    """Tokens of the request in each slot that the drafter has run over."""

    def __init__(self) -> None:
        self._seen = np.zeros(0, np.int32)
        self._held = np.zeros(0, np.int32)
        """[slots] tokens that the request in a slot held last."""

    def behind(self, state: StepState) -> Int32:
        """[R] tokens that the drafter would have to read of each request before it can draft for it."""
        slots, context = state.slots.astype(np.intp), state.context_lens
        try:
            held = self._held.take(slots)
        except IndexError:
            more = 2 * (int(slots.max()) + 1) - len(self._held)
            self._seen, self._held = np.pad(self._seen, (0, more)), np.pad(self._held, (0, more))
            held = self._held.take(slots)
        behind = context - self._seen.take(slots)
        np.copyto(behind, context, where=context < held)  # fewer tokens than before: another request
        return behind

    def observe(self, feedback: StepFeedback, budgets: Int32 | None) -> float:
        """Follow a step; returns how many tokens the requests that were drafted for were behind. budgets: [R] drafts
        asked for; None: none."""
        slots, context = feedback.state.slots.astype(np.intp), feedback.state.context_lens
        left, caught_up = self.behind(feedback.state), 0.0
        if budgets is not None:
            still_left = left * (budgets == 0)
            left, caught_up = still_left, float(left.sum() - still_left.sum())
        elif stood_by(feedback):
            left.fill(0)
        self._seen[slots] = context - left
        self._held[slots] = context
        return caught_up
