"""The engine's vocabulary: what a caller asks for, what it gets back. Importable without torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import StrEnum

from .grammar import Grammar

MAX_FLOAT = sys.float_info.max
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM: dividing by them would leave the range of a float."""


class InvalidParameter(ValueError):
    """A sampling parameter is out of range; `name` is its name, the text says the allowed range."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled. Names and meanings are vLLM's.

    Raises InvalidParameter when a value is out of range.
    """

    max_tokens: int = 256
    """Most tokens to generate, at least 1."""
    min_tokens: int = 0
    """End-of-sequence, stop ids and stop strings do not count before this many tokens."""
    temperature: float = 0.0
    """0 (or anything below 1e-5) is greedy; otherwise logits are divided by it."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this, (0, 1]."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one, [0, 1]."""
    repetition_penalty: float = 1.0
    """Divide (or multiply, where negative) logits of tokens seen in prompt or output, > 0."""
    presence_penalty: float = 0.0
    """Subtract from logits of tokens seen in the output, [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtract, for each occurrence in the output, [-2, 2]."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Token id -> value added to its logit."""
    stop: tuple[str, ...] = ()
    """Strings that end the output; the text is cut before them."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output, besides the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """Go on past end-of-sequence."""
    seed: int = 0
    """64-bit key of this request's noise; the runner derives it from job seed and row."""
    logprobs: int | None = None
    """0 returns the log probability of each chosen token; None returns none. More is not supported."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "min_tokens", "top_k", "seed"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise InvalidParameter(name, f"must be a whole number, got {value!r}")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= MAX_FLOAT:
                raise InvalidParameter(name, f"must be a finite number, got {value!r}")
        self._check("max_tokens", self.max_tokens >= 1, "must be at least 1")
        self._check("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "must be between 0 and max_tokens")
        self._check("temperature", self.temperature >= 0, "must not be negative")
        self._check("top_p", 0 < self.top_p <= 1, "must be above 0 and at most 1")
        self._check("top_k", self.top_k >= -1, "must be -1, 0 or a positive count")
        self._check("min_p", 0 <= self.min_p <= 1, "must be between 0 and 1")
        self._check("repetition_penalty", self.repetition_penalty > 0, "must be above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            self._check(name, -2 <= getattr(self, name) <= 2, "must be between -2 and 2")
        self._check("stop", all(isinstance(s, str) and s for s in self.stop), "must be non-empty strings")
        self._check("logprobs", self.logprobs in (None, 0), "only 0 (the chosen token) is supported")

    def _check(self, name: str, ok: bool, message: str) -> None:
        if not ok:
            raise InvalidParameter(name, f"{message}, got {getattr(self, name)!r}")

    @property
    def has_penalties(self) -> bool:
        """Whether a row's logits depend on the tokens before it."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, without noise."""
        return self.temperature < GREEDY_BELOW

    @property
    def is_plain(self) -> bool:
        """Whether the next token is the argmax of the unmodified logits and nothing else is asked for."""
        return (
            self.is_greedy
            and self.logprobs is None
            and self.min_tokens == 0
            and not self.logit_bias
            and not self.has_penalties
        )


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"
    TIMEOUT = "timeout"
    """It had run for EngineConfig.request_timeout_s; its output so far depends on the machine's speed."""


class RequestStatus(StrEnum):
    """Where a request stands in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One prompt on its way through the engine. State is counters; the rest is derived.

    The caller gives request_id, prompt_token_ids and sampling_params (and a group); the engine fills the rest.
    """

    request_id: int
    """The caller's number; a job uses the global row index."""
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    group: int = 0
    """Rows that share a template, for policies that learn by group."""
    grammar: Grammar | None = None
    """What the output must follow; advances with it."""

    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    """Leading tokens whose KV is in the cache."""
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache at the first admission."""
    block_table: list[int] = field(default_factory=list)
    slot: int = -1
    """Stable row of this request in the engine's arrays while it runs; -1 otherwise."""
    status: RequestStatus = RequestStatus.WAITING
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_preemptions: int = 0
    began_at_s: float | None = None
    """EngineStats.busy_s when it first was scheduled."""
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    """The stop string or, as text, the stop token id that ended the output."""
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens still to run; 1 for a request that decodes."""
        return self.num_tokens - self.num_computed_tokens


@dataclass(slots=True)
class RequestOutput:
    """A finished request."""

    request_id: int
    token_ids: list[int]
    """Output tokens, the stop token included where one ended the output."""
    finish_reason: FinishReason
    stop_reason: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_drafts: int = 0
    """Verifications that carried at least one draft token."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    logprobs: list[float] | None = None
    """Natural log of each output token's probability under the unmodified logits."""
    error: str | None = None
    """Why it failed, when finish_reason is error or timeout."""

    @classmethod
    def of(cls, request: Request) -> RequestOutput:
        """The output of a request that has a finish_reason."""
        assert request.finish_reason is not None
        return cls(
            request_id=request.request_id,
            token_ids=request.output_token_ids,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=request.num_cached_tokens,
            num_drafts=request.num_drafts,
            num_draft_tokens=request.num_draft_tokens,
            num_accepted_tokens=request.num_accepted_tokens,
            logprobs=request.logprobs if request.sampling_params.logprobs is not None else None,
            error=request.error,
        )
