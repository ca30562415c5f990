"""A cost model that has seen a few steps."""

import numpy as np

from specrun.policies.base import StepFeedback, StepState
from specrun.policies.cost_model import CostModel


def measured_costs() -> CostModel:
    """Of steps that take 10 ms and 1 ms for each row."""
    costs = CostModel()
    for rows in (1, 2, 4, 8, 16, 4, 2):
        costs.observe(_step(rows, 0.01 + 0.001 * rows))
    return costs


def _step(num_rows: int, seconds: float) -> StepFeedback:
    """One in which each row is a request that decodes."""
    each = np.full(num_rows, 20, np.int32)
    nothing = np.zeros(num_rows, np.int32)
    state = StepState(
        step=0,
        num_running=num_rows,
        num_scheduled=num_rows,
        num_waiting=0,
        num_prefill_tokens=0,
        kv_usage=0.1,
        max_draft_tokens=3,
        drafter="ngram",
        rolling_acceptance_rate=None,
        slots=np.arange(num_rows, dtype=np.int32),
        context_lens=each,
        groups=nothing,
        num_draft_tokens=nothing.astype(np.int64),
        num_accepted_tokens=nothing.astype(np.int64),
    )
    return StepFeedback(
        state=state,
        num_proposed_tokens=nothing,
        num_draft_tokens=nothing,
        num_accepted_tokens=nothing,
        num_matched_tokens=nothing,
        num_committed_tokens=nothing + 1,
        num_batched_tokens=num_rows,
        draft_s=0.0,
        verify_s=seconds,
        other_s=0.0,
    )
