"""When to try what is not being done: a few drafts while off, a plain step while on."""

from __future__ import annotations

import numpy as np

from .base import Int32, StepState
from .ladder import Float64
from .prices import PricedStep

BUDGET = 0.004
"""Share of the time that probes may cost, by the predicted cost of each."""
ADVANCE, MOST_CREDIT = 1.0, 3.0
"""Plain steps' worth of probing that a job may do before it has earned it, and that it may save up."""
MOST_DEBT = 4.0
"""Plain steps' worth of debt that a probe may leave: one that hiccuped must not be the last."""
HOPELESS = -0.2
"""Gain below which nothing is urgent: no few drafts will turn it."""
LEAST_INTERVAL = 4
"""Steps between probes at least, and 8 times as many while they keep finding nothing."""
MOST_BACK_OFF = 8
PROBE_SHARE = 8
"""One in so many requests is probed,"""
MOST_PROBED = 8
"""and no more than so many, with one draft token: the first is what a change shows in, and costs least."""
STRETCH_EVERY = 16
"""Speculating steps between those in which a few requests draft one token further than the rest."""
TRIAL_EVERY, MOST_TRIAL_WAIT = 64, 1024
"""Steps without speculation before a draft length is tried of which only the price is in doubt, twice as many each
time."""
VERDICT = 16
"""Graded drafts that make a probe's verdict."""
SURPRISE = 0.3
"""Acceptance above the usual after which every step probes, as long as it can be paid for, until there is a verdict."""
REFERENCE_EVERY = 384
"""Steps between plain steps where the gain is small and a mistake is likely, and four times as many elsewhere."""
CLEAR_GAIN = 0.3
FIRST_REFERENCE, SOON = 16, 2
"""Speculating steps before the first plain one, and in a large batch, where a mistake is dear;"""
SURE_GAIN = 1.0
"""but no first one where the cost of plain decoding may be wrong by half and speculation would still gain."""
TAIL = 8
"""A batch so many times smaller than any that was seen plain is another machine: what drafts cost there is known only
beside what none cost. Measured once it is paid for, as a probe is."""


class Probes:
    """Earns probes with every second of the job and spends them on looks at a few requests."""

    def __init__(self) -> None:
        self._credit_s, self._has_advance = 0.0, False
        self._steps_to_probe = 0
        self._back_off = 1
        self._num_graded = self._num_accepted = 0.0
        self._steps_since_plain = self._steps_since_stretch = 0
        self._is_repeated = self._is_surprised = False
        self._least_plain = 0
        """Requests of the smallest batch that was seen without drafts; 0: none was."""
        self._steps_to_trial = self._trial_wait = TRIAL_EVERY
        self._offset = 0

    def reset(self) -> None:
        """Something has changed: look as soon as it is paid for, and often."""
        self._steps_to_probe, self._back_off = 0, 1

    def earn(self, seconds: float, plain_s: float) -> None:
        """A step has run, which would have taken plain_s without drafts and prefill; 0 while that is not known."""
        if not plain_s:
            return
        if not self._has_advance:
            self._has_advance = True
            self._credit_s += ADVANCE * plain_s
        credit_s = max(self._credit_s + BUDGET * seconds, -MOST_DEBT * plain_s)
        self._credit_s = min(credit_s, MOST_CREDIT * plain_s)

    def is_due(self, is_urgent: bool) -> bool:
        """Whether the next step without speculation should be a probe; counts the step. is_urgent: little is known
        yet, so every step will do that can be paid for."""
        self._steps_to_probe -= 1
        self._steps_to_trial -= 1
        is_broke = self._has_advance and self._credit_s < 0
        if is_broke or (self._steps_to_probe >= 0 and not is_urgent and not self._is_surprised):
            return False
        self._steps_to_probe = LEAST_INTERVAL * self._back_off
        return True

    def is_trial_due(self) -> bool:
        """Whether a probe may rather be a trial of a draft length."""
        if self._steps_to_trial > 0:
            return False
        self._steps_to_trial = self._trial_wait = min(2 * self._trial_wait, MOST_TRIAL_WAIT)
        return True

    def spend(self, seconds: float) -> None:
        """A probe has taken so much longer than a plain step."""
        self._credit_s -= max(seconds, 0.0)

    def grade(self, num_graded: int, num_accepted: int) -> None:
        """So many drafts of a probe were graded and accepted, and speculation is still off: after enough of them, probe
        less; at once more where they are better than they were."""
        usual = self._num_accepted / max(self._num_graded, 1)
        if self._num_graded and num_accepted > (usual + SURPRISE) * num_graded:
            self.reset()
            self._is_surprised = True
            self._num_graded = self._num_accepted = 0
        self._num_graded += num_graded
        self._num_accepted += num_accepted
        if self._num_graded >= VERDICT:
            self._is_surprised = False
            self._back_off = min(2 * self._back_off, MOST_BACK_OFF)
            self._num_graded, self._num_accepted = self._num_graded / 2, self._num_accepted / 2

    def is_reference(self, step: PricedStep, gain: float, is_large: bool) -> bool:
        """Whether a speculating step should be plain, so that the cost of plain decoding is known; counts the step."""
        if self._is_repeated:
            self._is_repeated = False
            return True
        self._steps_since_plain += 1
        num_running, has_prefill = step.state.num_running, step.state.num_prefill_tokens > 0
        loss_s = 2 * step.plain_s * gain / (1 + gain)
        is_tail = TAIL * num_running <= self._least_plain and self._credit_s > loss_s
        wait = REFERENCE_EVERY * (4 if gain > CLEAR_GAIN else 1)
        if is_tail or (not self._least_plain and gain < SURE_GAIN):
            wait = SOON if is_large and not has_prefill and not is_tail else FIRST_REFERENCE
        if self._steps_since_plain < (2 * wait if has_prefill else wait):
            return False
        if is_tail:
            self.spend(loss_s)
        self.plain_step(num_running)
        self._is_repeated = True  # one odd step proves nothing
        return True

    def plain_step(self, num_running: int) -> None:
        """A step without drafts and prefill ran, planned or not."""
        self._steps_since_plain = 0
        self._least_plain = min(self._least_plain or num_running, num_running)

    def budgets(self, state: StepState, reading_s: Float64, most_s: float) -> Int32:
        """[R] a draft token for each of a few requests: those of which least is known, as many as the drafter reads in
        most_s, each taking reading_s [R]; or else the one that takes least."""
        count = min(max(1, state.num_running // PROBE_SHARE), MOST_PROBED)
        few = np.argpartition(state.num_draft_tokens, count - 1)[:count]
        few = few[reading_s[few].cumsum() <= most_s]
        budgets = np.zeros(state.num_running, np.int32)
        budgets[few if len(few) else int(reading_s.argmin())] = 1
        return budgets

    def stretch(self, budgets: Int32, longest: int) -> None:
        """Now and then let a few requests draft one token further than budgets [R] say, so that what is not drafted is
        known too."""
        self._steps_since_stretch += 1
        if self._steps_since_stretch >= STRETCH_EVERY:
            self._steps_since_stretch = 0
            few = np.arange(self._offset % PROBE_SHARE, len(budgets), PROBE_SHARE)
            budgets[few] = np.minimum(budgets[few] + 1, longest)
            self._offset += 1
