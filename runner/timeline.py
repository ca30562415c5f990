"""The steps of a job over its time, in a few hundred bins however long it ran: what a plot needs of metrics/steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..jobs.store import Store
from .recorded_steps import SECONDS, Steps, read_steps

Float64 = NDArray[np.float64]

MAX_BINS = 200
STEPS_PER_BIN = 4
"""Fewest, on average: a rate over less would be noise."""
PARTS_PER_BIN = 8
"""Of these a rate's band shows the least and the most."""
_COUNTS = ("num_running", "num_waiting", "num_draft_tokens", "num_accepted_tokens", "num_generation_tokens")
_SHORTEST_S = 1e-9


@dataclass(frozen=True, slots=True)
class Lane:
    """The S steps of one shard, its attempts one after the other."""

    starts: Float64
    """[S] seconds since the engine of the first attempt began to run, without the time between attempts."""
    ends: Float64
    """[S] seconds; no step begins before the one ahead of it ends."""
    counts: dict[str, NDArray[np.int32]]
    """Name of a column -> [S]."""
    attempts: list[tuple[float, int]]
    """When each attempt began, in seconds, and its number."""


@dataclass(frozen=True, slots=True)
class Series:
    """A quantity in each of N bins; NaN where there was nothing to measure."""

    mean: Float64
    least: Float64
    most: Float64


@dataclass(frozen=True, slots=True)
class Timeline:
    """A job in N bins of equal length. Of several shards, which are laid side by side as if they had begun together,
    requests and tokens are those of one: the mean of the shards, and the least and the most of any."""

    edges: Float64
    """[N + 1] seconds."""
    num_steps: int
    num_shards: int
    attempts: list[tuple[float, int]]
    """When each attempt began and its number; of a job of one shard."""
    decoding: Series
    """Requests that decode. Mean over the time in steps; least and most of any step."""
    waiting: Series
    draft_len: Series
    """Verified draft tokens of a decoding request, those without drafts included; least and most of any step."""
    acceptance: Series
    """Accepted of verified draft tokens, 0 to 1; least and most of any eighth of the bin."""
    tokens_per_s: Series
    """Committed tokens over time, waiting for input included; least and most of any eighth of the bin."""
    off_share: Float64
    """[N] of the time in which requests decoded, the share of steps without drafts."""
    totals: dict[str, float]
    """Sums over all steps: tokens by the name of their column; off_s and decoding_s, request_steps, step_s, time_s."""


def read_lanes(store: Store) -> list[Lane]:
    """The steps of each shard that has any, by shard. StorageError where a file cannot be read."""
    return [_lane(steps) for _, steps in read_steps(store, ["start_s", *_COUNTS, *SECONDS])]


def _lane(steps: Steps) -> Lane:
    """The attempts of a shard one after the other: how long nobody was at work is not in their records."""
    began_s, began, starts, ends = 0.0, [], [], []
    seconds = np.maximum(steps.seconds, _SHORTEST_S)
    for attempt in np.unique(steps["attempt"]):
        began.append((began_s, int(attempt)))
        inside = steps["attempt"] == attempt
        start_s = began_s + steps["start_s"][inside]
        end_s = np.maximum.accumulate(start_s + seconds[inside])
        starts.append(np.maximum(start_s, np.concatenate([[began_s], end_s[:-1]])))
        ends.append(end_s)
        began_s = float(end_s[-1])
    counts = {name: steps[name].astype(np.int32) for name in _COUNTS}
    return Lane(np.concatenate(starts), np.concatenate(ends), counts, began)


def timeline(lanes: Sequence[Lane]) -> Timeline:
    """The lanes in bins; without any, one bin of no length in which nothing was measured."""
    time_s = max((float(lane.ends[-1]) for lane in lanes), default=0.0)
    most_steps = max((len(lane.starts) for lane in lanes), default=0)
    num_bins = min(max(most_steps // STEPS_PER_BIN, 1), MAX_BINS)
    edges = np.linspace(0.0, time_s, num_bins + 1)
    fine = np.linspace(0.0, time_s, num_bins * PARTS_PER_BIN + 1)
    binned = [_BinnedLane(lane, edges) for lane in lanes]
    parts = [_BinnedLane(lane, fine) for lane in lanes]
    step_s = _total([lane.step_s for lane in binned], num_bins)
    running_s = _total([lane.spread(lane.seconds * lane.counts["num_running"]) for lane in binned], num_bins)
    waiting_s = _total([lane.spread(lane.seconds * lane.counts["num_waiting"]) for lane in binned], num_bins)
    requests, drafted, accepted, tokens = (
        _total([lane.spread(lane.counts[name]) for lane in binned], num_bins)
        for name in ("num_running", "num_draft_tokens", "num_accepted_tokens", "num_generation_tokens")
    )
    decoding_s = _total([lane.spread(lane.seconds * lane.decodes) for lane in binned], num_bins)
    off_s = _total([lane.spread(lane.seconds * (lane.decodes & ~lane.drafts)) for lane in binned], num_bins)
    active_s = _total([lane.active_s for lane in binned], num_bins)
    sums = {name: float(sum(lane.counts[name].sum(dtype=np.int64) for lane in lanes)) for name in _COUNTS[2:]}
    sums |= {"off_s": off_s.sum(), "decoding_s": decoding_s.sum(), "request_steps": requests.sum(), "time_s": time_s}
    sums |= {"step_s": step_s.sum(), "request_s": running_s.sum(), "active_s": active_s.sum()}
    return Timeline(
        edges=edges,
        num_steps=sum(len(lane.starts) for lane in lanes),
        num_shards=len(lanes),
        attempts=lanes[0].attempts if len(lanes) == 1 else [],
        decoding=_series(_ratio(running_s, step_s), [lane.extremes(lane.counts["num_running"]) for lane in binned]),
        waiting=_series(_ratio(waiting_s, step_s), [lane.extremes(lane.counts["num_waiting"]) for lane in binned]),
        draft_len=_series(
            _ratio(drafted, requests), [lane.extremes(lane.draft_lens, among=lane.decodes) for lane in binned]
        ),
        acceptance=_series(_ratio(accepted, drafted), [_of_parts(lane.acceptance) for lane in parts]),
        tokens_per_s=_series(_ratio(tokens, active_s), [_of_parts(lane.tokens_per_s) for lane in parts]),
        off_share=_ratio(off_s, decoding_s),
        totals=sums,
    )


class _BinnedLane:
    """A lane against the edges [N + 1] of N bins."""

    def __init__(self, lane: Lane, edges: Float64) -> None:
        self._starts, self._ends, self._edges = lane.starts, lane.ends, edges
        self._bounds = np.stack([lane.starts, lane.ends], axis=1).ravel()
        self.counts = lane.counts
        self.seconds = lane.ends - lane.starts
        self.decodes = lane.counts["num_running"] > 0
        self.drafts = lane.counts["num_draft_tokens"] > 0

    def spread(self, values: NDArray[Any]) -> Float64:
        """[N] sums of what the steps' values [S] come to in each bin; a step's is even over its time."""
        sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
        return np.diff(np.interp(self._edges, self._bounds, np.repeat(sums, 2)[1:-1]))

    def extremes(self, values: NDArray[Any], among: NDArray[np.bool_] | None = None) -> tuple[Float64, Float64]:
        """[N], [N] least and most of the steps (among some) that reach into each bin; NaN where none does."""
        if among is None:
            among = np.ones(len(values), dtype=np.bool_)
        first = np.searchsorted(self._ends[among], self._edges[:-1], side="right")
        last = np.searchsorted(self._starts[among], self._edges[1:], side="left")
        pairs = np.stack([first, np.maximum(first, last)], axis=1).ravel()
        padded = np.append(values[among].astype(np.float64), np.nan)  # so that a pair may begin past the last step
        least, most = (reduce.reduceat(padded, pairs)[::2] for reduce in (np.minimum, np.maximum))
        return np.where(first < last, least, np.nan), np.where(first < last, most, np.nan)

    @property
    def step_s(self) -> Float64:
        """[N] seconds in steps."""
        return self.spread(self.seconds)

    @property
    def active_s(self) -> Float64:
        """[N] seconds until the lane's last step ended."""
        return np.diff(np.minimum(self._edges, self._ends[-1]))

    @property
    def draft_lens(self) -> Float64:
        """[S] verified draft tokens of a decoding request."""
        return self.counts["num_draft_tokens"] / np.maximum(self.counts["num_running"], 1)

    @property
    def acceptance(self) -> Float64:
        """[N] accepted of verified draft tokens."""
        return _ratio(self.spread(self.counts["num_accepted_tokens"]), self.spread(self.counts["num_draft_tokens"]))

    @property
    def tokens_per_s(self) -> Float64:
        """[N] while the lane was at work."""
        return _ratio(self.spread(self.counts["num_generation_tokens"]), self.active_s)


def _total(values: Sequence[Float64], num_bins: int) -> Float64:
    return np.sum(values, axis=0) if values else np.zeros(num_bins)


def _ratio(part: Float64, whole: Float64) -> Float64:
    """NaN where there is nothing to divide by, or no more than what rounding leaves of nothing."""
    is_some = whole > 1e-9 * max(1.0, float(whole.max(initial=0.0)))
    ratio: Float64 = np.divide(part, whole, out=np.full(len(whole), np.nan), where=is_some)
    return ratio


def _of_parts(values: Float64) -> tuple[Float64, Float64]:
    """[N * PARTS_PER_BIN] -> [N], [N] least and most."""
    parts = values.reshape(-1, PARTS_PER_BIN)
    return np.fmin.reduce(parts, axis=1), np.fmax.reduce(parts, axis=1)


def _series(mean: Float64, extremes: Sequence[tuple[Float64, Float64]]) -> Series:
    """The mean, with the least and most of all lanes."""
    nothing = np.full(len(mean), np.nan)
    least = np.fmin.reduce([least for least, _ in extremes], axis=0) if extremes else nothing
    most = np.fmax.reduce([most for _, most in extremes], axis=0) if extremes else nothing
    return Series(mean, least, most)
