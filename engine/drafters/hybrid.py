"""Two drafters: the second is asked for the requests about which the first has nothing to say."""

from __future__ import annotations

import numpy as np

from ...policies.base import Float32, Int32
from ..block_manager import BlockManager
from ..request import Request
from .base import DraftBatch, Drafter, Drafts
from .forced import num_legal


class SuffixThenModel(Drafter):
    """A cheap drafter first, such as the suffix index, and a costly one, such as a draft model, where it is silent.

    Each hears only of the drafts that it made itself.
    """

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self.first, self.second = first, second
        self.kind = f"{first.kind}+{second.kind}"
        self._by_second: set[Request] = set()  # whose drafts in this step are the second's

    def propose(self, batch: DraftBatch, num_draft_tokens: Int32) -> Drafts:
        """See Drafter."""
        self._by_second.clear()
        drafts = self.first.propose(batch, num_draft_tokens)
        legal = [num_legal(r, tokens) for r, tokens in zip(batch.requests, drafts.token_ids, strict=True)]
        silent = np.array(legal, dtype=np.int32) == 0
        if not num_draft_tokens[silent].any():
            return drafts
        others = self.second.propose(batch, np.where(silent, num_draft_tokens, 0).astype(np.int32))
        self._by_second.update(r for r, is_silent in zip(batch.requests, silent.tolist(), strict=True) if is_silent)
        both = zip(drafts.token_ids, others.token_ids, silent.tolist(), strict=True)
        token_ids = [other if is_silent else own for own, other, is_silent in both]
        return Drafts(token_ids, _merged(drafts.survival, others.survival, silent))

    def observe(self, batch: DraftBatch, num_draft_tokens: Int32, num_accepted_tokens: Int32) -> None:
        """See Drafter."""
        second = np.fromiter((r in self._by_second for r in batch.requests), bool, count=len(batch.requests))
        for drafter, is_own in ((self.first, ~second), (self.second, second)):
            drafted = np.where(is_own, num_draft_tokens, 0).astype(np.int32)
            if drafted.any():
                drafter.observe(batch, drafted, np.minimum(drafted, num_accepted_tokens))

    def forget(self, request: Request) -> None:
        """See Drafter."""
        self._by_second.discard(request)
        self.first.forget(request)
        self.second.forget(request)

    @property
    def bytes_per_block(self) -> int:
        """See Drafter."""
        return self.first.bytes_per_block + self.second.bytes_per_block

    def allocate(self, blocks: BlockManager) -> None:
        """See Drafter."""
        self.first.allocate(blocks)
        self.second.allocate(blocks)

    def facts(self) -> dict[str, float]:
        """Those of both; the drafters' names for them differ."""
        return {**self.first.facts(), **self.second.facts()}


def _merged(first: Float32, second: Float32, silent: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Float32:
    """[R, K] the second's rows where the first is silent."""
    merged = np.zeros((len(silent), max(first.shape[1], second.shape[1])), dtype=np.float32)
    merged[:, : first.shape[1]] = first
    merged[silent, : second.shape[1]] = second[silent]
    return merged
