"""One run of the table: a workload under a contender, boiled down to the figures that the verdicts need."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specrun.policies.simulator import Result

WINDOW = 32
"""Steps over which a speed is measured after an acceptance step."""
RECOVERED = 0.95
"""Share of the oracle's speed after the change at which a policy counts as recovered."""
PHASE = 0.1
"""Share of the job's tokens after a change over which the oracle's speed is taken, or up to the next change."""
FLIP_WINDOW = 1000
LATER = 500
TAIL_BELOW = 32

Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Recovery:
    """From a change of acceptance to the first window of 32 steps at 95 % of the oracle's speed there."""

    step: int
    was_on: bool
    """Whether most requests were speculating in the 32 steps before the change."""
    tokens: int | None
    """Tokens committed until then; None: not within the job."""
    steps: int | None

    def within(self, tokens: float, steps: int) -> bool:
        """Whether it took at most this many tokens, or at most this many steps."""
        return self.tokens is not None and self.steps is not None and (self.tokens <= tokens or self.steps <= steps)

    def describe(self) -> str:
        """In words."""
        return "never within the job" if self.tokens is None else f"{self.tokens} tokens, {self.steps} steps"


@dataclass(frozen=True, slots=True)
class Cell:
    """A run's figures. Everything is plain JSON, so that a table can be taken up again where it stopped."""

    workload: str
    surface: str
    seed: int
    contender: str
    key: str
    """Hash of the workload and of the code that the run depends on."""
    makespan_s: float
    num_steps: int
    num_tokens: int
    num_drafted: int
    num_accepted: int
    flips: int
    """Most on/off flips of the batch in any 1,000 steps."""
    flips_later: int
    """The same after the first 500 steps."""
    mean_draft_len: float
    """Mean over the steps that decode of the draft length per request."""
    late_draft_len: float
    """The same over the last quarter of the job's tokens."""
    tail_s: float
    """Seconds of the steps after the last in which 32 requests or more ran."""
    num_preemptions: int
    speeds: list[float]
    """Tokens/s after each change of acceptance, over the next tenth of the job or up to the next change."""
    rest_s: dict[str, float]
    """Where the start is not judged: seconds after the first 500 steps, by who takes over then."""
    recoveries: list[Recovery]
    facts: dict[str, float]
    """What the policy says of itself."""
    cpu_s: float
    """Processor seconds of the run, the policy's own included."""

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Cell:
        """The inverse. Raises ValueError, KeyError or TypeError for anything else."""
        fields = json.loads(line)
        return cls(**{**fields, "recoveries": [Recovery(**r) for r in fields["recoveries"]]})


def read_cells(path: Path) -> Iterator[Cell]:
    """The cells of a file of lines; none where there is no file. A line cut off by a kill is passed over."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield Cell.from_json(line)
        except (ValueError, KeyError, TypeError):
            continue


@dataclass(frozen=True, slots=True)
class Track:
    """A run step by step: what the figures of a cell are made of."""

    seconds: Float64
    tokens: Float64
    """Cumulative, after each step."""
    time: Float64
    """Cumulative seconds, after each step."""
    num_running: NDArray[np.int32]
    draft_len: Float64
    """Mean draft length per decoding request."""
    is_on: NDArray[np.bool_]

    @classmethod
    def of(cls, result: Result) -> Track:
        """From a simulator's result."""
        return cls(
            seconds=result.seconds,
            tokens=np.cumsum(result.committed_tokens, dtype=np.float64),
            time=np.cumsum(result.seconds),
            num_running=result.num_running,
            draft_len=result.mean_draft_len,
            is_on=result.is_on,
        )

    def flips(self, first: int = 0) -> int:
        """Most flips in any 1,000 steps, from step first on. Steps in which nothing decodes count for nothing."""
        decoding = np.flatnonzero(self.num_running[first:])
        flip_at = decoding[1:][np.diff(self.is_on[first:][decoding].astype(np.int8)) != 0]
        if not len(flip_at):
            return 0
        return int((np.searchsorted(flip_at, flip_at + FLIP_WINDOW) - np.arange(len(flip_at))).max())

    def speed_between(self, start: float, end: float) -> float:
        """Median tokens/s over windows of 32 steps between two shares of the job's tokens."""
        first, last = np.searchsorted(self.tokens, np.array([start, end]) * self.tokens[-1])
        speeds = self._window_speeds()[first : max(first + 1, last - WINDOW)]
        return float(np.median(speeds)) if len(speeds) else 0.0

    def recovery(self, share: float, oracle_speed: float) -> Recovery:
        """How long after this share of the tokens the speed is the oracle's again, but for 5 %."""
        first = int(np.searchsorted(self.tokens, share * self.tokens[-1]))
        was_on = bool(self.is_on[max(0, first - WINDOW) : first].mean() >= 0.5) if first else False
        back = np.flatnonzero(self._window_speeds()[first:] >= RECOVERED * oracle_speed)
        if not len(back):
            return Recovery(first, was_on, None, None)
        steps = int(back[0])
        return Recovery(first, was_on, int(self.tokens[first + steps] - self.tokens[first]), steps)

    def tail_seconds(self) -> float:
        """Seconds after the last step in which at least 32 requests ran; all of them where none did."""
        crowded = np.flatnonzero(self.num_running >= TAIL_BELOW)
        return float(self.seconds[crowded[-1] + 1 :].sum()) if len(crowded) else float(self.seconds.sum())

    def late_draft_len(self) -> float:
        """Mean draft length in the last quarter of the tokens."""
        late = self.tokens >= 0.75 * self.tokens[-1]
        return float(self.draft_len[late & (self.num_running > 0)].mean())

    def _window_speeds(self) -> Float64:
        tokens, time = (np.concatenate([[0.0], total]) for total in (self.tokens, self.time))
        return np.asarray((tokens[WINDOW:] - tokens[:-WINDOW]) / (time[WINDOW:] - time[:-WINDOW]))


def make_cell(
    names: tuple[str, str, int, str],
    key: str,
    result: Result,
    changes: Sequence[float],
    oracle_speeds: Sequence[float] | None,
    rest_s: dict[str, float],
    facts: dict[str, float],
    cpu_s: float,
) -> Cell:
    """The figures of a run. names: workload, surface, seed, contender. oracle_speeds: one for each of changes; None:
    this is the oracle's run, whose own speeds count."""
    track = Track.of(result)
    ends = [min(start + PHASE, after) for start, after in pairwise([*changes, 1.0])]
    speeds = [track.speed_between(start, end) for start, end in zip(changes, ends, strict=True)]
    yardstick = speeds if oracle_speeds is None else oracle_speeds
    return Cell(
        *names,
        key=key,
        makespan_s=result.makespan_s,
        num_steps=result.num_steps,
        num_tokens=result.num_tokens,
        num_drafted=result.num_draft_tokens,
        num_accepted=result.num_accepted_tokens,
        flips=track.flips(),
        flips_later=track.flips(LATER),
        mean_draft_len=float(track.draft_len[track.num_running > 0].mean()),
        late_draft_len=track.late_draft_len(),
        tail_s=track.tail_seconds(),
        num_preemptions=result.num_preemptions,
        speeds=speeds,
        rest_s=rest_s,
        recoveries=[track.recovery(s, speed) for s, speed in zip(changes, yardstick, strict=True) if speed > 0],
        facts=facts,
        cpu_s=cpu_s,
    )
