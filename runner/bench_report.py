"""A bench's result as tables for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..jobs.errors import OutputError
from .comparison import Comparison, Summary
from .contender import NEVER


@dataclass(frozen=True, slots=True)
class BenchReport:
    """A comparison and what is needed to judge it."""

    comparison: Comparison
    facts: dict[str, Any]
    """Job, fingerprint, settings, versions, machine. JSON values."""

    def to_json(self) -> dict[str, Any]:
        """Facts, summaries and every run."""
        comparison = self.comparison
        return {
            **self.facts,
            "identical": comparison.difference() is None if comparison.is_exact else None,
            "summaries": [asdict(summary) for summary in comparison.summaries()],
            **asdict(comparison),
        }

    def write(self, path: Path) -> None:
        """to_json() as a file. Raises OutputError."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        except OSError as exc:
            raise OutputError(f"{path}: {exc.strerror or exc}; choose another place with --save") from exc

    def text(self) -> str:
        """Markdown tables, one a batch size, and what to know when reading them."""
        summaries = self.comparison.summaries()
        tables = []
        for batch in dict.fromkeys(summary.batch for summary in summaries):
            rows = [_cells(s, self.comparison.is_exact) for s in summaries if s.batch == batch]
            tables.append(f"batch {batch}\n\n" + markdown_table(_columns(self.comparison.is_exact), rows))
        return "\n\n".join([*tables, *self._notes()])

    def _notes(self) -> list[str]:
        comparison, machine = self.comparison, self.facts["machine"]
        notes = [
            f"{comparison.num_rows} rows ({self.facts['num_skipped_rows']} bad ones left out), "
            f"{self.facts['repeats']} repetitions; "
            f"{self.facts['dtype']} on {self.facts['device']}, {machine['cpu']}, {machine['cores']} cores",
            "vs never: makespan of never / makespan, paired by repetition, median (min-max); above 1 is faster",
        ]
        batches = sorted(comparison.batch_forks)
        if comparison.is_exact and comparison.difference() is None:
            notes.append("all outputs are identical, token by token, under every policy and batch size")
        elif not comparison.is_exact and len(batches) > 1:
            shares = [f"{len(comparison.batch_forks[b]) / comparison.num_rows:.1%} at {b}" for b in batches[1:]]
            notes.append(f"rows of never that differ from never at batch {batches[0]}: {', '.join(shares)}")
        if batches[-1] > comparison.num_rows:
            notes.append(f"a batch larger than the {comparison.num_rows} rows is never full")
        if num_failed := max(run.num_failed for run in comparison.runs):
            notes.append(f"up to {num_failed} rows failed in the engine and did no work")
        if machine["load_average"] > machine["cores"] / 2:
            notes.append(f"the load average was {machine['load_average']:.1f} before the first run: expect noise")
        return notes


def _columns(is_exact: bool) -> list[str]:
    last = "identical" if is_exact else "forked rows"
    return [
        "policy",
        "makespan s",
        "tokens/s",
        "acceptance",
        "acceptance length",
        "vs never",
        "host ms/step",
        last,
    ]


def _cells(summary: Summary, is_exact: bool) -> list[str]:
    rate, length = summary.acceptance_rate, summary.mean_acceptance_length
    forked = f"{summary.fork_rate:.1%}" + (f" at {summary.first_fork:.0f}" if summary.first_fork is not None else "")
    spread = f" ({summary.speedup_min:.2f}-{summary.speedup_max:.2f})"
    return [
        summary.policy,
        f"{summary.makespan_s:.2f}",
        f"{summary.tokens_per_s:.1f}",
        "-" if rate is None else f"{rate:.1%}",
        "-" if length is None else f"{length:.2f}",
        f"{summary.speedup:.2f}x" + ("" if summary.policy == NEVER else spread),
        f"{summary.host_ms_per_step:.2f}",
        ("yes" if not summary.fork_rate else "NO") if is_exact else forked,
    ]


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns also line up in a terminal; the first is to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = []
    for cells in (columns, rule, *rows):
        first, *others = zip(cells, widths, strict=True)
        lines.append("| " + " | ".join([first[0].ljust(first[1]), *(c.rjust(w) for c, w in others)]) + " |")
    return "\n".join(lines)
