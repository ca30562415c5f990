"""What a step takes, with so many drafts, and what a token more is worth in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .base import Proposals, StepFeedback, StepState
from .catch_up import CatchUp
from .cost_model import CostModel
from .ladder import Float64, Ladder, Rung

PREFILL_MEMORY = 32
"""Steps over which it is averaged how much is prefilled."""
FULL = 0.95
"""A step with so much of the most rows that were ever scheduled has all the prefill it can hold."""
DECODE_BOUND = 0.2
"""Share of steps that are not full of prefill above which a token saves its share of such a step."""
MOST_HOPE = 0.5
"""Share of a step's predicted seconds that may be put down to not knowing better."""
LEAST_SHARE = 0.2
"""Of a plain step, that any step takes at least: the difference of two predictions may be anything."""
READING = 0.1
"""Share of a plain step that a probe's requests may take to be read; one there is in any case."""
FREE = 0.01
"""A drafter that takes less than this share of a step costs nothing."""


@dataclass(slots=True)
class PricedStep:
    """A step between `decide` and `observe`, which may come some steps late."""

    state: StepState
    num_context_tokens: int
    off_s: float
    """Predicted seconds without drafts; 0 while nothing is known."""
    plain_s: float
    """The same without prefill."""
    token_s: float = 0.0
    """Seconds that a token more is worth; 0: all that counts is tokens a second."""
    is_free: bool = False
    """The drafter costs next to nothing."""
    is_on: bool = False
    """Drafts are verified for what they bring, and not for what they teach."""
    expected_accepted: float = 0.0
    """Drafts that should be accepted of those that are verified, by the acceptance model alone."""
    proposals: Proposals | None = None

    def gain_of(self, rung: Rung) -> float:
        """What the drafts down to a rung bring over plain decoding, as a share of it; 0 while nothing is known."""
        if not self.plain_s:
            return 0.0
        if self.token_s:
            saved_s = (rung.tokens - self.state.num_running) * self.token_s
            return (saved_s + self.plain_s - rung.seconds) / self.plain_s
        return rung.goodput * self.plain_s / self.state.num_running - 1

    @property
    def edges(self) -> Float64 | None:
        """Draft rows at which the padded forward pass is full; None where nothing is padded."""
        if not len(self.state.capture_sizes):
            return None
        return (self.state.capture_sizes - self.state.num_running - self.state.num_prefill_tokens).astype(np.float64)


class Prices:
    """The cost model, asked about steps as a policy sees them, with what prefill does to the worth of a token."""

    def __init__(self, cost: CostModel | None = None) -> None:
        """cost: what is known already."""
        self.cost = CostModel() if cost is None else cost
        self._is_new = cost is None
        self._catch_up = CatchUp()
        self._full_share, self._prefill_rate, self._most_rows = 0.5, 0.0, 0
        self._num_asked = 0

    def price(self, state: StepState, gain: float) -> PricedStep:
        """What the step takes as it stands. gain: of speculating at present, over plain decoding."""
        if self._is_new:
            self.cost, self._is_new = CostModel(state.capture_sizes), False
        num_context, num_prefill = int(state.context_lens.sum()), state.num_prefill_tokens
        rows = state.num_running + num_prefill
        off_s = plain_s = self.cost.one_step_s(rows, state.num_running, num_context, num_prefill)
        if num_prefill:
            plain_s = self.cost.one_step_s(state.num_running, state.num_running, num_context, 0)
        step = PricedStep(state, num_context, off_s, plain_s, self._token_s(state, plain_s, gain))
        everyone_s = self.cost.draft_s(state.num_running, state.max_draft_tokens)
        step.is_free = self.has_asked and float(everyone_s) <= FREE * plain_s
        return step

    def _token_s(self, state: StepState, plain_s: float, gain: float) -> float:
        """Seconds that a token more is worth in a step that is full of prefill; 0 in any other.

        Without prefill, and where prompts only replace what has finished, the most tokens a second are the best: each
        brings its share of prefill with it. But where prefill alone fills the steps they are run anyhow, and a token
        saves its share of a step that is not full, if there are any.
        """
        num_rows = state.num_running + state.num_prefill_tokens
        self._most_rows = max(self._most_rows, num_rows)
        is_full = state.num_prefill_tokens > 0 and num_rows >= FULL * self._most_rows
        self._full_share += (is_full - self._full_share) / PREFILL_MEMORY
        self._prefill_rate += (state.num_prefill_tokens - self._prefill_rate) / PREFILL_MEMORY
        if not is_full:
            return 0.0
        worth = min((1 - self._full_share) / DECODE_BOUND, 1.0) / (1 + max(gain, 0.0))
        return max(plain_s / state.num_running * worth, 1e-12)

    def verify_s(self, step: PricedStep, draft_rows: Float64) -> Float64:
        """[N] seconds of the step but for drafting, with so many draft rows."""
        state = step.state
        rows = draft_rows + (state.num_running + state.num_prefill_tokens)
        return self.cost.step_s(rows, state.num_running, step.num_context_tokens, state.num_prefill_tokens)

    def seconds(self, step: PricedStep, draft_s: Float64 | float, draft_rows: Float64) -> Float64:
        """[N] seconds of a step with so many draft rows, but for its prefill; 1 while nothing is known, so that tokens
        alone decide."""
        if not step.off_s:
            return np.ones(len(draft_rows))
        seconds = self.verify_s(step, draft_rows) + (draft_s - (step.off_s - step.plain_s))
        return np.maximum(seconds, LEAST_SHARE * step.plain_s)

    def hoped_s(self, step: PricedStep, draft_s: Float64 | float, draft_rows: Float64) -> Float64:
        """As seconds, but as little as it may well be for all that is known."""
        state = step.state
        plain_rows = state.num_running + state.num_prefill_tokens
        place = (state.num_running, step.num_context_tokens, state.num_prefill_tokens)
        hope = 1 - np.minimum(self.cost.doubt(draft_rows + plain_rows, plain_rows, *place), MOST_HOPE)
        return np.asarray(self.seconds(step, draft_s, draft_rows) * hope)

    @property
    def has_asked(self) -> bool:
        """Whether the drafter was ever asked for anything."""
        return self._num_asked > 0

    def reading_s(self, step: PricedStep) -> tuple[Float64, float]:
        """[R] seconds in which the drafter would read what it has missed of each request, and the most that a probe may
        take for it; before it was ever asked tokens in place of seconds, and none of them."""
        behind = self._catch_up.behind(step.state)
        if not self.has_asked:
            return behind.astype(np.float64), 0.0
        return behind * np.float64(self.cost.read_s(1)), READING * step.plain_s

    def asking_s(self, ladder: Ladder) -> Float64:
        """[64] seconds of drafting down to each rung of a plan, the prompts included that the drafter would read."""
        seconds = np.asarray(self.cost.draft_s(ladder.drafting, ladder.longest))
        return np.asarray(seconds + np.where(ladder.drafting > 0, self.cost.read_s(self._prefill_rate), 0.0))

    def asked_s(self, proposals: Proposals) -> float:
        """Seconds that the drafting of these proposals should have taken."""
        budgets = proposals.num_budgeted_tokens
        return float(self.cost.draft_s(int(np.count_nonzero(budgets)), int(budgets.max())))

    def observe(self, step: PricedStep, feedback: StepFeedback) -> None:
        """Learn from the step's clock."""
        budgets = None if step.proposals is None else step.proposals.num_budgeted_tokens
        behind = 0.0 if step.is_free else self._catch_up.observe(feedback, budgets)
        self.cost.observe(feedback, budgets, behind)
        self._num_asked += budgets is not None
