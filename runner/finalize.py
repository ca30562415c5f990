"""Declaring a job done: its shards' parts and metrics become one job, which is judged, and _SUCCESS comes last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..jobs.finished import FinishedJob, error_line
from ..jobs.folder import ERRORS, MANIFEST, RESULTS, SUCCESS, OutputFolder, WorkFolder
from ..jobs.metrics import JobMetrics
from ..jobs.openai_files import result_lines
from .exit_codes import DONE, TOO_MANY_FAILED
from .record import publish

TokenBytes = Callable[[], Sequence[bytes]]
"""Gives token id -> the bytes that it adds to the text; asked only where log probabilities are written with tokens."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a finished job is judged."""

    exit_code: int
    """0, or 2 when more rows have failed than the job allows."""
    report: dict[str, Any]
    """As report.json."""


def finalize_job(folder: WorkFolder, token_bytes: TokenBytes) -> Verdict:
    """Judge a job all of whose shards are done, and write what stands for the whole of it.

    May be called again, and by several at a time: all write the same. Raises what FinishedJob.gather() raises.
    folder: any work folder in the job's output.
    """
    output = folder.output
    job = FinishedJob.gather(output)
    counts = job.counts
    is_good = counts.num_failed <= job.terms.max_failed_fraction * counts.num_rows
    exit_code = DONE if is_good else TOO_MANY_FAILED
    totals = JobMetrics.of_shards(job.reports, counts)
    totals.state, totals.exit_code = "done", exit_code
    results = RESULTS if job.terms.format == "openai-batch" else None
    if results is not None:
        folder.write_lines([results, ERRORS], _results(job, output, totals, token_bytes))
    else:
        folder.write_lines([ERRORS], ((0, error_line(row)) for row in job.failed_rows(output)))
    report = publish(folder, totals, results)
    folder.write_json(MANIFEST, job.manifest("done" if is_good else "failed_rows"))
    if is_good:
        folder.write(SUCCESS, b"")
    else:
        output.store.delete(SUCCESS)
    return Verdict(exit_code, report)


def _results(
    job: FinishedJob, output: OutputFolder, totals: JobMetrics, token_bytes: TokenBytes
) -> Iterator[tuple[int, bytes]]:
    """Lines of output.jsonl (0) and errors.jsonl (1)."""
    created = int(totals.started_at.timestamp()) if totals.started_at is not None else 0
    has_logprobs = job.has_column(output, "logprobs")
    lines = result_lines(job.batches(output), job.terms.model, created, list(token_bytes()) if has_logprobs else None)
    for is_result, line in lines:
        yield 0 if is_result else 1, line
