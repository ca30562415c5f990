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
        slots, context = state.slots, state.context_lens
        if (top := int(slots.max(initial=-1)) + 1) > len(self._seen):
            self._seen, self._held = (np.pad(a, (0, 2 * top - len(a))) for a in (self._seen, self._held))
        behind = context - self._seen.take(slots)
        is_other = context < self._held.take(slots)  # fewer tokens than before: another request
        np.copyto(behind, context, where=is_other)
        return behind

    def observe(self, feedback: StepFeedback, budgets: Int32 | None) -> float:
        """Follow a step; returns how many tokens the requests that were drafted for were behind. budgets: [R] drafts
        asked for; None: none."""
        slots, context = feedback.state.slots, feedback.state.context_lens
        left, caught_up = self.behind(feedback.state), 0.0
        if budgets is not None:
            asked = budgets > 0
            caught_up = float(left @ asked)
            left[asked] = 0
        elif stood_by(feedback):
            left[:] = 0
        self._seen[slots] = context - left
        self._held[slots] = context
        return caught_up
