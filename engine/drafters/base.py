"""The seam between the engine and whatever guesses the next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ...policies.base import Float32, Int32
from ..request import Request


@dataclass(frozen=True, slots=True)
class Drafts:
    """Guesses for the R decoding requests of a step."""

    token_ids: list[list[int]]
    """R lists, each at most the request's budget, possibly empty."""
    survival: Float32
    """[R, K] estimated probability that draft j and all before it are accepted."""

    @property
    def num_draft_tokens(self) -> Int32:
        """[R] length of each list."""
        return np.fromiter(map(len, self.token_ids), dtype=np.int32, count=len(self.token_ids))


class Drafter(Protocol):
    """Guesses tokens; owns its own state, never the truth. A wrong guess costs time, not correctness."""

    kind: str
    """As `speculation.method` in the job."""

    def propose(self, requests: Sequence[Request], num_draft_tokens: Int32) -> Drafts:
        """Up to num_draft_tokens[i] guesses for requests[i], continuing its prompt and output."""
        ...

    def observe(self, requests: Sequence[Request], num_draft_tokens: Int32, num_accepted_tokens: Int32) -> None:
        """Hear which of the proposed tokens were verified and accepted; called before finished requests leave."""
        ...

    def forget(self, request: Request) -> None:
        """The request has finished: drop its state."""
        ...
