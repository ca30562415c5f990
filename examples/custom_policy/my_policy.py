"""Speculate in the tail of a job only: while rows wait, the batch is full and the device has no time to spare."""

import numpy as np

from specrun.policies import SpecDecision, SpeculationPolicy, StepState


class TailPolicy(SpeculationPolicy):
    """Once no request waits, those that still run share a fixed number of draft tokens."""

    def __init__(self, tokens_per_step: int = 64) -> None:
        self.tokens_per_step = tokens_per_step

    def decide(self, state: StepState) -> SpecDecision:
        """More drafts for each the fewer run; a single one where most of a request's drafts have been refused."""
        if state.num_waiting > 0:
            return SpecDecision.uniform(state, 0, f"{state.num_waiting} waiting")
        each = min(state.max_draft_tokens, self.tokens_per_step // max(state.num_running, 1))
        refused = (state.num_draft_tokens >= 20) & (state.num_accepted_tokens < 0.2 * state.num_draft_tokens)
        budget = np.where(refused, min(each, 1), each).astype(np.int32)
        return SpecDecision(budget, f"tail of {state.num_running}: {each} each")
