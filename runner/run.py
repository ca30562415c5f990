"""Running a job: what is left to do, the pipeline that does it, and how it ended."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain
from time import monotonic
from typing import Any

from ..engine.request import InvalidParameter
from ..engine.trace import StepRecord
from ..jobs.errors import ConfigError, JobError, StorageError, TemporaryError
from ..jobs.finished import error_line
from ..jobs.folder import RESOLVED, OutputFolder
from ..jobs.index import JobIndex
from ..jobs.ledger import Ledger, Terms
from ..jobs.metrics import StepWriter, read_report
from ..jobs.outputs import OutputWriter
from ..jobs.prompts import PromptSource
from ..jobs.shard import Shard
from ..jobs.spec import JobSpec
from .build import Builder, ModelBuilder
from .conversation import PromptText
from .drafting import choose_method
from .exit_codes import DONE, TOO_MANY_FAILED, TRY_AGAIN, exit_code_of
from .finalize import finalize_job
from .fingerprint import job_fingerprint, pin
from .grouping import RequestGroups
from .outputs import OutputText
from .pipeline import Ending, JobEngine, Pipeline
from .record import JobRecord, publish
from .requests import RequestBuilder
from .sampling import RowSampling, check_job_format
from .status import JobStatus
from .stop import Interrupted, StopRequest
from .telemetry import serve
from .tokenizer import TextTokenizer
from .warm_start import check_sources, save_index

EXIT_CODES = {Ending.ABORTED: TOO_MANY_FAILED, Ending.PREEMPTED: TRY_AGAIN}

Progress = Callable[[JobStatus], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a run of a job ended."""

    exit_code: int
    """0 done, 2 too many failed rows, 75 stopped early with progress saved."""
    state: str
    """done, aborted or preempted."""
    report: dict[str, Any]
    """As report.json, or that of the shard while others are not done; empty when it was stopped before it began."""
    was_done: bool = False
    """The job was finished before, and nothing was run."""
    waits_for: str | None = None
    """What the job still needs after this shard is done."""
    stop_reason: str | None = None
    """Why it was stopped early."""


def run_job(
    spec: JobSpec,
    *,
    builder: Builder | None = None,
    progress: Progress | None = None,
    warn: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = monotonic,
    retry_codes: Collection[str] | None = None,
) -> JobResult:
    """Run a job, or the shard of it that run.shard or the environment names, to its end, or as far as a signal or
    run.max_runtime_s lets it.

    retry_codes: of a finished job, run the failed rows with these error codes again; empty: all failed rows.
    Raises JobError, ModelError or EngineError, whose text is one line a problem; anything else is a bug. Whatever
    happens, finished rows are kept and the next run goes on from them.
    """
    stop = StopRequest(spec.run.grace_s, spec.run.max_runtime_s, clock)
    with stop.signals():
        try:
            return _JobRun(spec, builder or ModelBuilder(warn=warn), progress, warn, stop, clock).run(retry_codes)
        except Interrupted:
            return JobResult(TRY_AGAIN, Ending.PREEMPTED, {}, stop_reason=stop.reason)


def job_sampling(spec: JobSpec) -> RowSampling:
    """The job's sampling section; ConfigError when a value is out of range."""
    try:
        return RowSampling(spec.sampling.model_dump())
    except InvalidParameter as exc:
        raise ConfigError(f"sampling.{exc}") from exc


@contextmanager
def _settled() -> Iterator[None]:
    """Keeps the garbage collector from going through libraries and model again and again while rows come and go."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _JobRun:
    """One attempt at a shard of a job."""

    def __init__(
        self,
        spec: JobSpec,
        builder: Builder,
        progress: Progress | None,
        warn: Callable[[str], None],
        stop: StopRequest,
        clock: Callable[[], float],
    ) -> None:
        self._spec = spec
        self._builder = builder
        self._progress = progress
        self._warn = warn
        self._stop = stop
        self._clock = clock
        self._began = clock()
        self._output = OutputFolder(spec.output.path)
        self._shard = Shard.of(spec.run.shard, os.environ)
        self._loaded: tuple[JobEngine, TextTokenizer] | None = None

    def run(self, retry_codes: Collection[str] | None) -> JobResult:
        """Look what is done, and do the rest."""
        spec = self._spec
        known = self._known_index() if spec.output.if_exists != "overwrite" else None
        self._source = PromptSource(spec, known.scan if known is not None else None)
        models = self._builder.identity(spec), self._builder.draft_identity(spec)
        self._spec = spec = pin(spec, *models)
        fingerprint = job_fingerprint(spec, self._source.identity(), *models)
        if retry_codes is None and Ledger.finished(self._output, fingerprint, spec.output.if_exists):
            return self._finished_before()
        self._policy = self._builder.policy(spec)
        self._sampling = job_sampling(spec)
        self._check_job()
        index = JobIndex.of(
            fingerprint, self._shard, self._source.num_rows, spec.output.rows_per_part, self._source.scan()
        )
        name = spec.model.served_model_name or spec.model.path
        terms = Terms(spec.output.if_exists, spec.errors.max_failed_fraction, spec.output.format, name)
        self._ledger = Ledger(self._output, self._shard, index, fingerprint, terms)
        self._ledger.open(retry_codes)
        try:
            return self._finished_before() if self._ledger.is_finished else self._attempt(retry_codes is not None)
        finally:
            self._ledger.close()

    def _check_job(self) -> None:
        """What would end the job only once it has put its name on the output. ConfigError or ModelError."""
        spec = self._spec
        check_sources(spec)
        if spec.sampling.response_format is not None:
            compile = self._builder.grammars(self._builder.tokenizer(spec))
            if compile is not None:
                check_job_format(spec, compile)

    def _known_index(self) -> JobIndex | None:
        try:
            return JobIndex.read(self._output)
        except StorageError:
            self._output.store.check()  # says it as an OutputError where the output as a whole cannot be used
            raise

    def _finished_before(self) -> JobResult:
        return JobResult(DONE, Ending.DONE, read_report(self._output.store) or {}, was_done=True)

    def _attempt(self, is_retry: bool) -> JobResult:
        """One attempt under the lock; whatever ends it is told in the report."""
        spec, ledger = self._spec, self._ledger
        self._record = JobRecord(spec, ledger.folder, self._clock, self._began)
        self._record.begin(ledger.attempt)
        if ledger.lost:
            self._warn(f"{', '.join(ledger.lost[:3])}: committed before and gone from data/; the rows run again")
        if not is_retry:  # what a retry was told by --set is for that retry
            ledger.folder.write(RESOLVED, spec.resolved_yaml().encode())
        logprobs = spec.sampling.logprobs is not None or "logprobs" in self._source.params
        # Result files of the OpenAI format spell the tokens of their log probabilities.
        self._with_token_ids = spec.output.token_ids or (logprobs and spec.output.format == "openai-batch")
        self._writer = OutputWriter(
            ledger,
            self._source.passthrough_schema,
            self._with_token_ids,
            logprobs,
            {
                "specrun.job": spec.name,
                "specrun.model": spec.model.path,
                "specrun.model_revision": spec.model.revision or "",
            },
        )
        try:
            try:
                ending = self._work()
            except Interrupted:
                ending = Ending.PREEMPTED
            if ending is not Ending.DONE:
                return self._stopped(ending)
            self._writer.finish()
            self._record.write(ending, DONE, self._writer.counts)
            self._save_index()
            ledger.complete()
        except BaseException as exc:
            # What went wrong comes first; a report that cannot be written on top of it does not.
            with suppress(JobError, OSError):
                self._save("failed", exit_code_of(exc))
            raise
        return self._finalized()

    def _work(self) -> Ending:
        """Run what is left; a shard with nothing left loads no model."""
        batches = self._source.batches(self._writer.range_done, self._ledger.ranges.start, self._ledger.ranges.stop)
        first = next(batches, None)
        if first is None:
            self._stop.start()
            return Ending.DONE
        status = JobStatus(self._ledger.ranges.num_rows, lambda: self._writer.counts)
        with ExitStack() as stack:
            stack.enter_context(serve(status, self._spec.metrics.prometheus_port))
            stack.enter_context(self._progress(status) if self._progress else nullcontext())
            steps = StepWriter(self._ledger.folder, self._shard, self._ledger.attempt)
            stack.callback(steps.flush)
            pipeline = self._load(status, steps)
            stack.enter_context(_settled())
            self._stop.start()
            return pipeline.run(chain([first], batches))

    def _load(self, status: JobStatus, steps: StepWriter) -> Pipeline:
        """Load tokenizer and weights and put the pipeline together."""
        spec, load_from = self._spec, self._clock()
        tokenizer = self._builder.tokenizer(spec)
        text = PromptText(spec, tokenizer)
        engine = self._builder.engine(spec, tokenizer, self._policy)
        self._loaded = engine, tokenizer
        status.begin(engine.stats)
        is_done = self._writer.is_done if status.num_rows_before else None
        requests = RequestBuilder(
            tokenizer,
            text,
            self._sampling,
            spec.prompt.overflow,
            engine.max_model_len,
            is_done=is_done,
            compile=self._builder.grammars(tokenizer, engine),
            groups=RequestGroups(self._source.files, spec.input.columns.group is not None),
        )
        texts = OutputText(tokenizer, self._with_token_ids)

        def on_step(record: StepRecord) -> None:
            self._record.add(record)
            if steps.append(record):  # once a minute or so: what a kill or a power cut may cost
                self._writer.checkpoint()
                self._record.write("running", None, self._writer.counts)

        limit, by_group = spec.errors.abort_after_consecutive, choose_method(spec.speculation).has_draft_model
        pipeline = Pipeline(requests, engine, texts, self._writer, self._stop, limit, on_step, spec.run.order, by_group)
        self._record.engine_ready(engine, self._policy, status, pipeline.lengths, self._clock() - load_from)
        return pipeline

    def _stopped(self, ending: Ending) -> JobResult:
        """The shard is not done: keep what there is and write down how far it came."""
        report = self._save(ending, EXIT_CODES[ending])
        self._save_index()
        reason = self._stop.reason if ending is Ending.PREEMPTED else None
        return JobResult(EXIT_CODES[ending], ending, report, stop_reason=reason)

    def _finalized(self) -> JobResult:
        """The shard is done, and if it is the last one the job is: judge it; _SUCCESS comes last."""
        folder = self._ledger.folder
        try:
            verdict = finalize_job(folder, self._token_bytes)
        except TemporaryError as exc:
            report = read_report(self._output.store, folder.report) or {}
            return JobResult(DONE, Ending.DONE, report, waits_for=str(exc))
        return JobResult(verdict.exit_code, Ending.DONE, verdict.report)

    def _token_bytes(self) -> Sequence[bytes]:
        return self._builder.tokenizer(self._spec).token_bytes()

    def _save_index(self) -> None:
        """Keep the drafter's index for a later job, once the rows are safe; nothing here fails the job."""
        if self._spec.speculation.save_index and self._loaded is not None:
            engine, tokenizer = self._loaded
            save_index(engine.drafter, self._ledger.folder, self._shard, tokenizer, self._warn)

    def _save(self, state: str, exit_code: int) -> dict[str, Any]:
        """Secure what is done and say how far it came; a job of one shard says so in its own report."""
        folder = self._ledger.folder
        self._writer.secure()
        totals = self._record.write(state, exit_code, self._writer.counts)
        folder.write_lines([folder.errors], ((0, error_line(row)) for row in self._writer.failed_rows()))
        self._ledger.save(state)
        if self._shard.is_all:
            return publish(folder, totals)
        return read_report(self._output.store, folder.report) or {}
