"""Replay of a recorded output with errors at set rates: any acceptance process, at the real costs of a step.

Whether the draft for an output position is right is a coin keyed by (seed, request, position), so the process is the
same under every policy. A position is graded at most once, so whichever draft gets there meets a fresh coin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...policies.base import Float32, Int32, Int64
from ..request import Request
from .acceptance_rates import AcceptanceRates, Float64
from .base import DraftBatch, Drafter, Drafts

__all__ = ["AcceptanceRates", "SyntheticDrafter"]

UInt64 = NDArray[np.uint64]
CONFIDENCES = ("exact", "none")
_NO_CONFIDENCE = 0.5
_GAMMA = np.uint64(0x9E3779B97F4A7C15)


@dataclass(slots=True)
class _Replay:
    """The recording of a request that runs, and how far its output has followed it."""

    tokens: Int32
    num_followed: int = 0
    """Leading output tokens that were held against the recording."""
    forked: bool = False


@dataclass(frozen=True, slots=True)
class _Proposed:
    """The drafts of the step under verification, R requests by K positions."""

    recorded: Int32
    """[R, K] recorded tokens, -1 past a request's drafts."""
    right: NDArray[np.bool_]
    """[R, K] whether the draft is the recorded token."""
    probabilities: Float64
    """[R, K] set probability that draft j is right."""
    starts: list[int]
    """R output positions of the first drafts."""


class SyntheticDrafter(Drafter):
    """Drafts what an earlier run of the same job wrote, wrong where a keyed coin says so.

    It needs outputs that repeat, so deterministic mode (or fp64). A request whose output leaves its recording gets no
    drafts from there on; neither does one that has no recording, nor any past a recording's end.

    recorded: request id -> int32 token ids of its output, all within the model's vocabulary.
    seed: keys coins and wrong tokens; another seed is another draw of the same process.
    confidence: what Drafts.survival says: "exact", the products of the set probabilities; "none", 0.5 everywhere.
    Raises ValueError naming the key.
    """

    kind = "synthetic"

    def __init__(
        self,
        recorded: Mapping[int, Sequence[int] | NDArray[np.int32]],
        rates: AcceptanceRates,
        seed: int = 0,
        confidence: str = "exact",
    ) -> None:
        if confidence not in CONFIDENCES:
            raise ValueError(f"confidence must be one of {', '.join(CONFIDENCES)}, got {confidence!r}")
        self._recorded, self._rates, self._confidence = recorded, rates, confidence
        self._seed = _mix(np.array([seed % 2**64], dtype=np.uint64))
        largest = max((int(np.max(tokens)) for tokens in recorded.values() if len(tokens)), default=0)
        self._num_tokens = max(largest + 1, 2)  # ids below it are in the vocabulary for certain
        self._replays: dict[Request, _Replay] = {}
        self._proposed: _Proposed | None = None
        self._num_finished_tokens = 0
        self._num_replayed = self._num_unrecorded = self._num_forked = 0
        self._totals = np.zeros((3, 0))  # by draft position: graded drafts, their set probabilities, accepted drafts

    def propose(self, batch: DraftBatch, num_draft_tokens: Int32) -> Drafts:
        """See Drafter."""
        requests = batch.requests
        replays = [self._follow(request) for request in requests]
        starts = [len(request.output_token_ids) for request in requests]
        rows = [
            [] if replay.forked else replay.tokens[start : start + budget].tolist()
            for replay, start, budget in zip(replays, starts, num_draft_tokens.tolist(), strict=True)
        ]
        recorded = _grid(rows)
        positions = np.array(starts)[:, None] + np.arange(recorded.shape[1])
        probabilities = self._probabilities(requests, positions)
        coins = self._hash([request.request_id for request in requests], positions)
        right = (coins >> np.uint64(11)) * 2.0**-53 < probabilities
        token_ids = np.where(right, recorded, self._wrong(recorded, coins)).tolist()
        self._proposed = _Proposed(recorded, right, probabilities, starts)
        return Drafts(
            [tokens[: len(row)] for tokens, row in zip(token_ids, rows, strict=True)],
            self._survival(probabilities, recorded),
        )

    def observe(self, batch: DraftBatch, num_draft_tokens: Int32, num_accepted_tokens: Int32) -> None:
        """Count, by draft position, the drafts that were graded while the output followed its recording."""
        if self._proposed is None:
            return
        recorded, right = self._proposed.recorded, self._proposed.right
        width = recorded.shape[1]
        starts = self._proposed.starts
        output = _grid([r.output_token_ids[n : n + width] for r, n in zip(batch.requests, starts, strict=True)], width)
        position = np.arange(width)
        accepted = position < num_accepted_tokens[:, None]
        verified = position < num_draft_tokens[:, None]
        # The output ends one token after the last accepted draft, so it has a token for each graded draft. Where it is
        # not the recorded token the coin has no say; where the coin disagrees the draft was not one of ours.
        graded = np.logical_and.accumulate(verified & (output == recorded) & (accepted == right), axis=1)
        if width > self._totals.shape[1]:
            self._totals = np.pad(self._totals, ((0, 0), (0, width - self._totals.shape[1])))
        parts = (graded, graded * self._proposed.probabilities, graded & accepted)
        self._totals[:, :width] += [part.sum(axis=0) for part in parts]

    def forget(self, request: Request) -> None:
        """See Drafter."""
        self._follow(request)
        self._num_finished_tokens += len(request.output_token_ids)
        del self._replays[request]

    def facts(self) -> dict[str, float]:
        """Set and realised acceptance by draft position from 0, over the drafts that were graded on the recording."""
        facts: dict[str, float] = {
            "replayed_requests": self._num_replayed,
            "requests_without_recording": self._num_unrecorded,
            "forked_requests": self._num_forked,
            "forked_fraction": self._num_forked / max(self._num_replayed, 1),
        }
        for position, (graded, probability, accepted) in enumerate(self._totals.T.tolist()):
            facts[f"graded_drafts_pos_{position}"] = graded
            if graded:
                facts[f"set_acceptance_rate_pos_{position}"] = probability / graded
                facts[f"realised_acceptance_rate_pos_{position}"] = accepted / graded
        return facts

    def _follow(self, request: Request) -> _Replay:
        """The request's recording, held against what its output has gained since the last call."""
        replay = self._replays.get(request)
        if replay is None:
            tokens = self._recorded.get(request.request_id)
            self._num_replayed += tokens is not None
            self._num_unrecorded += tokens is None
            replay = self._replays[request] = _Replay(np.asarray([] if tokens is None else tokens, np.int32))
        first, last = replay.num_followed, min(len(request.output_token_ids), len(replay.tokens))
        if not replay.forked and request.output_token_ids[first:last] != replay.tokens[first:last].tolist():
            replay.forked = True
            self._num_forked += 1
        replay.num_followed = last
        return replay

    def _probabilities(self, requests: Sequence[Request], positions: Int64) -> Float64:
        """[R, K] set probabilities of drafts for these output positions."""
        num_generated = self._num_finished_tokens + sum(len(request.output_token_ids) for request in self._replays)
        prompt_lens = np.array([len(request.prompt_token_ids) for request in requests])
        return self._rates.probabilities(
            np.array([request.request_id for request in requests]),
            np.array([request.group for request in requests]),
            prompt_lens[:, None] + positions,
            num_generated,
        )

    def _hash(self, request_ids: list[int], positions: Int64) -> UInt64:
        """[R, K] 64 random bits for each output position."""
        keys = _mix(self._seed + np.array(request_ids, dtype=np.int64).astype(np.uint64) * _GAMMA)
        return _mix(keys[:, None] + positions.astype(np.uint64) * _GAMMA)

    def _wrong(self, recorded: Int32, coins: UInt64) -> Int32:
        """[R, K] tokens other than the recorded ones."""
        step = 1 + _mix(coins) % np.uint64(self._num_tokens - 1)
        return ((recorded + step.astype(np.int64)) % self._num_tokens).astype(np.int32)

    def _survival(self, probabilities: Float64, recorded: Int32) -> Float32:
        if self._confidence == "none":
            survival = np.full(recorded.shape, _NO_CONFIDENCE)
        else:
            survival = np.cumprod(probabilities, axis=1)
        return np.where(recorded >= 0, survival, 0).astype(np.float32)


def _grid(rows: list[list[int]], width: int | None = None) -> Int32:
    """[R, K] the rows one below the other, -1 past the end of each; K is the longest one's length if not given."""
    lens = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    grid = np.full((len(rows), lens.max(initial=0) if width is None else width), -1, dtype=np.int32)
    grid[np.arange(grid.shape[1]) < lens[:, None]] = [token for row in rows for token in row]
    return grid


def _mix(bits: UInt64) -> UInt64:
    """splitmix64's finaliser."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
