"""Numbers in, draft lengths out: what decides, at every step, how far to speculate. Standard library and numpy only."""

from .base import Proposals, SpecDecision, SpeculationPolicy, StepFeedback, StepState
from .registry import PolicyError, make_policy

__all__ = [
    "PolicyError",
    "Proposals",
    "SpecDecision",
    "SpeculationPolicy",
    "StepFeedback",
    "StepState",
    "make_policy",
]
