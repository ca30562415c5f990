"""How long a job will take, with speculation and without, foreseen once from its first steps.

A closed form and no simulation: every live row gains a token in each unit of a common clock, so which rows are live
when follows from their lengths alone, and only how long a unit takes depends on speculation. That is the cost model's
to say for any number of live rows, those of the tail included, which no pilot has seen.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from ..engine.trace import EngineStats, StepRecord
from ..policies.base import SpeculationPolicy, StepFeedback, StepState
from ..policies.cost_model import CostModel
from .row_lengths import RowLengths

Float64 = NDArray[np.float64]

PILOT_STEPS = 200
MAX_PILOT_STEPS = 2000
"""A pilot goes on past PILOT_STEPS, up to these, until"""
MIN_FINISHED = 8
"""so many rows have finished, since before that nothing is known of lengths but max_tokens."""
MAX_ROWS = 8192
"""Rows whose places are worked out one by one; of a longer job the rest is taken as a full batch."""
MAX_SIZES = 24
"""Batch sizes at which a pace is worked out; between them it is a straight line."""
BEYOND_DOUBT = (0.5, 2.0)
"""Limits of what the pilot's own pace may say against the cost model."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds of engine steps of a whole run, from its first step to its last."""

    at_step: int
    """When it was made."""
    seconds: float
    """As the job is set."""
    never_seconds: float
    """Had nothing been drafted and no drafter been loaded."""


class Forecaster:
    """Watches the first steps of a run and then says how long it will take. Memory bounded by MAX_PILOT_STEPS.

    A policy that learns can help, and need not: with an attribute `cost`, a CostModel, and among its facts() with
    acceptance_p0, acceptance_p1, ..., the chance of a draft, by position, to be right if all before it were, and
    acceptance_available, that of there being one.
    """

    def __init__(
        self, policy: SpeculationPolicy, num_rows: int, max_num_seqs: int, lengths: RowLengths, stats: EngineStats
    ) -> None:
        """num_rows: rows of this run, those included that never come to the engine. lengths, stats: the run's own, as
        they grow."""
        self._policy, self._num_rows, self._max_num_seqs = policy, num_rows, max_num_seqs
        self._lengths, self._stats = lengths, stats
        self._records: list[StepRecord] = []
        self._is_over = False

    def add(self, record: StepRecord) -> Forecast | None:
        """Take in a step; gives the forecast with the step that ends the pilot, None with every other."""
        if self._is_over:
            return None
        self._records.append(record)
        num_steps, num_finished = len(self._records), self._lengths.num_finished
        if num_steps < PILOT_STEPS or (num_finished < MIN_FINISHED and num_steps < MAX_PILOT_STEPS):
            return None
        self._is_over = True
        found = self._forecast()
        self._records = []
        return found

    def _forecast(self) -> Forecast | None:
        pilot = Pilot(self._records)
        cost = getattr(self._policy, "cost", None)
        if not isinstance(cost, CostModel):
            cost = pilot.fitted()
        if not (cost.is_ready and pilot.num_live):
            return None
        lengths, num_running = self._lengths, self._records[-1].num_scheduled
        share = lengths.num_expected / max(1, lengths.num_expected + lengths.num_refused)
        num_left = max(num_running, round(self._num_rows * share) - lengths.num_finished)
        outputs = output_lengths(min(num_left, MAX_ROWS), pilot.num_tokens, num_running, lengths)
        mean_prompt = lengths.num_prompt_tokens / max(1, lengths.num_expected)
        mean_output = float(outputs.mean()) if len(outputs) else 1.0
        context = mean_prompt + mean_output / 2
        outputs[:num_running] -= max(0, pilot.num_tokens - lengths.num_finished_tokens) / max(1, num_running)
        outputs[num_running:] -= 1  # the last chunk of a prompt brings the first token
        full, clock, live = live_rows(np.maximum(outputs, 1.0), num_left, self._max_num_seqs)
        cached = self._stats.num_cached_tokens / max(1, self._stats.num_prompt_tokens)
        # Prompt tokens for each output token, while rows that finish make room for others.
        density = mean_prompt * (1 - cached) / max(1.0, mean_output)
        never = Pace(cost, context)
        drafting = Pace(cost, context, pilot, policy_facts(self._policy))
        correction = pilot.pace() / max(1e-12, drafting.seconds(pilot.num_live, pilot.density))
        correction = min(max(correction, BEYOND_DOUBT[0]), BEYOND_DOUBT[1])
        after_s = [pace.total(full, clock, live, density) for pace in (drafting, never)]
        # Without drafts a step has fewer rows than the pilot's had, so it takes no longer, whatever the model says.
        plain_s = max(1e-12, never.seconds(pilot.num_live, pilot.density))
        bounded = min(1.0, pilot.verify_s / plain_s)
        busy_s, ratio = self._stats.busy_s, bounded * plain_s / max(1e-12, pilot.pace())
        never_s = busy_s + (ratio - 1) * pilot.drafting_s + bounded * after_s[1]
        found = Forecast(pilot.num_steps, busy_s + correction * after_s[0], never_s)
        return found if isfinite(found.seconds) and isfinite(found.never_seconds) else None


class Pilot:
    """The first steps of a run, summed up."""

    def __init__(self, records: Sequence[StepRecord]) -> None:
        self._records = records
        self.num_steps = len(records)
        self.num_tokens = sum(record.num_generation_tokens for record in records)
        # What a policy does at first, while it knows nothing, is not what it goes on to do.
        self._late = [record for record in records[len(records) // 2 :] if record.num_running]
        self._late_s = sum(map(_seconds, self._late))
        self.verify_s = (self._late_s - sum(record.draft_s for record in self._late)) / max(1, len(self._late))
        """Seconds of a step but for drafting, in the mean."""
        self._row_steps = sum(record.num_running for record in self._late)
        self.num_live = self._row_steps / max(1, len(self._late))
        """Rows that decode in a step, in the mean; 0 where none did."""
        self.tokens_per_row = 1 + self._share("num_accepted_tokens")
        """Tokens that a row gains in a step. With the next three, all of the second half."""
        self.drafts_per_row = self._share("num_draft_tokens")
        self.drafting_share = self._share("num_drafts")
        """Of the rows of a step, how many draft."""
        self.longest = max((record.max_draft_len for record in self._late), default=0)
        self.density = self._share("num_prefill_tokens") / self.tokens_per_row
        """Prompt tokens for each output token, of the second half too."""
        self.drafting_s = sum(_seconds(record) for record in records if record.num_draft_tokens)
        """Seconds of all steps that verified drafts."""

    def _share(self, name: str) -> float:
        total: int = sum(getattr(record, name) for record in self._late)
        return total / max(1, self._row_steps)

    def fitted(self) -> CostModel:
        """A cost model of these steps alone, for policies that have none."""
        cost = CostModel()
        for record in self._records:
            if record.num_running:
                cost.observe(_feedback(record))
        return cost

    def pace(self) -> float:
        """Seconds in which every live row gained a token, prefill and all else included."""
        return self._late_s / max(1, len(self._late)) / self.tokens_per_row


class Pace:
    """Seconds in which every one of so many live rows gains a token, by a cost model.

    Without a pilot, of plain decoding. With one, of the job's own policy: the best draft length where the policy tells
    of acceptance; otherwise it is taken to go on as it did. Prefill is asked for together with the decoding that it
    comes with, since a cost model knows best what steps were like.
    """

    def __init__(
        self, cost: CostModel, context: float, pilot: Pilot | None = None, facts: Mapping[str, float] | None = None
    ) -> None:
        """context: tokens that a row holds in the mean."""
        self._cost, self._context = cost, context
        rates = None if pilot is None else _rates(facts or {})
        self._drafting = 1.0
        if rates is not None:
            share = (facts or {}).get("acceptance_available", 1.0)
            self._longest = np.arange(len(rates) + 1.0)
            self._drafts = share * self._longest
            self._tokens = 1 + share * np.append(0.0, np.cumprod(rates)).cumsum()
        elif pilot is not None:
            self._drafting, self._longest = pilot.drafting_share, np.array([float(pilot.longest)])
            self._drafts, self._tokens = np.array([pilot.drafts_per_row]), np.array([pilot.tokens_per_row])
        else:
            self._longest, self._drafts, self._tokens = np.zeros(1), np.zeros(1), np.ones(1)

    def seconds(self, live: float, density: float = 0.0) -> float:
        """For `live` rows, `density` prompt tokens being read for each output token."""
        chunks = density * live * self._tokens
        rows = live * (1 + self._drafts) + chunks
        steps = [
            float(self._cost.step_s(n, round(live), live * self._context, round(chunk)))
            for n, chunk in zip(rows.tolist(), chunks.tolist(), strict=True)
        ]
        draft_s = self._cost.draft_s(live * self._drafting, self._longest)
        return float(np.min((np.array(steps) + draft_s) / self._tokens))

    def total(self, full: float, clock: Float64, live: Float64, density: float) -> float:
        """For what live_rows() gives: prefill as dense as that while rows start, none afterwards."""
        if not len(live):
            return 0.0
        sizes = np.unique(np.geomspace(1, live[0], MAX_SIZES).round())
        pace = np.interp(live, sizes, [self.seconds(size) for size in sizes.tolist()])
        return full * self.seconds(float(live[0]), density) + float(clock @ pace)


def policy_facts(policy: SpeculationPolicy) -> dict[str, float]:
    """policy.facts(), as far as they are finite numbers. A policy may be the user's own, and what it says about itself
    is not worth a job: one that fails has no facts."""
    try:
        facts = {str(name): float(value) for name, value in policy.facts().items()}
    except Exception:
        return {}
    return {name: value for name, value in facts.items() if isfinite(value)}


def output_lengths(num_rows: int, num_tokens: int, num_running: int, lengths: RowLengths) -> Float64:
    """[num_rows] output tokens of rows like those so far, in no order: num_tokens were written, rows still run.

    Their mean is that of an exponential length seen in part, cut at max_tokens: all tokens over the rows that have come
    to an end of their own (the maximum likelihood estimate). So is their spread, until the rows that have finished are
    many beside those that run; before that they are the short ones.
    """
    limit = lengths.max_output_tokens / max(1, lengths.num_expected)
    num_ends = lengths.num_finished - lengths.num_at_limit
    scale = num_tokens / num_ends if num_ends else np.inf
    draw = np.random.default_rng(0)
    shares = draw.permutation((np.arange(num_rows) + 0.5) / max(1, num_rows))
    outputs = np.full(num_rows, limit) if scale == np.inf else np.minimum(-scale * np.log(shares), limit)
    if lengths.num_finished >= 2 * num_running and num_rows:
        sample = np.array(lengths.sample, np.float64)
        outputs = draw.choice(sample, num_rows) * outputs.mean() / max(1.0, sample.mean())
    lasting: Float64 = np.maximum(outputs, 1.0)
    return lasting


def live_rows(outputs: Float64, num_left: int, max_num_seqs: int) -> tuple[float, Float64, Float64]:
    """Units of a clock in which every live row gains a token: those until the last row starts, and after these [N]
    units with how many rows [N] are live during each.

    outputs [M]: tokens that rows have before them; those behind the first max_num_seqs start as places become free.
    num_left: rows in all, of which more than M are like the others and keep the batch full.
    """
    places = min(len(outputs), max_num_seqs)
    ends, full = outputs[:places].tolist(), 0.0
    heapq.heapify(ends)
    for output in outputs[places:].tolist():
        full = ends[0]
        heapq.heapreplace(ends, full + output)
    clock = np.diff(np.sort(ends), prepend=full)
    if places:
        full += (num_left - len(outputs)) * float(outputs.mean()) / places
    return full, clock, np.arange(places, 0, -1, dtype=np.float64)


def _rates(facts: Mapping[str, float]) -> Float64 | None:
    """Acceptance by position; None where a policy does not tell."""
    rates: list[float] = []
    while (rate := facts.get(f"acceptance_p{len(rates)}")) is not None:
        rates.append(rate)
    return np.array(rates) if rates else None


def _seconds(record: StepRecord) -> float:
    return record.policy_s + record.draft_s + record.verify_s + record.other_s


def _feedback(record: StepRecord) -> StepFeedback:
    """A step as a policy might have heard of it, as far as a cost model looks at it."""
    count = record.num_running
    zeros, zeros64 = np.zeros(count, np.int32), np.zeros(count, np.int64)
    contexts = np.full(count, record.num_context_tokens // count, np.int32)
    contexts[: record.num_context_tokens % count] += 1
    drafts = np.where(np.arange(count) < record.num_drafts, record.max_draft_len, 0).astype(np.int32)
    state = StepState(
        step=record.step,
        num_running=count,
        num_scheduled=record.num_scheduled,
        num_waiting=record.num_waiting,
        num_prefill_tokens=record.num_prefill_tokens,
        kv_usage=record.kv_usage,
        max_draft_tokens=record.max_draft_len,
        drafter="",
        rolling_acceptance_rate=record.rolling_acceptance_rate,
        slots=np.arange(count, dtype=np.int32),
        context_lens=contexts,
        groups=zeros,
        num_draft_tokens=zeros64,
        num_accepted_tokens=zeros64,
    )
    return StepFeedback(
        state=state,
        num_proposed_tokens=drafts,
        num_draft_tokens=drafts,
        num_accepted_tokens=zeros,
        num_matched_tokens=zeros,
        num_committed_tokens=zeros,
        num_batched_tokens=record.num_batched_tokens,
        draft_s=record.draft_s,
        verify_s=record.verify_s,
        other_s=record.other_s + record.policy_s,
    )
