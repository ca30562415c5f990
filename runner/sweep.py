"""A policy that only measures: each draft length in turn, whatever comes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..policies.base import Int32, Proposals, SpecDecision, SpeculationPolicy, StepFeedback, StepState
from ..policies.catch_up import CatchUp
from ..policies.cost_model import CostModel


@dataclass(frozen=True, slots=True)
class Sample:
    """A step without prefill, as it was measured."""

    batch: int
    num_draft_tokens: int
    """Asked for, for each request."""
    num_rows: int
    num_context_tokens: int
    step_s: float
    """All but drafting."""
    draft_s: float


class Sweep(SpeculationPolicy):
    """Asks for each draft length in turn, step by step, so that whatever makes the machine slow meets them alike."""

    def __init__(self, costs: CostModel, lengths: Sequence[int], num_steps: int) -> None:
        """num_steps: for each length, at a full batch."""
        self.costs, self.samples = costs, list[Sample]()
        self._lengths, self._num_steps = lengths, num_steps
        self._turn, self._asked = 0, 0
        self._budgets: Int32 | None = None
        self._catch_up = CatchUp()

    def decide(self, state: StepState) -> SpecDecision:
        """The next length for all."""
        self._asked = self._lengths[self._turn % len(self._lengths)]
        self._budgets = None
        return SpecDecision.uniform(state, self._asked, "calibrate")

    def trim(self, proposals: Proposals) -> Int32:
        """All that was found."""
        self._budgets = proposals.num_budgeted_tokens
        return proposals.num_draft_tokens

    def observe(self, feedback: StepFeedback) -> None:
        """Teach the cost model and keep the step."""
        state = feedback.state
        behind = self._catch_up.observe(feedback, self._budgets)
        nobody = np.zeros(state.num_running, np.int32)
        self.costs.observe(feedback, nobody if self._budgets is None else self._budgets, behind)
        self._turn += 1
        if not state.num_prefill_tokens:
            step_s = feedback.verify_s + feedback.other_s
            rows, context = feedback.num_batched_tokens, int(state.context_lens.sum())
            self.samples.append(Sample(state.num_running, self._asked, rows, context, step_s, feedback.draft_s))

    def is_enough(self, batch: int) -> bool:
        """Whether each length had its steps at this batch size."""
        full = Counter(sample.num_draft_tokens for sample in self.samples if sample.batch == batch)
        return all(full[length] >= self._num_steps for length in self._lengths)
