"""SGLang's adaptive speculative decoding: tiers of draft steps by batch size, moved by accepted tokens a request."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

from ...base import SpecDecision, SpeculationPolicy, StepFeedback, StepState

TIERS = {1: (1, 3, 5, 7), 8: (0, 1, 3), 32: (0, 1), 64: (0,)}
"""Draft lengths to choose from, by the smallest batch size of each slot (defaults of 0.5.23)."""
DOWN_HYSTERESIS = {1: -0.25, 8: 0.0, 32: 0.0, 64: 0.0}
UP_HYSTERESIS = 0.0
EMA_ALPHA = 0.2
WARMUP_BATCHES = 10
UPDATE_INTERVAL = 5
INITIAL_STEPS = 3
"""The middle of all tiers, which the server takes when no number of steps is given."""
GRAPH_BATCH_SIZES = (*range(1, 9), *range(10, 33, 2), *range(40, 65, 4))
"""Batch sizes that CUDA graphs are captured for when speculating, as far as they bear on the slots."""


class SglangAdaptive(SpeculationPolicy):
    """Each slot of batch sizes follows its own moving average of accepted tokens; cost plays no part.

    Source: SGLang 0.5.23, python/sglang/srt/speculative/adaptive_spec_params.py, and its unit tests. Documented: the
    batch size is padded to a graph size and then finds its slot; the average over the batch of accepted tokens
    enters an exponential average, except where the slot is at 0; after 10 batches the tier is judged at every fifth.
    It falls while the average is at most the next lower tier - 0.5 + down hysteresis (0.5 + down hysteresis for tier
    0), else it rises while the average is above the tier - 0.5 + up hysteresis, over several tiers at once. A slot at
    0 always goes to its next tier and looks again. ceiling_coeff is off by default and left out. The drafter extends
    over new tokens at length 0 too, so it stays ready. Our reading: the batch is the requests that decode, as prefill
    is a batch of its own there; a tier longer than `StepState.max_draft_tokens` drafts as many as that.
    """

    def __init__(self) -> None:
        self._slots = [_Slot(tiers, DOWN_HYSTERESIS[size]) for size, tiers in TIERS.items()]
        self._starts = list(TIERS)

    def decide(self, state: StepState) -> SpecDecision:
        """The steps of the batch size's slot for every request."""
        slot = self._slot_of(state.num_running)
        reason = f"slot {slot.tiers}, average {slot.accepted:.2f}"
        return SpecDecision.uniform(state, min(slot.steps, state.max_draft_tokens), reason)

    def observe(self, feedback: StepFeedback) -> None:
        """Move the slot's average, and its tier when it is time."""
        if feedback.state.num_running:
            self._slot_of(feedback.state.num_running).update(float(feedback.num_accepted_tokens.mean()))

    def _slot_of(self, batch: int) -> _Slot:
        index = bisect_left(GRAPH_BATCH_SIZES, batch)
        padded = GRAPH_BATCH_SIZES[index] if index < len(GRAPH_BATCH_SIZES) else batch
        return self._slots[max(bisect_right(self._starts, padded) - 1, 0)]


@dataclass
class _Slot:
    tiers: tuple[int, ...]
    down_hysteresis: float
    steps: int = field(init=False)
    accepted: float = field(init=False)
    """Moving average of accepted draft tokens a request; starts one below the steps."""
    num_batches: int = 0

    def __post_init__(self) -> None:
        self.steps = INITIAL_STEPS if INITIAL_STEPS in self.tiers else self.tiers[len(self.tiers) // 2]
        self.accepted = float(self.steps - 1)

    def update(self, mean_accepted: float) -> None:
        if self.steps:
            self.accepted += EMA_ALPHA * (mean_accepted - self.accepted)
        self.num_batches += 1
        num_judged = self.num_batches - WARMUP_BATCHES
        if num_judged > 0 and num_judged % UPDATE_INTERVAL == 0:
            self.steps = self._choose()

    def _choose(self) -> int:
        if self.steps == 0:
            return self.tiers[min(1, len(self.tiers) - 1)]
        lower = (tier for tier in self.tiers if tier < self.steps and self.accepted <= self._falls_to(tier))
        if (fallen := next(lower, None)) is not None:
            return fallen
        upper = (tier for tier in self.tiers if tier >= self.steps and self.accepted <= tier - 0.5 + UP_HYSTERESIS)
        return next(upper, self.tiers[-1])

    def _falls_to(self, tier: int) -> float:
        """Largest average at which the slot falls to this tier; grows with the tier, so the first hit is the lowest."""
        return max(tier, 1) - 0.5 + self.down_hysteresis
