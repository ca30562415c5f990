"""What the benches of policy_jobs say, as the part of policies.md between its marks."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from examples.benchmarks.policy_job_files import Cell
from specrun.runner.bench_report import markdown_table

BEGIN, END = "<!-- engine: begin -->", "<!-- engine: end -->"
OURS, NEVER = "goodput", "never"
LEAST = 0.98
"""Of the speed of the best of never and every fixed length, at least so much on every job."""
HOW_TO_READ = (
    "Makespan of `never` over that of the policy, paired by repetition: median (min-max); above 1 is faster. The last "
    "column has, in place of `never`, whichever of `never` and the fixed lengths has the shortest median makespan."
)
Result = dict[str, Any]
"""A file of `specrun bench --save`."""


def write_table(results: Sequence[tuple[Cell, Result]], path: Path | None) -> str:
    """The table; put between the marks of `path`, which are added where they are missing."""
    text = engine_part(results)
    if path is not None and results:
        old = path.read_text(encoding="utf-8") if path.exists() else "# Policies\n"
        if BEGIN not in old:
            old = f"{old.rstrip()}\n\n{BEGIN}\n{END}\n"
        new = re.sub(f"{BEGIN}.*{END}", lambda match: f"{BEGIN}\n{text}\n{END}", old, count=1, flags=re.DOTALL)
        tmp = path.with_suffix(".tmp")
        tmp.write_text(new, encoding="utf-8")
        os.replace(tmp, path)
    return text


def engine_part(results: Sequence[tuple[Cell, Result]]) -> str:
    """Markdown."""
    if not results:
        return "no results yet"
    rows = [_row(cell, result) for cell, result in results]
    lengths = sorted({k for cell, _ in results for k in cell.lengths})
    titles = ["job", "drafter", "never s", *(f"always:{k}" for k in lengths), OURS, "best other", f"{OURS} / best"]
    cells = [[*row[:3], *(row[3].get(f"always:{k}", "-") for k in lengths), *row[4:]] for row in rows]
    jobs = {cell.job: f"- `{cell.job}`: {cell.what}; {_size(cell, result)}" for cell, result in results}
    return "\n\n".join(
        [
            "## On the real engine",
            _conditions(results),
            "\n".join(jobs.values()),
            _filled(HOW_TO_READ),
            markdown_table(titles, cells),
            _verdict(results),
        ]
    )


def against_best(result: Result) -> tuple[str, list[float]]:
    """The best contender but ours, by its median makespan, and its makespan over ours in each repetition."""
    runs = _makespans(result)
    best = min((name for name in runs if name != OURS), key=lambda name: median(runs[name]))
    return best, [other / ours for other, ours in zip(runs[best], runs[OURS], strict=True)]


def _makespans(result: Result) -> dict[str, list[float]]:
    """Seconds of each contender, by repetition."""
    runs: dict[str, list[float]] = {}
    for run in sorted(result["runs"], key=lambda run: run["repetition"]):
        runs.setdefault(run["policy"], []).append(run["makespan_s"])
    return runs


def _row(cell: Cell, result: Result) -> tuple[Any, ...]:
    runs = _makespans(result)
    ratios = {name: [n / s for n, s in zip(runs[NEVER], runs[name], strict=True)] for name in runs}
    shown = {name: _spread(values) for name, values in ratios.items()}
    best, ours = against_best(result)
    return cell.job, cell.drafter, f"{median(runs[NEVER]):.1f}", shown, shown[OURS], best, _spread(ours)


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def _size(cell: Cell, result: Result) -> str:
    tokens = next(run["num_generation_tokens"] for run in result["runs"])
    return f"{result['num_rows']} rows, {tokens:,} tokens, batch {cell.batch}"


def _conditions(results: Sequence[tuple[Cell, Result]]) -> str:
    """Where and how it was measured."""
    _, first = results[0]
    machine = first["machine"]
    loads = [
        load for _, result in results for load in (result["machine"]["load_average"], result["load_average_after"])
    ]
    repeats = sorted({result["repeats"] for _, result in results})
    text = (
        "`python -m examples.benchmarks.policy_jobs`. "
        f"SmolLM2-135M-Instruct in {first['dtype']} on {machine['cpu']}, {machine['cores']} cores; "
        f"torch {first['versions'].get('torch', '?')}; load average {min(loads):.1f} to {max(loads):.1f}; "
        f"{' or '.join(map(str, repeats))} repetitions, contenders in turns, their order reversed after each; every "
        "run begins with a policy and a drafter that know nothing. Rows run past any end-of-sequence, so that every "
        "policy has the same number of tokens to make. `draft_model` is the target's first 25 of 30 layers: it stands "
        "for a poor draft model. A2 to A14 replay a recorded output with errors at set rates, in deterministic mode."
    )
    return _filled(text)


def _verdict(results: Sequence[tuple[Cell, Result]]) -> str:
    """Each criterion, and where it is missed."""
    ratios = {cell.name: median(against_best(result)[1]) for cell, result in results}
    misses = [f"{name} ({ratio:.2f})" for name, ratio in ratios.items() if ratio < LEAST]
    mixed = {name: ratio for name, ratio in ratios.items() if name.startswith("mixed/")}
    behind = [f"{name} ({ratio:.2f})" for name, ratio in mixed.items() if ratio <= 1]
    lines = [f"- At least {LEAST} of the best other: {_tally(len(ratios), misses)}."]
    if mixed:
        lines.append(f"- Strictly the best on `mixed`: {_tally(len(mixed), behind)}.")
    return "\n".join(lines)


def _tally(count: int, misses: Sequence[str]) -> str:
    return f"{count - len(misses)} of {count}" + (f"; not {', '.join(misses)}" if misses else "")


def _filled(text: str) -> str:
    return textwrap.fill(text, 128, break_on_hyphens=False, break_long_words=False)
