"""TensorRT-LLM's draft_len_schedule: a draft length up to each batch size, and none above the largest."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from ...base import SpecDecision, SpeculationPolicy, StepState
from ...options import whole_number

EXAMPLE_SCHEDULE = {4: 4, 8: 2, 32: 1}
"""The schedule that TensorRT-LLM's documentation and tests show; there is no default one."""


class TensorrtSchedule(SpeculationPolicy):
    """The length of the smallest key that the batch does not exceed; 0 above the largest key.

    Source: TensorRT-LLM pull request 10860 and tests/unittest/_torch/speculative (test_min_runtime_draft_len.py).
    Documented: {4: 4, 8: 2, 32: 1} is 4 for batches of 1 to 4, 2 for 5 to 8, 1 for 9 to 32 and 0 from 33; lengths are
    cut to max_draft_len; some modes of one engine never go below min_runtime_draft_len 1, since their drafter would
    fall behind, others keep the drafter running instead. Our reading: the batch is all requests of the step, prefills
    included (the executor counts its active requests), and the drafter is kept ready at length 0.

    draft_len_schedule: {largest batch size: draft length}, sizes of at least 1, lengths of at least 0.
    min_runtime_draft_len: shortest length, 0 or more.
    Raises ValueError naming the entry that is wrong.
    """

    def __init__(self, draft_len_schedule: Mapping[int, int] | None = None, min_runtime_draft_len: int = 0) -> None:
        schedule = EXAMPLE_SCHEDULE if draft_len_schedule is None else draft_len_schedule
        if not isinstance(schedule, Mapping) or not schedule:
            raise ValueError(f"draft_len_schedule must map batch sizes to draft lengths, got {schedule!r}")
        for size, length in schedule.items():
            whole_number("draft_len_schedule batch size", size, 1)
            whole_number(f"draft_len_schedule[{size}]", length, 0)
        self._sizes = sorted(schedule)
        self._lengths = [schedule[size] for size in self._sizes] + [0]
        self._shortest = whole_number("min_runtime_draft_len", min_runtime_draft_len, 0)

    def decide(self, state: StepState) -> SpecDecision:
        """The same length for every request, by the size of the batch."""
        scheduled = self._lengths[bisect_left(self._sizes, state.num_scheduled)]
        length = min(max(scheduled, self._shortest), state.max_draft_tokens)
        return SpecDecision.uniform(state, length, f"batch {state.num_scheduled}: {length}")
