"""Measures what steps cost on a job's own rows, at several batch sizes and draft lengths, and saves it as a profile."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, groupby
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from ..engine.config import EngineConfig
from ..engine.request import Request
from ..engine.trace import StepRecord
from ..jobs.errors import ConfigError
from ..jobs.spec import JobSpec
from ..policies.cost_model import CostModel
from .bench_report import markdown_table
from .build import ModelBuilder
from .drafting import choose_method
from .loaded_job import LoadedJob
from .machine import machine_facts
from .profile import profile_identity, write_profile
from .requests import fresh_request
from .sweep import Sample, Sweep

if TYPE_CHECKING:
    from ..engine.drafters.base import Drafter
    from ..engine.target import Target

LENGTHS = (0, 1, 2, 3, 5, 8, 12, 16)
"""Draft lengths that are tried, up to the job's limit and with it."""
MAX_STEPS_OVER = 8
"""So many times the steps that were asked for are given to a batch size that is seldom full, then it is left."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A batch size and a draft length, measured and as the finished model predicts it; medians over the steps."""

    batch: int
    num_draft_tokens: int
    num_steps: int
    num_rows: int
    step_s: float
    predicted_step_s: float
    draft_s: float
    predicted_draft_s: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured, and the model that came of it."""

    costs: CostModel
    identity: dict[str, str]
    cells: list[Cell]
    machine: dict[str, Any]

    def write(self, path: Path) -> None:
        """Save it as a profile. Raises OutputError."""
        write_profile(
            path, self.identity, self.costs, {"machine": self.machine, "cells": list(map(asdict, self.cells))}
        )

    def to_json(self) -> dict[str, Any]:
        """Identity, errors and cells."""
        cells = list(map(asdict, self.cells))
        return {"identity": self.identity, **self.costs.facts(), "machine": self.machine, "cells": cells}

    def text(self) -> str:
        """A table of the cells, and how far off single steps were when they were predicted."""
        columns = ["batch", "draft tokens", "steps", "rows", "step ms", "predicted", "off", "draft ms", "predicted"]
        table = markdown_table(columns, [_row(cell) for cell in self.cells])
        facts = self.costs.facts()
        single = [f"{facts[key]:.1%}" for key in ("cost_error_p50", "cost_error_p95") if key in facts]
        return (
            f"{table}\n\nsingle steps, predicted before they ran, are off by {' (median), '.join(single)} (95 of 100)"
        )


def _row(cell: Cell) -> list[str]:
    times = [cell.step_s, cell.predicted_step_s, cell.draft_s, cell.predicted_draft_s]
    step, predicted, draft, predicted_draft = [f"{1e3 * seconds:.2f}" for seconds in times]
    off = f"{cell.predicted_step_s / cell.step_s - 1:+.0%}"
    counts = [cell.batch, cell.num_draft_tokens, cell.num_steps, cell.num_rows]
    return [*map(str, counts), step, predicted, off, draft, predicted_draft]


class _Enough(Exception):
    """Leaves the engine's run."""


class Calibrator:
    """Sweeps over batch sizes on one target; each size has its own engine and drafter, all teach one cost model."""

    def __init__(
        self,
        target: Target,
        config: EngineConfig,
        requests: Sequence[Request],
        make_drafter: Callable[[], Drafter | None],
        token_bytes: Sequence[bytes] | None = None,
    ) -> None:
        """The requests are run as often as it takes, each time as copies."""
        self._target, self._config, self._requests = target, config, requests
        self._make_drafter, self._token_bytes = make_drafter, token_bytes
        self.costs = CostModel()
        self.samples: list[Sample] = []

    def sweep(self, batch: int, lengths: Sequence[int], num_steps: int) -> None:
        """Run until each draft length had num_steps steps of `batch` requests, or that proves to be rare."""
        from ..engine.engine import Engine

        self._target.allocate(0)  # the former engine's KV cache goes before the next one is sized
        sweep = Sweep(self.costs, lengths, num_steps)
        config = replace(self._config, max_num_seqs=batch, max_draft_tokens=max(lengths))
        engine = Engine(self._target, config, sweep, self._make_drafter(), self._token_bytes)

        def stop_when_enough(record: StepRecord) -> None:
            if sweep.is_enough(batch) or engine.stats.num_steps >= MAX_STEPS_OVER * num_steps * len(lengths):
                raise _Enough

        engine.on_step = stop_when_enough
        gc.collect()
        try:
            for number, _ in enumerate(engine.run(self._copies())):
                if number >= len(self._requests) and not engine.stats.num_steps:
                    break  # none of them can run
        except _Enough:
            pass
        self.samples += [sample for sample in sweep.samples if sample.batch == batch]

    def _copies(self) -> Iterator[Request]:
        for number, request in enumerate(cycle(self._requests)):
            fresh = fresh_request(request)
            fresh.request_id = number
            yield fresh

    def cells(self) -> list[Cell]:
        """What was measured, by batch size and draft length."""

        def place(sample: Sample) -> tuple[int, int]:
            return sample.batch, sample.num_draft_tokens

        return [self._cell(*key, list(samples)) for key, samples in groupby(sorted(self.samples, key=place), place)]

    def _cell(self, batch: int, length: int, samples: list[Sample]) -> Cell:
        num_rows = round(median(sample.num_rows for sample in samples))
        context = median(sample.num_context_tokens for sample in samples)
        return Cell(
            batch=batch,
            num_draft_tokens=length,
            num_steps=len(samples),
            num_rows=num_rows,
            step_s=median(sample.step_s for sample in samples),
            predicted_step_s=float(self.costs.step_s(num_rows, batch, context, 0)),
            draft_s=median(sample.draft_s for sample in samples),
            predicted_draft_s=float(self.costs.draft_s(batch, length)) if length else self.costs.stand_by_s(batch),
        )


def draft_lengths(limit: int) -> list[int]:
    """Those to try for a job's max_draft_tokens."""
    return sorted({length for length in LENGTHS if length < limit} | {limit})


def parse_lengths(text: str) -> list[int]:
    """Draft lengths of a comma-separated list, ascending, with 0. Raises click.BadParameter."""
    try:
        lengths = sorted({0, *(int(part) for part in text.split(",") if part.strip())})
    except ValueError:
        lengths = []
    if len(lengths) < 2 or lengths[0] < 0:
        raise click.BadParameter(f"{text!r} is not a list of draft lengths such as 1,3,5", param_hint="--draft-tokens")
    return lengths


def batch_sizes(limit: int) -> list[int]:
    """Powers of two up to a job's max_num_seqs, and that."""
    return sorted({1 << i for i in range(limit.bit_length()) if 1 << i < limit} | {limit})


def run_calibration(
    spec: JobSpec,
    batches: Sequence[int] | None,
    lengths: Sequence[int] | None,
    num_steps: int,
    builder: ModelBuilder,
    progress: Callable[[str], None] = lambda line: None,
) -> Calibration:
    """Load the job's model and measure it on the job's rows; None: batch_sizes and draft_lengths of the job's limits.

    Writes nothing. Raises JobError, ModelError or EngineError, whose text is one line with the mend.
    """
    from ..engine.engine import MAX_NUM_SEQS

    if choose_method(spec.speculation).method == "none":
        raise ConfigError("speculation.method is none, so there are no drafts to measure; name another method")
    machine = machine_facts()
    job = LoadedJob.load(spec, builder)
    calibrator = Calibrator(job.target, job.config, job.requests, job.make_drafter, job.tokenizer.token_bytes())
    lengths = lengths or draft_lengths(job.config.max_draft_tokens)
    sizes = list(batches or batch_sizes(job.config.max_num_seqs or MAX_NUM_SEQS[job.target.device.type]))
    for batch in sizes + sizes[::-1]:  # there and back: a machine that grows slower does so for all alike
        progress(f"batch {batch}: drafts of {', '.join(map(str, lengths))} tokens")
        calibrator.sweep(batch, lengths, (num_steps + 1) // 2)
    if not calibrator.samples:
        raise ConfigError("no batch was ever full; name smaller ones with --batch, or set a larger sampling.max_tokens")
    return Calibration(calibrator.costs, profile_identity(job.spec, job.target), calibrator.cells(), machine)
