"""Prompt lookup: the tokens that followed the same n-gram earlier in this request's prompt and output.

Longest match first, the latest occurrence of it. The match length is the confidence: acceptance is counted by match
length, so a policy reads survival estimates that were measured on this job.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...policies.base import Int32
from ..request import Request
from .base import DraftBatch, Drafter, Drafts

PRIOR = (1.0, 2.0)
"""Accepted and graded draft tokens that each match length starts from: 0.5, worth two observations."""


@dataclass(slots=True)
class _Index:
    """Where each n-gram of a request was last followed by something."""

    tokens: list[int]
    ends: list[dict[tuple[int, ...], int]] = field(default_factory=list)
    """By n - min_match: n-gram -> index of the token after it."""
    match_len: int = 0
    """Of the drafts now in verification."""


class NgramDrafter(Drafter):
    """Drafts for each request alone, by index, without weights. Costs nothing in steps that ask for no drafts."""

    kind = "ngram"

    def __init__(self, min_match: int = 2, max_match: int = 5) -> None:
        """Match n-grams of min_match to max_match tokens."""
        if not 1 <= min_match <= max_match:
            raise ValueError(f"need 1 <= min_match <= max_match, got {min_match} and {max_match}")
        self.min_match, self.max_match = min_match, max_match
        self._index: dict[Request, _Index] = {}
        self._accepted = np.full(max_match + 1, PRIOR[0])
        self._graded = np.full(max_match + 1, PRIOR[1])

    def propose(self, batch: DraftBatch, num_draft_tokens: Int32) -> Drafts:
        """See Drafter. The survival of draft j is p ** (j + 1), p the acceptance measured for the match length."""
        token_ids: list[list[int]] = []
        rates = np.zeros(len(batch.requests))
        for i, (request, budget) in enumerate(zip(batch.requests, num_draft_tokens.tolist(), strict=True)):
            drafts, match_len = self._lookup(request, budget) if budget else ([], 0)
            token_ids.append(drafts)
            if drafts:
                rates[i] = self._accepted[match_len] / self._graded[match_len]
        width = max(map(len, token_ids), default=0)
        lens = np.fromiter(map(len, token_ids), dtype=np.int32, count=len(token_ids))
        survival = rates[:, None] ** np.arange(1, width + 1)
        survival[np.arange(width) >= lens[:, None]] = 0
        return Drafts(token_ids, survival.astype(np.float32))

    def observe(self, batch: DraftBatch, num_draft_tokens: Int32, num_accepted_tokens: Int32) -> None:
        """Count accepted and graded drafts by match length; a draft after the first refusal is not graded."""
        for request, drafted, accepted in zip(
            batch.requests, num_draft_tokens.tolist(), num_accepted_tokens.tolist(), strict=True
        ):
            if drafted:
                match_len = self._index[request].match_len
                self._accepted[match_len] += accepted
                self._graded[match_len] += min(accepted + 1, drafted)

    def forget(self, request: Request) -> None:
        """See Drafter."""
        self._index.pop(request, None)

    def _lookup(self, request: Request, budget: int) -> tuple[list[int], int]:
        index = self._index.get(request)
        if index is None:
            index = self._index[request] = _Index([], [{} for _ in range(self.min_match, self.max_match + 1)])
        self._catch_up(index, request)
        tokens = index.tokens
        for n in range(min(self.max_match, len(tokens)), self.min_match - 1, -1):
            start = index.ends[n - self.min_match].get(tuple(tokens[-n:]))
            if start is not None:
                index.match_len = n
                return _continuation(tokens, start, budget), n
        return [], 0

    def _catch_up(self, index: _Index, request: Request) -> None:
        """Index what was appended since the last call: n-grams that end before the last token, so that all have a
        continuation and the current suffix never finds itself."""
        known = len(index.tokens)
        num_prompt = len(request.prompt_token_ids)
        if known < num_prompt:
            index.tokens.extend(request.prompt_token_ids[known:])
        index.tokens.extend(request.output_token_ids[len(index.tokens) - num_prompt :])
        tokens = index.tokens
        for n, ends in zip(range(self.min_match, self.max_match + 1), index.ends, strict=True):
            for end in range(max(n, known), len(tokens)):
                ends[tuple(tokens[end - n : end])] = end


def _continuation(tokens: list[int], start: int, budget: int) -> list[int]:
    """budget tokens from start on; a continuation that reaches the end repeats itself, as a loop in the text would."""
    drafts = tokens[start : start + budget]
    period = len(tokens) - start
    while len(drafts) < budget:
        drafts.append(drafts[len(drafts) - period])
    return drafts
