"""Everything about a job that can be checked without its weights."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..jobs.folder import OutputFolder
from ..jobs.prompts import PromptSource
from ..jobs.spec import JobSpec
from .build import Builder
from .conversation import PromptText
from .fingerprint import pin
from .requests import RequestBatch, RequestBuilder
from .run import job_sampling
from .sampling import check_job_format
from .warm_start import check_sources

UNLIMITED = 1 << 62


@dataclass(slots=True)
class Validation:
    """What a job would do."""

    resolved: str
    """The job with every default written out, YAML."""
    files: list[str]
    num_rows: int
    max_model_len: int | None
    """None where the model does not say."""
    first_prompt: str | None = None
    """As the model sees it."""
    num_ok: int = 0
    error_codes: dict[str, int] = field(default_factory=dict)
    """Rows that would fail, by error code."""
    first_errors: dict[str, str] = field(default_factory=dict)
    """The first row of each error code and why it fails."""
    num_duplicate_ids: int = 0
    """Rows whose id an earlier row has."""
    num_prompt_tokens: int = 0
    max_output_tokens: int = 0
    """If no row ended before its max_tokens."""
    prompt_tokens: dict[str, int] = field(default_factory=dict)
    """p50, p95 and max over rows that have tokens."""
    max_failed_fraction: float = 0.0

    @property
    def num_failed(self) -> int:
        """Rows that would fail before they reach the engine."""
        return sum(self.error_codes.values())

    @property
    def is_ok(self) -> bool:
        """Whether no more rows fail than the job allows."""
        return self.num_failed <= self.max_failed_fraction * self.num_rows

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {"ok": self.is_ok, **asdict(self), "num_failed": self.num_failed}

    def text(self) -> str:
        """For people."""
        tokens = self.prompt_tokens
        lines = [
            self.resolved,
            "first prompt, as the model sees it:",
            f"{self.first_prompt or '(no row has one)'}\n",
            f"files           {', '.join(self.files)}",
            f"rows            {self.num_rows:,}",
            f"prompt tokens   p50 {tokens['p50']:,}, p95 {tokens['p95']:,}, max {tokens['max']:,}",
            f"max_model_len   {self.max_model_len or 'unknown'}",
            f"tokens in all   {self.num_prompt_tokens:,} in, at most {self.max_output_tokens:,} out",
            f"duplicate ids   {self.num_duplicate_ids:,}",
            f"bad rows        {self.num_failed:,}",
        ]
        for code, count in sorted(self.error_codes.items()):
            lines.append(f"  {code:<20}{count:>8,}   {self.first_errors[code]}")
        return "\n".join(lines)


def validate_job(spec: JobSpec, builder: Builder) -> Validation:
    """Read and tokenise every row as the job would. Raises what run_job raises before it loads weights."""
    output = OutputFolder(spec.output.path)
    if spec.output.if_exists == "error":
        output.require_empty()
    output.store.check()
    sampling = job_sampling(spec)
    source = PromptSource(spec)
    spec = pin(spec, builder.identity(spec), builder.draft_identity(spec))
    builder.policy(spec)
    check_sources(spec)
    limit = builder.max_model_len(spec)
    tokenizer = builder.tokenizer(spec)
    text = PromptText(spec, tokenizer)
    compile = builder.grammars(tokenizer)
    if compile is not None:
        check_job_format(spec, compile)
    requests = RequestBuilder(tokenizer, text, sampling, spec.prompt.overflow, limit or UNLIMITED, compile=compile)
    files = [file["path"] for file in source.identity()]
    result = Validation(spec.resolved_yaml(), files, source.num_rows, limit)
    result.max_failed_fraction = spec.errors.max_failed_fraction
    lengths: Counter[int] = Counter()
    ids: set[bytes] = set()
    for batch in source.batches():
        prepared = requests.build(batch)
        if result.first_prompt is None and prepared.requests:
            index = prepared.requests[0].request_id - batch.start
            result.first_prompt = spec.hide(text.render(batch.rows[index]))
        _count(result, prepared, lengths, spec)
        result.num_duplicate_ids += _count_duplicates(prepared.ids, ids)
    result.prompt_tokens = {name: _quantile(lengths, q) for name, q in (("p50", 0.5), ("p95", 0.95), ("max", 1.0))}
    return result


def _count(result: Validation, batch: RequestBatch, lengths: Counter[int], spec: JobSpec) -> None:
    for request in batch.requests:
        result.num_ok += 1
        result.num_prompt_tokens += len(request.prompt_token_ids)
        result.max_output_tokens += request.sampling_params.max_tokens
        lengths[len(request.prompt_token_ids)] += 1
    for row in batch.errors:
        code = row.error_code or ""
        result.error_codes[code] = result.error_codes.get(code, 0) + 1
        result.first_errors.setdefault(code, spec.hide(f"row {row.row_index}: {row.error_message}"))
        if row.prompt_tokens:
            lengths[row.prompt_tokens] += 1


def _count_duplicates(ids: Sequence[str | None], seen: set[bytes]) -> int:
    """Ids that were seen before; their hashes are kept, since ids may be long."""
    count = 0
    for row_id in ids:
        if row_id is not None:
            digest = hashlib.blake2b(row_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
            count += digest in seen
            seen.add(digest)
    return count


def _quantile(lengths: Counter[int], share: float) -> int:
    """The smallest length that at least this share of the rows does not exceed; 0 without rows."""
    rest = share * lengths.total()
    for length, count in sorted(lengths.items()):
        rest -= count
        if rest <= 0:
            return length
    return 0
