"""The ragged batch as flat arrays: what the forward pass, the sampler and the policy read.

Everything is kept in numpy rows over stable slots and gathered for a step, so that no array is built by a loop over
tokens, and no layer loops over requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..policies.base import Int32, Int64
from .request import Request
from .scheduler import Batch


@dataclass(frozen=True, slots=True)
class InputBatch:
    """T rows of N requests, request after request; the requests that decode come first."""

    input_ids: Int64
    """[T]"""
    positions: Int64
    """[T] index of each row's token in its request."""
    slot_mapping: Int64
    """[T] where each row's KV goes: block * block_size + offset."""
    query_lens: Int32
    """[N] rows of each request."""
    cu_seqlens: Int32
    """[N + 1] first row of each request."""
    seq_lens: Int32
    """[N] tokens of each request once these rows are computed."""
    block_tables: Int32
    """[N, B] KV blocks of each request, 0 past its last."""
    logit_rows: Int64
    """[L] rows whose logits are wanted: all of a decode's, the last of a finished prefill."""


class SlotTable:
    """Tokens, KV blocks and counters of running requests, one row a slot."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self.block_tables = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        self.max_num_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        self.groups = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_draft_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_accepted_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._stay: list[tuple[Request, int] | None] = [None] * max_num_seqs

    def load(self, requests: list[Request]) -> Int32:
        """Bring the rows of these requests up to date; returns their slots."""
        for request in requests:
            slot = request.slot
            if self._stay[slot] != (stay := (request, request.num_preemptions)):
                self._stay[slot] = stay
                self._enter(request)
            known = self.num_tokens[slot]
            if known < request.num_tokens:
                new = request.output_token_ids[known - len(request.prompt_token_ids) :]
                self.token_ids[slot, known : known + len(new)] = new
                self.num_tokens[slot] += len(new)
            self.refresh_blocks(request)
        return np.fromiter((r.slot for r in requests), dtype=np.int32, count=len(requests))

    def gather(self, batch: Batch, slots: Int32) -> InputBatch:
        """The flat arrays of a step, drafts included."""
        for request, draft in zip(batch.decodes, batch.drafts, strict=True):
            if draft:
                self.token_ids[request.slot, request.num_tokens : request.num_tokens + len(draft)] = draft
        query_lens = batch.query_lens
        num_rows = int(query_lens.sum())
        cu_seqlens = np.zeros(len(query_lens) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=cu_seqlens[1:])
        computed = np.fromiter((r.num_computed_tokens for r in batch.requests), dtype=np.int32, count=len(query_lens))
        positions = np.arange(num_rows) + np.repeat(computed - cu_seqlens[:-1], query_lens)
        row_slots = np.repeat(slots, query_lens)
        blocks = self.block_tables[row_slots, positions // self.block_size].astype(np.int64)
        seq_lens = computed + query_lens
        num_decode_rows = int(cu_seqlens[len(batch.decodes)])
        ends_prefill = seq_lens[len(batch.decodes) :] == self.num_tokens[slots[len(batch.decodes) :]]
        last_rows = cu_seqlens[len(batch.decodes) + 1 :][ends_prefill] - 1
        return InputBatch(
            input_ids=self.token_ids[row_slots, positions].astype(np.int64),
            positions=positions,
            slot_mapping=blocks * self.block_size + positions % self.block_size,
            query_lens=query_lens,
            cu_seqlens=cu_seqlens,
            seq_lens=seq_lens,
            block_tables=self.block_tables[slots, : -(-int(seq_lens.max()) // self.block_size)],
            logit_rows=np.concatenate([np.arange(num_decode_rows), last_rows]),
        )

    def refresh_blocks(self, request: Request) -> None:
        """Blocks past the computed tokens may have been rolled back and replaced since they were written here."""
        first = request.num_computed_tokens // self.block_size
        self.block_tables[request.slot, first : len(request.block_table)] = request.block_table[first:]

    def _enter(self, request: Request) -> None:
        slot = request.slot
        tokens = request.prompt_token_ids + request.output_token_ids
        self.token_ids[slot, : len(tokens)] = tokens
        self.num_tokens[slot] = len(tokens)
        self.max_num_tokens[slot] = min(
            len(request.prompt_token_ids) + request.sampling_params.max_tokens, self.token_ids.shape[1]
        )
        self.groups[slot] = request.group
        self.num_draft_tokens[slot] = request.num_draft_tokens
        self.num_accepted_tokens[slot] = request.num_accepted_tokens
        self.block_tables[slot, : len(request.block_table)] = request.block_table
