"""What a run leaves behind about itself: job.parquet, report.json and metrics.prom, with the same totals in each."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from ..engine.trace import EngineStats
from ..jobs.counts import RowCounts
from ..jobs.folder import OutputFolder
from ..jobs.metrics import JobMetrics, read_report, write_job_metrics, write_report
from ..jobs.spec import JobSpec
from .machine import library_versions
from .pipeline import JobEngine
from .status import JobStatus
from .telemetry import prometheus_text


class JobRecord:
    """Gathers the metrics of one attempt and writes the job's, earlier attempts included."""

    def __init__(self, spec: JobSpec, folder: OutputFolder, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._clock = clock
        self._began = clock()
        self._stats = EngineStats()
        self._previous: dict[str, Any] | None = None
        self._metrics = JobMetrics(
            job=spec.name,
            started_at=datetime.now(UTC),
            model=spec.model.path,
            revision=spec.model.revision,
            method=spec.speculation.method,
            policy=spec.speculation.policy.name,
            versions=library_versions(),
        )

    def begin(self, attempt: int) -> None:
        """The output is ours: take up what earlier attempts reported."""
        self._metrics.attempt = attempt
        self._previous = read_report(self._folder) if attempt > 1 else None

    def engine_ready(self, engine: JobEngine, load_s: float) -> None:
        """The engine is loaded, and from now on counts."""
        self._stats = engine.stats
        self._metrics.device = engine.device_name
        self._metrics.dtype = engine.dtype_name
        self._metrics.load_s = load_s

    def write(self, state: str, exit_code: int, rows: RowCounts) -> None:
        """Write all of it. StorageError when that fails."""
        metrics = self._metrics
        metrics.state, metrics.exit_code, metrics.rows = state, exit_code, rows
        metrics.finished_at = datetime.now(UTC)
        metrics.total_s = self._clock() - self._began
        metrics.peak_rss_bytes = _peak_rss_bytes()
        metrics.add_stats(asdict(self._stats))
        self._stats = EngineStats()
        totals = metrics.merge(self._previous)
        write_job_metrics(self._folder, totals)
        self._folder.write(self._folder.prometheus, prometheus_text(_final_status(totals)))
        write_report(self._folder, totals)


def _final_status(totals: JobMetrics) -> JobStatus:
    """The totals in the form in which a running job shows them."""
    stats = EngineStats(
        num_prompt_tokens=totals.rows.num_prompt_tokens,
        num_generation_tokens=totals.num_generation_tokens,
        num_drafts=totals.num_drafts,
        num_draft_tokens=totals.num_draft_tokens,
        num_accepted_tokens=totals.num_accepted_tokens,
        spec_on_s=totals.spec_on_s,
        spec_off_s=totals.spec_off_s,
    )
    return JobStatus(totals.rows.num_rows, lambda: totals.rows, stats)


def _peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # the BSDs count bytes, Linux kibibytes
