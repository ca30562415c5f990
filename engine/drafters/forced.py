"""Drafts for requests that follow a grammar: what it forbids is cut off, what it forces is drafted in any case."""

from __future__ import annotations

import numpy as np

from ...policies.base import Float32, Int32
from ..grammar import GrammarError
from ..request import Request
from .base import DraftBatch, Drafter, Drafts


class GrammarDrafter:
    """Stands between the engine and its drafter. Tokens that a grammar forces are drafts like any other, nearly always
    right, and cost nothing; a draft that a grammar forbids would be refused, so it is not verified."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._replaced: set[Request] = set()

    def propose(self, batch: DraftBatch, num_draft_tokens: Int32) -> Drafts:
        """As Drafter.propose."""
        self._replaced.clear()
        own = self._drafter.propose(batch, num_draft_tokens)
        if all(request.grammar is None for request in batch.requests):
            return own
        forced = [_forced(r, k) for r, k in zip(batch.requests, num_draft_tokens.tolist(), strict=True)]
        token_ids = [d[: num_legal(r, d)] for r, d in zip(batch.requests, own.token_ids, strict=True)]
        for i, (request, tokens) in enumerate(zip(batch.requests, forced, strict=True)):
            if token_ids[i][: len(tokens)] != tokens:
                token_ids[i] = tokens
                self._replaced.add(request)
        return Drafts(token_ids, _survival(own.survival, token_ids, forced))

    def observe(self, batch: DraftBatch, num_draft_tokens: Int32, num_accepted_tokens: Int32) -> None:
        """As Drafter.observe, with what the drafter itself proposed."""
        if self._replaced:
            is_replaced = [request in self._replaced for request in batch.requests]
            num_draft_tokens = np.where(is_replaced, 0, num_draft_tokens).astype(np.int32)
            num_accepted_tokens = np.minimum(num_draft_tokens, num_accepted_tokens)
        self._drafter.observe(batch, num_draft_tokens, num_accepted_tokens)


def _forced(request: Request, limit: int) -> list[int]:
    if request.grammar is None or limit == 0:
        return []
    try:
        return request.grammar.forced(limit)
    except GrammarError:  # told when the next token is committed
        return []


def num_legal(request: Request, drafts: list[int]) -> int:
    """Leading drafts that the request's grammar, if it has one, allows."""
    if request.grammar is None or not drafts:
        return len(drafts)
    try:
        return request.grammar.num_legal(drafts)
    except GrammarError:
        return 0


def _survival(own: Float32, token_ids: list[list[int]], forced: list[list[int]]) -> Float32:
    """[R, K] the drafter's estimates, cut where its drafts were, and 1 for what is forced."""
    width = max(map(len, token_ids), default=0)
    survival = np.zeros((len(token_ids), width), dtype=np.float32)
    survival[:, : own.shape[1]] = own[:, :width]
    for i, tokens in enumerate(forced):
        survival[i, : len(tokens)] = 1
    lens = np.fromiter(map(len, token_ids), dtype=np.int32, count=len(token_ids))
    survival[np.arange(width) >= lens[:, None]] = 0
    return survival
