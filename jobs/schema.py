"""Every column that a job writes: names, types and order, once.

Schemas are always explicit. A type inferred from rows (null where the first rows hold no error) breaks readers later.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from .errors import ConfigError

_KEY_FIELDS = (pa.field("row_index", pa.int64()), pa.field("id", pa.string()))
_TEXT_FIELDS = (
    pa.field("text", pa.large_string()),
    pa.field("finish_reason", pa.string()),
    pa.field("stop_reason", pa.string()),
    pa.field("prompt_tokens", pa.int32()),
    pa.field("output_tokens", pa.int32()),
)
_TOKEN_IDS_FIELD = pa.field("token_ids", pa.list_(pa.int32()))
_LOGPROBS_FIELD = pa.field("logprobs", pa.list_(pa.float32()))
_ERROR_FIELDS = (pa.field("error_code", pa.string()), pa.field("error_message", pa.large_string()))

OUTPUT_COLUMNS = frozenset(
    field.name for field in (*_KEY_FIELDS, *_TEXT_FIELDS, _TOKEN_IDS_FIELD, _LOGPROBS_FIELD, *_ERROR_FIELDS)
)
"""Names that specrun gives to its own columns, whether or not a job asks for all of them."""


@dataclass(slots=True)
class OutputRow:
    """The result of one input row. A failed row has an error_code and, as a rule, no text."""

    row_index: int
    """Global index of the input row, from 0."""
    id: str | None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    """Natural log of each output token's probability."""
    error_code: str | None = None
    error_message: str | None = None


def result_schema(token_ids: bool, logprobs: bool) -> pa.Schema:
    """The generated columns, which follow the passthrough columns in a part."""
    optional = [_TOKEN_IDS_FIELD] * token_ids + [_LOGPROBS_FIELD] * logprobs
    return pa.schema([*_TEXT_FIELDS, *optional, *_ERROR_FIELDS])


def source_schema(passthrough: pa.Schema) -> pa.Schema:
    """id and the passthrough columns: what is known of a row before it has run.

    Metadata of the input (pandas, huggingface) is dropped, since it describes other columns. Raises ConfigError when a
    column has a name of ours or comes twice.
    """
    for name in passthrough.names:
        if name in OUTPUT_COLUMNS or passthrough.names.count(name) > 1:
            raise ConfigError(f"output.keep_columns: {name!r} would appear twice in the output; leave it out")
    return pa.schema([_KEY_FIELDS[1], *(field.with_nullable(True).remove_metadata() for field in passthrough)])


def output_schema(passthrough: pa.Schema, token_ids: bool, logprobs: bool) -> pa.Schema:
    """The columns of data/part-*.parquet: row_index, id, passthrough, generated. Errors as source_schema."""
    return pa.schema([_KEY_FIELDS[0], *source_schema(passthrough), *result_schema(token_ids, logprobs)])


STEP_SCHEMA = pa.schema(
    [
        ("shard", pa.int32()),
        ("attempt", pa.int32()),
        ("step", pa.int64()),
        ("start_s", pa.float64()),
        ("num_running", pa.int32()),
        ("num_scheduled", pa.int32()),
        ("num_waiting", pa.int32()),
        ("num_prefill_tokens", pa.int32()),
        ("num_batched_tokens", pa.int32()),
        ("num_context_tokens", pa.int64()),
        ("num_drafts", pa.int32()),
        ("num_proposed_tokens", pa.int32()),
        ("num_draft_tokens", pa.int32()),
        ("max_draft_len", pa.int32()),
        ("num_accepted_tokens", pa.int32()),
        ("num_generation_tokens", pa.int32()),
        ("num_preemptions", pa.int32()),
        ("kv_usage", pa.float64()),
        ("rolling_acceptance_rate", pa.float64()),
        ("reason", pa.string()),
        ("policy_s", pa.float64()),
        ("draft_s", pa.float64()),
        ("verify_s", pa.float64()),
        ("other_s", pa.float64()),
        ("input_wait_s", pa.float64()),
    ]
)
"""The columns of metrics/steps: the fields of the engine's StepRecord, and the shard and attempt that ran the step."""


def _histogram(key: str, value: pa.DataType) -> pa.DataType:
    # A list of structs and not a map: not every Parquet reader knows maps.
    return pa.list_(pa.struct([(key, pa.string()), ("value", value)]))


JOB_SCHEMA = pa.schema(
    [
        ("job", pa.string()),
        ("state", pa.string()),
        ("exit_code", pa.int32()),
        ("attempt", pa.int32()),
        ("shards", pa.int32()),
        ("started_at", pa.timestamp("us", tz="UTC")),
        ("finished_at", pa.timestamp("us", tz="UTC")),
        ("model", pa.string()),
        ("revision", pa.string()),
        ("content_hash", pa.string()),
        ("device", pa.string()),
        ("dtype", pa.string()),
        ("method", pa.string()),
        ("method_reason", pa.string()),
        ("draft_model", pa.string()),
        ("draft_revision", pa.string()),
        ("draft_content_hash", pa.string()),
        ("drafter_facts", _histogram("name", pa.float64())),
        ("policy", pa.string()),
        ("policy_facts", _histogram("name", pa.float64())),
        ("versions", _histogram("name", pa.string())),
        ("num_rows", pa.int64()),
        ("num_ok", pa.int64()),
        ("num_failed", pa.int64()),
        ("error_codes", _histogram("name", pa.int64())),
        ("finish_reasons", _histogram("name", pa.int64())),
        ("num_prompt_tokens", pa.int64()),
        ("num_output_tokens", pa.int64()),
        ("num_cached_tokens", pa.int64()),
        ("num_generation_tokens", pa.int64()),
        ("num_drafts", pa.int64()),
        ("num_draft_tokens", pa.int64()),
        ("num_accepted_tokens", pa.int64()),
        ("num_accepted_tokens_per_pos", pa.list_(pa.int64())),
        ("num_steps", pa.int64()),
        ("num_preemptions", pa.int64()),
        ("total_s", pa.float64()),
        ("load_s", pa.float64()),
        ("busy_s", pa.float64()),
        ("spec_on_s", pa.float64()),
        ("spec_off_s", pa.float64()),
        ("input_wait_s", pa.float64()),
        ("forecast_s", pa.float64()),
        ("forecast_never_s", pa.float64()),
        ("forecast_at_step", pa.int64()),
        ("peak_rss_bytes", pa.int64()),
        ("failed_fraction", pa.float64()),
        ("acceptance_rate", pa.float64()),
        ("mean_acceptance_length", pa.float64()),
        ("spec_on_fraction", pa.float64()),
        ("output_tokens_per_s", pa.float64()),
        ("rows_per_s", pa.float64()),
    ]
)
"""The columns of metrics/job.parquet: the fields of JobMetrics, then its rates."""
