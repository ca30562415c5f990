"""The seam between the engine and whatever guesses the next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ...policies.base import Float32, Int32
from ..block_manager import BlockManager
from ..input_batch import SlotTable
from ..request import Request


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """The R requests that decode in a step."""

    requests: Sequence[Request]
    slots: Int32
    """[R] rows of `table`."""
    table: SlotTable
    """Tokens and KV blocks of running requests, up to date for these slots when drafts are proposed."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """Guesses for the R decoding requests of a step."""

    token_ids: list[list[int]]
    """R lists, each at most the request's budget, possibly empty."""
    survival: Float32
    """[R, K] estimated probability that draft j and all before it are accepted; 0 past a request's drafts."""

    @property
    def num_draft_tokens(self) -> Int32:
        """[R] length of each list."""
        return np.fromiter(map(len, self.token_ids), dtype=np.int32, count=len(self.token_ids))


class Drafter(Protocol):
    """Guesses tokens; owns its own state, never the truth. A wrong guess costs time, not correctness.

    Subclass it; what a drafter without weights does not need has a default.
    """

    kind: str
    """As `speculation.method` in the job."""

    def propose(self, batch: DraftBatch, num_draft_tokens: Int32) -> Drafts:
        """Up to num_draft_tokens[i] guesses for batch.requests[i], continuing its prompt and output.

        KV blocks for the request's tokens and as many drafts are reserved.
        """
        ...

    def observe(self, batch: DraftBatch, num_draft_tokens: Int32, num_accepted_tokens: Int32) -> None:
        """Hear how many tokens were verified and accepted, once the new tokens are in the requests and before finished
        ones leave. A policy may have cut what was proposed, and a grammar may have put tokens of its own in its place.
        """
        ...

    def forget(self, request: Request) -> None:
        """The request has finished: learn from its output, drop its state."""
        ...

    @property
    def bytes_per_block(self) -> int:
        """Bytes of KV that each block costs the drafter, over its layers."""
        return 0

    def allocate(self, blocks: BlockManager) -> None:
        """Make room for KV in each of the blocks; called once, before the first step."""
        return None

    def facts(self) -> dict[str, float]:
        """Numbers about itself for the job's report."""
        return {}
