"""TensorRT-LLM's acceptance-rate gate: speculation ends for good once acceptance falls below a threshold."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np

from ...base import SpecDecision, SpeculationPolicy, StepFeedback, StepState
from ...options import draft_length, share, whole_number
from .tensorrt_schedule import TensorrtSchedule


class TensorrtGate(SpeculationPolicy):
    """On until the mean acceptance rate of the last steps is below the threshold; then off, and never on again.

    Source: TensorRT-LLM pull request 12905 and tests/unittest/_torch/speculative/hw_agnostic/test_spec_gate.py.
    Documented: one sample for each step that speculates, accepted / drafted tokens over its batch; the verdict is
    the plain mean of the last acceptance_rate_window_size samples, once there are that many; strictly below
    acceptance_rate_threshold speculation is disabled for good. A draft_len_schedule may be set beside it. Our
    reading: a step in which nothing was drafted gives no sample, and a drafter that is never asked again is let go.

    acceptance_rate_window_size: samples, at least 1. The source has no default, 64 is ours.
    acceptance_rate_threshold: 0 to 1. The source has no default, 0.4 is ours.
    num_draft_tokens: at least 1, cut to `StepState.max_draft_tokens`; None: as many as that allows. The source has no
        default, 4 is the max_draft_len of its test.
    draft_len_schedule: as TensorrtSchedule's; None: num_draft_tokens at every batch size.
    Raises ValueError naming the key that is wrong.
    """

    def __init__(
        self,
        acceptance_rate_window_size: int = 64,
        acceptance_rate_threshold: float = 0.4,
        num_draft_tokens: int | None = 4,
        draft_len_schedule: Mapping[int, int] | None = None,
    ) -> None:
        window = whole_number("acceptance_rate_window_size", acceptance_rate_window_size, 1)
        self._threshold = share("acceptance_rate_threshold", acceptance_rate_threshold)
        self._num_draft_tokens = draft_length(num_draft_tokens)
        self._schedule = None if draft_len_schedule is None else TensorrtSchedule(draft_len_schedule)
        self._rates: deque[float] = deque(maxlen=window)
        self._disabled_by: str | None = None

    def decide(self, state: StepState) -> SpecDecision:
        """The same length for every request while on; 0, with the drafter let go, once disabled."""
        if self._disabled_by is not None:
            return SpecDecision(np.zeros(state.num_running, np.int32), self._disabled_by, stand_by=False)
        if self._schedule is not None:
            return self._schedule.decide(state)
        limit = state.max_draft_tokens
        length = limit if self._num_draft_tokens is None else min(self._num_draft_tokens, limit)
        return SpecDecision.uniform(state, length, f"gate open: {length}")

    def observe(self, feedback: StepFeedback) -> None:
        """Take the step's acceptance rate and judge, unless the gate has fallen already."""
        num_drafted = int(feedback.num_draft_tokens.sum())
        if num_drafted == 0 or self._disabled_by is not None:
            return
        self._rates.append(int(feedback.num_accepted_tokens.sum()) / num_drafted)
        if len(self._rates) == self._rates.maxlen:
            mean = sum(self._rates) / len(self._rates)
            if mean < self._threshold:
                self._disabled_by = f"disabled at {mean:.2f} < {self._threshold:.2f}"
