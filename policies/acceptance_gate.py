"""Speculate while drafts are accepted: the classic 60/70 % rule, with probes so that it never latches."""

from __future__ import annotations

from collections import deque

import numpy as np

from .base import SpecDecision, SpeculationPolicy, StepFeedback, StepState
from .options import draft_length, share, whole_number

PROBE_STEPS = 16
"""Longest probe; an n-gram drafter may find nothing to propose for the requests that are probed."""


class AcceptanceGate(SpeculationPolicy):
    """On until acceptance falls below `low`; off, with probes, until a probe shows more than `high`.

    Acceptance is accepted draft tokens / verified draft tokens. It falls as drafts get longer, so a probe drafts as
    far as the gate does when it is on, but for a few requests only. A draft is graded when one request had at least
    one draft token verified; a verdict rests on at least a quarter of `window` graded drafts, counted anew after
    each switch. A probe ends with that many, or after 16 steps with what it has; having nothing is a failure.

    low, high: 0 <= low <= high <= 1.
    num_draft_tokens: at least 1, cut to `StepState.max_draft_tokens`; None: as many as that allows.
    window: graded drafts that acceptance is taken over while on, at least 1.
    probe_every: decoding steps from switching off to the first probe; each failed probe doubles it, up to
        max_probe_every.
    probe_requests: requests that a probe step drafts for, evenly spread over the batch and moving on each step.
    probe_tokens: draft length of a probe; None: as num_draft_tokens.
    Raises ValueError naming the key that is wrong.
    """

    def __init__(
        self,
        low: float = 0.6,
        high: float = 0.7,
        num_draft_tokens: int | None = None,
        window: int = 128,
        probe_every: int = 64,
        max_probe_every: int = 1024,
        probe_requests: int = 4,
        probe_tokens: int | None = None,
    ) -> None:
        self._low, self._high = share("low", low), share("high", high)
        if low > high:
            raise ValueError(f"low must not be above high, got {low} and {high}")
        self._num_draft_tokens = draft_length(num_draft_tokens)
        probe_length = draft_length(probe_tokens, "probe_tokens")
        self._probe_tokens = self._num_draft_tokens if probe_length is None else probe_length
        self._window = whole_number("window", window, 1)
        self._enough = -(-self._window // 4)
        self._probe_every = whole_number("probe_every", probe_every, 1)
        self._max_probe_every = whole_number("max_probe_every", max_probe_every, self._probe_every)
        self._probe_requests = whole_number("probe_requests", probe_requests, 1)

        self._on = True
        self._reason = "no verdict yet"
        self._graded = _GradedDrafts()
        self._interval = self._probe_every
        self._steps_to_probe = 0
        self._probe_steps = 0
        self._offset = 0

    def decide(self, state: StepState) -> SpecDecision:
        """The same length for every request while on; while off nothing, or a probe of a few requests."""
        if self._on:
            return SpecDecision.uniform(state, _within(self._num_draft_tokens, state.max_draft_tokens), self._reason)
        if state.num_running == 0 or self._steps_to_probe > 0:
            self._steps_to_probe -= state.num_running > 0
            return SpecDecision.uniform(state, 0, self._reason)
        return self._probe(state)

    def observe(self, feedback: StepFeedback) -> None:
        """Count graded drafts, and switch once there are enough of them."""
        num_drafts = int(np.count_nonzero(feedback.num_draft_tokens))
        if num_drafts:
            accepted = int(feedback.num_accepted_tokens.sum())
            self._graded.add(num_drafts, int(feedback.num_draft_tokens.sum()), accepted)
        if self._on:
            self._judge()
        elif self._probe_steps and (self._graded.num_drafts >= self._enough or self._probe_steps >= PROBE_STEPS):
            self._judge_probe()

    def _judge(self) -> None:
        self._graded.keep_last(self._window)
        if self._graded.num_drafts < self._enough:
            return
        rate = self._graded.acceptance_rate
        if rate < self._low:
            self._switch_off(f"acceptance {rate:.2f} < {self._low:.2f}", self._probe_every)
        else:
            self._reason = f"acceptance {rate:.2f} >= {self._low:.2f}"

    def _probe(self, state: StepState) -> SpecDecision:
        num_probed = min(self._probe_requests, state.num_running)
        self._probe_steps += 1
        self._offset += 1
        spread = np.arange(num_probed) * state.num_running // num_probed
        budget = np.zeros(state.num_running, dtype=np.int32)
        budget[(spread + self._offset) % state.num_running] = _within(self._probe_tokens, state.max_draft_tokens)
        return SpecDecision(budget, f"probe {num_probed}/{state.num_running}")

    def _judge_probe(self) -> None:
        longer = min(2 * self._interval, self._max_probe_every)
        if self._graded.num_drafts == 0:
            self._switch_off("probe found no drafts", longer)
        elif (rate := self._graded.acceptance_rate) <= self._high:
            self._switch_off(f"probe {rate:.2f} <= {self._high:.2f}", longer)
        else:
            self._on, self._reason = True, f"probe {rate:.2f} > {self._high:.2f}"
            self._graded = _GradedDrafts()

    def _switch_off(self, reason: str, interval: int) -> None:
        self._on, self._reason = False, reason
        self._interval = self._steps_to_probe = interval
        self._probe_steps = 0
        self._graded = _GradedDrafts()


class _GradedDrafts:
    """Graded drafts and their tokens, summed by step."""

    def __init__(self) -> None:
        self.num_drafts = 0
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0
        self._steps: deque[tuple[int, int, int]] = deque()

    @property
    def acceptance_rate(self) -> float:
        """Accepted / verified draft tokens; needs at least one draft."""
        return self._num_accepted_tokens / self._num_draft_tokens

    def add(self, num_drafts: int, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        self._steps.append((num_drafts, num_draft_tokens, num_accepted_tokens))
        self._count(num_drafts, num_draft_tokens, num_accepted_tokens)

    def keep_last(self, num_drafts: int) -> None:
        """Drop the oldest steps that are not needed to hold this many drafts."""
        while self._steps and self.num_drafts - self._steps[0][0] >= num_drafts:
            self._count(*(-count for count in self._steps.popleft()))

    def _count(self, num_drafts: int, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        self.num_drafts += num_drafts
        self._num_draft_tokens += num_draft_tokens
        self._num_accepted_tokens += num_accepted_tokens


def _within(length: int | None, limit: int) -> int:
    return limit if length is None else min(length, limit)
