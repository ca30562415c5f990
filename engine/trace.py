"""What the engine says about its own work: one record a step, and running totals. Importable without torch."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class StepRecord:
    """One step of the engine; the field names are the columns of metrics/steps."""

    step: int
    start_s: float
    """Seconds since the engine began to run."""
    num_running: int
    """Requests that decoded."""
    num_scheduled: int
    num_waiting: int
    num_prefill_tokens: int
    num_batched_tokens: int
    """Rows of the forward pass."""
    num_context_tokens: int
    """Tokens, prompt and output, that the decoding requests held."""
    num_drafts: int
    """Requests that had at least one draft token verified."""
    num_proposed_tokens: int
    """Draft tokens that the drafter found, before the policy cut them."""
    num_draft_tokens: int
    max_draft_len: int
    """Most draft tokens of one request."""
    num_accepted_tokens: int
    num_generation_tokens: int
    """Tokens committed to outputs."""
    num_preemptions: int
    kv_usage: float
    rolling_acceptance_rate: float | None
    """As the policy saw it."""
    reason: str
    """The policy's."""
    policy_s: float
    draft_s: float
    verify_s: float
    """Forward pass and sampling."""
    other_s: float
    """Scheduling, batch building, commit."""
    input_wait_s: float
    """Time in which the engine waited for its caller to hand over requests or take outputs."""


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine was built. Counts as vLLM's: acceptance length is 1 + accepted / drafts."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens of admitted requests."""
    num_cached_tokens: int = 0
    """Prefill tokens saved: prompt tokens found in the prefix cache."""
    num_generation_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    spec_on_s: float = 0.0
    """Seconds of decoding steps in which at least one draft token was verified."""
    spec_off_s: float = 0.0
    """Seconds of decoding steps without drafts."""
    busy_s: float = 0.0
    """Seconds in steps."""
    input_wait_s: float = 0.0

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0

    def add(self, record: StepRecord) -> None:
        """Count a step. Prompt tokens and the state of the queues are the engine's to set."""
        self.num_steps += 1
        self.num_generation_tokens += record.num_generation_tokens
        self.num_drafts += record.num_drafts
        self.num_draft_tokens += record.num_draft_tokens
        self.num_accepted_tokens += record.num_accepted_tokens
        self.num_preemptions += record.num_preemptions
        self.input_wait_s += record.input_wait_s
        seconds = record.policy_s + record.draft_s + record.verify_s + record.other_s
        self.busy_s += seconds
        if record.num_draft_tokens:
            self.spec_on_s += seconds
        elif record.num_running:
            self.spec_off_s += seconds


class RollingAcceptance:
    """Accepted over drafted tokens of the last `window` graded drafts, whole steps at a time."""

    def __init__(self, window: int = 256) -> None:
        self._window = window
        self._steps: deque[tuple[int, int, int]] = deque()
        self._totals = [0, 0, 0]

    @property
    def rate(self) -> float | None:
        """0 to 1; None before any draft was graded."""
        return self._totals[2] / self._totals[1] if self._totals[1] else None

    def add(self, num_drafts: int, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Count a step's drafts and forget the steps that the window no longer needs."""
        if not num_drafts:
            return
        self._steps.append((num_drafts, num_draft_tokens, num_accepted_tokens))
        self._totals = [a + b for a, b in zip(self._totals, self._steps[-1], strict=True)]
        while self._totals[0] - self._steps[0][0] >= self._window:
            self._totals = [a - b for a, b in zip(self._totals, self._steps.popleft(), strict=True)]


class StepClock:
    """Seconds of the step at work, by part."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self.start_s = 0.0
        """When the step began; 0 is when the clock was made."""
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def begin_step(self) -> None:
        """Forget the last step."""
        self._last = time.perf_counter()
        self.start_s = self._last - self._began
        self.seconds.clear()

    def lap(self, part: str) -> None:
        """Book the time since the last lap under this part."""
        now = time.perf_counter()
        self.seconds[part] += now - self._last
        self._last = now
