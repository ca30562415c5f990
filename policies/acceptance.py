"""How likely drafts are to be accepted: by position, by group of rows and by request, learned from graded trials."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .base import Float32, Int32, Proposals, StepFeedback, StepState
from .confidence import Confidence, Float64, Intp, bins_of
from .ladder import prefixes
from .rates import ACCEPTANCE, AVAILABILITY, Rates

MAX_GROUPS = 64
FOLD_STEPS = 4
"""Outcomes are counted at every step and turned into rates every so many; twice that from 64 requests or 3 groups on,
four times from 9 groups on, where a step has more to say and the tables are larger."""
LEVELS = np.arange(-4, 4.25, 0.5)[:, None]
"""Logit offsets of a request against its group; odds ratios of 0.02 to 55."""
KNOWN = np.minimum((LEVELS / 1.5) ** 2, 1)
"""How far a request with such an offset is known to be no average one; see `AcceptanceModel`."""
LEVELS_PER_LOGIT = 2
MAX_INFORMATION = 12.0
"""What a request's offset remembers at most, about 60 trials at a rate of 0.7."""
YOUNG = 1.0
"""Information on its offset below which a request is a newcomer, some 4 trials."""
NEWCOMERS, MOST_NEWCOMER = 40.0, 2.0
"""Information from newcomers over which their mean offset is averaged, and the largest that is believed."""
SCORED_REQUESTS = 64
MANY_REQUESTS = 192
"""With so many asked, one step is learned from and the next is not."""


class AcceptanceModel:
    """Probabilities that drafts are proposed and accepted, from outcomes alone or with the drafter's confidence.

    A draft at position j (from 0) is a graded trial when the draft before it was accepted and decoding reached it:
    j <= matched, j < proposed and j < committed; it succeeds when j < matched. Rates are successes over trials at
    that position, so they do not depend on the draft lengths that were tried. Tokens that `trim` cut right behind
    the accepted ones are graded like the others.

    A request's offset is a logit added to its group's rates. It is the mean of a Gaussian posterior, followed by one
    Newton step on the log likelihood at each observation (an extended Kalman filter for logistic regression), with a
    prior whose variance over requests is learned too. Offsets are rounded to steps of 0.5, less than their error, so
    that the probabilities of every request are rows of one table.

    Rates are those of trials, and the slower a request the more of them it has, so a request that has just come is
    likely better than the rates say: its offset begins with the mean that newcomers were found to have.

    Later positions are reached by the better requests, so their rates say more of those than of the average one. For
    a request of which nothing is known this is right: having got there it is a better one. For one whose offset is
    known it would count twice, so there the offset of those who got there, against all, is taken off the rate.

    Arrays over slots and groups grow on demand; groups are taken modulo 64. Not thread-safe.
    """

    def __init__(self) -> None:
        self._rates = Rates()
        self._confidence = Confidence()
        self._offsets = np.zeros(256)  # by slot
        self._levels: Intp = np.full(256, len(LEVELS) // 2)  # by slot: of the offset, a row of its group's tables
        self._information = np.zeros(256)  # by slot: of the offset, from trials alone
        self._variance = 0.3  # of the offsets over requests
        self._newcomer = 0.0  # offset of a request of which nothing is known
        self._state: StepState | None = None
        self._num_steps = self._next_fold = self._next_score = 0
        self._num_folds = self._num_scored = self._last_count = 0
        self._first_error, self._first_trials = 0.0, 0.0
        self._resize(1, 1)

    def expected(self, state: StepState, num_positions: int) -> tuple[Float64, Float64]:
        """What K = num_positions budgeted tokens would give each request, before anything is proposed.

        Returns yield_ and available, both float64 [R, K] and falling in j: the probability that the draft at
        position j is proposed and accepted with all before it, and that at least j + 1 drafts are proposed.
        """
        self._locate(state, num_positions)
        yields, available = self._yields.take(self._rows, 0), self._available.take(self._groups, 0)
        if num_positions == self._num_positions:
            return yields, available
        return yields[:, :num_positions], available[:, :num_positions]

    def survival(self, proposals: Proposals) -> Float64:
        """float64 [R, K] probability that each proposed draft and all before it are accepted, 0 where there is none.

        K is that of `Proposals.survival`. Falls in j.
        """
        width = proposals.survival.shape[1]
        self._locate(proposals.state, width)
        if self._confidence.trust and width:
            by_confidence = self._by_confidence(proposals.survival)
            by_confidence *= prefixes(width, np.float32).take(proposals.num_draft_tokens, 0)
            return by_confidence.astype(np.float64)
        survival: Float64 = self._survival.take(self._rows, 0)
        survival *= self._masks.take(proposals.num_draft_tokens, 0)
        return survival if width == self._num_positions else survival[:, :width]

    def _by_confidence(self, survival: Float32) -> Float32:
        """[R, K] survival from the drafter's confidence, mixed with history as far as that helps."""
        width = survival.shape[1]
        before = np.empty(survival.shape, np.float32)
        before.ravel()[1:] = survival.ravel()[:-1]  # one run: request by request would take longer
        before[:, 0] = 1
        bins = bins_of(survival, before)
        if self._confidence.trust == 1:
            logs = self._confidence.log_rates.take(bins)
        else:
            logs = self._confidence.root_odds.take(bins)
            logs *= self._root_odds.take(self._rows, 0)[:, :width]
            logs /= 1 + logs
            np.log(logs, out=logs)
        # A sum of logarithms as a matrix product: numpy's running product goes through requests one by one.
        sums: Float32 = logs @ self._running_sum[:width, :width]
        return np.exp(sums, out=sums)

    def observe(
        self, proposals: Proposals | None, budgets: Int32, feedback: StepFeedback, is_rare: bool = False
    ) -> bool:
        """Learn what became of a step's drafts; returns whether acceptance as a whole was found to have changed.

        proposals: as given to `trim`; None where the drafter was not asked or nothing is known of its confidence.
        budgets: [R] tokens that the drafter was asked for, at most max_draft_tokens. `Proposals.num_budgeted_tokens`
            goes before it, since it leaves out what a request could not have used.
        is_rare: the next drafts may be long in coming, so these count at once.
        """
        budgets = budgets if proposals is None else proposals.num_budgeted_tokens
        self._num_steps += 1
        num_asked = np.count_nonzero(budgets)
        if num_asked and (num_asked < MANY_REQUESTS or self._num_steps - self._last_count > 1):
            self._last_count = self._num_steps
            self._locate(feedback.state, 1)
            reached, passed = _graded(feedback)
            if proposals is not None and self._num_steps >= self._next_score:
                self._score(proposals, reached, passed)
            self._count(budgets, feedback.num_proposed_tokens, reached, passed)
        if self._rates.has_news and (is_rare or self._num_steps >= self._next_fold):
            return self._fold()
        return False

    def facts(self) -> dict[str, float]:
        """Rates by position, Brier scores (per graded trial: all positions, the first), trials, spread, trust."""
        if self._rates.has_news:
            self._fold()
        rates = self._rates.rates[ACCEPTANCE, -1]
        tested = self._rates.trials[ACCEPTANCE, -1] > 0
        facts = {f"acceptance_p{j}": float(rates[j]) for j in range(self._num_positions) if tested[j]}
        facts["acceptance_brier"] = self._confidence.brier
        facts["acceptance_brier_first"] = self._first_error / max(self._first_trials, 1.0)
        facts["acceptance_trials"] = float(self._rates.num_graded)
        facts["acceptance_available"] = float(self._rates.rates[AVAILABILITY, -1, 0])
        facts["acceptance_request_spread"] = float(self._variance**0.5)
        facts["confidence_trust"] = self._confidence.trust
        return facts

    def _locate(self, state: StepState, num_positions: int) -> None:
        """Find each request's row of the tables: its group and its offset, 0 where it is new in its slot."""
        needed = max(num_positions, state.max_draft_tokens)
        if needed > self._num_positions:
            self._resize(self._num_groups, needed)
        if state is self._state:
            return
        self._state, self._slots = state, state.slots.astype(np.intp)
        if np.count_nonzero(state.num_draft_tokens) < len(self._slots):
            new = self._slots[state.num_draft_tokens == 0]
            self._make_room(int(new.max()) + 1)
            self._place(new, np.full(len(new), self._newcomer))
            self._information[new] = 0
        try:
            self._rows: Intp = self._levels.take(self._slots)
        except IndexError:
            self._make_room(int(self._slots.max()) + 1)
            self._rows = self._levels.take(self._slots)
        self._groups: Intp = state.groups.astype(np.intp)
        self._groups &= MAX_GROUPS - 1
        if self._num_groups > 1 or np.count_nonzero(self._groups):
            if (num_groups := int(self._groups.max(initial=0)) + 1) > self._num_groups:
                self._resize(num_groups, self._num_positions)
            self._rows += self._groups * len(LEVELS)

    def _make_room(self, num_slots: int) -> None:
        more = max(num_slots - len(self._offsets), 0)
        self._offsets, self._information = np.pad(self._offsets, (0, more)), np.pad(self._information, (0, more))
        self._levels = np.pad(self._levels, (0, more), constant_values=len(LEVELS) // 2)

    def _place(self, slots: Intp, offsets: Float64) -> None:
        """Note the offsets of the requests in these slots, and which rows of the tables they make."""
        self._offsets[slots] = offsets
        levels = offsets * LEVELS_PER_LOGIT
        levels += len(LEVELS) // 2 + 0.5
        self._levels[slots] = levels.astype(np.intp)

    def _count(self, budgets: Int32, proposed: Int32, reached: Int32, passed: Int32) -> None:
        """Add outcomes to the counts of each group, and to the offsets of the requests."""
        found = np.minimum(proposed + 1, budgets)
        found += proposed
        groups, old_offsets = self._groups if self._num_groups > 1 else None, self._offsets.take(self._slots)
        self._rates.count(reached + passed, found, old_offsets, groups)
        cells = self._rows * (self._num_positions + 1)
        cells += reached
        information, gained = self._information.take(self._slots), self._sums[1].take(cells)
        offsets = passed - self._sums[0].take(cells)
        if self._num_folds > 2 * FOLD_STEPS and (young := np.flatnonzero(information < YOUNG)).size:
            self._newcomer += float(offsets.take(young).sum() / (gained.take(young).sum() + NEWCOMERS))
            self._newcomer = min(max(self._newcomer, -MOST_NEWCOMER), MOST_NEWCOMER)
        information += gained
        np.minimum(information, MAX_INFORMATION, out=information)
        offsets /= information + 1 / self._variance
        offsets += old_offsets
        np.maximum(offsets, LEVELS[0, 0], out=offsets)
        np.minimum(offsets, LEVELS[-1, 0], out=offsets)
        self._place(self._slots, offsets)
        self._information[self._slots] = information

    def _score(self, proposals: Proposals, reached: Int32, passed: Int32) -> None:
        """Grade predictions for some of the requests, every few steps where there are many."""
        num_requests, width = proposals.survival.shape
        self._next_score = self._num_steps + (2 if num_requests <= 64 else 8)
        stride = -(-num_requests // SCORED_REQUESTS)
        chosen = slice(self._num_scored % stride, None, stride)
        self._num_scored += 1
        positions = np.arange(width)
        cells = np.flatnonzero(positions < reached[chosen, None])
        if len(cells) == 0:
            return
        outcomes = (positions < passed[chosen, None]).take(cells).astype(np.float64)
        is_first = cells % width == 0
        survival = proposals.survival[chosen]
        before = survival.take(cells - 1)
        before[is_first] = 1
        history = self._probabilities.take(self._rows[chosen], 0)[:, :width]
        errors = self._confidence.grade(bins_of(survival.take(cells), before), history.take(cells), outcomes)
        self._first_error += float(errors @ is_first)
        self._first_trials += float(np.count_nonzero(is_first))

    def _fold(self) -> bool:
        """Turn the counts into rates and the rates into tables, in every step at first; returns as observe()."""
        self._num_folds += 1
        if self._num_folds > 2 * FOLD_STEPS:
            many = self._num_groups > 2 or len(self._rows) >= 64
            self._next_fold = self._num_steps + FOLD_STEPS * (4 if self._num_groups > 8 else 2 if many else 1)
        changed = self._rates.fold()
        if changed is not None:
            self._forget(changed)
        if self._num_folds % 4 == 0:
            self._learn_spread()
        self._build()
        return changed is not None and bool(changed[-1])

    def _forget(self, changed: NDArray[np.bool_]) -> None:
        """Drop what hangs on rates that have changed. changed: [rows] of the groups, the pool's last."""
        if changed[-1]:
            self._confidence.forget()
            self._newcomer = 0.0
        if self._state is not None:
            slots = self._slots[changed[self._groups]]
            self._place(slots, np.zeros(len(slots)))
            self._information[slots] = 0

    def _learn_spread(self) -> None:
        """One EM step for the variance of the offsets over requests."""
        known = self._information > 2
        offsets, information = self._offsets[known], self._information[known]
        if len(offsets) >= 4:
            found = float((offsets**2 + 1 / (information + 1 / self._variance)).mean())
            share = len(offsets) / (len(offsets) + 8)
            self._variance = min(max(self._variance + share * (found - self._variance), 0.05), 4.0)

    def _resize(self, num_groups: int, num_positions: int) -> None:
        self._num_groups, self._num_positions = num_groups, num_positions
        self._rates.resize(num_groups, num_positions)
        self._masks = prefixes(num_positions)
        self._running_sum = np.tri(num_positions, dtype=np.float32).T
        self._build()

    def _build(self) -> None:
        """The tables that everything else only looks up: a row for each level of each group, a column for each j."""
        rates = self._rates.rates[ACCEPTANCE, : self._num_groups, None]
        lean = np.maximum.accumulate(self._rates.lean[0, : self._num_groups], axis=1)
        lean -= lean[:, :1]
        odds = rates / (1 - rates) * np.exp(LEVELS - lean[:, None] * KNOWN)
        odds = odds.reshape(-1, self._num_positions)
        self._root_odds = np.sqrt(odds).astype(np.float32)
        # Expected successes and the information of the offset, for one position and for so many trials.
        single = np.empty((2, *odds.shape))
        self._probabilities = np.divide(odds, 1 + odds, out=single[0])
        np.multiply(single[0], 1 - single[0], out=single[1])
        self._sums = single @ self._masks.T
        self._survival = np.multiply.accumulate(self._probabilities, axis=1)
        self._available = np.multiply.accumulate(self._rates.rates[AVAILABILITY, : self._num_groups], axis=1)
        by_group = self._survival.reshape(self._num_groups, -1, self._num_positions)
        self._yields = (by_group * self._available[:, None]).reshape(odds.shape)


def _graded(feedback: StepFeedback) -> tuple[Int32, Int32]:
    """[R] graded trials and [R] successes of each request; successes are all of the trials or all but the last."""
    matched = feedback.num_matched_tokens
    reached = np.minimum(matched + 1, feedback.num_proposed_tokens)
    np.minimum(reached, feedback.num_committed_tokens, out=reached)
    return reached, np.minimum(matched, reached)
