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
from ..engine.grammar import Grammar
from ..engine.request import FinishReason, Request
from ..engine.trace import StepRecord
from ..jobs.errors import ConfigError
from ..jobs.prompts import PromptSource
from ..jobs.response_format import ResponseFormat
from ..jobs.spec import JobSpec
from .bench_report import BenchReport
from .build import ModelBuilder, engine_config
from .comparison import BenchRun, Comparison, Outputs, find_forks
from .contender import NONE, Contender, orders
from .conversation import PromptText
from .drafting import choose_method
from .fingerprint import job_fingerprint, pin
from .grammar import GrammarCompiler
from .grouping import RequestGroups
from .machine import library_versions, load_average, machine_facts
from .profile import profile_identity, with_costs
from .requests import RequestBuilder
from .run import job_sampling
from .sampling import Compile, check_job_format
from .tokenizer import TextTokenizer

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
        new_grammar: Callable[[Grammar], Grammar | None] | None = None,
    ) -> None:
        """The requests are copied for every run, and new_grammar gives each copy its own grammar. Without make_drafter
        drafts come from n-grams. `progress` hears a line before each run."""
        self.target, self.config, self.requests = target, config, requests
        self._new_grammar = new_grammar
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
        requests = [self._fresh(request, max_tokens) for request in self.requests[:num_requests]]
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

    def _fresh(self, request: Request, max_tokens: int | None) -> Request:
        """The same request as it was before any engine saw it."""
        params = request.sampling_params
        if max_tokens is not None and max_tokens < params.max_tokens:
            params = replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))
        grammar = self._new_grammar(request.grammar) if self._new_grammar and request.grammar else None
        return Request(request.request_id, request.prompt_token_ids, params, request.group, grammar)


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


class _Formats:
    """Remembers what each grammar was made of, since one advances with its request and every run needs a new one."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._format: dict[Grammar, ResponseFormat] = {}

    def compile(self, format: ResponseFormat) -> Grammar:
        """As GrammarCompiler.compile."""
        grammar = self._compiler.compile(format)
        self._format[grammar] = format
        return grammar

    def again(self, grammar: Grammar) -> Grammar:
        """A new grammar of the same format."""
        return self._compiler.compile(self._format[grammar])


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
    from ..engine.target import Target

    machine = machine_facts()
    source = PromptSource(spec)
    models = builder.identity(spec), builder.draft_identity(spec)
    spec = pin(spec, *models)
    fingerprint = job_fingerprint(spec, source.identity(), *models)
    tokenizer = builder.tokenizer(spec)
    config = replace(engine_config(spec), request_timeout_s=None)  # every contender must finish the same rows
    target = Target.load(builder.checkpoint(spec), config)
    for contender in contenders:
        with_costs(contender.name, contender.kwargs, profile_identity(spec, target))
    formats = _Formats(GrammarCompiler(tokenizer, target.vocab_size, target.eos_token_ids))
    requests, num_skipped = _job_requests(spec, source, tokenizer, target.max_model_len, formats.compile)
    drafters = builder.drafters(spec, config, target, tokenizer, with_own=False)

    def make_drafter(method: str | None) -> Drafter | None:
        drafters.release()  # as the target's KV cache: before the next one is sized
        return drafters.make(method)

    bench = Bench(target, config, requests, make_drafter, tokenizer.token_bytes(), progress, formats.again)
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
        "num_skipped_rows": num_skipped,
        "versions": library_versions(),
        "machine": machine,
        "load_average_after": load_average(),
        "inputs": [{"path": file["path"], "size": file["size"]} for file in source.identity()],
        "fingerprint": fingerprint.to_json(),
    }
    return BenchReport(comparison, facts)


def _job_requests(
    spec: JobSpec, source: PromptSource, tokenizer: TextTokenizer, max_model_len: int, compile: Compile
) -> tuple[list[Request], int]:
    """All good rows of the job, and how many bad ones were left out. ConfigError when none is good."""
    text = PromptText(spec, tokenizer)
    check_job_format(spec, compile)
    groups = RequestGroups(source.files, spec.input.columns.group is not None)
    builder = RequestBuilder(
        tokenizer, text, job_sampling(spec), spec.prompt.overflow, max_model_len, compile=compile, groups=groups
    )
    batches = [builder.build(batch) for batch in source.batches()]
    requests = [request for batch in batches for request in batch.requests]
    errors = [error for batch in batches for error in batch.errors]
    if not requests:
        reason = f"row {errors[0].row_index}: {errors[0].error_message}" if errors else "there are no rows"
        raise ConfigError(f"input.path {spec.input.path!r} has no row to run ({reason}); name another input")
    return requests, len(errors)
