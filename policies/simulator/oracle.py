"""The batch-uniform myopic oracle: the bound that policies are measured against."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..base import Int32, SpecDecision, SpeculationPolicy, StepState
from .simulation import Simulation

Float64 = NDArray[np.float64]
CATCH_UP_STEPS = 64
"""Steps, or those that a request has left where they are fewer, over which what it has to catch up is spread when it is
weighed; it is paid at once all the same."""


class Oracle(SpeculationPolicy):
    """Knows the true odds and the true seconds, not the coins: each step it takes the one draft length for all that is
    best for this step, and pays for standing by, catching up and drafting like everyone.

    The best has the most progress a second, where

        progress is exp(mean over requests of log(expected tokens)): a token is worth more to a request that gets few of
            them, since it is the number of its steps that has to shrink. With equal requests this is the number of
            tokens; with unequal ones the plain sum favours those that are easy, which leaves the hard ones behind and
            loses up to 2 % to a fixed length.
        seconds are those of the step without what its prefill adds at draft length 0, which has to be paid at any
            length; left in, it makes drafts look cheap and loses up to 4 %. Where prompts are what the job waits for,
            it is the other way round: a step is there for its prefill, and only what the decodes add to it counts.

    While off it stands by only where that is cheaper than reading the step's tokens later.
    """

    def __init__(self) -> None:
        self._simulation: Simulation | None = None

    def attach(self, simulation: Simulation) -> None:
        """Look at this run."""
        self._simulation = simulation

    def decide(self, state: StepState) -> SpecDecision:
        """The best of 0 to max_draft_tokens."""
        if self._simulation is None:
            raise ValueError("an oracle decides in a simulation only")
        simulation = self._simulation
        budgets = np.minimum(np.arange(state.max_draft_tokens + 1, dtype=np.int32)[:, None], simulation.limits)
        tokens, num_rows = _expected(simulation, state, budgets)
        stands_by = _stands_by(simulation, state)
        seconds = _seconds(simulation, state, budgets, tokens, num_rows, stands_by)
        best = int(np.argmax(tokens / (seconds - _for_prefill_s(simulation, state))))
        if _is_prefill_bound(simulation, state, float(tokens[best])):
            prefill = state.num_prefill_tokens
            alone = float(simulation.workload.surface.step_s(prefill, 0, 0, prefill, simulation.progress))
            best = int(np.argmax(tokens / np.maximum(seconds - alone, 1e-9)))
        return SpecDecision(budgets[best], f"oracle {best}", stand_by=stands_by)


def _expected(simulation: Simulation, state: StepState, budgets: Int32) -> tuple[Float64, Float64]:
    """Geometric mean of the requests' tokens, and rows of the step, for budgets [K + 1, R]: two arrays [K + 1]."""
    batching, slots = simulation.batching, simulation.decodes
    held = batching.num_tokens[slots]
    longest = int(budgets[-1].max(initial=0))
    survival, available = simulation.guesser.expected(
        batching.rows[slots], held - batching.prompts[slots], held, simulation.progress, longest
    )
    left = np.minimum(batching.ends[slots] - held - 1, budgets[-1])
    survival *= np.arange(longest) < left[:, None]
    tokens = np.ones(len(budgets))
    tokens[1 : longest + 1] = np.exp(np.log1p(np.cumsum(survival, axis=1)).mean(axis=0))
    tokens[longest + 1 :] = tokens[longest]
    return tokens, state.num_running + budgets @ available + state.num_prefill_tokens


def _seconds(
    simulation: Simulation, state: StepState, budgets: Int32, tokens: Float64, num_rows: Float64, stands_by: bool
) -> Float64:
    """[K + 1] of the step with each of the budgets."""
    workload, slots = simulation.workload, simulation.decodes
    step_s, cost = workload.surface.step_s, workload.draft_cost
    num_running, prefill, context = state.num_running, state.num_prefill_tokens, simulation.num_context_tokens
    rows = np.rint(num_rows).astype(np.int64)
    seconds = step_s(rows, num_running, context, prefill, simulation.progress)
    seconds[0] *= 1 + cost.off_tax
    seconds = seconds + cost.draft_s(budgets, state.context_lens)
    if stands_by:
        seconds += cost.stand_by_s(budgets, state.context_lens)
    elif cost.has_weights:
        behind = simulation.batching.num_behind[slots]
        if behind.any():
            left = simulation.batching.ends[slots] - simulation.batching.num_tokens[slots]
            num_steps = np.clip(left / tokens[:, None], 1, CATCH_UP_STEPS)
            seconds += ((budgets > 0) * behind / num_steps).sum(axis=1) * cost.catch_up_s_per_token
    return np.asarray(seconds, np.float64)


def _for_prefill_s(simulation: Simulation, state: StepState) -> float:
    """What the prefill adds to the step without drafts."""
    prefill, num_running, context = state.num_prefill_tokens, state.num_running, simulation.num_context_tokens
    if not prefill:
        return 0.0
    step_s, progress = simulation.workload.surface.step_s, simulation.progress
    rows = np.array([num_running + prefill, num_running])
    both = float(step_s(rows[:1], num_running, context, prefill, progress)[0])
    return max(0.0, both - float(step_s(rows[1:], num_running, context, 0, progress)[0]))


def _is_prefill_bound(simulation: Simulation, state: StepState, tokens: float) -> bool:
    """Whether the prompts that are left need more steps than the outputs, at so many tokens a request and step."""
    workload, batching = simulation.workload, simulation.batching
    room = workload.max_num_batched_tokens - state.num_running
    if state.num_prefill_tokens < room:
        return False
    tokens_left = (1 - simulation.progress) * workload.num_output_tokens
    return bool(batching.num_prefill_left / max(1, room) > tokens_left / (batching.num_running * tokens))


def _stands_by(simulation: Simulation, state: StepState) -> bool:
    cost = simulation.workload.draft_cost
    alone = cost.stand_by_s(np.zeros(state.num_running, np.int32), state.context_lens)
    return bool(alone < state.num_running * cost.catch_up_s_per_token)
