"""Step states and feedback made of plain numbers."""

import numpy as np

from specrun.policies import StepFeedback, StepState


def state_of(
    num_running: int = 4,
    num_prefills: int = 0,
    max_draft_tokens: int = 5,
    num_waiting: int = 0,
    rolling_acceptance_rate: float | None = None,
) -> StepState:
    """So many requests that decode, each with 100 tokens."""
    zeros = np.zeros(num_running, dtype=np.int64)
    return StepState(
        step=0,
        num_running=num_running,
        num_scheduled=num_running + num_prefills,
        num_waiting=num_waiting,
        num_prefill_tokens=16 * num_prefills,
        kv_usage=0.5,
        max_draft_tokens=max_draft_tokens,
        drafter="ngram",
        rolling_acceptance_rate=rolling_acceptance_rate,
        slots=np.arange(num_running, dtype=np.int32),
        context_lens=np.full(num_running, 100, dtype=np.int32),
        groups=np.zeros(num_running, dtype=np.int32),
        num_draft_tokens=zeros,
        num_accepted_tokens=zeros,
    )


def feedback_of(state: StepState, drafted: np.ndarray, accepted: np.ndarray) -> StepFeedback:
    """All that was drafted was verified; drafted and accepted [R]."""
    return StepFeedback(
        state=state,
        num_proposed_tokens=drafted.astype(np.int32),
        num_draft_tokens=drafted.astype(np.int32),
        num_accepted_tokens=accepted.astype(np.int32),
        num_matched_tokens=accepted.astype(np.int32),
        num_committed_tokens=(accepted + 1).astype(np.int32),
        num_batched_tokens=int(drafted.sum()) + state.num_running,
        draft_s=0.001,
        verify_s=0.01,
        other_s=0.001,
    )
