"""KV blocks: allocate, share equal prefixes, roll back."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from ..policies.base import Int64
from .request import Request

ROOT = 0
"""Id of the empty prefix."""

PrefixKey = tuple[int, tuple[int, ...]]
"""Id of the prefix before a block and the block's tokens: exact, so two prefixes never collide."""


class Admission(Enum):
    """What became of a request that asked for its blocks."""

    ADMITTED = "admitted"
    WAITS_FOR_PREFIX = "another request is computing its next block"
    NO_ROOM = "too few free blocks"


@dataclass(slots=True)
class _Prefix:
    """What a running request knows of its own full blocks."""

    ids: list[int] = field(default_factory=list)
    """Id of the prefix that ends with each of its leading full blocks."""
    num_offered: int = 0
    """Leading blocks that the cache already knows."""
    promised: set[PrefixKey] = field(default_factory=set)
    """Keys of prompt blocks that it will compute and that others may wait for."""


class BlockManager:
    """A pool of `num_blocks` KV blocks of `block_size` tokens.

    Full blocks of committed tokens are kept under their exact prefix, by reference count while in use and then in
    least-recently-used order until the room is needed. A block that a running request is about to compute is
    promised: a request with the same prefix waits for it rather than compute it again.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.generations: Int64 = np.zeros(num_blocks, dtype=np.int64)
        """[num_blocks] how often each was taken for new content: whether what a drafter wrote there still holds."""
        self._num_users = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._block_of: dict[PrefixKey, int] = {}
        self._key_of: dict[int, PrefixKey] = {}
        self._prefix_id: dict[int, int] = {}  # block -> id of the prefix that ends with it
        self._promised: set[PrefixKey] = set()
        self._of: dict[Request, _Prefix] = {}
        self._next_id = ROOT + 1

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses, cached ones included."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of blocks in use, 0 to 1."""
        return 1 - len(self._free) / self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def admit(self, request: Request) -> Admission:
        """Give a waiting request the blocks for all its tokens, cached ones first; or leave it unchanged."""
        tokens = request.prompt_token_ids + request.output_token_ids
        cached, ids, waits = self._match(tokens)
        if waits:
            return Admission.WAITS_FOR_PREFIX
        num_revived = sum(1 for block in cached if self._num_users[block] == 0)
        num_new = self.blocks_for(len(tokens)) - len(cached)
        if num_new + num_revived > len(self._free):
            return Admission.NO_ROOM
        for block in cached:
            self._use(block)
        request.block_table = cached + [self._take() for _ in range(num_new)]
        request.num_computed_tokens = len(cached) * self.block_size
        self._of[request] = _Prefix(ids, num_offered=len(ids))
        if self.enable_prefix_caching:
            self._promise(request, tokens)
        return Admission.ADMITTED

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Make room for num_tokens tokens in all; False (and nothing taken) when the pool is empty."""
        num_new = self.blocks_for(num_tokens) - len(request.block_table)
        if num_new > len(self._free):
            return False
        for _ in range(num_new):
            request.block_table.append(self._take())
        return True

    def commit(self, request: Request) -> None:
        """After a step: offer the full blocks of computed tokens to others, give back what drafts left unused."""
        if self.enable_prefix_caching:
            self._offer(request)
        keep = self.blocks_for(request.num_tokens)
        while len(request.block_table) > keep:
            self._release(request.block_table.pop())

    def free(self, request: Request) -> None:
        """Take everything back from a finished or preempted request; its full blocks stay cached."""
        prefix = self._of.pop(request)
        for key in prefix.promised:
            self._promised.remove(key)
        for block in reversed(request.block_table):  # so that the tail of a prefix is evicted before its head
            self._release(block)
        request.block_table = []
        request.num_computed_tokens = 0

    def _match(self, tokens: list[int]) -> tuple[list[int], list[int], bool]:
        """Cached blocks of the longest prefix short of the last token, their prefix ids, and whether to wait."""
        blocks: list[int] = []
        ids: list[int] = []
        if not self.enable_prefix_caching:
            return blocks, ids, False
        for index in range((len(tokens) - 1) // self.block_size):
            key = self._key(ids, tokens, index)
            if (block := self._block_of.get(key)) is None:
                return blocks, ids, key in self._promised
            blocks.append(block)
            ids.append(self._prefix_id[block])
        return blocks, ids, False

    def _key(self, ids: list[int], tokens: list[int], index: int) -> PrefixKey:
        start = index * self.block_size
        return (ids[index - 1] if index else ROOT, tuple(tokens[start : start + self.block_size]))

    def _promise(self, request: Request, tokens: list[int]) -> None:
        prefix = self._of[request]
        for index in range(len(prefix.ids), len(tokens) // self.block_size):
            key = self._key(prefix.ids, tokens, index)
            if key in self._block_of:  # the last full block: cached, yet computed again for its logits
                prefix.ids.append(self._prefix_id[self._block_of[key]])
                continue
            prefix.ids.append(self._new_id())
            if key not in self._promised:
                self._promised.add(key)
                prefix.promised.add(key)

    def _offer(self, request: Request) -> None:
        prefix = self._of[request]
        num_full = request.num_computed_tokens // self.block_size
        if num_full == prefix.num_offered:
            return
        tokens = request.prompt_token_ids + request.output_token_ids
        for index in range(prefix.num_offered, num_full):
            key = self._key(prefix.ids, tokens, index)
            block = request.block_table[index]
            if index == len(prefix.ids):
                known = self._block_of.get(key)
                prefix.ids.append(self._new_id() if known is None else self._prefix_id[known])
            if key not in self._block_of and block not in self._key_of:
                self._block_of[key] = block
                self._key_of[block] = key
                self._prefix_id[block] = prefix.ids[index]
            if key in prefix.promised:
                self._promised.remove(key)
                prefix.promised.remove(key)
        prefix.num_offered = num_full

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _use(self, block: int) -> None:
        if self._num_users[block] == 0:
            del self._free[block]
        self._num_users[block] += 1

    def _take(self) -> int:
        """The least recently used free block, forgotten by the cache."""
        block, _ = self._free.popitem(last=False)
        if (key := self._key_of.pop(block, None)) is not None:
            del self._block_of[key]
            del self._prefix_id[block]
        self._num_users[block] = 1
        self.generations[block] += 1
        return block

    def _release(self, block: int) -> None:
        self._num_users[block] -= 1
        if self._num_users[block] == 0:
            self._free[block] = None
            if block not in self._key_of:
                self._free.move_to_end(block, last=False)  # nothing cached in it: reuse first
