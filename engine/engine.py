"""The step loop: schedule, decide, draft, verify, commit."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..policies.base import Int32, Proposals, SpecDecision, SpeculationPolicy, StepFeedback, StepState
from .block_manager import BlockManager
from .checkpoint import Checkpoint
from .config import EngineConfig
from .drafters.base import DraftBatch, Drafter
from .drafters.forced import GrammarDrafter
from .errors import EngineError
from .grammar import GrammarError
from .input_batch import SlotTable
from .memory import num_kv_blocks
from .request import FinishReason, Request, RequestOutput
from .sampler import Sampler, count_accepted
from .scheduler import Batch, Scheduler
from .stop import StopChecker
from .trace import EngineStats, RollingAcceptance, StepClock, StepRecord

if TYPE_CHECKING:
    from .target import Target  # which takes seconds to import; a replay has no model

MAX_NUM_SEQS = {"cpu": 64, "cuda": 256}
MAX_NUM_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}
"""A CPU is compute-bound from about 64 rows on, so a longer chunk only keeps the decoding requests waiting."""


@dataclass(frozen=True, slots=True)
class Verified:
    """What the target says: one token for each row of logits, request after request."""

    requests: list[Request]
    """Those that decode, then those whose prefill is complete."""
    token_ids: list[int]
    logprobs: list[float | None] | None


class Engine:
    """Continuous batching over one target, with a drafter and a policy. Not thread-safe.

    `run` is the whole interface: requests in, finished requests out, in the order in which they finish. A replay has
    draft(), sample() and the clock its own way.
    """

    def __init__(
        self,
        target: Target,
        config: EngineConfig,
        policy: SpeculationPolicy,
        drafter: Drafter | None = None,
        token_bytes: Sequence[bytes] | None = None,
    ) -> None:
        """token_bytes maps token id -> bytes of text; needed for stop strings only. Raises EngineError."""
        device = target.device.type
        self.target, self.policy, self.drafter = target, policy, drafter
        self.max_model_len = target.max_model_len
        self.max_num_seqs = config.max_num_seqs or MAX_NUM_SEQS[device]
        self.max_draft_tokens = config.max_draft_tokens if drafter else 0
        self.device_name, self.dtype_name = str(target.device), str(target.dtype).removeprefix("torch.")
        self._proposer = GrammarDrafter(drafter) if drafter else None
        drafter_bytes = drafter.bytes_per_block if drafter else 0
        target.allocate(num_blocks := num_kv_blocks(target, config, self.max_num_seqs, drafter_bytes))
        self.blocks = BlockManager(num_blocks, config.block_size, config.enable_prefix_caching)
        if drafter:
            drafter.allocate(self.blocks)
        max_num_batched_tokens = config.max_num_batched_tokens or MAX_NUM_BATCHED_TOKENS[device]
        self.scheduler = Scheduler(self.blocks, self.max_num_seqs, max_num_batched_tokens)
        self.slots = SlotTable(self.max_num_seqs, self.max_model_len, config.block_size)
        self.sampler = Sampler(target.eos_token_ids)
        self.stop = StopChecker(target.eos_token_ids, token_bytes, self.max_model_len)
        self.stats = EngineStats(num_accepted_tokens_per_pos=[0] * self.max_draft_tokens)
        self.clock = StepClock()
        self.on_step: Callable[[StepRecord], None] | None = None
        """Called after each step; an exception from it leaves `run` once what has finished is handed over."""
        self._request_timeout_s = config.request_timeout_s
        self._acceptance = RollingAcceptance()
        self._waited_s = 0.0  # for the caller, since the last step

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        config: EngineConfig,
        policy: SpeculationPolicy,
        drafter: Drafter | None = None,
        token_bytes: Sequence[bytes] | None = None,
    ) -> Engine:
        """Load the model and build an engine around it. Raises ModelError or EngineError."""
        from .target import Target

        return cls(Target.load(checkpoint, config), config, policy, drafter, token_bytes)

    def run(self, requests: Iterable[Request | None]) -> Iterator[RequestOutput]:
        """Yield each request's output when it finishes. Draws a request only when there may soon be room for it.

        A source that has nothing ready yields None after a short wait of its own, and running requests go on.
        A request that can never run (no tokens, too long) comes back with finish_reason error, one that has used up
        request_timeout_s with finish_reason timeout.
        """
        source = iter(requests)
        may_come = True
        while may_come or self.scheduler.has_unfinished:
            yield from self._hand_over(self._end_overdue())
            if may_come:
                may_come = yield from self._draw(source)
            if self.scheduler.has_unfinished:
                finished, record = self.step()
                try:
                    if self.on_step is not None:
                        self.on_step(record)
                finally:  # whoever ends the run by an exception still gets what it has paid for
                    yield from self._hand_over(finished)

    def step(self) -> tuple[list[Request], StepRecord]:
        """Schedule, decide, draft, verify, commit; returns the requests that finished and the step's record."""
        clock = self.clock
        clock.begin_step()
        batch = self.scheduler.schedule()
        for request in batch.admitted:
            request.began_at_s = self.stats.busy_s
        slots = self.slots.load(batch.requests)
        state = self._state(batch, slots[: len(batch.decodes)])
        clock.lap("other")
        decision = self._decide(state)
        clock.lap("policy")
        self.draft(state, decision, batch)
        clock.lap("draft")
        verified = self._verify(batch, slots)
        clock.lap("verify")
        num_committed, num_matched = self._commit(batch, verified)
        num_accepted = np.minimum(num_matched, batch.num_draft_tokens)
        clock.lap("other")
        self._learn(state, batch, num_committed, num_accepted, num_matched)
        record = self._record(state, decision, batch, num_committed, num_accepted)
        return [request for request in verified.requests if request.finish_reason is not None], record

    def _hand_over(self, finished: list[Request]) -> Iterator[RequestOutput]:
        for request in finished:
            handed_over = time.perf_counter()
            yield RequestOutput.of(request)
            self._waited_s += time.perf_counter() - handed_over

    def _end_overdue(self) -> list[Request]:
        """Give up the requests that have used up their time. Waiting for the caller is not counted."""
        limit = self._request_timeout_s
        if limit is None:
            return []
        overdue = self.scheduler.begun_before(self.stats.busy_s - limit)
        for request in overdue:
            request.finish_reason, request.error = FinishReason.TIMEOUT, f"not finished after {limit:g} s"
            self._let_go(request)
        return overdue

    def _draw(self, source: Iterator[Request | None]) -> Generator[RequestOutput, None, bool]:
        """Queue new requests while there may soon be room; yields those that can never run. Returns whether more may
        come."""
        while self.scheduler.num_wanted:
            asked = time.perf_counter()
            try:
                request = next(source)
            except StopIteration:
                return False
            finally:
                self._waited_s += time.perf_counter() - asked
            if request is None:
                return True
            if (error := self._refusal(request)) is None:
                self.scheduler.add(request)
                continue
            request.finish_reason, request.error = FinishReason.ERROR, error
            yield RequestOutput.of(request)
        return True

    def _refusal(self, request: Request) -> str | None:
        num_prompt, params = len(request.prompt_token_ids), request.sampling_params
        longest = min(num_prompt + params.max_tokens, self.max_model_len)
        if num_prompt == 0:
            return "the prompt has no tokens"
        if num_prompt >= self.max_model_len:
            return f"the prompt has {num_prompt} tokens, no room is left of max_model_len {self.max_model_len}"
        if self.blocks.blocks_for(longest) > self.blocks.num_blocks:
            return f"{longest} tokens do not fit into the KV cache of {self.blocks.num_blocks} blocks"
        named = {
            "the prompt": request.prompt_token_ids,
            "logit_bias": params.logit_bias,
            "stop_token_ids": params.stop_token_ids,
        }
        for where, ids in named.items():
            if ids and not 0 <= min(ids) <= max(ids) < self.target.vocab_size:
                return f"{where} names a token id outside the vocabulary of {self.target.vocab_size}"
        if params.stop and self.stop.token_bytes is None:
            return "stop strings need the engine to know the bytes of its tokens"
        return None

    def _state(self, batch: Batch, slots: Int32) -> StepState:
        at = slots.astype(np.intp)
        return StepState(
            step=self.stats.num_steps,
            num_running=len(batch.decodes),
            num_scheduled=len(batch.decodes) + len(batch.prefills),
            num_waiting=len(self.scheduler.waiting),
            num_prefill_tokens=batch.num_prefill_tokens,
            kv_usage=self.blocks.usage,
            max_draft_tokens=self.max_draft_tokens,
            drafter=self.drafter.kind if self.drafter else "none",
            rolling_acceptance_rate=self._acceptance.rate,
            slots=slots,
            context_lens=self.slots.num_tokens.take(at),
            groups=self.slots.groups.take(at),
            num_draft_tokens=self.slots.num_draft_tokens.take(at),
            num_accepted_tokens=self.slots.num_accepted_tokens.take(at),
        )

    def _decide(self, state: StepState) -> SpecDecision:
        """The policy's budgets, within what each request may still use: its last token needs no draft."""
        if self.drafter is None or state.num_running == 0:
            return SpecDecision.uniform(state, 0, "no drafter" if self.drafter is None else "prefill only")
        decision = self.policy.decide(state)
        if np.shape(decision.num_draft_tokens) != (state.num_running,):
            raise EngineError(
                f"{type(self.policy).__name__}.decide returned num_draft_tokens of shape "
                f"{np.shape(decision.num_draft_tokens)} for {state.num_running} requests; give one budget for each"
            )
        limit = np.minimum(self.slots.max_num_tokens[state.slots] - state.context_lens - 1, state.max_draft_tokens)
        return replace(decision, num_draft_tokens=np.clip(decision.num_draft_tokens, 0, limit).astype(np.int32))

    def draft(self, state: StepState, decision: SpecDecision, batch: Batch) -> None:
        """Find KV slots for the budgets, let the drafter propose and the policy trim."""
        batch.propose([[] for _ in batch.decodes], np.zeros(state.num_running, np.int32))
        if self._proposer is None or not decision.num_draft_tokens.any():
            return
        budgets = self.scheduler.reserve_drafts(batch, decision.num_draft_tokens)
        for request, budget in zip(batch.decodes, budgets.tolist(), strict=True):
            if budget:
                self.slots.refresh_blocks(request)
        drafts = self._proposer.propose(self._draft_batch(state, batch), budgets)
        batch.propose(drafts.token_ids, drafts.num_draft_tokens)
        batch.cut(self.policy.trim(Proposals(state, budgets, batch.num_proposed_tokens, drafts.survival)))

    def _draft_batch(self, state: StepState, batch: Batch) -> DraftBatch:
        return DraftBatch(batch.decodes, state.slots, self.slots)

    def _verify(self, batch: Batch, slots: Int32) -> Verified:
        """Ask the target about what decodes, what is drafted and what comes after a complete prefill."""
        if not batch.requests:
            raise EngineError("no request can be scheduled; the KV cache is too small for the queue's head")
        complete = [r for r, n in zip(batch.prefills, batch.chunks, strict=True) if n == r.num_uncomputed_tokens]
        requests = batch.decodes + complete
        token_ids, logprobs = self.sample(batch, slots, requests, batch.drafts + [[] for _ in complete])
        return Verified(requests, token_ids, logprobs)

    def sample(
        self, batch: Batch, slots: Int32, requests: list[Request], drafts: list[list[int]]
    ) -> tuple[list[int], list[float | None] | None]:
        """One ragged forward pass over prefill chunks, decodes and drafts, and a token for each row of logits: 1 + its
        drafts for each of the requests. Log probabilities where any of them wants some."""
        logits = self.target.forward(self.slots.gather(batch, slots))
        return self.sampler.sample(logits, requests, drafts)

    def _commit(self, batch: Batch, verified: Verified) -> tuple[Int32, Int32]:
        """Append what the target said as far as the drafts agree.

        Returns tokens committed, for each request of `verified`, and proposed tokens matched [R], for those that
        decode, as in StepFeedback: the token behind the drafts also grades the first one that was cut.
        """
        for request, chunk in zip(batch.prefills, batch.chunks, strict=True):
            request.num_computed_tokens += chunk
        num_decodes, num_complete = len(batch.decodes), len(verified.requests) - len(batch.decodes)
        proposals = batch.proposals + [[]] * num_complete
        lengths = batch.num_draft_tokens.tolist() + [0] * num_complete
        committed, matched, row = [], [], 0
        for request, proposal, length in zip(verified.requests, proposals, lengths, strict=True):
            sampled = verified.token_ids[row : row + length + 1]
            num_matched = count_accepted(proposal[: length + 1], sampled)
            end = min(num_matched, length) + 1
            logprobs = verified.logprobs[row : row + end] if verified.logprobs else None
            committed.append(num := self._append(request, sampled[:end], logprobs))
            matched.append(min(num_matched, num))
            row += length + 1
        for request, num in zip(batch.decodes, committed, strict=False):
            request.num_computed_tokens += num
        for request in batch.requests:
            self.blocks.commit(request)
        return np.array(committed, np.int32), np.array(matched[:num_decodes], np.int32)

    def _append(self, request: Request, token_ids: list[int], logprobs: list[float | None] | None) -> int:
        """Append tokens until one ends the request; returns how many."""
        for count, token in enumerate(token_ids, start=1):
            if not self._follows_grammar(request, token):
                return count - 1
            request.output_token_ids.append(token)
            if logprobs and (logprob := logprobs[count - 1]) is not None:
                request.logprobs.append(logprob)
            request.finish_reason = self.stop.check(request)
            if request.finish_reason is not None:
                return count
        return len(token_ids)

    def _follows_grammar(self, request: Request, token: int) -> bool:
        """Advance the request's grammar; where it cannot go on, neither can the request."""
        try:
            if request.grammar is not None:
                request.grammar.accept(token)
        except GrammarError as exc:
            request.finish_reason, request.error = FinishReason.ERROR, str(exc)
            return False
        return True

    def _learn(self, state: StepState, batch: Batch, committed: Int32, accepted: Int32, matched: Int32) -> None:
        """Tell the drafter and the policy what happened, and let finished requests go."""
        drafted = batch.num_draft_tokens
        if drafted.any():
            assert self._proposer is not None
            self._proposer.observe(self._draft_batch(state, batch), drafted, accepted)
            self._acceptance.add(int((drafted > 0).sum()), int(drafted.sum()), int(accepted.sum()))
            self._count_drafts(state, batch, drafted, accepted)
        if state.num_running:
            self.policy.observe(
                StepFeedback(
                    state=state,
                    num_proposed_tokens=batch.num_proposed_tokens,
                    num_draft_tokens=drafted,
                    num_accepted_tokens=accepted,
                    num_matched_tokens=matched,
                    num_committed_tokens=committed[: state.num_running],
                    num_batched_tokens=batch.num_rows,
                    draft_s=self.clock.seconds["draft"],
                    verify_s=self.clock.seconds["verify"],
                    other_s=self.clock.seconds["other"] + self.clock.seconds["policy"],
                )
            )
        for request in batch.requests:
            if request.finish_reason is not None:
                self._let_go(request)

    def _let_go(self, request: Request) -> None:
        self.scheduler.finish(request)
        if self.drafter is not None:
            self.drafter.forget(request)

    def _count_drafts(self, state: StepState, batch: Batch, drafted: Int32, accepted: Int32) -> None:
        self.slots.num_draft_tokens[state.slots] += drafted
        self.slots.num_accepted_tokens[state.slots] += accepted
        for request, num_drafted, num_accepted in zip(batch.decodes, drafted.tolist(), accepted.tolist(), strict=True):
            if num_drafted:
                request.num_drafts += 1
                request.num_draft_tokens += num_drafted
                request.num_accepted_tokens += num_accepted
        for num_accepted, count in Counter(accepted.tolist()).items():
            for position in range(num_accepted):
                self.stats.num_accepted_tokens_per_pos[position] += count

    def _record(
        self, state: StepState, decision: SpecDecision, batch: Batch, committed: Int32, accepted: Int32
    ) -> StepRecord:
        """Add the step to the totals."""
        self.clock.lap("other")
        seconds = self.clock.seconds
        record = StepRecord(
            step=state.step,
            start_s=self.clock.start_s,
            num_running=state.num_running,
            num_scheduled=state.num_scheduled,
            num_waiting=state.num_waiting,
            num_prefill_tokens=state.num_prefill_tokens,
            num_batched_tokens=batch.num_rows,
            num_context_tokens=int(state.context_lens.sum()),
            num_drafts=int(np.count_nonzero(batch.num_draft_tokens)),
            num_proposed_tokens=int(batch.num_proposed_tokens.sum()),
            num_draft_tokens=int(batch.num_draft_tokens.sum()),
            max_draft_len=int(batch.num_draft_tokens.max(initial=0)),
            num_accepted_tokens=int(accepted.sum()),
            num_generation_tokens=int(committed.sum()),
            num_preemptions=batch.num_preemptions,
            kv_usage=state.kv_usage,
            rolling_acceptance_rate=state.rolling_acceptance_rate,
            reason=decision.reason,
            policy_s=seconds["policy"],
            draft_s=seconds["draft"],
            verify_s=seconds["verify"],
            other_s=seconds["other"],
            input_wait_s=self._waited_s,
        )
        self._waited_s = 0.0
        self.stats.add(record)
        for request in batch.admitted:
            self.stats.num_prompt_tokens += len(request.prompt_token_ids)
            self.stats.num_cached_tokens += request.num_cached_tokens
        self.stats.num_running = len(self.scheduler.running)
        self.stats.num_waiting = len(self.scheduler.waiting)
        self.stats.kv_usage = self.blocks.usage
        return record
