"""Drafts from text that has been seen: the request's own, and the outputs of this job and of earlier ones.

For each request the places where its last tokens stood before are candidates: in its own prompt and output by a scan,
in finished outputs by an index. Each votes for the tokens that followed it, the more the longer its match. The draft is
the continuation with the greatest expected acceptance under these votes, and ends where it is unlikely to survive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...policies.base import Int32, Int64
from ..request import FinishReason, Request
from .base import DraftBatch, Drafter, Drafts
from .calibration import Calibration
from .suffix_index import MAX_CONTINUATION, MAX_MATCH, NO_TOKEN, Row, SuffixIndex

MAX_SCANNED_TOKENS = 1 << 20
"""Tokens of running requests that one step scans, shared by its requests; the newest of each."""
REQUESTS_PER_LEARNED_ROW = 32
"""Finished outputs wait until there is one for so many running requests: inserting a few costs hardly more than one."""
MAX_LEARNED_ROWS = 64
"""Finished outputs that wait at most, where no drafts are asked for."""
MAX_SCAN_HITS = 8
"""Latest places of a request's last two tokens that are compared further."""
NUM_VOTERS = 4
"""Candidates of a request that vote: those with the longest match, the latest of equals."""
MATCH_BASE = 2.0
"""Each further token of match multiplies a vote by this."""

# Bins of the calibration: source (index, own text) x match length x share of the votes.
MATCH_EDGES = np.array([2, 3, 4, 6, 9, 13, 17])
SHARE_EDGES = np.array([0.5, 0.8, 0.95])
PRIOR = np.array(
    [
        [  # index
            [0.06, 0.16, 0.25, 0.20, 0.53],
            [0.16, 0.26, 0.52, 0.40, 0.72],
            [0.12, 0.27, 0.50, 0.42, 0.79],
            [0.13, 0.29, 0.50, 0.52, 0.82],
            [0.20, 0.30, 0.45, 0.57, 0.87],
            [0.20, 0.37, 0.54, 0.68, 0.91],
            [0.25, 0.41, 0.65, 0.75, 0.92],
            [0.33, 0.55, 0.70, 0.85, 0.95],
        ],
        [  # own text
            [0.13, 0.30, 0.50, 0.36, 0.68],
            [0.42, 0.44, 0.70, 0.58, 0.77],
            [0.41, 0.48, 0.72, 0.68, 0.83],
            [0.38, 0.46, 0.68, 0.75, 0.84],
            [0.38, 0.47, 0.70, 0.80, 0.88],
            [0.42, 0.47, 0.70, 0.82, 0.92],
            [0.40, 0.48, 0.78, 0.83, 0.96],
            [0.48, 0.52, 0.85, 0.92, 0.98],
        ],
    ]
)
"""[sources, lengths, shares] acceptance to start from, measured with SmolLM2-135M on questions, code and chat. The last
two shares are a single vote and an agreement of several."""
_, NUM_LENGTHS, NUM_SHARES = PRIOR.shape
_LENGTH_BINS = np.digitize(np.arange(MAX_MATCH + MAX_CONTINUATION + 1), MATCH_EDGES)
_SHARE_BINS = np.digitize(np.arange(21) / 20, SHARE_EDGES)

# A candidate is one int64, and sorting ranks it: by length of match, then the request's own text, then the later place.
_MATCH_SHIFT = 33
_LOCAL = 1 << 32
_POSITION = _LOCAL - 1
_WEIGHTS = np.where(np.arange(MAX_MATCH + 1) > 0, MATCH_BASE ** np.arange(MAX_MATCH + 1), 0).astype(np.float32)
_NEWEST_FIRST = np.arange(1, MAX_MATCH + 2)
_OLDEST_FIRST = _NEWEST_FIRST[::-1].copy()


class SuffixDrafter(Drafter):
    """Suffix matches, weighted by votes. No model, bounded memory, and nothing done in steps that ask for no drafts."""

    kind = "suffix"

    def __init__(self, index_tokens: int = 4_000_000, min_survival: float = 0.1) -> None:
        """index_tokens: size of the index over finished outputs; 0 drafts from each request's own text alone.
        min_survival: drafts that are less likely to be accepted are not proposed; raise it where another drafter waits
        for what this one leaves.
        """
        self.index = SuffixIndex(index_tokens) if index_tokens else None
        self.min_survival = min_survival
        self.num_seeded_tokens = 0
        self._calibration = Calibration(PRIOR.ravel(), weight=8.0)
        self._learned: list[list[int]] = []
        """Finished outputs that are not in the index yet."""
        self._pending: _Pending | None = None

    def seed(self, token_ids: Sequence[Row]) -> None:
        """Learn rows of earlier jobs, oldest first. `index.extend` takes flat arrays, and is faster."""
        if self.index is not None:
            self.index.append(token_ids)
            self.num_seeded_tokens += sum(map(len, token_ids))

    def propose(self, batch: DraftBatch, num_draft_tokens: Int32) -> Drafts:
        """See Drafter."""
        self._pending = None
        if len(self._learned) * REQUESTS_PER_LEARNED_ROW >= len(batch.requests):
            self._learn()
        asked = np.flatnonzero(num_draft_tokens)
        if len(asked) == len(batch.requests):
            return self._propose(batch, num_draft_tokens)
        some = DraftBatch([batch.requests[i] for i in asked.tolist()], batch.slots[asked], batch.table)
        return _spread(self._propose(some, num_draft_tokens[asked]), asked.tolist(), len(batch.requests))

    def observe(self, batch: DraftBatch, num_draft_tokens: Int32, num_accepted_tokens: Int32) -> None:
        """Grade what was proposed by the tokens that came, whatever of it was verified."""
        if self._pending is not None:
            self._calibration.observe(*self._pending.graded())
            self._pending = None

    def forget(self, request: Request) -> None:
        """See Drafter; an output that is complete is learned."""
        if self.index is not None and request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._learned.append(request.output_token_ids)
            if len(self._learned) >= MAX_LEARNED_ROWS:
                self._learn()

    def facts(self) -> dict[str, float]:
        """Sizes of the index."""
        self._learn()
        index = self.index
        return {
            "index_tokens": index.num_tokens if index else 0,
            "index_rows": index.num_rows if index else 0,
            "index_bytes": index.nbytes if index else 0,
            "seeded_tokens": self.num_seeded_tokens,
        }

    def _learn(self) -> None:
        if self._learned and self.index is not None:
            self.index.append(self._learned)
            self._learned = []

    def _propose(self, batch: DraftBatch, num_draft_tokens: Int32) -> Drafts:
        num_requests = len(batch.requests)
        budgets = np.minimum(num_draft_tokens, MAX_CONTINUATION)
        width = int(budgets.max(initial=0))
        if not width:
            return Drafts([[] for _ in range(num_requests)], np.zeros((num_requests, 0), dtype=np.float32))
        texts = _Texts(batch)
        keys = texts.scan()
        if self.index is not None and not self.index.is_empty:
            match_lens, places = self.index.lookup(texts.contexts)
            keys = np.concatenate([keys, (match_lens << _MATCH_SHIFT) | places], axis=1)
        keys.sort(axis=1)
        voters = keys[:, : -NUM_VOTERS - 1 : -1]
        positions, is_local = voters & _POSITION, (voters & _LOCAL) != 0
        nexts = texts.continuations(positions * is_local, width)
        if self.index is not None and not is_local.all():
            nexts = np.where(is_local[:, :, None], nexts, self.index.continuations(positions * ~is_local, width))
        drafts, bins, is_open = _elect(voters >> _MATCH_SHIFT, is_local, nexts)
        is_open &= np.arange(width) < budgets[:, None]
        survival = np.multiply.accumulate(self._calibration.rates()[bins] * is_open, axis=1)
        is_likely = survival >= self.min_survival
        survival *= is_likely
        lens = is_likely.sum(axis=1).tolist()
        token_ids = [tokens[:length] for tokens, length in zip(drafts.tolist(), lens, strict=True)]
        self._pending = _Pending(batch.requests, texts.num_tokens, token_ids, bins)
        return Drafts(token_ids, survival[:, : max(lens)].astype(np.float32))


def _spread(drafts: Drafts, asked: list[int], num_requests: int) -> Drafts:
    """Those of the requests that were asked for, among all of the step."""
    token_ids: list[list[int]] = [[] for _ in range(num_requests)]
    for i, tokens in zip(asked, drafts.token_ids, strict=True):
        token_ids[i] = tokens
    survival = np.zeros((num_requests, drafts.survival.shape[1]), dtype=np.float32)
    survival[asked] = drafts.survival
    return Drafts(token_ids, survival)


@dataclass(frozen=True, slots=True)
class _Pending:
    """What was proposed last."""

    requests: Sequence[Request]
    num_tokens: Int64
    """[R] tokens that each request had."""
    token_ids: list[list[int]]
    bins: Int64
    """[R, K] calibration bin of each draft token."""

    def graded(self) -> tuple[Int64, NDArray[np.bool_]]:
        """Bin of each draft token that the tokens since then have put to the test, and whether it was right."""
        num_right, num_graded = [], []
        for request, known, drafts in zip(self.requests, self.num_tokens.tolist(), self.token_ids, strict=True):
            right = graded = 0
            if drafts:
                came = request.output_token_ids[known - len(request.prompt_token_ids) :]
                most = min(len(drafts), len(came))
                while right < most and drafts[right] == came[right]:
                    right += 1
                graded = min(right + 1, most)
            num_right.append(right)
            num_graded.append(graded)
        columns = np.arange(self.bins.shape[1])
        is_graded = columns < np.array(num_graded)[:, None]
        is_right = columns < np.array(num_right)[:, None]
        return self.bins[is_graded], is_right[is_graded]


class _Texts:
    """The texts of R requests in the engine's table."""

    def __init__(self, batch: DraftBatch) -> None:
        rows = batch.table.token_ids
        self.flat = rows.reshape(-1)
        self.begins = batch.slots.astype(np.int64) * rows.shape[1]
        self.num_tokens = batch.table.num_tokens[batch.slots].astype(np.int64)
        missing = self.num_tokens[:, None] - _OLDEST_FIRST
        self.contexts: Int32 = self.flat[self.begins[:, None] + np.maximum(missing, 0)]
        """[R, MAX_MATCH + 1] the last tokens of each; the first column, and what a text does not have, is NO_TOKEN."""
        self.contexts[missing < 0] = NO_TOKEN
        self.contexts[:, 0] = NO_TOKEN

    def scan(self) -> Int64:
        """Keys [R, C] of the latest places of each text where its last two tokens stood before, or else the last."""
        num_requests = len(self.begins)
        longest = int(self.num_tokens.max())
        window = min(longest, max(MAX_SCANNED_TOKENS // num_requests, 3))
        firsts = np.maximum(self.num_tokens - window, 0)
        shape = len(self.flat) - window + 1, window
        block = np.ndarray(shape, np.int32, self.flat, strides=self.flat.strides * 2)[self.begins + firsts]
        hits = (block[:, :-1] == self.contexts[:, -1:]).ravel().nonzero()[0]
        which, positions = np.divmod(hits, max(window - 1, 1))
        positions += firsts[which] + 1  # of the token after the match
        is_past = positions < self.num_tokens[which]  # what stands behind the text in the table is not of it
        which, positions = which[is_past], positions[is_past]
        is_pair = self.flat[self.begins[which] + np.maximum(positions - 2, 0)] == self.contexts[which, -2]
        is_pair &= positions > 1
        has_pair = np.zeros(num_requests, dtype=bool)
        has_pair[which[is_pair]] = True
        is_wanted = is_pair | ~has_pair[which]
        which, positions = which[is_wanted], positions[is_wanted]
        rank = np.bincount(which, minlength=num_requests).cumsum()[which] - np.arange(1, len(which) + 1)
        is_late = rank < MAX_SCAN_HITS
        which, positions, rank = which[is_late], positions[is_late], rank[is_late]
        keys = np.zeros((num_requests, 1 + int(rank.max(initial=0))), dtype=np.int64)
        keys[which, rank] = _LOCAL | (self._match_lens(which, positions) << _MATCH_SHIFT) | positions
        return keys

    def continuations(self, positions: Int64, width: int) -> Int32:
        """[R, V, width] tokens from each position [R, V] on. What reaches the end of the text repeats itself, as a
        loop in the text would."""
        period = self.num_tokens[:, None] - positions
        offsets = np.arange(width) % period[:, :, None]
        tokens: Int32 = self.flat[(self.begins[:, None] + positions)[:, :, None] + offsets]
        return tokens

    def _match_lens(self, which: Int64, positions: Int64) -> Int64:
        """How many tokens before each position are those before the end of the text, at most MAX_MATCH."""
        offsets = positions[:, None] - _NEWEST_FIRST
        before = self.flat[self.begins[which, None] + np.maximum(offsets, 0)]
        # Before the beginning stands NO_TOKEN + 1, which no context has.
        before[offsets < 0] = NO_TOKEN + 1
        match_lens: Int64 = (before != self.contexts[which, ::-1]).argmax(axis=1)
        return match_lens


def _elect(match_lens: Int64, is_local: NDArray[np.bool_], nexts: Int32) -> tuple[Int32, Int64, NDArray[np.bool_]]:
    """The continuation with the greatest expected acceptance: the sum, over its tokens, of the share of the votes that
    agree with it so far.

    match_lens [R, V], best first, 0 without a vote; nexts [R, V, K]. Returns the drafts [R, K], the calibration bin of
    each [R, K], and whether it is a draft at all [R, K].
    """
    num_requests, num_voters, width = nexts.shape
    everyone = np.arange(num_requests)
    votes = np.ascontiguousarray(nexts.transpose(2, 1, 0))  # requests last: long rows for numpy's inner loops
    agrees = votes[:, :, None] == votes[:, None]
    agrees &= (votes >= 0)[:, :, None]
    for j in range(1, width):
        agrees[j] &= agrees[j - 1]
    weights = _WEIGHTS[match_lens]
    supports = np.einsum("kcvr,vr->kcr", agrees, np.ascontiguousarray(weights.T))
    elected = supports.sum(axis=0).argmax(axis=0)
    support = supports[:, elected, everyone].T
    elected += everyone * num_voters  # in [R * V]
    own = weights.ravel()[elected][:, None]
    before = np.concatenate([weights.sum(axis=1)[:, None], support[:, :-1]], axis=1)
    shares = support / np.maximum(before, np.float32(1e-9))
    share_bins = _SHARE_BINS[(shares * 20).astype(np.int64)] + ((shares > SHARE_EDGES[-1]) & (support > own))
    length_bins = _LENGTH_BINS[match_lens.ravel()[elected][:, None] + np.arange(width)]
    sources = is_local.ravel()[elected][:, None]
    bins: Int64 = (sources * NUM_LENGTHS + length_bins) * NUM_SHARES + share_bins
    return nexts.reshape(-1, width)[elected], bins, (support > 0) & (own > 0)
