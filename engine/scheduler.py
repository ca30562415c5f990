"""Waiting and running requests -> the ragged batch of a step: admission, chunked prefill, preemption."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from ..policies.base import Int32
from .block_manager import Admission, BlockManager
from .request import Request, RequestStatus

MAX_HELD_BACK = 64
"""Waiting requests looked at in one step for one whose prefix nobody is computing; bounds the scan, not the queue."""


@dataclass(slots=True)
class Batch:
    """The requests of a step and how many tokens each contributes: first R that decode, then those in prefill."""

    decodes: list[Request] = field(default_factory=list)
    prefills: list[Request] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    """Prefill tokens of each entry of prefills."""
    drafts: list[list[int]] = field(default_factory=list)
    """Draft tokens of each entry of decodes that are verified, set once the policy has cut the drafter's proposals."""
    proposals: list[list[int]] = field(default_factory=list)
    """What the drafter proposed for each entry of decodes: the drafts and what was cut behind them."""
    num_draft_tokens: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))
    num_proposed_tokens: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))
    """[R] lengths of drafts and of proposals."""
    admitted: list[Request] = field(default_factory=list)
    """Those of prefills that run for the first time."""
    num_preemptions: int = 0

    @property
    def requests(self) -> list[Request]:
        """All requests, in the order of the batch's rows."""
        return self.decodes + self.prefills

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt (or recomputed) tokens in the step."""
        return sum(self.chunks)

    def propose(self, proposals: list[list[int]], num_proposed_tokens: Int32) -> None:
        """Take what the drafter found, all of it to be verified until it is cut."""
        self.drafts = self.proposals = proposals
        self.num_draft_tokens = self.num_proposed_tokens = num_proposed_tokens

    def cut(self, keep: Int32) -> None:
        """Verify no more than so many [R] of what was proposed."""
        self.num_draft_tokens = np.minimum(np.maximum(keep, 0), self.num_proposed_tokens).astype(np.int32)
        self.drafts = [ids[:k] for ids, k in zip(self.proposals, self.num_draft_tokens.tolist(), strict=True)]

    @property
    def query_lens(self) -> Int32:
        """[N] rows that each request contributes: 1 + drafts, or its prefill chunk."""
        drafts = self.drafts or [[]] * len(self.decodes)
        return np.array([1 + len(d) for d in drafts] + self.chunks, dtype=np.int32)

    @property
    def num_rows(self) -> int:
        """Rows of the forward pass: all of query_lens."""
        return len(self.decodes) + sum(map(len, self.drafts)) + self.num_prefill_tokens


class Scheduler:
    """Hands a step's token budget to requests that decode first, then to prefills, oldest first.

    A request that cannot get a KV block preempts the youngest running one, which waits and is computed again.
    """

    def __init__(self, blocks: BlockManager, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._free_slots = list(range(max_num_seqs))[::-1]
        self._num_preemptions = 0

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would have work."""
        return bool(self.waiting or self.running)

    @property
    def num_wanted(self) -> int:
        """Requests worth drawing now: enough to fill the free slots and to look past those held back."""
        return max(0, self.max_num_seqs - len(self.running) + min(self.max_num_seqs, MAX_HELD_BACK) - len(self.waiting))

    def add(self, request: Request) -> None:
        """Queue a request."""
        request.status = RequestStatus.WAITING
        self.waiting.append(request)

    def schedule(self) -> Batch:
        """The batch of the next step, without drafts. Every decode has its KV slot, every prefill chunk too."""
        self._num_preemptions = 0
        self._secure_decodes()
        batch = Batch()
        budget = self.max_num_batched_tokens
        for request in self.running:
            if request.num_uncomputed_tokens == 1:
                batch.decodes.append(request)
        budget -= len(batch.decodes)
        for request in self.running:
            if request.num_uncomputed_tokens > 1 and budget > 0:
                budget -= self._add_chunk(batch, request, budget)
        self._admit(batch, budget)
        batch.num_preemptions = self._num_preemptions
        return batch

    def reserve_drafts(self, batch: Batch, num_draft_tokens: Int32) -> Int32:
        """Give drafts their KV slots; returns for how many [R] there is room, since guesses never preempt."""
        fitting = num_draft_tokens.tolist()
        for i, request in enumerate(batch.decodes):
            while fitting[i] and not self.blocks.grow(request, request.num_tokens + fitting[i]):
                fitting[i] -= 1
        return np.array(fitting, dtype=np.int32)

    def finish(self, request: Request) -> None:
        """Take a finished request out, be it running or waiting after a preemption; give its blocks and slot back."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._leave(request, RequestStatus.FINISHED)
        else:
            self.waiting.remove(request)
            request.status = RequestStatus.FINISHED

    def begun_before(self, busy_s: float) -> list[Request]:
        """Requests that were first scheduled at EngineStats.busy_s or earlier, those preempted since included."""
        unfinished = (*self.running, *self.waiting)
        return [request for request in unfinished if request.began_at_s is not None and request.began_at_s <= busy_s]

    def _secure_decodes(self) -> None:
        """Give every decoding request the slot of its next token, oldest first, preempting the youngest if need be."""
        for request in list(self.running):
            while request.slot >= 0 and not self.blocks.grow(request, request.num_tokens):
                self._preempt(self.running[-1])

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._leave(request, RequestStatus.PREEMPTED)
        request.num_preemptions += 1
        self._num_preemptions += 1
        self.waiting.appendleft(request)

    def _leave(self, request: Request, status: RequestStatus) -> None:
        self.blocks.free(request)
        self._free_slots.append(request.slot)
        request.slot = -1
        request.status = status

    def _add_chunk(self, batch: Batch, request: Request, budget: int) -> int:
        chunk = min(request.num_uncomputed_tokens, budget)
        batch.prefills.append(request)
        batch.chunks.append(chunk)
        return chunk

    def _admit(self, batch: Batch, budget: int) -> None:
        """Admit waiting requests in order; one whose prefix is being computed is held back, the next may pass it."""
        held: list[Request] = []
        while self.waiting and self._free_slots and budget > 0 and len(held) < MAX_HELD_BACK:
            request = self.waiting.popleft()
            if (admission := self.blocks.admit(request)) is not Admission.ADMITTED:
                held.append(request)
                if admission is Admission.NO_ROOM:
                    break  # a smaller one must not starve it
                continue
            request.slot = self._free_slots.pop()
            if request.status is RequestStatus.WAITING:
                request.num_cached_tokens = request.num_computed_tokens
                batch.admitted.append(request)
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            budget -= self._add_chunk(batch, request, budget)
        self.waiting.extendleft(reversed(held))
