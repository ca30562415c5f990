"""Policies on the real engine: goodput against never and every fixed draft length, on jobs of SmolLM2 on the CPU.

    python -m examples.benchmarks.policy_jobs [--only JOB[/DRAFTER],...] [--rows N] [--repeats N] [--quick]

Runs `specrun bench` on each job and each drafter, in turns there and back again, and writes the table into policies.md
between its marks. How long it may take is printed first and after each job. Each result is kept as JSON in --folder, so
that a later call with --only renews some and keeps the others; --table runs nothing and writes the table again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")

from examples.benchmarks.policy_job_files import Cell, cells
from examples.benchmarks.policy_job_table import write_table
from specrun.runner.cli import run_command

FOLDER = Path("out/policy-jobs")
TABLE = Path(__file__).with_name("policies.md")
DRAFT_LAYERS = 25
LOAD_S = 8.0
"""Of a bench: loading and the first use of each shape."""
STEP_S = {1: 0.06, 4: 0.06, 8: 0.065, 16: 0.075, 64: 0.14}
"""A plain decode step on the reference machine of README.md, by rows."""
PREFILL_S = 0.0006
"""A prompt token there."""
PROMPT_TOKENS = {"on-1": 150, "on-4": 150, "mixed": 60}
WITH_DRAFTS = {"on-1": 0.6, "on-4": 0.7, "mixed": 0.8}
"""Makespan with drafts that cost no forward pass over that without, about."""


def estimated_s(cell: Cell, repeats: int) -> float:
    """About how long a cell takes on a quiet machine."""
    step_s = STEP_S[min(size for size in STEP_S if size >= min(cell.batch, len(cell.rows)))]
    lengths = sorted((row["max_tokens"] for row in cell.rows), reverse=True)
    num_steps = max(sum(lengths) / cell.batch, lengths[0])
    tail_steps = lengths[0] - lengths[min(len(lengths) - 1, 8)]
    run_s = (num_steps - tail_steps) * step_s + tail_steps * STEP_S[4]
    run_s += len(cell.rows) * PROMPT_TOKENS.get(cell.job, 45) * PREFILL_S
    drafting = sum(0.6 * k for k in cell.lengths) if cell.drafter == "draft_model" else 0.0
    gain = WITH_DRAFTS.get(cell.job, 1.0) if cell.drafter in ("ngram", "suffix") else 1.0
    num_runs = 1 + gain * (len(cell.policies) - 1) + drafting
    recording_s = run_s * (cell.drafter == "synthetic")
    seconds: float = LOAD_S + recording_s + run_s * num_runs * (repeats + 0.3)  # and what warms up
    return seconds


def run_cell(cell: Cell, options: argparse.Namespace) -> None:
    """Make the job and bench it; its numbers go to a file of their own."""
    folder = options.folder / f"{cell.job}-{cell.drafter}"
    draft_model, recording = options.folder / "draft-model", folder / "recording"
    if cell.drafter == "draft_model" and not (draft_model / "config.json").exists():
        save_draft_model(draft_model)
    if cell.drafter == "synthetic":
        recorder = cell.write(folder, draft_model, recording, method="none")
        check(run_command(["submit", str(recorder)]), f"recording {cell.name}")
    job = cell.write(folder, draft_model, recording)
    names = ["--policies", ",".join(cell.policies), "--batch", str(cell.batch), "--repeats", str(options.repeats)]
    check(run_command(["bench", str(job), *names, "--save", str(result_file(cell, options.folder))]), cell.name)


def save_draft_model(folder: Path) -> None:
    """The target cut off after DRAFT_LAYERS layers, with its tokenizer."""
    from transformers import AutoTokenizer

    from examples.benchmarks.real_text import MODEL, save_model
    from specrun.engine import resolve_checkpoint

    target = resolve_checkpoint(MODEL)
    AutoTokenizer.from_pretrained(target.folder, **target.from_pretrained_kwargs()).save_pretrained(folder)
    save_model(folder, DRAFT_LAYERS)


def check(code: int, what: str) -> None:
    """End where a command has failed; it has said why."""
    if code:
        sys.exit(f"{what} ended with exit code {code}")


def result_file(cell: Cell, folder: Path) -> Path:
    """Where a cell's numbers are."""
    return folder / "results" / f"{cell.job}-{cell.drafter}.json"


def chosen(options: argparse.Namespace) -> list[Cell]:
    """The cells of --only, cut down to --rows and, with --quick, to a few tokens."""
    only = options.only.split(",") if options.only else []
    found = [cell for cell in cells() if not only or {cell.job, cell.drafter, cell.name} & set(only)]
    known = {name for cell in cells() for name in (cell.job, cell.drafter, cell.name)}
    if unknown := set(only) - known:
        sys.exit(f"--only: no {', '.join(sorted(unknown))}; choose of {', '.join(sorted(known))}")
    if options.rows:
        found = [replace(cell, rows=few(cell.rows, options.rows)) for cell in found]
    if options.quick:
        found = [replace(cell, rows=[{**row, "max_tokens": 4} for row in cell.rows], lengths=(3,)) for cell in found]
    return found


def few(rows: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The longest row and, spread evenly, others."""
    longest = max(rows, key=lambda row: row["max_tokens"])
    others = [row for row in rows if row is not longest]
    step = max(1, len(others) // max(1, count - 1))
    return [longest, *others[::step][: count - 1]]


def parse_options() -> argparse.Namespace:
    """The command line; --quick replaces what makes a run long."""
    parser = argparse.ArgumentParser(description="Policies on the real engine.")
    parser.add_argument("--only", default="", help="jobs (on-1), drafters (suffix) or both (on-1/suffix), with commas")
    parser.add_argument("--rows", type=int, help="so many rows of each job")
    parser.add_argument("--repeats", type=int, default=2, help="even numbers are order-balanced")
    parser.add_argument("--quick", action="store_true", help="a smoke test of 3 rows; writes no table")
    parser.add_argument("--table", action="store_true", help="run nothing; write the table from what there is")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for jobs, recordings and numbers")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.repeats, options.folder = 3, 1, options.folder / "quick"
    return options


def main() -> None:
    """Measure and write the table."""
    options = parse_options()
    found = [] if options.table else chosen(options)
    (options.folder / "results").mkdir(parents=True, exist_ok=True)
    expected = [estimated_s(cell, options.repeats) for cell in found]
    if found:
        print(f"{len(found)} benches, about {sum(expected) / 60:.0f} minutes on a quiet machine", flush=True)
    began, done_s = time.monotonic(), 0.0
    for cell, cell_s in zip(found, expected, strict=True):
        print(f"\n## {cell.name}: {cell.what} (about {cell_s:.0f} s)\n", flush=True)
        run_cell(cell, options)
        done_s += cell_s
        taken_s = time.monotonic() - began
        left_s = (sum(expected) - done_s) * taken_s / done_s
        print(f"\n{taken_s / 60:.1f} minutes gone, about {left_s / 60:.1f} to go", flush=True)
    results = [(cell, result_file(cell, options.folder)) for cell in cells()]
    measured = [(cell, json.loads(path.read_text(encoding="utf-8"))) for cell, path in results if path.exists()]
    print(f"\n{write_table(measured, None if options.quick else TABLE)}")


if __name__ == "__main__":
    main()
