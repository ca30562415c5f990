"""Logits -> tokens: penalties, temperature, top-k, top-p, min-p, keyed noise, argmax; and the accept scan.

Row j of a request that verifies drafts is processed with the history "committed tokens + drafts[:j]". If a draft before
it is refused the row is thrown away, so one pass is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .grammar import GrammarError
from .noise import gumbel, row_key
from .request import Request, SamplingParams

NUCLEUS = 1024
"""Candidates sorted at first for top-p and min-p; rows that need more are sorted whole."""


@dataclass(frozen=True, slots=True)
class LogitRow:
    """Where a row of logits stands in its request."""

    request: Request
    drafts: list[int]
    """Draft tokens between the committed tokens and this row."""

    @property
    def num_output_tokens(self) -> int:
        """Output tokens before the one to be sampled."""
        return len(self.request.output_token_ids) + len(self.drafts)

    @property
    def position(self) -> int:
        """Index in the request of the token to be sampled: the key of its noise."""
        return self.request.num_tokens + len(self.drafts)


class Sampler:
    """Samples one token for each row of logits."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self.eos_token_ids = eos_token_ids

    def sample(
        self, logits: Tensor, requests: Sequence[Request], drafts: Sequence[list[int]]
    ) -> tuple[list[int], list[float | None] | None]:
        """logits [L, V], 1 + len(drafts[i]) rows for each request -> L token ids and, where any request asks for them,
        the log probability of each under the unmodified logits."""
        if all(map(_is_plain, requests)):
            return greedy(logits).tolist(), None
        rows = [LogitRow(r, d[:j]) for r, d in zip(requests, drafts, strict=True) for j in range(len(d) + 1)]
        token_ids = self.sample_rows(logits, rows)
        return token_ids.tolist(), _chosen_logprobs(logits, rows, token_ids)

    def sample_rows(self, logits: Tensor, rows: Sequence[LogitRow]) -> Tensor:
        """logits [L, V] -> [L] token ids, each the same whatever rows are around it."""
        if all(_is_plain(row.request) for row in rows):
            return greedy(logits)
        processed = self._process(logits, rows)
        token_ids = greedy(processed)
        noisy = [i for i, row in enumerate(rows) if not row.request.sampling_params.is_greedy]
        if noisy:
            index = torch.tensor(noisy, device=logits.device)
            token_ids[index] = _sample_keyed(processed[index], [rows[i] for i in noisy])
        return token_ids

    def _process(self, logits: Tensor, rows: Sequence[LogitRow]) -> Tensor:
        """Bias, penalties, minimum length and grammar, on a copy of the rows where any row asks for them."""
        touched = [i for i, row in enumerate(rows) if self._needs_processing(row)]
        if not touched:
            return logits
        # At least float32: a penalty of 0.1 is lost on a bfloat16 logit of 20.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        for i in touched:
            params = rows[i].request.sampling_params
            if params.logit_bias:
                ids = torch.tensor(list(params.logit_bias), device=logits.device)
                logits[i, ids] += torch.tensor(list(params.logit_bias.values()), device=logits.device).to(logits.dtype)
            if params.has_penalties:
                logits[i] = penalize(logits[i], params, rows[i].request.prompt_token_ids, history(rows[i]))
            if rows[i].request.grammar is None and self._is_short(rows[i]):
                logits[i, self._ends(params, logits.device)] = -torch.inf
        constrained = [i for i in touched if rows[i].request.grammar is not None]
        if constrained:
            index = torch.tensor(constrained, device=logits.device)
            legal = self._legal([rows[i] for i in constrained], logits.shape[-1], logits.device)
            logits[index] = logits[index].masked_fill_(~legal, -torch.inf)
        return logits

    def _legal(self, rows: Sequence[LogitRow], vocab_size: int, device: torch.device) -> Tensor:
        """[n, V] tokens that may come next: what the grammars allow, without ends before min_tokens, unless a grammar
        leaves nothing else. A row whose grammar leaves nothing at all may have anything: its token is refused when it
        is to be committed, if the request ever gets there."""
        words = torch.from_numpy(np.stack([_mask(row, vocab_size) for row in rows]).view(np.int32)).to(device)
        bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=device)
        legal = (bits & 1).bool().flatten(1)[:, :vocab_size]
        legal |= ~legal.any(dim=1, keepdim=True)
        for i, row in enumerate(rows):
            if self._is_short(row):
                longer = legal[i].index_fill(0, self._ends(row.request.sampling_params, device), False)
                legal[i] = torch.where(longer.any(), longer, legal[i])
        return legal

    def _needs_processing(self, row: LogitRow) -> bool:
        params = row.request.sampling_params
        follows = row.request.grammar is not None
        return bool(params.logit_bias) or params.has_penalties or follows or self._is_short(row)

    def _is_short(self, row: LogitRow) -> bool:
        return row.num_output_tokens < row.request.sampling_params.min_tokens

    def _ends(self, params: SamplingParams, device: torch.device) -> Tensor:
        return torch.tensor(sorted(self.eos_token_ids.union(params.stop_token_ids)), dtype=torch.long, device=device)


def _is_plain(request: Request) -> bool:
    return request.sampling_params.is_plain and request.grammar is None


def _mask(row: LogitRow, vocab_size: int) -> NDArray[np.uint32]:
    """[ceil(V / 32)] what the row's grammar says; nothing where it cannot go on."""
    assert row.request.grammar is not None
    try:
        return row.request.grammar.mask(row.drafts)
    except GrammarError:
        return np.zeros(-(-vocab_size // 32), dtype=np.uint32)


def greedy(logits: Tensor) -> Tensor:
    """[L, V] -> [L] the first of the largest. By max, which torch vectorises for bfloat16 where it does not argmax."""
    return logits.max(dim=-1).indices


def history(row: LogitRow) -> list[int]:
    """Output tokens that a row's penalties see."""
    return row.request.output_token_ids + row.drafts


def penalize(logits: Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> Tensor:
    """[V] -> [V]: repetition over prompt and output, then frequency and presence over output, in vLLM's order."""
    logits = logits.clone()
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted({*prompt, *output}), device=logits.device, dtype=torch.long)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if output and (params.frequency_penalty or params.presence_penalty):
        seen, counts = torch.unique(torch.tensor(output, device=logits.device), return_counts=True)
        penalty = counts.to(logits.dtype) * params.frequency_penalty + params.presence_penalty
        logits[seen] -= penalty
    return logits


def _sample_keyed(logits: Tensor, rows: Sequence[LogitRow]) -> Tensor:
    """[n, V] -> [n] token ids: argmax of tempered, filtered logits plus the row's own noise, in float64."""
    params = [row.request.sampling_params for row in rows]
    scores = logits.double() / _column([p.temperature for p in params], logits)
    if any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params):
        scores.masked_fill_(scores < _threshold(scores, params), -torch.inf)
    keys = [row_key(p.seed, row.position) for p, row in zip(params, rows, strict=True)]
    return (scores + gumbel(keys, logits.shape[-1], logits.device)).argmax(dim=-1)


def _threshold(scores: Tensor, params: Sequence[SamplingParams], width: int = NUCLEUS) -> Tensor:
    """[n, 1] lowest tempered logit that min-p, then top-k, then top-p keep, each renormalised over what is left.

    A value, not a rank, so that equal logits stand or fall together whatever order a sort leaves them in.
    """
    vocab_size = scores.shape[-1]
    top_k = _column([p.top_k if p.top_k > 0 else vocab_size for p in params], scores)
    width = min(vocab_size, max(width, *(p.top_k for p in params)))
    ranked = scores.topk(width, dim=-1).values
    min_p = ranked[:, :1] + _column([p.min_p for p in params], scores).log()
    kept = (ranked >= min_p) & (torch.arange(width, device=scores.device) < top_k)
    whole = (top_k >= vocab_size) & (min_p == -torch.inf)  # nothing dropped so far: the mass is the row's
    mass = torch.where(whole, scores.logsumexp(-1, True), ranked.masked_fill(~kept, -torch.inf).logsumexp(-1, True))
    open_ended = ~whole & (top_k > width) & kept[:, -1:]  # min-p keeps more than was sorted: the mass falls short
    before = (ranked - mass).exp().cumsum(-1) - (ranked - mass).exp()
    top_p = _column([p.top_p for p in params], scores)
    kept &= (before < top_p) | (top_p >= 1)
    open_ended |= whole & (top_p < 1) & kept[:, -1:]  # so does top-p
    if width < vocab_size and bool(open_ended.any()):
        return _threshold(scores, params, vocab_size)
    lowest = ranked.masked_fill(~kept, torch.inf).amin(-1, True)
    return torch.where(whole & (top_p >= 1), -torch.inf, lowest)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def _chosen_logprobs(logits: Tensor, rows: Sequence[LogitRow], token_ids: Tensor) -> list[float | None]:
    wanted = [i for i, row in enumerate(rows) if row.request.sampling_params.logprobs is not None]
    logprobs: list[float | None] = [None] * len(rows)
    if wanted:
        index = torch.tensor(wanted, device=logits.device)
        picked = torch.log_softmax(logits[index].double(), dim=-1).gather(1, token_ids[index, None])[:, 0]
        for i, value in zip(wanted, picked.tolist(), strict=True):
            logprobs[i] = value
    return logprobs


def count_accepted(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """Leading drafts that equal the target's own token at their place."""
    for j, draft in enumerate(drafts):
        if draft != sampled[j]:
            return j
    return len(drafts)
