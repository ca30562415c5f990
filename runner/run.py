"""Running a job: what is left to do, the pipeline that does it, and how it ended."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Any

from ..engine.request import InvalidParameter
from ..jobs.errors import ConfigError, JobError
from ..jobs.folder import OutputFolder
from ..jobs.input_files import identity
from ..jobs.ledger import Ledger
from ..jobs.metrics import StepWriter, read_report
from ..jobs.outputs import OutputWriter
from ..jobs.prompts import PromptSource
from ..jobs.spec import JobSpec
from .build import Builder, ModelBuilder
from .conversation import PromptText
from .exit_codes import DONE, TOO_MANY_FAILED, TRY_AGAIN, exit_code_of
from .fingerprint import job_fingerprint
from .outputs import OutputText
from .pipeline import Ending, Pipeline
from .record import JobRecord
from .requests import RequestBuilder
from .sampling import RowSampling
from .status import JobStatus
from .stop import Interrupted, StopRequest
from .telemetry import serve

EXIT_CODES = {Ending.DONE: DONE, Ending.ABORTED: TOO_MANY_FAILED, Ending.PREEMPTED: TRY_AGAIN}

Progress = Callable[[JobStatus], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a run of a job ended."""

    exit_code: int
    """0 done, 2 too many failed rows, 75 stopped early with progress saved."""
    state: str
    """done, aborted or preempted."""
    report: dict[str, Any]
    """As report.json; empty when the run was stopped before it began."""
    was_done: bool = False
    """The job was finished before, and nothing was run."""
    stop_reason: str | None = None
    """Why it was stopped early."""


def run_job(
    spec: JobSpec,
    *,
    builder: Builder | None = None,
    progress: Progress | None = None,
    clock: Callable[[], float] = monotonic,
) -> JobResult:
    """Run a job to its end, or as far as a signal or run.max_runtime_s lets it.

    Raises JobError, ModelError or EngineError, whose text is one line a problem; anything else is a bug. Whatever
    happens, finished rows are kept and the next run goes on from them.
    """
    stop = StopRequest(spec.run.grace_s, spec.run.max_runtime_s, clock)
    with stop.signals():
        try:
            return _JobRun(spec, builder or ModelBuilder(), progress, stop, clock).run()
        except Interrupted:
            return JobResult(TRY_AGAIN, Ending.PREEMPTED, {}, stop_reason=stop.reason)


def job_sampling(spec: JobSpec) -> RowSampling:
    """The job's sampling section; ConfigError when a value is out of range."""
    try:
        return RowSampling(spec.sampling.model_dump())
    except InvalidParameter as exc:
        raise ConfigError(f"sampling.{exc}") from exc


class _JobRun:
    """One attempt at a job."""

    def __init__(
        self,
        spec: JobSpec,
        builder: Builder,
        progress: Progress | None,
        stop: StopRequest,
        clock: Callable[[], float],
    ) -> None:
        self._spec = spec
        self._builder = builder
        self._progress = progress
        self._stop = stop
        self._clock = clock
        self._folder = OutputFolder(Path(spec.output.path).expanduser())

    def run(self) -> JobResult:
        """Look what is done, and do the rest."""
        spec = self._spec
        self._record = JobRecord(spec, self._folder, self._clock)
        inputs = identity(spec.input)
        fingerprint = job_fingerprint(spec, inputs, self._builder.identity(spec))
        if Ledger.finished(self._folder.path, fingerprint, spec.output.if_exists):
            return self._finished_before()
        self._policy = self._builder.policy(spec)
        self._sampling = job_sampling(spec)
        self._source = PromptSource(spec)
        self._ledger = Ledger(self._folder.path, fingerprint, spec.output.if_exists, inputs)
        self._ledger.open()
        try:
            return self._finished_before() if self._ledger.is_complete else self._attempt()
        finally:
            self._ledger.close()

    def _finished_before(self) -> JobResult:
        return JobResult(DONE, Ending.DONE, read_report(self._folder) or {}, was_done=True)

    def _attempt(self) -> JobResult:
        """One attempt under the lock; whatever ends it is told in the report."""
        spec, folder = self._spec, self._folder
        self._record.begin(self._ledger.attempt)
        folder.write(folder.resolved, spec.resolved_yaml().encode())
        self._writer = OutputWriter(
            self._ledger,
            self._source.passthrough_schema,
            spec.output.rows_per_part,
            spec.output.token_ids,
            spec.sampling.logprobs is not None or "logprobs" in self._source.params,
            job=spec.name,
            model=spec.model.path,
        )
        try:
            try:
                ending = self._work()
            except Interrupted:
                ending = Ending.PREEMPTED
            return self._end(ending)
        except BaseException as exc:
            # What went wrong comes first; a report that cannot be written on top of it does not.
            with suppress(JobError, OSError):
                self._writer.checkpoint()
                self._record.write("failed", exit_code_of(exc), self._writer.counts)
                self._ledger.save("failed")
            raise

    def _work(self) -> Ending:
        """Run what is left; a job with nothing left loads no model."""
        batches = self._source.batches(self._writer.range_done)
        first = next(batches, None)
        if first is None:
            return Ending.DONE
        status = JobStatus(self._source.num_rows, lambda: self._writer.counts)
        with ExitStack() as stack:
            stack.enter_context(serve(status, self._spec.metrics.prometheus_port))
            stack.enter_context(self._progress(status) if self._progress else nullcontext())
            steps = StepWriter(self._folder, self._ledger.attempt)
            stack.callback(steps.flush)
            pipeline = self._load(status, steps)
            self._stop.start()
            return pipeline.run(chain([first], batches))

    def _load(self, status: JobStatus, steps: StepWriter) -> Pipeline:
        """Load tokenizer and weights and put the pipeline together."""
        spec, load_from = self._spec, self._clock()
        tokenizer = self._builder.tokenizer(spec)
        text = PromptText(spec, tokenizer)
        engine = self._builder.engine(spec, tokenizer, self._policy)
        status.begin(engine.stats)
        self._record.engine_ready(engine, self._clock() - load_from)
        is_done = self._writer.is_done if status.num_rows_before else None
        requests = RequestBuilder(
            tokenizer, text, self._sampling, spec.prompt.overflow, engine.max_model_len, is_done=is_done
        )
        outputs = OutputText(tokenizer, spec.output.token_ids)
        abort_after = spec.errors.abort_after_consecutive
        return Pipeline(requests, engine, outputs, self._writer, self._stop, abort_after, steps.append)

    def _end(self, ending: Ending) -> JobResult:
        """Commit what there is, judge it, and write it down; _SUCCESS comes last."""
        num_rows = self._source.num_rows
        if ending is Ending.DONE:
            self._writer.finish(num_rows)
        else:
            self._writer.checkpoint()
        counts = self._writer.counts
        too_many = counts.num_failed > self._spec.errors.max_failed_fraction * counts.num_rows
        exit_code = EXIT_CODES[ending] or (TOO_MANY_FAILED if too_many else DONE)
        self._record.write(ending, exit_code, counts)
        if exit_code == DONE:
            self._ledger.complete(num_rows)
        else:
            self._ledger.save("failed_rows" if ending is Ending.DONE else ending, num_rows)
        reason = self._stop.reason if ending is Ending.PREEMPTED else None
        return JobResult(exit_code, ending, read_report(self._folder) or {}, stop_reason=reason)
