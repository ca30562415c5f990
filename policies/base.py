"""The seam between the engine and whoever decides how far to speculate: numbers in, draft lengths out.

One step is three calls. `decide` sees what is known before the step and gives each decoding request a draft budget.
The drafter then proposes, and `trim` may cut what is sent to verification. `observe` hears what came of it.
Under exact-match verification every answer is lossless, so a policy may look at anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StepState:
    """What may be known before a step. Arrays have one entry for each of the R requests that decode in it.

    A slot is a small integer that a request keeps while it runs, so a policy may hold arrays over slots.
    `slots`, `context_lens`, `groups` and the counters are aligned: entry i of each is the same request.
    """

    step: int
    """Index of the step, from 0."""
    num_running: int
    """R, the requests that decode in this step."""
    num_scheduled: int
    """All requests in the step, those in prefill included (the key of vLLM's batch-size table)."""
    num_waiting: int
    """Requests that are drawn but not yet admitted."""
    num_prefill_tokens: int
    """Prompt tokens computed in this step."""
    kv_usage: float
    """Share of KV blocks in use, 0 to 1."""
    max_draft_tokens: int
    """Upper limit for every entry of a decision."""
    drafter: str
    """Kind of drafter, as `speculation.method` in the job."""
    rolling_acceptance_rate: float | None
    """Accepted over drafted tokens of the last graded drafts; None before any."""
    slots: Int32
    """[R] stable slot of each request."""
    context_lens: Int32
    """[R] tokens (prompt and output) that each request holds."""
    groups: Int32
    """[R] group of each request (rows that share a prompt template), 0 where there is one group."""
    num_draft_tokens: Int64
    """[R] draft tokens that each request has had verified so far."""
    num_accepted_tokens: Int64
    """[R] draft tokens that each request has had accepted so far."""
    capture_sizes: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))
    """[C] ascending row counts that the forward pass is padded to; empty where nothing is padded. More rows than the
    last are not padded."""


@dataclass(frozen=True, slots=True)
class SpecDecision:
    """Draft budget for each decoding request and a short reason that lands in the step trace."""

    num_draft_tokens: Int32
    """[R] at most this many draft tokens; 0 means no speculation. Values are clipped to 0..max_draft_tokens."""
    reason: str
    stand_by: bool = True
    """Whether a drafter that has to run to stay ready should do so where this step drafts nothing. One that is let go
    falls behind, and catches up when it is asked again; drafters that always work that way ignore it."""

    @classmethod
    def uniform(cls, state: StepState, num_draft_tokens: int, reason: str) -> SpecDecision:
        """The same budget for every request of the step."""
        return cls(np.full(state.num_running, num_draft_tokens, dtype=np.int32), reason)


@dataclass(frozen=True, slots=True)
class Proposals:
    """What the drafter found, before any of it is verified."""

    state: StepState
    num_budgeted_tokens: Int32
    """[R] draft tokens asked for: the decision, within what the request may still generate and the KV cache holds."""
    num_draft_tokens: Int32
    """[R] draft tokens proposed, at most as many."""
    survival: Float32
    """[R, K] estimated probability that draft j and all before it are accepted; 0 past a request's drafts."""


@dataclass(frozen=True, slots=True)
class StepFeedback:
    """What happened in a step."""

    state: StepState
    num_proposed_tokens: Int32
    """[R] draft tokens that the drafter found, before `trim`."""
    num_draft_tokens: Int32
    """[R] draft tokens verified."""
    num_accepted_tokens: Int32
    """[R] leading draft tokens that equalled the target's own. Position j (from 0) was graded when accepted >= j."""
    num_matched_tokens: Int32
    """[R] leading proposed tokens that equalled the target's own: the accepted ones, and one more where the first
    token that `trim` cut is what decoding then gave anyway. So position j of what was proposed is graded where
    matched >= j and j < committed: a drafter that costs nothing can be watched while nothing is verified."""
    num_committed_tokens: Int32
    """[R] tokens appended to the output: accepted + 1, less what a stop condition dropped."""
    num_batched_tokens: int
    """Rows of the forward pass: decodes, drafts and prefill chunks."""
    draft_s: float
    verify_s: float
    other_s: float
    """Seconds spent drafting, in the target's forward pass with sampling, and in the rest of the step."""


class SpeculationPolicy(Protocol):
    """Decides, at every step, how many tokens to draft for each request.

    Subclass it and write `decide`; `trim` and `observe` have defaults that verify everything and learn nothing.
    A policy lives in one process and is called from one thread, once a step; keep it under 100 microseconds.
    """

    def decide(self, state: StepState) -> SpecDecision:
        """Draft budget for each request of the step."""
        ...

    def trim(self, proposals: Proposals) -> Int32:
        """[R] how many of each request's drafts are verified, at most the number proposed."""
        return proposals.num_draft_tokens

    def observe(self, feedback: StepFeedback) -> None:
        """Learn from the step that has just run."""
        return None

    def facts(self) -> dict[str, float]:
        """Numbers about itself for the job's report."""
        return {}
