"""How far a drafter has fallen behind the requests that it was not asked about."""

from __future__ import annotations

import numpy as np

from .base import Int32, StepFeedback
from .cost_model import stood_by


class CatchUp:
    """Tokens of the request in each slot that the drafter has run over."""

    def __init__(self) -> None:
        self._seen = np.zeros(0, np.int32)
        self._held = np.zeros(0, np.int32)
        """[slots] tokens that the request in a slot held last."""

    def observe(self, feedback: StepFeedback, budgets: Int32 | None) -> float:
        """Follow a step; returns how many tokens the requests that were drafted for were behind. budgets: [R] drafts
        asked for; None: none."""
        slots, context = feedback.state.slots, feedback.state.context_lens
        if (top := int(slots.max(initial=-1)) + 1) > len(self._seen):
            self._seen, self._held = (np.pad(a, (0, 2 * top - len(a))) for a in (self._seen, self._held))
        seen = self._seen.take(slots)
        seen[context < self._held.take(slots)] = 0  # fewer tokens than before: another request
        behind = 0.0
        if budgets is not None:
            asked = budgets > 0
            behind = float((context - seen) @ asked)
            np.copyto(seen, context, where=asked)
        elif stood_by(feedback):
            seen = context
        self._seen[slots] = seen
        self._held[slots] = context
        return behind
