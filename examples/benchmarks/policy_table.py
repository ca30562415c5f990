"""The table of policies as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from examples.benchmarks.policy_criteria import judge_each
from examples.benchmarks.policy_verdict import NEVER, ORACLE, Key, Table, Verdict, verdicts, verdicts_of_the_rest
from specrun.policies.simulator.suite import CASES
from specrun.runner.bench_report import markdown_table

PRIORS = {"goodput:prior-30": "30 % too cheap", "goodput:prior+50": "50 % too dear"}
DISTORTED = ("A16a", "A16b")


def render(table: Table, contender: str) -> str:
    """All tables, for one contender among the others."""
    seeds = sorted({seed for key in table.keys for seed in table.seeds(key)})
    parts = [f"Seeds {', '.join(map(str, seeds))}. Judged: `{contender}`."]
    for surface in dict.fromkeys(surface for _, surface in table.keys):
        keys = [key for key in table.keys if key[1] == surface]
        parts += [f"### {surface}: {contender}", _main_table(table, keys, contender)]
        parts += [f"### {surface}: speed-up over never of every contender", _speedups(table, keys)]
    parts += ["### Worst and median of every contender", _contenders(table)]
    parts += [f"### Criteria: {contender}", verdict_list(verdicts(table, contender))]
    for prior, wrong in PRIORS.items():
        if prior in table.contenders:
            title = f"### A profile to which drafts look {wrong}: after the first 500 steps"
            parts += [title, verdict_list(verdicts_of_the_rest(table, prior))]
    if distorted := [key for key in table.keys if key[0] in DISTORTED]:
        part = table.only(distorted)
        parts += ["### Drift of 15 % (A16a) and a cliff of 5 times (A16b): after the first 500 steps"]
        parts += [verdict_list(verdicts_of_the_rest(part, contender))]
    parts += ["### What each workload asks", _each(table, contender)]
    return "\n\n".join(parts)


def _main_table(table: Table, keys: Sequence[Key], contender: str) -> str:
    columns = ["workload", "steps of never", "best fixed", "oracle", contender, "capture", "harm", "against fixed"]
    columns += ["draft length", "flips", "recovery, tokens"]
    rows = []
    for key in keys:
        seeds = table.seeds(key, NEVER, ORACLE, contender)
        if not seeds:
            continue
        cells = [table.cell(key, seed, contender) for seed in seeds]
        fixed, capture = table.best_fixed(key), table.capture(key, contender)
        recoveries = [r.tokens for cell in cells for r in cell.recoveries]
        lost = "" if not recoveries else f"{max(-1 if t is None else t for t in recoveries)}"
        rows.append(
            [
                f"{key[0]} {CASES[key[0]].title}" + ("" if table.stationary[key[0]] else " (not stationary)"),
                f"{median(table.cell(key, seed, NEVER).num_steps for seed in seeds):.0f}",
                f"{fixed.removeprefix('always:')} {table.speedup(key, fixed):.3f}x",
                f"{table.speedup(key, ORACLE):.3f}x",
                f"{table.speedup(key, contender):.3f}x",
                "" if capture is None else f"{capture:.0%}",
                f"{max(0.0, table.harm(key, contender)):.1%}",
                f"{table.against_fixed(key, contender) - 1:+.1%}",
                f"{median(cell.mean_draft_len for cell in cells):.2f}",
                str(max(cell.flips for cell in cells)),
                "never" if None in recoveries else lost,
            ]
        )
    return markdown_table(columns, rows)


def _speedups(table: Table, keys: Sequence[Key]) -> str:
    names = [name for name in table.contenders if name != NEVER]
    rows = [[key[0], *(_number(table.speedup(key, name), "x") for name in names)] for key in keys]
    return markdown_table(["workload", *names], rows)


def _contenders(table: Table) -> str:
    """For each contender: worst harm, captures, flips."""
    rows = []
    for name in table.contenders:
        keys = [key for key in table.keys if table.seeds(key, NEVER, ORACLE, name)]
        captures = [c for key in keys if (c := table.capture(key, name)) is not None]
        speedups = [table.speedup(key, name) for key in keys]
        flips = max(table.cell(key, seed, name).flips for key in keys for seed in table.seeds(key, name))
        below = sum(table.harm(key, name) > 0.02 for key in keys)
        mean = math.exp(sum(map(math.log, speedups)) / len(speedups))
        captured = [f"{median(captures):.0%}", f"{min(captures):.0%}"] if captures else ["", ""]
        worst = f"{max(0.0, *(table.harm(key, name) for key in keys)):.1%}"
        rows.append([name, f"{mean:.3f}x", worst, f"{below} of {len(keys)}", *captured, str(flips)])
    columns = ["contender", "speed-up, geometric mean", "worst harm", "workloads harmed over 2 %"]
    return markdown_table([*columns, "capture, median", "capture, worst", "flips, worst"], rows)


def verdict_list(found: Sequence[Verdict]) -> str:
    """One line a criterion, and every miss under it."""
    lines = []
    for verdict in found:
        state = "not judged" if not verdict.num_judged else "met" if verdict.passed else f"{len(verdict.misses)} missed"
        lines.append(f"- **{state}** of {verdict.num_judged}: {verdict.criterion}; {verdict.found}")
        lines += [f"  - {miss}" for miss in verdict.misses]
    return "\n".join(lines)


def _each(table: Table, contender: str) -> str:
    rows = [
        [key[0], key[1], asked, found, "yes" if met else "**no**"]
        for key, asked, found, met in judge_each(table, contender)
    ]
    return markdown_table(["workload", "surface", "asked", "found", "met"], rows)


def _number(value: float, unit: str) -> str:
    return "" if math.isnan(value) else f"{value:.3f}{unit}"
