"""The default policy: the draft lengths with the most expected tokens a second, by what this very run has measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from .acceptance import AcceptanceModel
from .base import Int32, Proposals, SpecDecision, SpeculationPolicy, StepFeedback, StepState
from .cost_model import CostModel
from .harm_guard import HarmGuard
from .ladder import BINS, Float64, Ladder, Rung, prefixes
from .options import draft_length
from .prices import PricedStep, Prices
from .probes import HOPELESS, Probes
from .surplus import Surplus
from .switch import BIG_GAIN, Switch

QUORUM = 0.125
"""While on, more than this share of the requests are drafted for in every step: a batch that would rather not for a
moment is not worth a change of everything that goes with it, unless the step would lose too much by it."""
PLAN_STEPS, MANY_REQUESTS = 4, 64
"""With so many requests, once things have settled, a plan is made in every fourth step only and stands for those
between,"""
SAME_ROWS = 0.02
"""unless the rows, prefill included, change by more than this share."""
ENOUGH_GRADED, GROWTH = 32, 4
"""Graded drafts before a large batch speculates as a whole; before that so many times as many requests are asked as
drafts were graded."""
CAUTIOUS_ROWS = 32
"""A step with fewer draft rows than this needs no such evidence."""


class Goodput(SpeculationPolicy):
    """Speculates where, and as far as, it brings more tokens a second than plain decoding.

    Learns while the job runs, from nothing: seconds of a step (CostModel), acceptance by position, group, request and
    the drafter's own confidence (AcceptanceModel). `decide` asks for the drafts with the most expected tokens a second,
    `trim` verifies the best of what was found, each request as far as its own drafts are worth their place in the
    forward pass. Off is never for good: probes of a few requests, as often as their price allows, go on looking, and a
    drafter that costs nothing is watched in every step. Nor is on taken on trust: now and then a step without drafts is
    measured, and a guard turns speculation off where the clock shows harm. A drafter with weights is never kept ready
    for requests that are not drafted for: it reads what it has missed, once and in bulk, when it is asked about them
    again, and that is priced.

    num_draft_tokens: longest draft, at least 1, cut to `StepState.max_draft_tokens`; None: as long as that allows.
    profile: costs to begin with, as CostModel.to_json() gives them.
    Raises ValueError naming the key that is wrong.
    """

    def __init__(self, num_draft_tokens: int | None = None, profile: Mapping[str, Any] | None = None) -> None:
        self._num_draft_tokens = draft_length(num_draft_tokens)
        self._prices = Prices(None if profile is None else CostModel.from_json(dict(profile)))
        self._acceptance, self._surplus = AcceptanceModel(), Surplus()
        self._switch, self._probes, self._guard = Switch(), Probes(), HarmGuard()
        self._steps: deque[PricedStep] = deque()
        self._num_graded = 0
        self._usual = 0.0
        self._age, self._planned_rows, self._rung = 0, 0, BINS
        self._stood = 1
        self._by_slot = np.zeros(0, np.int32)
        self._measured_s = self._predicted_off_s = 0.0

    @property
    def cost(self) -> CostModel:
        """What it has learned about seconds."""
        return self._prices.cost

    @property
    def acceptance(self) -> AcceptanceModel:
        """What it has learned about drafts."""
        return self._acceptance

    def decide(self, state: StepState) -> SpecDecision:
        """Budgets for what is worth asking for; while off those of a probe, or none."""
        longest = state.max_draft_tokens
        if self._num_draft_tokens is not None:
            longest = min(longest, self._num_draft_tokens)
        if state.num_running == 0 or longest == 0:
            return SpecDecision.uniform(state, 0, "no drafts")
        step = self._begin(state)
        budgets = self._plan(step, longest)
        if self._switch.turn():
            self._probes.reset()
        gain = f"gain {self._switch.gain:+.0%}"
        if not self._switch.is_on or self._guard.blocks(_tier(state)):
            return self._look(step, longest, f"off: {gain}")
        is_large = state.num_running * longest > CAUTIOUS_ROWS
        if self._probes.is_reference(step, self._switch.gain, is_large):
            return SpecDecision(np.zeros(state.num_running, np.int32), "plain step, to measure", stand_by=False)
        if not step.is_free and self._is_leap(step, budgets):
            return self._look(step, longest, "few drafts graded")
        step.is_on = True
        if not step.is_free:
            self._probes.stretch(budgets, longest)
        return SpecDecision(budgets, gain, stand_by=False)

    def trim(self, proposals: Proposals) -> Int32:
        """The proposals with the most expected tokens a second; those of a probe are left whole."""
        found = proposals.num_draft_tokens
        if not self._steps or self._steps[-1].state is not proposals.state:
            return found
        step = self._steps[-1]
        step.proposals = proposals
        num_found = int(np.count_nonzero(found))
        if not num_found or not (step.is_on or step.is_free):
            return found
        if self._age and not step.is_on:
            return np.zeros_like(found)
        survival = self._acceptance.survival(proposals)
        ladder = Ladder(survival, scale=self._surplus.ratio)
        keep = self._cut(step, ladder, proposals, num_found)
        if step.is_on:
            step.expected_accepted = float(np.vdot(survival, prefixes(survival.shape[1]).take(keep, 0)))
        return keep

    def observe(self, feedback: StepFeedback) -> None:
        """Learn from the step."""
        if not any(step.state is feedback.state for step in self._steps):
            return
        while (step := self._steps.popleft()).state is not feedback.state:
            pass
        self._account(step, feedback)
        self._prices.observe(step, feedback)
        self._surplus.observe(float(feedback.num_accepted_tokens.sum()) if step.is_on else 0.0, step.expected_accepted)
        if (proposals := step.proposals) is None:
            if not step.state.num_prefill_tokens:
                self._probes.plain_step(step.state.num_running)
            return
        is_probe = not step.is_on and not step.is_free
        has_changed = self._acceptance.observe(proposals, proposals.num_budgeted_tokens, feedback, is_rare=is_probe)
        if is_probe and has_changed:
            self._switch.doubt()
        num_graded = int(np.count_nonzero(proposals.num_draft_tokens))
        self._num_graded += num_graded
        if is_probe:
            rows = np.array([0.0, feedback.num_draft_tokens.sum()])
            plain_s, probe_s = self._prices.verify_s(step, rows).tolist()
            self._probes.spend(feedback.draft_s + probe_s - plain_s)
            self._probes.grade(num_graded, int(np.count_nonzero(feedback.num_matched_tokens)))

    def facts(self) -> dict[str, float]:
        """See SpeculationPolicy."""
        times = {"measured_s": self._measured_s, "predicted_off_s": self._predicted_off_s}
        return {**self.cost.facts(), **self._acceptance.facts(), **times}

    def _begin(self, state: StepState) -> PricedStep:
        """Note the step and its price without drafts."""
        if not 0.5 <= state.num_running / (self._usual or 0.1) <= 2:
            self._usual = state.num_running
            self._probes.reset()
        self._switch.step()
        step = self._prices.price(state, self._switch.gain)
        self._steps.append(step)
        return step

    def _plan(self, step: PricedStep, longest: int) -> Int32:
        """Budgets with the most expected tokens a second, going by history, whose gain is taken note of; all there may
        be of a drafter that costs nothing, since its finds are judged when they are there."""
        state = step.state
        is_stale = self._is_stale(step)
        if step.is_free:
            return np.full(state.num_running, longest, np.int32)
        if not is_stale:
            return np.minimum(self._by_slot.take(state.slots), longest)
        ladder = self._ladder(state, longest)
        best = self._best(step, ladder, self._prices.asking_s(ladder), state.num_running, None, is_plan=True)
        budgets = ladder.lengths_down_to(best.rung)
        size = max(len(self._by_slot), int(state.slots.max()) + 1)
        self._by_slot = np.full(size, round(float(budgets.mean())), np.int32)  # what a newcomer gets
        self._by_slot[state.slots] = budgets
        return budgets

    def _is_stale(self, step: PricedStep) -> bool:
        """Whether the step needs a plan of its own; counts the steps that the last one has stood for."""
        state = step.state
        rows = state.num_running + state.num_prefill_tokens
        self._age += 1
        is_same = abs(rows - self._planned_rows) <= SAME_ROWS * rows
        is_settled = self._switch.is_settled and state.num_running >= MANY_REQUESTS
        stands = self._age < PLAN_STEPS and is_same and is_settled
        if stands and (step.is_free or int(state.slots.max()) < len(self._by_slot)):
            return False
        self._stood = min(self._age, PLAN_STEPS)
        self._age, self._planned_rows, self._rung = 0, rows, BINS
        return True

    def _ladder(self, state: StepState, longest: int) -> Ladder:
        """The drafts that may be asked for, going by history."""
        yields, available = self._acceptance.expected(state, longest)
        return Ladder(yields / available, available, self._surplus.ratio)

    def _best(
        self,
        step: PricedStep,
        ladder: Ladder,
        draft_s: Float64 | float,
        num_asked: int,
        edges: Float64 | None,
        is_plan: bool,
    ) -> Rung:
        """The best rung with a quorum of the requests that were asked; where that loses too much in this step, of all.

        is_plan: its gain is what turns speculation on and off.
        """
        seconds = partial(self._prices.seconds, step, draft_s)
        quorum = int(ladder.drafting.searchsorted(int(QUORUM * num_asked), side="right"))
        best = ladder.best(seconds, step.token_s, min(quorum, BINS - 1), edges)
        gain = step.gain_of(best) if step.plain_s else self._switch.gain
        if is_plan:
            self._switch.see(gain, self._stood)
        return ladder.best(seconds, step.token_s, 0, edges) if self._switch.leaves_out(gain) else best

    def _cut(self, step: PricedStep, ladder: Ladder, proposals: Proposals, num_found: int) -> Int32:
        """[R] drafts to verify of what was found for num_found requests."""
        if self._age and self._rung < BINS:
            return ladder.lengths_down_to(self._rung)
        draft_s = self._prices.asked_s(proposals)
        best = self._best(step, ladder, draft_s, num_found, step.edges, is_plan=step.is_free)
        self._rung = best.rung
        num_rows = best.num_rows if step.is_on else 0
        if self._is_cautious(num_rows):
            num_rows = max(CAUTIOUS_ROWS, step.state.num_running // 8)
        return ladder.lengths(num_rows)

    def _is_leap(self, step: PricedStep, budgets: Int32) -> bool:
        """Whether asking for so much would be too much trust in a drafter that was hardly tried."""
        if not self._prices.has_asked or self._is_cautious(int(budgets.sum())):
            return True
        if self._num_graded >= ENOUGH_GRADED or step.state.num_running == 1:
            return False
        if np.count_nonzero(budgets) > GROWTH * (self._num_graded + 1):
            return True
        reading_s, _ = self._prices.reading_s(step)
        return float(reading_s @ (budgets > 0)) > step.plain_s

    def _is_cautious(self, num_rows: int) -> bool:
        """Whether so many rows would be too much trust in what was hardly tried."""
        return self._num_graded < ENOUGH_GRADED and num_rows > CAUTIOUS_ROWS

    def _look(self, step: PricedStep, longest: int, why: str) -> SpecDecision:
        """A probe where one is due; a drafter that costs nothing is watched in every step."""
        if step.is_free:
            return SpecDecision.uniform(step.state, longest, f"{why}, watching")
        is_urgent = self._num_graded < ENOUGH_GRADED and self._switch.gain > HOPELESS
        if self._probes.is_due(is_urgent):
            if (budgets := self._try(step, longest)) is not None:
                return SpecDecision(budgets, f"{why}, trying a length", stand_by=False)
            budgets = self._probes.budgets(step.state, *self._prices.reading_s(step))
            return SpecDecision(budgets, f"{why}, probe", stand_by=False)
        return SpecDecision(np.zeros(step.state.num_running, np.int32), why, stand_by=False)

    def _try(self, step: PricedStep, longest: int) -> Int32 | None:
        """Budgets that would be a clear gain if rows that were never tried were as cheap as they may be; else None."""
        if not step.off_s or not self._probes.is_trial_due():
            return None
        ladder = self._ladder(step.state, longest)
        best = ladder.best(partial(self._prices.hoped_s, step, self._prices.asking_s(ladder)), step.token_s)
        if best.num_rows == 0 or step.gain_of(best) < BIG_GAIN:
            return None
        return ladder.lengths_down_to(best.rung)

    def _account(self, step: PricedStep, feedback: StepFeedback) -> None:
        """Hold the step against plain decoding of the same tokens."""
        off_s = feedback.verify_s + feedback.other_s
        seconds = feedback.draft_s + off_s
        if np.count_nonzero(feedback.num_draft_tokens):
            num_tokens = float(feedback.num_committed_tokens.sum())
            off_s = step.plain_s * num_tokens / step.state.num_running + step.off_s - step.plain_s
        is_evidence = step.is_on and step.plain_s > 0 and not step.state.num_prefill_tokens
        self._guard.observe(_tier(step.state), seconds, off_s, is_evidence)
        self._probes.earn(seconds, step.plain_s)
        self._measured_s += seconds
        self._predicted_off_s += off_s


def _tier(state: StepState) -> int:
    """Sizes 1, 2 to 3, 4 to 7, ... of the batch."""
    return state.num_running.bit_length()
