"""Continuous batching over numpy rows: admission, chunked prefill, KV blocks and preemption as in the engine."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from ..base import Int32, Int64
from .workload import Workload

MAX_DRAWN_AHEAD = 64
"""Rows that the engine draws beyond its free slots."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Slots of a step: R that decode, P in prefill."""

    decodes: Int64
    """[R]"""
    prefills: Int64
    """[P]"""
    chunks: Int64
    """[P] prefill tokens of each."""

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt (or recomputed) tokens in the step."""
        return int(self.chunks.sum()) if len(self.chunks) else 0


_NONE = np.zeros(0, np.int64)


class Batching:
    """Rows in slots. Arrays are indexed by slot unless named by row."""

    def __init__(self, workload: Workload, load_drafter: bool) -> None:
        num_slots = min(workload.max_num_seqs, workload.num_rows)
        self.workload = workload
        self.num_blocks = self.num_free = workload.num_blocks(load_drafter)
        self.rows, self.num_tokens, self.num_computed, self.ends, self.limits, self.prompts = (
            np.zeros(num_slots, np.int64) for _ in range(6)
        )
        self.groups = np.zeros(num_slots, np.int32)
        self.num_behind = np.zeros(num_slots, np.int64)
        """Tokens that the drafter has not read."""
        self.num_drafted = np.zeros(num_slots, np.int64)
        self.num_accepted = np.zeros(num_slots, np.int64)
        self.num_preemptions = 0
        self._limits = workload.token_limits
        self._prompts_done = np.concatenate([[0], np.cumsum(workload.prompt_lens, dtype=np.int64)])
        self._num_held = np.zeros(num_slots, np.int64)
        self._running = _NONE  # slots, oldest first
        self._may_prefill = self._has_reserved = False
        self._has_left = np.zeros(num_slots, np.bool_)
        self._free_slots = list(range(num_slots))[::-1]
        self._preempted: deque[int] = deque()
        self._num_admitted = self._num_drawn = 0
        self._kept: dict[int, tuple[int, int, int]] = {}  # preempted row -> tokens, drafted, accepted

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would have work."""
        return bool(len(self._running) or self._preempted or self._num_admitted < self.workload.num_rows)

    @property
    def num_waiting(self) -> int:
        """Rows drawn but not admitted."""
        return len(self._preempted) + self._num_drawn - self._num_admitted

    @property
    def num_running(self) -> int:
        """Requests that hold a slot, those in prefill included."""
        return len(self._running)

    @property
    def num_prefill_left(self) -> int:
        """Prompt tokens still to be computed, without those of preempted requests."""
        running = self._running
        left = np.maximum(self.num_tokens[running] - self.num_computed[running] - 1, 0)
        return int(left.sum()) + int(self._prompts_done[-1] - self._prompts_done[self._num_admitted])

    @property
    def kv_usage(self) -> float:
        """Share of blocks in use, 0 to 1."""
        return 1 - self.num_free / self.num_blocks

    def schedule(self) -> Batch:
        """The batch of the next step."""
        self._draw()
        self._secure()
        decodes, prefills, chunks = self._running, _NONE, _NONE
        budget = self.workload.max_num_batched_tokens
        if self._may_prefill:
            left = self.num_tokens[self._running] - self.num_computed[self._running]
            decodes = self._running[left == 1]
            budget -= len(decodes)
            prefills, left = self._running[left > 1], left[left > 1]
            chunks = np.minimum(left, np.maximum(budget - (np.cumsum(left) - left), 0))
            prefills, chunks = prefills[chunks > 0], chunks[chunks > 0]
            budget -= int(chunks.sum())
        else:
            budget -= len(decodes)
        if self.num_waiting and self._free_slots and budget > 0:
            prefills, chunks = self._admit(prefills, chunks, budget)
            self._may_prefill |= bool(len(prefills))
        return Batch(decodes, prefills, chunks)

    def reserve_drafts(self, decodes: Int64, budgets: Int32) -> Int32:
        """Give drafts their blocks, in order; returns for how many [R] there is room."""
        tokens = self.num_tokens[decodes]
        missing = np.maximum(self._blocks_for(tokens + budgets) - self._num_held[decodes], 0)
        total = int(missing.sum())
        if total > self.num_free:
            budgets = self._ration(decodes, budgets, missing)
            missing = np.maximum(self._blocks_for(tokens + budgets) - self._num_held[decodes], 0)
            total = int(missing.sum())
        if total:
            self._num_held[decodes] += missing
            self.num_free -= total
            self._has_reserved = True
        return budgets

    def commit(self, batch: Batch, num_committed: Int32) -> Int64:
        """Append tokens, give back what drafts left unused; returns the slots whose prefill is complete [C], each of
        which has written one token."""
        decodes, complete = batch.decodes, _NONE
        self.num_tokens[decodes] += num_committed
        self.num_computed[decodes] += num_committed
        if self._has_reserved:
            self._trim_blocks(decodes)
        if len(batch.prefills):
            self.num_computed[batch.prefills] += batch.chunks
            is_complete = self.num_computed[batch.prefills] == self.num_tokens[batch.prefills]
            complete = batch.prefills[is_complete]
            self.num_behind[complete] = self.num_tokens[complete]
            self.num_tokens[complete] += 1
        return complete

    def finish(self, slots: Int64) -> Int64:
        """Let those of these slots go that have written all; returns their rows."""
        done = slots[self.num_tokens[slots] >= self.ends[slots]]
        if len(done):
            self._has_left[done] = True
            self._running = self._running[~self._has_left[self._running]]
            self._has_left[done] = False
            self.num_free += int(self._num_held[done].sum())
            self._num_held[done] = 0
            self._free_slots.extend(done.tolist())
        if self._may_prefill:
            running = self._running
            self._may_prefill = bool(np.any(self.num_tokens[running] - self.num_computed[running] != 1))
        return self.rows[done]

    def _blocks_for(self, num_tokens: Int64) -> Int64:
        return (num_tokens + (self.workload.block_size - 1)) // self.workload.block_size

    def _draw(self) -> None:
        num_seqs = self.workload.max_num_seqs
        wanted = num_seqs - len(self._running) + min(num_seqs, MAX_DRAWN_AHEAD) - self.num_waiting
        self._num_drawn = min(self.workload.num_rows, self._num_drawn + max(0, wanted))

    def _secure(self) -> None:
        """Blocks for the next token of every request, oldest first; the youngest is preempted where there are none."""
        missing = self._blocks_for(self.num_tokens[self._running]) - self._num_held[self._running]
        total = int(missing.sum())
        if total <= self.num_free:
            if total:
                self._num_held[self._running] += missing
                self.num_free -= total
            return
        for index, (slot, count) in enumerate(zip(self._running.tolist(), missing.tolist(), strict=True)):
            while index < len(self._running) and count > self.num_free:
                self._preempt_youngest()
            if index >= len(self._running):
                return
            self._grant(slot, count)

    def _grant(self, slot: int, count: int) -> None:
        self._num_held[slot] += count
        self.num_free -= count

    def _preempt_youngest(self) -> None:
        slot = int(self._running[-1])
        row = int(self.rows[slot])
        self._running = self._running[:-1]
        self.num_free += int(self._num_held[slot])
        self._num_held[slot] = 0
        self._free_slots.append(slot)
        self._kept[row] = int(self.num_tokens[slot]), int(self.num_drafted[slot]), int(self.num_accepted[slot])
        self._preempted.appendleft(row)
        self.num_preemptions += 1

    def _admit(self, prefills: Int64, chunks: Int64, budget: int) -> tuple[Int64, Int64]:
        """Waiting rows in order, until one does not fit."""
        slots, sizes = [], []
        while self.num_waiting and self._free_slots and budget > 0:
            row = self._preempted[0] if self._preempted else self._num_admitted
            num_prompt = int(self.workload.prompt_lens[row])
            num_tokens, num_drafted, num_accepted = self._kept.get(row, (num_prompt, 0, 0))
            num_blocks = -(-num_tokens // self.workload.block_size)
            if num_blocks > self.num_free:
                break
            if self._preempted:
                self._preempted.popleft()
            else:
                self._num_admitted += 1
            slot = self._free_slots.pop()
            self._enter(slot, row, num_tokens)
            self.num_drafted[slot], self.num_accepted[slot] = num_drafted, num_accepted
            self._grant(slot, num_blocks)
            slots.append(slot)
            sizes.append(min(num_tokens, budget))
            budget -= sizes[-1]
        entered = np.array(slots, np.int64)
        self._running = np.concatenate([self._running, entered])
        return np.concatenate([prefills, entered]), np.concatenate([chunks, np.array(sizes, np.int64)])

    def _enter(self, slot: int, row: int, num_tokens: int) -> None:
        self.rows[slot], self.num_tokens[slot], self.num_computed[slot] = row, num_tokens, 0
        self.prompts[slot] = self.workload.prompt_lens[row]
        self.ends[slot] = self.prompts[slot] + self.workload.output_lens[row]
        self.limits[slot] = self._limits[row]
        self.groups[slot] = self.workload.groups[row]
        self.num_behind[slot] = 0

    def _ration(self, decodes: Int64, budgets: Int32, missing: Int64) -> Int32:
        """Budgets that fit, request after request, as many tokens of each as there are blocks for."""
        size = self.workload.block_size
        room = np.maximum(self._num_held[decodes] * size - self.num_tokens[decodes], 0)
        fitting: Int32 = np.minimum(budgets, room).astype(np.int32)  # what needs no block
        taken = np.cumsum(missing)
        first = int(np.searchsorted(taken, self.num_free, side="right"))
        fitting[:first] = budgets[:first]
        free = self.num_free - (int(taken[first - 1]) if first else 0)
        for i in range(first, len(budgets)):
            if not free:
                break
            fitting[i] = min(int(budgets[i]), int(room[i]) + free * size)
            free -= min(free, int(missing[i]))
        return fitting

    def _trim_blocks(self, slots: Int64) -> None:
        surplus = np.maximum(self._num_held[slots] - self._blocks_for(self.num_tokens[slots]), 0)
        self._num_held[slots] -= surplus
        self.num_free += int(surplus.sum())
        self._has_reserved = False
