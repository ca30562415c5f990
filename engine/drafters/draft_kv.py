"""Which KV of a drafter's own layers is true: it shares the target's blocks, but not when they are written."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...policies.base import Int32
from ..block_manager import BlockManager
from ..input_batch import SlotTable
from ..request import Request
from ..sampler import count_accepted


@dataclass(slots=True)
class _Progress:
    """How far the KV of one request reaches."""

    tenure: int
    """Request.num_preemptions when its block table was first seen; a preempted request comes back with another."""
    num_computed: int = 0
    """Leading tokens whose KV is true."""
    guesses: list[int] = field(default_factory=list)
    """Tokens fed past the committed ones when it last drafted: true as far as they came to be."""
    start: int = 0
    """Position of the first guess."""
    pages: list[tuple[int, int]] = field(default_factory=list)
    """(block, generation) of the blocks that hold the guesses."""


class DraftKV:
    """Counts of true KV by block, under the block's generation, and by request.

    A block counts how many of its leading tokens were computed, whoever computed them, so that a request admitted onto
    cached blocks goes on from there. A block that was taken for other content has another generation and counts for
    nothing. Guesses are written behind the committed tokens and count only once the request is found to hold them.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self._block_size = blocks.block_size
        self._generations = blocks.generations
        self._num_valid = np.zeros(blocks.num_blocks, dtype=np.int32)
        self._written_in = np.full(blocks.num_blocks, -1, dtype=np.int64)  # generation that num_valid is about
        self._of: dict[Request, _Progress] = {}

    def num_computed(self, request: Request, table: SlotTable) -> int:
        """Leading tokens of a running request whose KV is true now."""
        row, num_tokens = table.block_tables[request.slot], int(table.num_tokens[request.slot])
        progress = self._of.get(request)
        if progress is None or progress.tenure != request.num_preemptions:
            progress = self._of[request] = _Progress(request.num_preemptions)
        elif progress.guesses:
            self._confirm(progress, row, table.token_ids[request.slot, progress.start : num_tokens])
        progress.num_computed = self._reach(row, progress.num_computed, num_tokens)
        return progress.num_computed

    def extend(self, request: Request, table: SlotTable, stop: int) -> None:
        """KV up to position `stop` is true once the coming forward pass is through; those that share its blocks may
        count on it in the same pass, since a layer writes all KV before it attends."""
        progress = self._of[request]
        self._count(table.block_tables[request.slot], progress.num_computed, stop)
        progress.num_computed = stop

    def guess(self, request: Request, table: SlotTable, tokens: list[int]) -> None:
        """These tokens were fed behind the committed ones, all of which are computed."""
        progress = self._of[request]
        progress.guesses, progress.start = tokens, int(table.num_tokens[request.slot])
        first, last = progress.start // self._block_size, (progress.start + len(tokens) - 1) // self._block_size
        held = table.block_tables[request.slot, first : last + 1]
        progress.pages = list(zip(held.tolist(), self._generations[held].tolist(), strict=True))

    def forget(self, request: Request) -> None:
        """The request has finished; its blocks keep their counts."""
        self._of.pop(request, None)

    def _confirm(self, progress: _Progress, row: Int32, real: Int32) -> None:
        """Keep the guesses that the request now holds, in the blocks they were written to."""
        guesses, start = progress.guesses, progress.start
        matched = count_accepted(guesses[: len(real)], real.tolist())
        first = start // self._block_size
        for index, page in enumerate(progress.pages, start=first):
            block = int(row[index])
            if (block, int(self._generations[block])) != page:  # given back in between
                matched = min(matched, max(0, index * self._block_size - start))
                break
        self._count(row, start, start + matched)
        progress.num_computed = max(progress.num_computed, start + matched)
        progress.guesses = []

    def _reach(self, row: Int32, num_computed: int, num_tokens: int) -> int:
        """Go on over what others have computed in shared blocks."""
        while num_computed < num_tokens:
            index = num_computed // self._block_size
            block = row[index]
            if self._written_in[block] != self._generations[block]:
                break
            end = index * self._block_size + int(self._num_valid[block])
            if end <= num_computed:
                break
            num_computed = end
        return num_computed

    def _count(self, row: Int32, start: int, stop: int) -> None:
        """Positions start .. stop are true, as is everything before them."""
        for index in range(start // self._block_size, -(-stop // self._block_size)):
            block = row[index]
            num_valid = min(self._block_size, stop - index * self._block_size)
            if self._written_in[block] == self._generations[block]:
                num_valid = max(num_valid, int(self._num_valid[block]))
            self._written_in[block] = self._generations[block]
            self._num_valid[block] = num_valid
