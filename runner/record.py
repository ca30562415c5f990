"""What a run leaves behind about itself: job.parquet, report.json and metrics.prom, with the same totals in each."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ..engine.trace import EngineStats, StepRecord
from ..jobs.counts import RowCounts
from ..jobs.folder import PROMETHEUS, REPORT, ShardFolder, WorkFolder
from ..jobs.metrics import JobMetrics, read_report, write_job_metrics, write_report
from ..jobs.spec import JobSpec
from ..jobs.speculation import SpeculationSpec
from ..policies.base import SpeculationPolicy
from .drafting import choose_method
from .forecast import Forecaster, policy_facts
from .machine import library_versions
from .pipeline import JobEngine
from .row_lengths import RowLengths
from .status import JobStatus
from .telemetry import prometheus_text

if TYPE_CHECKING:
    from ..engine.drafters.base import Drafter


class JobRecord:
    """Gathers the metrics of one attempt at a shard and writes the shard's, earlier attempts included."""

    def __init__(self, spec: JobSpec, folder: ShardFolder, clock: Callable[[], float], began: float) -> None:
        """began: when the command began, by the clock."""
        self._folder = folder
        self._clock = clock
        self._began = began
        self._stats = EngineStats()
        self._drafter: Drafter | None = None
        self._policy: SpeculationPolicy | None = None
        self._forecaster: Forecaster | None = None
        self._previous: dict[str, Any] | None = None
        self._metrics = JobMetrics(
            job=spec.name,
            started_at=datetime.now(UTC),
            model=spec.model.path,
            revision=spec.model.revision,
            content_hash=spec.model.content_hash,
            policy=spec.speculation.policy.name,
            versions=library_versions(),
            **_drafting(spec.speculation),
        )

    def begin(self, attempt: int) -> None:
        """The output is ours: take up what earlier attempts reported."""
        self._metrics.attempt = attempt
        self._previous = read_report(self._folder.store, self._folder.report) if attempt > 1 else None

    def engine_ready(
        self, engine: JobEngine, policy: SpeculationPolicy, status: JobStatus, lengths: RowLengths, load_s: float
    ) -> None:
        """The engine is loaded, and from now on counts.

        policy: the one that it asks. lengths: those of the rows that it is given, as they turn out.
        """
        self._stats = engine.stats
        self._drafter, self._policy = engine.drafter, policy
        self._metrics.device = engine.device_name
        self._metrics.dtype = engine.dtype_name
        self._metrics.load_s = load_s
        num_rows = (status.num_rows or 0) - status.num_rows_before
        self._forecaster = Forecaster(policy, num_rows, engine.max_num_seqs, lengths, engine.stats)

    def add(self, step: StepRecord) -> None:
        """Take in a step; early on, one of them brings the forecast."""
        if self._forecaster is not None and (found := self._forecaster.add(step)) is not None:
            metrics = self._metrics
            metrics.forecast_s, metrics.forecast_never_s = found.seconds, found.never_seconds
            metrics.forecast_at_step = found.at_step

    def write(self, state: str, exit_code: int | None, rows: RowCounts) -> JobMetrics:
        """Write the shard's report, now and then while it runs so that a kill costs little. StorageError."""
        metrics = replace(self._metrics, state=state, exit_code=exit_code, rows=rows, finished_at=datetime.now(UTC))
        metrics.total_s = self._clock() - self._began
        metrics.peak_rss_bytes = _peak_rss_bytes()
        metrics.drafter_facts = self._drafter.facts() if self._drafter is not None else {}
        metrics.policy_facts = policy_facts(self._policy) if self._policy is not None else {}
        metrics.add_stats(asdict(self._stats))
        totals = metrics.merge(self._previous)
        write_report(self._folder, self._folder.report, totals, self._folder.errors)
        return totals


def _drafting(speculation: SpeculationSpec) -> dict[str, Any]:
    """How drafts are made, by the names of JobMetrics."""
    choice = choose_method(speculation)
    facts = {"method": choice.method, "method_reason": choice.reason}
    if choice.has_draft_model:
        facts["draft_model"] = speculation.model
        facts["draft_revision"], facts["draft_content_hash"] = speculation.revision, speculation.content_hash
    return facts


def publish(folder: WorkFolder, totals: JobMetrics, results: str | None = None) -> dict[str, Any]:
    """Write the job's own job.parquet, metrics.prom and report.json; gives the report. StorageError when that fails.

    results: name of the file with the results, where there is one beside data/.
    """
    write_job_metrics(folder, totals)
    folder.write(PROMETHEUS, prometheus_text(_final_status(totals)))
    return write_report(folder, REPORT, totals, results=results)


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
