"""A job that has run, read back from its output folder: what its rows said, and what each step did and cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from ..engine.grammar import Grammar
from ..engine.request import FinishReason, Request, RequestOutput
from ..jobs.errors import ConfigError
from ..jobs.finished import FinishedJob
from ..jobs.folder import STEPS, OutputFolder
from ..jobs.parts import Part
from ..jobs.prompts import PromptSource
from ..jobs.response_format import ResponseFormat
from ..jobs.shard import Shard
from ..jobs.spec import JobSpec
from .build import Builder
from .conversation import PromptText
from .drafting import choose_method
from .grammar import GrammarCompiler
from .grouping import RequestGroups
from .ordering import RequestWindow
from .recorded_steps import Steps, read_steps
from .requests import RequestBuilder, fresh_request
from .row_lengths import RowLengths
from .run import job_sampling

Float64 = NDArray[np.float64]

NUMBERS = (
    *("num_running", "num_prefill_tokens", "num_batched_tokens", "num_context_tokens", "num_drafts"),
    *("num_draft_tokens", "max_draft_len", "num_accepted_tokens", "num_generation_tokens"),
    *("num_preemptions", "kv_usage", "policy_s", "draft_s", "verify_s", "other_s"),
)
"""Columns of metrics/steps that are read."""
_ROW_COLUMNS = ["row_index", "prompt_tokens", "output_tokens", "finish_reason", "stop_reason", "error_code"]


@dataclass(frozen=True, slots=True)
class RecordedShard:
    """What one engine did."""

    shard: Shard
    start: int
    """First row."""
    stop: int
    report: Mapping[str, Any]
    steps: Steps


@dataclass(frozen=True, slots=True)
class Recording:
    """A finished job."""

    spec: JobSpec
    """As it ran."""
    location: str
    shards: list[RecordedShard]
    outputs: dict[int, list[int]]
    """Row index -> output tokens of each row that did not fail; zeros where no token ids were recorded."""
    has_token_ids: bool
    num_prompt_tokens: dict[int, int]
    """Of the same rows."""
    ends: frozenset[int]
    """Tokens with which the model ended an output by itself."""
    num_failed: int

    @classmethod
    def read(cls, spec: JobSpec) -> Recording:
        """The job behind output.path of stored_job().

        Raises InputMissing (no job), TemporaryError (not finished), ConfigError (no steps recorded) or StorageError
        (files that cannot be read).
        """
        output = OutputFolder(spec.output.path)
        job = FinishedJob.gather(output)
        steps = {shard: _with_longest_drafts(steps) for shard, steps in read_steps(output.store, NUMBERS)}
        shards = []
        for i, report in enumerate(job.reports):
            parts = [part for part in job.parts if part.shard == i]
            if parts and i in steps:
                shard = Shard(i, job.index.num_shards)
                shards.append(RecordedShard(shard, parts[0].row_start, parts[-1].row_stop, report, steps[i]))
        if not shards:
            raise ConfigError(
                f"{output.location}: {STEPS} holds no steps, so nothing says what a step costs; run the job again"
            )
        has_token_ids = job.has_column(output, "token_ids")
        outputs: dict[int, list[int]] = {}
        num_prompt_tokens: dict[int, int] = {}
        ends: set[int] = set()
        for part in job.parts:
            ends |= _read_rows(output, part, has_token_ids, outputs, num_prompt_tokens)
        facts = has_token_ids, num_prompt_tokens, frozenset(ends), job.counts.num_failed
        if not outputs:
            raise ConfigError(f"{output.location}: no row has an output to replay; see its errors.jsonl")
        return cls(spec, output.location, shards, outputs, *facts)

    def rows(self, shard: RecordedShard, builder: Builder, max_model_len: int) -> JobRows:
        """The shard's rows in the order in which they ran, each with its prompt encoded anew.

        ConfigError where a prompt has another length than it had: the input or the tokenizer has changed.
        """
        span = range(shard.start, shard.stop)
        rows = JobRows.of(self.spec, builder, max_model_len, span, self.outputs, self.ends)
        rows.requests = [request for request in rows.requests if request.request_id in self.outputs]
        for request in rows.requests:
            before, now = self.num_prompt_tokens[request.request_id], len(request.prompt_token_ids)
            if before != now:
                raise ConfigError(
                    f"row {request.request_id} had {before} prompt tokens and has {now} now; put back the input, the "
                    "template and the tokenizer that the job ran with"
                )
        return rows


@dataclass(slots=True)
class JobRows:
    """Rows of a job that can run, in the order in which they would."""

    requests: list[Request]

    @classmethod
    def of(
        cls,
        spec: JobSpec,
        builder: Builder,
        max_model_len: int,
        rows: range,
        outputs: Mapping[int, Sequence[int]] | None = None,
        ends: frozenset[int] = frozenset(),
    ) -> JobRows:
        """Loads the tokenizer and encodes the prompts.

        outputs: row index -> output tokens, since the order of later rows hangs on the lengths of earlier ones.
        ends: the model's end-of-sequence tokens, for response formats.
        Raises as PromptSource and Builder.tokenizer().
        """
        tokenizer = builder.tokenizer(spec)

        @cache
        def compiler() -> GrammarCompiler:
            num_ids = max(len(tokenizer.token_bytes()), *(end + 1 for end in ends or (0,)))
            # Where no end is known any id serves that is past all others: the outputs are not held against it.
            return GrammarCompiler(tokenizer, num_ids + 1, ends or [num_ids])

        def compile(format: ResponseFormat) -> Grammar:
            return compiler().compile(format)

        text, sampling = PromptText(spec, tokenizer), job_sampling(spec)
        source = PromptSource(spec)
        groups = RequestGroups(source.files, spec.input.columns.group is not None)
        make = RequestBuilder(
            tokenizer, text, sampling, spec.prompt.overflow, max_model_len, compile=compile, groups=groups
        )
        batches = (make.build(batch).requests for batch in source.batches(start=rows.start, stop=rows.stop))
        by_group = choose_method(spec.speculation).has_draft_model
        ordered = batches if spec.run.order == "input" else _in_order(batches, by_group, outputs or {})
        return cls([request for ready in ordered for request in ready])

    def fresh(self, with_grammars: bool) -> list[Request]:
        """Copies that no engine has seen."""
        copies = [fresh_request(request) for request in self.requests]
        if not with_grammars:
            for request in copies:
                request.grammar = None
        return copies


def _in_order(
    batches: Iterable[list[Request]], by_group: bool, outputs: Mapping[int, Sequence[int]]
) -> Iterator[Sequence[Request]]:
    """As a pipeline hands them to its engine. It reads one window ahead of those that run: when it puts a window in
    order, the rows before the last one have finished."""
    lengths = RowLengths()
    window = RequestWindow(by_group, lengths)
    last: list[Request] = []
    for batch in batches:
        lengths.expect(batch)
        if ready := window.add(batch):
            yield from ready
            for request in last:
                tokens = list(outputs.get(request.request_id, ()))
                lengths.add(RequestOutput(request.request_id, tokens, FinishReason.STOP))
            last = [request for requests in ready for request in requests]
    yield from window.flush()


def _with_longest_drafts(steps: Steps) -> Steps:
    """An older version did not write max_draft_len: of uniform drafts the longest is the mean."""
    mean = np.ceil(steps["num_draft_tokens"] / np.maximum(steps["num_drafts"], 1))
    return Steps({**steps.columns, "max_draft_len": np.maximum(steps["max_draft_len"], mean)})


def _read_rows(
    output: OutputFolder, part: Part, has_ids: bool, outputs: dict[int, list[int]], num_prompt: dict[int, int]
) -> set[int]:
    """Take in the rows of a part that have at least one token; returns the tokens that ended one of themselves."""
    ends: set[int] = set()
    for batch in part.batches(output.store, [*_ROW_COLUMNS, *(["token_ids"] if has_ids else [])]):
        good = batch.filter(pc.is_null(batch.column("error_code")))
        good = good.filter(pc.greater(good.column("output_tokens"), 0))
        rows = good.to_pydict()
        num_prompt.update(zip(rows["row_index"], rows["prompt_tokens"], strict=True))
        if not has_ids:
            lengths = zip(rows["row_index"], rows["output_tokens"], strict=True)
            outputs.update((index, [0] * length) for index, length in lengths)
            continue
        outputs.update(zip(rows["row_index"], rows["token_ids"], strict=True))
        how = zip(rows["token_ids"], rows["finish_reason"], rows["stop_reason"], strict=True)
        ends |= {ids[-1] for ids, finish, stop in how if finish == "stop" and stop is None}
    return ends
