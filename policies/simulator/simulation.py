"""A job under a policy, step by step as the engine takes them, with seconds from a surface and coins for tokens."""

from __future__ import annotations

from collections import deque
from typing import Protocol, runtime_checkable

import numpy as np

from ..base import Int32, Int64, Proposals, SpecDecision, SpeculationPolicy, StepFeedback, StepState
from .acceptance_process import Guesser, Guesses
from .batching import Batch, Batching
from .result import Result, Steps
from .workload import Workload

ROLLING_WINDOW = 256
"""Graded drafts of the rolling acceptance rate, as in the engine."""


@runtime_checkable
class Informed(Protocol):
    """A policy that is told the truth, such as an oracle."""

    def attach(self, simulation: Simulation) -> None:
        """Called once, before the first step."""
        ...


def simulate(workload: Workload, policy: SpeculationPolicy, seed: int = 0, load_drafter: bool = True) -> Result:
    """Run the job to its end. `Never` with load_drafter=False is an engine without speculation.

    The coins depend on the seed, the row and the position in its output, and a step's noise on the seed and the step,
    so two policies meet the same ones. A policy learns: give each run a new one. Its own seconds are not counted.
    """
    simulation = Simulation(workload, policy, seed, load_drafter)
    while simulation.batching.has_unfinished:
        simulation.step()
    return simulation.result()


class Simulation:
    """One run; what it holds is the truth, which an Informed policy may read."""

    def __init__(self, workload: Workload, policy: SpeculationPolicy, seed: int, load_drafter: bool) -> None:
        self.workload = workload
        self.batching = Batching(workload, load_drafter)
        self.guesser: Guesser = workload.process.begin(workload.output_lens, seed)
        self.progress = 0.0
        """Share of the job's tokens that are done."""
        self.decodes: Int64 = np.zeros(0, np.int64)
        """[R] slots of the requests that decode in this step, in the state's order."""
        self.limits: Int32 = np.zeros(0, np.int32)
        """[R] longest draft that each of them can use."""
        self.num_context_tokens = 0
        """Tokens that they hold."""
        self.max_draft_tokens = workload.max_draft_tokens if load_drafter else 0
        self._policy = policy
        self._is_loaded = load_drafter
        self._steps = Steps()
        self._rolling = _Rolling()
        self._late: deque[StepFeedback] = deque()
        self._noise = np.random.default_rng([seed, 3])
        self._num_done = self._num_steps = self._num_catch_up_tokens = 0
        self._is_on = False
        if isinstance(policy, Informed):
            policy.attach(self)

    def step(self) -> None:
        """Schedule, decide, draft, verify, commit, learn."""
        batch = self.batching.schedule()
        state = self._state(batch)
        decision = self._decide(state)
        budgets, guesses, verified = self._draft(state, decision, batch)
        draft_s = self._draft_s(state, budgets, decision.stand_by)
        num_drafted = int(verified.sum())
        num_rows = state.num_running + num_drafted + state.num_prefill_tokens
        verify_s = self._verify_s(state, num_rows, num_drafted > 0, decision.stand_by)
        committed, accepted = self._commit(guesses, verified)
        if self._is_loaded and not decision.stand_by:
            self.batching.num_behind[batch.decodes] += np.where(budgets > 0, 0, committed)
        feedback = StepFeedback(
            state=state,
            num_proposed_tokens=guesses.num_proposed_tokens,
            num_draft_tokens=verified,
            num_accepted_tokens=accepted,
            num_matched_tokens=np.minimum(np.minimum(guesses.num_matched_tokens, verified + np.int32(1)), committed),
            num_committed_tokens=committed,
            num_batched_tokens=num_rows,
            draft_s=draft_s,
            verify_s=verify_s,
            other_s=0.0,
        )
        self._learn(feedback)
        self._record(feedback, decision, num_drafted, self._finish(batch, committed))

    def result(self) -> Result:
        """What has been run so far."""
        return self._steps.result(self.batching.num_preemptions, self._num_catch_up_tokens)

    def _state(self, batch: Batch) -> StepState:
        slots, batching = batch.decodes, self.batching
        context_lens = batching.num_tokens[slots]
        left = batching.limits[slots] - context_lens - 1
        self.decodes, self.num_context_tokens = slots, int(context_lens.sum())
        self.limits = np.minimum(np.maximum(left, 0), self.max_draft_tokens).astype(np.int32)
        return StepState(
            step=self._num_steps,
            num_running=len(slots),
            num_scheduled=len(slots) + len(batch.prefills),
            num_waiting=batching.num_waiting,
            num_prefill_tokens=batch.num_prefill_tokens,
            kv_usage=batching.kv_usage,
            max_draft_tokens=self.max_draft_tokens,
            drafter=self.workload.draft_cost.kind if self._is_loaded else "none",
            rolling_acceptance_rate=self._rolling.rate,
            slots=slots.astype(np.int32),
            context_lens=context_lens.astype(np.int32),
            groups=batching.groups[slots],
            num_draft_tokens=batching.num_drafted[slots],
            num_accepted_tokens=batching.num_accepted[slots],
            capture_sizes=self.workload.surface.capture_sizes,
        )

    def _decide(self, state: StepState) -> SpecDecision:
        if not self._is_loaded or not state.num_running:
            return SpecDecision.uniform(state, 0, "")
        decision = self._policy.decide(state)
        if decision.num_draft_tokens.shape != (state.num_running,):
            raise ValueError(f"{type(self._policy).__name__}.decide must return one budget for each request")
        budgets = np.minimum(np.maximum(decision.num_draft_tokens, 0), self.limits).astype(np.int32)
        return SpecDecision(budgets, decision.reason, decision.stand_by)

    def _draft(self, state: StepState, decision: SpecDecision, batch: Batch) -> tuple[Int32, Guesses, Int32]:
        """Budgets within the free KV blocks, what is found, and how much of it is verified: [R] each."""
        budgets = decision.num_draft_tokens
        if not budgets.any():
            return budgets, Guesses(budgets, budgets, np.zeros((state.num_running, 0), np.float32)), budgets
        slots, batching = batch.decodes, self.batching
        budgets = batching.reserve_drafts(slots, budgets)
        tokens = batching.num_tokens[slots]
        num_outputs = tokens - batching.prompts[slots]
        guesses = self.guesser.draft(batching.rows[slots], num_outputs, tokens, budgets, self.progress)
        kept = self._policy.trim(Proposals(state, budgets, guesses.num_proposed_tokens, guesses.survival))
        return budgets, guesses, np.minimum(np.maximum(kept, 0), guesses.num_proposed_tokens).astype(np.int32)

    def _draft_s(self, state: StepState, budgets: Int32, stand_by: bool) -> float:
        """Seconds of the drafter, and what it has read afterwards."""
        cost, slots = self.workload.draft_cost, self.decodes
        if not self._is_loaded or not len(slots):
            return 0.0
        num_drafting = np.count_nonzero(budgets)
        seconds = float(cost.draft_s(budgets, state.context_lens)) if num_drafting else 0.0
        if not cost.has_weights:
            return seconds
        if stand_by and num_drafting < len(slots):
            seconds += float(cost.stand_by_s(budgets, state.context_lens))
        reading = slots if stand_by or num_drafting == len(slots) else slots[budgets > 0]
        num_behind = int(self.batching.num_behind[reading].sum())
        if num_behind:
            self.batching.num_behind[reading] = 0
            self._num_catch_up_tokens += num_behind
            seconds += num_behind * cost.catch_up_s_per_token
        return seconds

    def _verify_s(self, state: StepState, num_rows: int, has_drafts: bool, stand_by: bool) -> float:
        surface, prefill = self.workload.surface, state.num_prefill_tokens
        seconds = float(surface.step_s(num_rows, state.num_running, self.num_context_tokens, prefill, self.progress))
        if self._is_loaded and not has_drafts and stand_by:
            seconds *= 1 + self.workload.draft_cost.off_tax
        if surface.noise:
            seconds *= float(np.exp(surface.noise * self._noise.standard_normal()))
        return seconds

    def _commit(self, guesses: Guesses, verified: Int32) -> tuple[Int32, Int32]:
        """Tokens committed and drafts accepted, [R] each."""
        slots, batching = self.decodes, self.batching
        left = batching.ends[slots] - batching.num_tokens[slots]
        accepted = np.minimum(guesses.num_matched_tokens, verified)
        committed = np.minimum(accepted + 1, left).astype(np.int32)
        accepted = np.minimum(accepted, committed)
        batching.num_drafted[slots] += verified
        batching.num_accepted[slots] += accepted
        return committed, accepted

    def _finish(self, batch: Batch, committed: Int32) -> int:
        """Append the tokens and let finished requests go; returns how many prefills are complete."""
        complete = self.batching.commit(batch, committed)
        written = np.concatenate([batch.decodes, complete]) if len(complete) else batch.decodes
        for row in self.batching.finish(written).tolist():
            self.guesser.finish(row)
        return len(complete)

    def _learn(self, feedback: StepFeedback) -> None:
        """Tell the policy, feedback_delay steps late."""
        self._late.append(feedback)
        if len(self._late) <= self.workload.feedback_delay:
            return
        feedback = self._late.popleft()
        if not feedback.state.num_running:
            return
        if num_drafts := np.count_nonzero(feedback.num_draft_tokens):
            accepted = int(feedback.num_accepted_tokens.sum())
            self._rolling.add(int(num_drafts), int(feedback.num_draft_tokens.sum()), accepted)
        if self._is_loaded:
            self._policy.observe(feedback)

    def _record(self, feedback: StepFeedback, decision: SpecDecision, num_drafted: int, num_complete: int) -> None:
        """Keep the step's numbers and move on."""
        state = feedback.state
        committed = int(feedback.num_committed_tokens.sum()) + num_complete
        self._steps.add(
            num_running=state.num_running,
            num_waiting=state.num_waiting,
            num_batched_tokens=feedback.num_batched_tokens,
            num_prefill_tokens=state.num_prefill_tokens,
            num_context_tokens=self.num_context_tokens,
            draft_tokens=num_drafted,
            accepted_tokens=int(feedback.num_accepted_tokens.sum()) if num_drafted else 0,
            committed_tokens=committed,
            seconds=feedback.draft_s + feedback.verify_s,
            draft_s=feedback.draft_s,
            progress=self.progress,
            is_on=self._speculates(feedback, decision.num_draft_tokens),
        )
        self._num_steps += 1
        self._num_done += committed
        self.progress = self._num_done / self.workload.num_output_tokens

    def _speculates(self, feedback: StepFeedback, budgets: Int32) -> bool:
        """As Result.is_on."""
        found, useful = np.count_nonzero(feedback.num_proposed_tokens), int(np.count_nonzero(self.limits))
        asked = 8 * np.count_nonzero(budgets) > (max(useful, 8) if useful > 1 else 1)
        if useful and (found or not asked):
            self._is_on = bool(asked and 8 * np.count_nonzero(feedback.num_draft_tokens) > found)
        return self._is_on


class _Rolling:
    """Accepted over drafted tokens of the last graded drafts, whole steps at a time."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, int, int]] = deque()
        self._totals = (0, 0, 0)

    @property
    def rate(self) -> float | None:
        """0 to 1; None before any draft was graded."""
        return self._totals[2] / self._totals[1] if self._totals[1] else None

    def add(self, num_drafts: int, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Count a step and forget those that the window no longer needs."""
        self._steps.append((num_drafts, num_draft_tokens, num_accepted_tokens))
        drafts, drafted, accepted = self._totals
        drafts, drafted, accepted = drafts + num_drafts, drafted + num_draft_tokens, accepted + num_accepted_tokens
        while drafts - self._steps[0][0] >= ROLLING_WINDOW:
            first = self._steps.popleft()
            drafts, drafted, accepted = drafts - first[0], drafted - first[1], accepted - first[2]
        self._totals = (drafts, drafted, accepted)
