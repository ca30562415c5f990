"""What a step costs, drafting included, from the steps of a job that has run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..policies.simulator.recorded_surface import RecordedSurface, non_negative
from .recorded_steps import Steps

Float64 = NDArray[np.float64]

NEAR = 0.25
"""A row count is known where one was measured that differs by no more than this share."""
BLOCK = 16
"""Steps that are predicted together from those around them."""
DRAFTING_S = 2e-5
"""A step that spent less on drafts did not ask for any."""


@dataclass(frozen=True, slots=True)
class StepErrors:
    """How well seconds of steps are predicted by a fit to other steps."""

    total: float
    """Predicted over measured seconds of all of them, less 1."""
    p50: float
    """Of |predicted / measured - 1|, step by step."""
    p95: float


@dataclass(frozen=True, slots=True)
class RecordedCosts:
    """Seconds of a step. Sums over the recorded steps are right, since it is sums that are asked for."""

    surface: RecordedSurface
    """Without drafting."""
    measured: Float64
    """Row counts of the recorded steps."""
    drafting: Float64 | None
    """[4] seconds of a step that drafts, and for each request, each token of the longest draft and each of all drafts;
    None where no drafts were recorded."""

    @classmethod
    def fit(cls, steps: Steps) -> RecordedCosts:
        """Of at least one step."""
        rows, seconds = steps["num_batched_tokens"], steps.seconds - steps["draft_s"]
        columns = rows, steps["num_running"], steps["num_context_tokens"], steps["num_prefill_tokens"]
        surface = RecordedSurface.from_steps(*columns, seconds)
        scale = seconds.sum() / max(float(surface.step_s(*columns).sum()), 1e-12)
        surface = replace(surface, seconds=surface.seconds * scale, slopes=surface.slopes * scale)
        drafts = (steps["num_running"] > 0) & ((steps["draft_s"] > DRAFTING_S) | (steps["num_drafts"] > 0))
        drafting = _fit_drafting(steps, drafts) if drafts.any() else None
        return cls(surface, np.unique(rows), drafting)

    def step_s(
        self, num_rows: Any, num_requests: Any, num_context_tokens: Any, num_prefill_tokens: Any
    ) -> Float64 | float:
        """See StepCosts."""
        return self.surface.step_s(num_rows, num_requests, num_context_tokens, num_prefill_tokens)

    def draft_s(self, num_drafting: Any, longest: Any) -> Float64 | float | None:
        """See StepCosts."""
        if self.drafting is None:
            return None
        once, per_request, per_length, per_token = self.drafting
        requests, length = np.asarray(num_drafting, np.float64), np.asarray(longest, np.float64)
        return np.asarray(once + per_request * requests + (per_length + per_token * requests) * length, np.float64)

    def without_drafting(self) -> RecordedCosts:
        """See StepCosts."""
        return replace(self, drafting=None)

    def is_known(self, num_rows: int) -> bool:
        """See StepCosts."""
        return bool(np.abs(self.measured - num_rows).min() <= max(1.0, NEAR * num_rows))


def step_errors(steps: Steps) -> StepErrors | None:
    """Errors of RecordedCosts for each half of the steps, from the other half; None for too few steps."""
    number = np.arange(len(steps)) // BLOCK % 2
    if len(steps) < 4 * BLOCK:
        return None
    predicted = np.zeros(len(steps))
    for half in (0, 1):
        costs = RecordedCosts.fit(_where(steps, number != half))
        test = number == half
        predicted[test] = costs_of(costs, _where(steps, test))
    measured = steps.seconds
    errors = np.abs(predicted / measured - 1)
    p50, p95 = np.quantile(errors, [0.5, 0.95]).tolist()
    return StepErrors(float(predicted.sum() / measured.sum() - 1), p50, p95)


def costs_of(costs: RecordedCosts, steps: Steps) -> Float64:
    """[N] predicted seconds of these steps."""
    step_s = costs.step_s(
        steps["num_batched_tokens"], steps["num_running"], steps["num_context_tokens"], steps["num_prefill_tokens"]
    )
    drafts = (steps["draft_s"] > DRAFTING_S) & (steps["num_running"] > 0)
    draft_s = costs.draft_s(steps["num_running"], steps["max_draft_len"])
    return step_s + np.where(drafts, 0.0 if draft_s is None else draft_s, 0.0)


def _where(steps: Steps, mask: NDArray[np.bool_]) -> Steps:
    return Steps({name: column[mask] for name, column in steps.columns.items()})


def _fit_drafting(steps: Steps, drafts: NDArray[np.bool_]) -> Float64:
    """Seconds of drafting over [1, requests, longest, requests x longest], none negative."""
    some = _where(steps, drafts)
    requests, longest = some["num_running"], some["max_draft_len"]
    design = np.stack([np.ones(len(some)), requests, longest, requests * longest], axis=1)
    scale = np.maximum(design.max(axis=0), 1e-12)
    seconds = np.minimum(some["draft_s"], 20 * np.median(some["draft_s"]))
    ridge = np.eye(4) * 1e-3 * np.sqrt(len(some))
    found = non_negative(np.concatenate([design / scale, ridge]), np.append(seconds, np.zeros(4)))
    ratio = float(some["draft_s"].sum()) / max(float((design / scale @ found).sum()), 1e-12)
    return np.asarray(found / scale * ratio, np.float64)
