"""Step states, feedback and decisions for the tests of policies."""

from collections.abc import Callable

import numpy as np
import pytest

from specrun.policies import SpecDecision, StepFeedback, StepState
from tests.policies.states import feedback_of, state_of


@pytest.fixture
def make_state() -> Callable[..., StepState]:
    """make_state(num_running=4, num_prefills=0, max_draft_tokens=5, num_waiting=0, rolling_acceptance_rate=None)."""
    return state_of


@pytest.fixture
def make_feedback() -> Callable[..., StepFeedback]:
    """make_feedback(state, drafted, accepted): arrays with one entry for each request."""
    return feedback_of


@pytest.fixture
def lengths() -> Callable[[SpecDecision], list[int]]:
    """The budgets of a decision as a list, once shape and dtype are checked."""

    def read(decision: SpecDecision) -> list[int]:
        assert decision.num_draft_tokens.dtype == np.int32
        assert decision.num_draft_tokens.ndim == 1
        return [int(length) for length in decision.num_draft_tokens]

    return read
