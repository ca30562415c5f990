"""Measures policies and drafters against each other on a job's own rows: models are loaded once, each run has a new
engine and a new drafter."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from ..engine.config import EngineConfig
from ..engine.request import FinishReason, Request
from ..engine.trace import StepRecord
from ..jobs.spec import JobSpec
from .bench_report import BenchReport
from .build import ModelBuilder
from .comparison import BenchRun, Comparison, Outputs, find_forks
from .contender import NONE, Contender, orders
from .drafting import choose_method
from .fingerprint import job_fingerprint
from .loaded_job import LoadedJob
from .machine import library_versions, load_average, machine_facts
from .profile import profile_identity, with_costs
from .requests import fresh_request

if TYPE_CHECKING:
    from ..engine.drafters.base import Drafter
    from ..engine.target import Target

MakeDrafter = Callable[[str | None], "Drafter | None"]
"""A new drafter by a speculation.method, None being the job's own; gives None for `none`."""

WARM_UP_TOKENS = 8


class Bench:
    """Runs the same requests through one target under different policies and batch sizes."""

    def __init__(
        self,
        target: Target,
        config: EngineConfig,
        requests: Sequence[Request],
        make_drafter: MakeDrafter | None = None,
        token_bytes: Sequence[bytes] | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        """The requests are copied for every run. Without make_drafter drafts come from n-grams. `progress` hears a line
        before each run."""
        self.target, self.config, self.requests = target, config, requests
        self._make_drafter, self._token_bytes = make_drafter or _ngram, token_bytes
        self._progress = progress or (lambda line: None)

    @property
    def is_exact(self) -> bool:
        """Whether every run must give the same tokens."""
        return self.config.deterministic or str(self.target.dtype) == "torch.float64"

    def compare(self, contenders: Sequence[Contender], batches: Sequence[int], repeats: int) -> Comparison:
        """Run all of them, order-balanced, batch size after batch size; `never` must come first among them."""
        runs: list[BenchRun] = []
        references: dict[int, Outputs] = {}
        for batch in batches:
            self.warm_up(contenders, batch)
            for repetition, order in enumerate(orders(contenders, repeats)):
                for place, contender in enumerate(order):
                    self._progress(f"batch {batch}, repetition {repetition + 1}/{repeats}: {contender.label}")
                    run, outputs = self.run(contender, batch)
                    reference = references.setdefault(batch, outputs)
                    forks = find_forks(outputs, reference)
                    runs.append(replace(run, repetition=repetition, order=place, forks=forks))
        first = references[batches[0]]
        batch_forks = {batch: find_forks(outputs, first) for batch, outputs in references.items()}
        return Comparison(self.is_exact, len(self.requests), runs, batch_forks)

    def warm_up(self, contenders: Sequence[Contender], batch: int) -> None:
        """A few tokens under each policy, so that no run pays for the first use of a shape."""
        for contender in contenders:
            self._progress(f"batch {batch}, warm-up: {contender.label}")
            self.run(contender, batch, num_requests=batch, max_tokens=WARM_UP_TOKENS)

    def run(
        self, contender: Contender, batch: int, num_requests: int | None = None, max_tokens: int | None = None
    ) -> tuple[BenchRun, Outputs]:
        """One pass over (the first num_requests of) the requests by an engine that knows nothing of earlier passes."""
        from ..engine.engine import Engine

        self.target.allocate(0)  # the former engine's KV cache goes before the next one is sized
        limit = max(self.config.max_draft_tokens, contender.num_draft_tokens)
        config = replace(self.config, max_num_seqs=batch, max_draft_tokens=limit)
        drafter = self._make_drafter(contender.method if contender.has_drafter else NONE)
        engine = Engine(self.target, config, contender.policy(), drafter, self._token_bytes)
        steps = _StepTimes()
        engine.on_step = steps.add
        requests = [_fresh(request, max_tokens) for request in self.requests[:num_requests]]
        gc.collect()
        started = time.perf_counter()
        outputs = {output.request_id: output for output in engine.run(requests)}
        makespan_s = time.perf_counter() - started
        stats = engine.stats
        run = BenchRun(
            policy=contender.label,
            batch=batch,
            repetition=0,
            order=0,
            makespan_s=makespan_s,
            num_steps=stats.num_steps,
            host_s=steps.host_s,
            decode_step_s=median(steps.decode_s) if steps.decode_s else 0.0,
            num_prompt_tokens=stats.num_prompt_tokens,
            num_cached_tokens=stats.num_cached_tokens,
            num_generation_tokens=stats.num_generation_tokens,
            num_drafts=stats.num_drafts,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_tokens=stats.num_accepted_tokens,
            num_preemptions=stats.num_preemptions,
            num_failed=sum(output.finish_reason is FinishReason.ERROR for output in outputs.values()),
            forks=[],
        )
        return run, outputs


def _fresh(request: Request, max_tokens: int | None) -> Request:
    """The same request as it was before any engine saw it, but for a smaller limit."""
    fresh = fresh_request(request)
    params = request.sampling_params
    if max_tokens is not None and max_tokens < params.max_tokens:
        fresh.sampling_params = replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))
    return fresh


def _ngram(method: str | None) -> Drafter | None:
    from ..engine.drafters.ngram import NgramDrafter

    return None if method == NONE else NgramDrafter()


class _StepTimes:
    """Collects from the step records what the engine's totals do not keep."""

    def __init__(self) -> None:
        self.host_s = 0.0
        self.decode_s: list[float] = []

    def add(self, record: StepRecord) -> None:
        host_s = record.policy_s + record.draft_s + record.other_s
        self.host_s += host_s
        if not record.num_prefill_tokens:
            self.decode_s.append(host_s + record.verify_s)


def run_bench(
    spec: JobSpec,
    contenders: Sequence[Contender],
    batches: Sequence[int],
    repeats: int,
    builder: ModelBuilder,
    progress: Callable[[str], None] | None = None,
) -> BenchReport:
    """Load the job's model once and compare the contenders on its rows. Writes nothing.

    Raises JobError, ModelError or EngineError, whose text is one line with the mend.
    """
    machine = machine_facts()
    job = LoadedJob.load(spec, builder)
    spec, target = job.spec, job.target
    for contender in contenders:
        with_costs(contender.name, contender.kwargs, profile_identity(spec, target))
    bench = Bench(target, job.config, job.requests, job.make_drafter, job.tokenizer.token_bytes(), progress)
    inputs = job.source.identity()
    fingerprint = job_fingerprint(spec, inputs, builder.identity(spec), builder.draft_identity(spec))
    comparison = bench.compare(contenders, batches, repeats)
    facts = {
        "job": spec.name,
        "model": spec.model.path,
        "content_hash": spec.model.content_hash,
        "method": choose_method(spec.speculation).method,
        "draft_model": spec.speculation.model,
        "draft_content_hash": spec.speculation.content_hash,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "policies": [contender.label for contender in contenders],
        "batches": list(batches),
        "repeats": repeats,
        "num_skipped_rows": job.num_skipped,
        "versions": library_versions(),
        "machine": machine,
        "load_average_after": load_average(),
        "inputs": [{"path": file["path"], "size": file["size"]} for file in inputs],
        "fingerprint": fingerprint.to_json(),
    }
    return BenchReport(comparison, facts)
