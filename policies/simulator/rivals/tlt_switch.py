"""TLT's switch for rollouts: speculation begins when the batch has stayed small for a while, and does not end."""

from __future__ import annotations

import numpy as np

from ...base import SpecDecision, SpeculationPolicy, StepState
from ...options import whole_number

NUM_CONSECUTIVE = 10
"""Decode batches in a row that must be small enough; a constant in the source."""


class TltSwitch(SpeculationPolicy):
    """Off until 10 decode batches in a row are at most bs_threshold; on from the step after, whatever follows.

    Source: TLT (arXiv 2511.16665), mit-han-lab/fastrl at bce3df7, third-party/sglang eagle_worker.py, with
    bs_threshold 32 and spec_steps 8 from its trainer configuration. Documented: a larger decode batch sets the count
    back to 0; the batch that completes the count still decodes plainly, and the requests then running go through
    prefill again so that the drafter has their KV; the switch is set back only when the idle server is flushed,
    between two rollouts. Our reading: a job is one rollout, so it is never set back; while off the drafter is let go
    and pays to catch up when the switch falls; the batch is the requests that decode, as prefill is a batch of its
    own there; 8 steps of a tree are a chain of 8. Its bandit over tree shapes is not part of this.

    bs_threshold: largest batch that counts, at least 1.
    num_draft_tokens: at least 1, cut to `StepState.max_draft_tokens`.
    Raises ValueError naming the key that is wrong.
    """

    def __init__(self, bs_threshold: int = 32, num_draft_tokens: int = 8) -> None:
        self._threshold = whole_number("bs_threshold", bs_threshold, 1)
        self._num_draft_tokens = whole_number("num_draft_tokens", num_draft_tokens, 1)
        self._num_small = 0
        self._on = False

    def decide(self, state: StepState) -> SpecDecision:
        """0 with the drafter let go, or the same length for every request once the switch has fallen."""
        if self._on:
            return SpecDecision.uniform(state, min(self._num_draft_tokens, state.max_draft_tokens), "switched on")
        if state.num_running:
            self._num_small = self._num_small + 1 if state.num_running <= self._threshold else 0
            self._on = self._num_small >= NUM_CONSECUTIVE
        reason = f"batch {state.num_running}, {self._num_small}/{NUM_CONSECUTIVE} at most {self._threshold}"
        return SpecDecision(np.zeros(state.num_running, np.int32), reason, stand_by=False)
