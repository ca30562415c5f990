"""What other policies would have done, as a table for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..engine.trace import EngineStats
from ..jobs.errors import OutputError
from .bench_report import markdown_table
from .contender import NEVER

RECORDED = "as recorded"
ORACLE = "oracle"
COLUMNS = ["policy", "makespan s", "vs never", "tokens/s", "acceptance", "acceptance length", "steps", "unseen"]
LARGE_SHARE = 0.05
"""Of a makespan in steps unlike any that was measured: worth a word."""


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """The job under one policy, shards added up."""

    policy: str
    makespan_s: float
    """Seconds in engine steps."""
    num_steps: int
    num_generation_tokens: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_preemptions: int
    unseen_fraction: float
    """Share of the makespan in steps of row counts that were not measured, nor any near them."""
    drafting_measured: bool = False
    """Whether the seconds of drafting are those of this machine, now, since nobody measured them before."""

    @classmethod
    def of(
        cls, policy: str, stats: Iterable[EngineStats], unseen_s: float = 0.0, drafting_measured: bool = False
    ) -> SimulatedRun:
        """Of the totals of its engines."""
        stats = list(stats)
        makespan_s = sum(s.busy_s for s in stats)
        return cls(
            policy,
            makespan_s,
            num_steps=sum(s.num_steps for s in stats),
            num_generation_tokens=sum(s.num_generation_tokens for s in stats),
            num_drafts=sum(s.num_drafts for s in stats),
            num_draft_tokens=sum(s.num_draft_tokens for s in stats),
            num_accepted_tokens=sum(s.num_accepted_tokens for s in stats),
            num_preemptions=sum(s.num_preemptions for s in stats),
            unseen_fraction=unseen_s / max(makespan_s, 1e-12),
            drafting_measured=drafting_measured,
        )

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over verified draft tokens; None without drafts."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / drafts, as vLLM's; None without drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of steps."""
        return self.num_generation_tokens / max(self.makespan_s, 1e-12)

    def to_json(self, never_s: float) -> dict[str, Any]:
        """Counters and what is derived from them."""
        return {
            **asdict(self),
            "speedup": never_s / self.makespan_s,
            "tokens_per_s": self.tokens_per_s,
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
        }


@dataclass(frozen=True, slots=True)
class Simulation:
    """All runs of a simulation and what is needed to judge them."""

    runs: list[SimulatedRun]
    """`never` among them."""
    facts: dict[str, Any]
    """JSON values."""
    notes: list[str]
    """What to know when reading the table, one line each."""

    @property
    def never_s(self) -> float:
        """Makespan that the others are compared with."""
        return next(run.makespan_s for run in self.runs if run.policy == NEVER)

    def run(self, policy: str) -> SimulatedRun:
        """The run of a policy; KeyError where there is none."""
        for run in self.runs:
            if run.policy == policy:
                return run
        raise KeyError(policy)

    def to_json(self) -> dict[str, Any]:
        """Facts, runs and notes."""
        return {**self.facts, "runs": [run.to_json(self.never_s) for run in self.runs], "notes": self.notes}

    def write(self, path: Path) -> None:
        """to_json() as a file. Raises OutputError."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        except OSError as exc:
            raise OutputError(f"{path}: {exc.strerror or exc}; choose another place with --save") from exc

    def text(self) -> str:
        """A Markdown table, then the notes."""
        table = markdown_table(COLUMNS, [self._cells(run) for run in self.runs])
        return "\n\n".join([table, *self.notes, *self._doubts()])

    def _cells(self, run: SimulatedRun) -> Sequence[str]:
        rate, length = run.acceptance_rate, run.mean_acceptance_length
        return [
            run.policy,
            f"{run.makespan_s:,.2f}",
            f"{self.never_s / run.makespan_s:.2f}x",
            f"{run.tokens_per_s:,.1f}",
            "-" if rate is None else f"{rate:.1%}",
            "-" if length is None else f"{length:.2f}",
            f"{run.num_steps:,}",
            f"{run.unseen_fraction:.0%}",
        ]

    def _doubts(self) -> list[str]:
        doubts = []
        if any(run.unseen_fraction > LARGE_SHARE for run in self.runs):
            doubts.append(
                "unseen: share of the makespan in steps of row counts far from all that were measured; they are a guess"
            )
        if measured := [run.policy for run in self.runs if run.drafting_measured]:
            doubts.append(
                f"nobody had measured the drafting of {', '.join(measured)}: its seconds are those that it took here"
            )
        return doubts
