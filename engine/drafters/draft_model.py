"""A smaller language model drafts: it is run over the same ragged batches, on further layers of the same KV blocks.

One pass reads what each request holds that the draft model has not read yet, most often the one or two tokens of the
last step; each pass after it adds one draft token. Tokens are sampled as the target would sample them, with the
target's noise at that position and the request's own settings, so that two models that nearly agree nearly always
pick the same token, at any temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...policies.base import Int32, Int64
from ..block_manager import BlockManager
from ..checkpoint import Checkpoint
from ..config import EngineConfig
from ..errors import EngineError
from ..input_batch import InputBatch
from ..request import Request
from ..sampler import LogitRow, Sampler, count_accepted, greedy
from ..target import Target
from .base import DraftBatch, Drafter, Drafts
from .calibration import Calibration
from .draft_kv import DraftKV
from .vocab_map import SameVocab, VocabMap

MAX_CATCH_UP_TOKENS = {"cpu": 512, "cuda": 8192}
"""Tokens of requests that lag behind which a step may read, as EngineConfig.max_num_batched_tokens for prefills."""
MAX_STEP_TOKENS = 8
"""A request that lacks no more than this has not paused: what a step commits is always read."""
EDGES = np.array([0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97])
"""Bins of the draft model's own probability of its token; greedy and sampling requests have bins of their own."""
PRIOR = (0.1, 0.2, 0.3, 0.45, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Acceptance that each bin is taken for before it was measured."""


@dataclass(slots=True)
class _Proposal:
    """What was drafted for a request, until it is known how much of it was right."""

    start: int
    """Output tokens before the first draft."""
    tokens: list[int] = field(default_factory=list)
    bins: list[int] = field(default_factory=list)


class DraftModelDrafter(Drafter):
    """Drafts with a causal LM of its own, whose vocabulary may be another one.

    It costs nothing in steps that ask for no drafts; a request that was left out for a while is read from where the
    draft model stopped. Requests longer than the draft model's context get no drafts.
    """

    kind = "draft_model"

    def __init__(
        self,
        model: Target,
        target: Target,
        vocab_map: VocabMap | None = None,
        *,
        coupled: bool = True,
        max_catch_up_tokens: int | None = None,
    ) -> None:
        """vocab_map: None where the two vocabularies are one up to padding. coupled False drafts the most likely token
        whatever the request asks for, which is for comparisons. Of the target only its vocabulary is looked at."""
        self.model = model
        self.coupled = coupled
        self.max_catch_up_tokens = max_catch_up_tokens or MAX_CATCH_UP_TOKENS[model.device.type]
        self._vocab = vocab_map or SameVocab(model.vocab_size)
        self._vocab_size = target.vocab_size
        self._eos_token_ids = target.eos_token_ids
        self._sampler = Sampler(target.eos_token_ids)
        self._calibration = Calibration(PRIOR * 2)
        self._proposals: dict[Request, _Proposal] = {}
        self._num_drafted = self._num_passes = self._num_catch_ups = self._num_caught_up = 0

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, config: EngineConfig, target: Target, vocab_map: VocabMap | None = None
    ) -> DraftModelDrafter:
        """Read the draft model's weights; `config` is the engine's. Raises ModelError."""
        # A shorter context is no reason to refuse it, and a draft need not be bit-equal in every batch.
        own = replace(config, max_model_len=None, deterministic=False)
        return cls(Target.load(checkpoint, own), target, vocab_map, max_catch_up_tokens=config.max_num_batched_tokens)

    @property
    def bytes_per_block(self) -> int:
        """See Drafter."""
        return self.model.kv_layout.bytes_per_block(self.model.block_size)

    def allocate(self, blocks: BlockManager) -> None:
        """See Drafter. Raises EngineError when the blocks have another size than the draft model was told."""
        if blocks.block_size != self.model.block_size:
            raise EngineError(
                f"the draft model was built for KV blocks of {self.model.block_size} tokens, "
                f"the engine has blocks of {blocks.block_size}; give both the same engine.block_size"
            )
        self.model.allocate(blocks.num_blocks)
        self._kv = DraftKV(blocks)
        self._proposals.clear()

    def propose(self, batch: DraftBatch, num_draft_tokens: Int32) -> Drafts:
        """See Drafter. A request that lags by more than a step's share gets no drafts, and goes on catching up."""
        num_tokens = batch.table.num_tokens[batch.slots]
        # Draft j is sampled from the row at position num_tokens + j - 2, which must lie within the context.
        budgets = np.minimum(num_draft_tokens, self.model.max_model_len - num_tokens + 1)
        readers, starts, stops = self._plan(batch, budgets)
        at_end = readers[stops == num_tokens[readers]].tolist()
        proposals = {i: _Proposal(len(batch.requests[i].output_token_ids)) for i in at_end}
        if len(readers):
            logits = self._read(batch, readers, starts, stops)
            self._extend(batch, proposals, budgets, logits)
        return self._drafts(len(batch.requests), proposals)

    def observe(self, batch: DraftBatch, num_draft_tokens: Int32, num_accepted_tokens: Int32) -> None:
        """Compare its drafts with what the requests hold now, whatever was verified in between."""
        bins: list[int] = []
        accepted: list[bool] = []
        for request, drafted in zip(batch.requests, num_draft_tokens.tolist(), strict=True):
            if drafted and (proposal := self._proposals.pop(request, None)) is not None:
                graded = _grade(proposal.tokens, request.output_token_ids[proposal.start :])
                accepted += graded
                bins += proposal.bins[: len(graded)]
        self._calibration.observe(np.array(bins, dtype=np.int64), np.array(accepted, dtype=bool))

    def forget(self, request: Request) -> None:
        """See Drafter."""
        self._proposals.pop(request, None)
        self._kv.forget(request)

    def facts(self) -> dict[str, float]:
        """Tokens that were drafted, passes that drafted them, and what had to be read again or late."""
        return {
            "num_draft_model_tokens": self._num_drafted,
            "num_draft_model_passes": self._num_passes,
            "num_draft_model_catch_ups": self._num_catch_ups,
            "num_draft_model_catch_up_tokens": self._num_caught_up,
        }

    def _plan(self, batch: DraftBatch, budgets: Int32) -> tuple[Int64, Int64, Int64]:
        """Which requests to read and from where to where: all that were read up to the last step, then in their order
        those that lag, as far as the step's share goes."""
        left = self.max_catch_up_tokens
        plan: list[tuple[int, int, int]] = []
        for i in np.flatnonzero(budgets > 0).tolist():
            request = batch.requests[i]
            stop = request.num_tokens
            start = min(self._kv.num_computed(request, batch.table), stop - 1)  # the last row's logits are wanted
            if stop - start > MAX_STEP_TOKENS:
                stop = min(stop, start + left)
                left -= stop - start
                self._num_catch_ups += stop > start
                self._num_caught_up += stop - start
            if stop > start:
                self._kv.extend(request, batch.table, stop)
                plan.append((i, start, stop))
        readers, starts, stops = np.array(plan, dtype=np.int64).reshape(-1, 3).T
        return readers, starts, stops

    def _read(self, batch: DraftBatch, readers: Int64, starts: Int64, stops: Int64) -> Tensor:
        """Run the committed tokens starts .. stops of each reader; logits [D, V] of those that are read to the end."""
        lens = stops - starts
        positions = np.arange(int(lens.sum())) + np.repeat(stops - np.cumsum(lens), lens)
        token_ids = batch.table.token_ids[np.repeat(batch.slots[readers], lens), positions].astype(np.int64)
        at_end = stops == batch.table.num_tokens[batch.slots[readers]]
        return self._forward(batch, readers, lens, positions, token_ids, np.cumsum(lens)[at_end] - 1)

    def _extend(self, batch: DraftBatch, proposals: dict[int, _Proposal], budgets: Int32, logits: Tensor) -> None:
        """Add a draft to each proposal from its row of logits, run those that go on, and so forth."""
        writers = list(proposals)
        while writers:
            self._add_tokens(batch, writers, proposals, logits)
            going_on = [i for i in writers if self._goes_on(batch.requests[i], proposals[i], int(budgets[i]))]
            if not (writers := going_on):
                break
            index = np.array(writers)
            newest = np.array([proposals[i].tokens[-1] for i in writers])
            num_drafts = np.array([len(proposals[i].tokens) for i in writers], dtype=np.int64)
            positions = batch.table.num_tokens[batch.slots[index]] + num_drafts - 1
            rows = np.arange(len(writers), dtype=np.int64)
            logits = self._forward(batch, index, np.ones_like(rows), positions, newest, rows)
        for i, proposal in proposals.items():
            request = batch.requests[i]
            self._proposals[request] = proposal
            if fed := proposal.tokens[:-1]:
                self._kv.guess(request, batch.table, fed)

    def _forward(
        self, batch: DraftBatch, index: Int64, lens: Int64, positions: Int64, token_ids: Int64, logit_rows: Int64
    ) -> Tensor:
        """Run `lens` rows of each request of `index`; logits [L, V] over the target's vocabulary."""
        table, block_size = batch.table, batch.table.block_size
        slots = batch.slots[index]
        cu_seqlens = np.zeros(len(lens) + 1, dtype=np.int32)
        np.cumsum(lens, out=cu_seqlens[1:])
        seq_lens = positions[cu_seqlens[1:] - 1] + 1
        blocks = table.block_tables[np.repeat(slots, lens), positions // block_size].astype(np.int64)
        logits = self.model.forward(
            InputBatch(
                input_ids=self._vocab.to_draft(token_ids),
                positions=positions,
                slot_mapping=blocks * block_size + positions % block_size,
                query_lens=lens.astype(np.int32),
                cu_seqlens=cu_seqlens,
                seq_lens=seq_lens.astype(np.int32),
                block_tables=table.block_tables[slots, : -(-int(seq_lens.max()) // block_size)],
                logit_rows=logit_rows,
            )
        )
        self._num_passes += 1
        return self._vocab.to_target(logits, self._vocab_size)

    def _add_tokens(
        self, batch: DraftBatch, writers: list[int], proposals: dict[int, _Proposal], logits: Tensor
    ) -> None:
        """Sample the next draft of each writer and note how sure the draft model is of it."""
        requests = [batch.requests[i] for i in writers]
        if self.coupled:
            rows = [LogitRow(r, proposals[i].tokens) for i, r in zip(writers, requests, strict=True)]
            token_ids = self._sampler.sample_rows(logits, rows)
        else:
            token_ids = greedy(logits)
        tokens, sureness = _on_host(token_ids, _probabilities(logits, requests, token_ids))
        bins = np.searchsorted(EDGES, sureness)
        bins += [0 if r.sampling_params.is_greedy else len(PRIOR) for r in requests]
        for i, token, bin_ in zip(writers, tokens, bins.tolist(), strict=True):
            proposals[i].tokens.append(token)
            proposals[i].bins.append(bin_)
        self._num_drafted += len(writers)

    def _goes_on(self, request: Request, proposal: _Proposal, budget: int) -> bool:
        params, token = request.sampling_params, proposal.tokens[-1]
        ends = token in params.stop_token_ids or (token in self._eos_token_ids and not params.ignore_eos)
        return len(proposal.tokens) < budget and not ends

    def _drafts(self, num_requests: int, proposals: dict[int, _Proposal]) -> Drafts:
        """Survival is the product of the acceptance measured for the bins of a request's drafts so far."""
        token_ids: list[list[int]] = [[] for _ in range(num_requests)]
        rates = np.append(self._calibration.rates(), 0.0)
        width = max((len(p.tokens) for p in proposals.values()), default=0)
        bins = np.full((num_requests, width), len(rates) - 1)
        for i, proposal in proposals.items():
            token_ids[i] = proposal.tokens.copy()
            bins[i, : len(proposal.bins)] = proposal.bins
        return Drafts(token_ids, np.cumprod(rates[bins], axis=1, dtype=np.float32))


def _grade(drafts: list[int], real: list[int]) -> list[bool]:
    """Which drafts were right, as far as that can be said: where the place is filled and all before were right."""
    num_right = count_accepted(drafts[: len(real)], real)
    return [True] * num_right + [False] * (num_right < min(len(drafts), len(real)))


def _probabilities(logits: Tensor, requests: Sequence[Request], token_ids: Tensor) -> Tensor:
    """[L] probability of each token at its request's temperature, before filters and penalties."""
    temperatures = [1.0 if r.sampling_params.is_greedy else r.sampling_params.temperature for r in requests]
    scores = logits.float() / torch.tensor(temperatures, device=logits.device)[:, None]
    return (scores.gather(1, token_ids[:, None])[:, 0] - scores.logsumexp(-1)).exp()


def _on_host(token_ids: Tensor, probabilities: Tensor) -> tuple[list[int], NDArray[np.float64]]:
    """Both in one transfer."""
    both = torch.stack([token_ids.double(), probabilities.double()]).cpu().numpy()
    return both[0].astype(np.int64).tolist(), both[1]
