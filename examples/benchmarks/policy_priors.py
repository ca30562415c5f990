"""Profiles that are wrong about what speculation costs, and what of a job is left when that should be mended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from specrun.policies import Proposals, SpecDecision, SpeculationPolicy, StepFeedback, StepState, make_policy
from specrun.policies.base import Int32
from specrun.policies.cost_model import CostModel
from specrun.policies.simulator import Distorted, Oracle, Result, Simulation, Workload, simulate

NUM_SWEEPS = 4
MENDED_AFTER = 500
"""Steps."""
SHORTEST_REST = 0.1
"""Share of a job's tokens that must be left for the rest of it to be judged."""


class Without(SpeculationPolicy):
    """No drafts, and a drafter that is let go."""

    def decide(self, state: StepState) -> SpecDecision:
        """0 for every request."""
        return SpecDecision(np.zeros(state.num_running, np.int32), "without", stand_by=False)


class HandOver(SpeculationPolicy):
    """One policy for the first 500 steps of a job, then another: the second takes over in the state that the first has
    brought about, and so its time for the rest can be compared with the first's own."""

    def __init__(self, first: SpeculationPolicy, then: SpeculationPolicy) -> None:
        self._first, self._then = first, then

    def attach(self, simulation: Simulation) -> None:
        """For an oracle."""
        if isinstance(self._then, Oracle):
            self._then.attach(simulation)

    def decide(self, state: StepState) -> SpecDecision:
        """By the one whose turn it is."""
        return self._of(state).decide(state)

    def trim(self, proposals: Proposals) -> Int32:
        """By the one whose turn it is."""
        return self._of(proposals.state).trim(proposals)

    def observe(self, feedback: StepFeedback) -> None:
        """To the one whose step it was."""
        self._of(feedback.state).observe(feedback)

    def _of(self, state: StepState) -> SpeculationPolicy:
        return self._first if state.step < MENDED_AFTER else self._then


def rest_s(
    workload: Workload, seed: int, whole: Result, first: Callable[[], SpeculationPolicy], fixed: int
) -> dict[str, float]:
    """Seconds of a job's steps from the 501st on, once `first` has run 500: by policy that takes over then.

    whole: the run of `first` to the job's end. fixed: the best fixed draft length of the whole job, 0 as never.
    The keys are self, never, oracle and fixed. Empty where less than a tenth of the tokens is left.
    """
    if whole.num_steps <= MENDED_AFTER or whole.progress[MENDED_AFTER] > 1 - SHORTEST_REST:
        return {}
    best = make_policy("always", num_draft_tokens=fixed) if fixed else Without()
    others = {"never": Without(), "oracle": Oracle(), "fixed": best}
    found = {"self": float(whole.seconds[MENDED_AFTER:].sum())}
    for name, policy in others.items():
        found[name] = float(simulate(workload, HandOver(first(), policy), seed).seconds[MENDED_AFTER:].sum())
    return found


def wrong_profile(workload: Workload, factor: float) -> dict[str, Any]:
    """CostModel.to_json() of a sweep over batch sizes and draft lengths on a machine where drafting, and every step of
    more rows than the batch has requests, takes `factor` times as long as on the workload's.

    One factor for all steps would change no decision: what misleads is the price of drafts against that of plain steps.
    """
    surface = Distorted(workload.surface, cliff=(workload.max_num_seqs, factor))
    drafting = workload.draft_cost
    cost = CostModel(surface.capture_sizes)
    context = float(np.mean(workload.prompt_lens) + np.mean(workload.output_lens) / 2)
    sizes = np.unique(np.geomspace(1, workload.max_num_seqs, 8).astype(int)).tolist()
    cells = [(size, k) for size in sizes for k in range(workload.max_draft_tokens + 1)]
    rng = np.random.default_rng(0)
    for index in np.concatenate([rng.permutation(len(cells)) for _ in range(NUM_SWEEPS)]):
        size, k = cells[index]
        state = _state(workload, surface, size, context)
        budgets = np.full(size, k, np.int32)
        draft_s = float(
            drafting.draft_s(budgets, state.context_lens) + drafting.stand_by_s(budgets, state.context_lens)
        )
        step_s = float(surface.step_s(size * (1 + k), size, size * context, 0))
        cost.observe(_feedback(state, budgets, factor * draft_s, step_s), budgets)
    return cost.to_json()


def _state(workload: Workload, surface: Distorted, size: int, context: float) -> StepState:
    zeros = np.zeros(size, np.int64)
    return StepState(
        step=0,
        num_running=size,
        num_scheduled=size,
        num_waiting=0,
        num_prefill_tokens=0,
        kv_usage=0.5,
        max_draft_tokens=workload.max_draft_tokens,
        drafter=workload.draft_cost.kind,
        rolling_acceptance_rate=None,
        slots=np.arange(size, dtype=np.int32),
        context_lens=np.full(size, int(context), np.int32),
        groups=np.zeros(size, np.int32),
        num_draft_tokens=zeros,
        num_accepted_tokens=zeros,
        capture_sizes=surface.capture_sizes,
    )


def _feedback(state: StepState, budgets: np.ndarray, draft_s: float, step_s: float) -> StepFeedback:
    zeros = np.zeros_like(budgets)
    return StepFeedback(
        state=state,
        num_proposed_tokens=budgets,
        num_draft_tokens=budgets,
        num_accepted_tokens=zeros,
        num_matched_tokens=zeros,
        num_committed_tokens=zeros + 1,
        num_batched_tokens=int(budgets.sum()) + state.num_running,
        draft_s=draft_s,
        verify_s=step_s,
        other_s=0.0,
    )
