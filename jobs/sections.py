"""The sections of job.yaml. Every key that specrun understands is in this file or in speculation.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from .fields import Float, Int, Location, Strings, Text
from .response_format import FORMAT_JSON_SCHEMA, check_response_format

ContentHash = Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$")]
"""Of a checkpoint's files."""


class Section(BaseModel):
    """A mapping in job.yaml: frozen, and no key that is not here."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        protected_namespaces=(),
        hide_input_in_errors=True,  # a traceback must not show what came from the environment
    )


class ModelSpec(Section):
    """The target model."""

    path: Text
    """A local folder, a .gguf file, a hub id or package:NAME."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; job.resolved.yaml has the commit that was found."""
    content_hash: ContentHash | None = None
    """Refuse files other than those of this hash, which stands in job.resolved.yaml; null takes what is there."""
    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: Annotated[Int, Field(ge=1)] | None = None
    """Most tokens, prompt and output, in a row; null is what the model was made for."""
    served_model_name: Text | None = None
    """The name that OpenAI batch lines give as their model; null is `path`."""
    trust_remote_code: bool = False
    """Let a checkpoint run Python code that it brings along."""


class ColumnsSpec(Section):
    """Which input columns hold what."""

    id: Text | None = None
    prompt: Text | None = None
    """Text column; "prompt" when neither prompt nor messages is given."""
    messages: Text | None = None
    """Conversation column: a list of role and content, or that as JSON text."""
    group: Text | None = None
    """Column of any kind whose values tell apart rows of unlike output, such as tasks or data sets, for policies that
    learn by group; without it rows are grouped by file and by how their prompts begin. No output depends on it."""

    @model_validator(mode="before")
    @classmethod
    def _default_prompt(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("prompt") is None and value.get("messages") is None:
            return {**value, "prompt": "prompt"}
        return value

    @model_validator(mode="after")
    def _exclusive(self) -> ColumnsSpec:
        if self.prompt is not None and self.messages is not None:
            raise ValueError("prompt and messages exclude each other; keep one")
        return self


class InputSpec(Section):
    """Where rows come from."""

    path: Location
    """A file, a folder or a glob of *.parquet, *.jsonl, *.jsonl.gz or *.jsonl.zst; local, s3:// or gs://."""
    format: Literal["auto", "parquet", "jsonl", "openai-batch"] = "auto"
    """openai-batch: lines of the OpenAI batch API, in files of the names that jsonl has."""
    columns: ColumnsSpec = ColumnsSpec(prompt="prompt")
    limit: Annotated[Int, Field(ge=1)] | None = None
    """Only the first rows."""


class PromptSpec(Section):
    """From columns to the text that the model sees."""

    system: str | None = None
    """System message before each prompt."""
    template: Text | None = None
    """Jinja template of the prompt; every input column is a variable."""
    chat_template: Text = "default"
    """default (the model's own), none (plain text) or the path of a Jinja file."""
    continue_final_message: bool = False
    """Let the model go on with a last message that is the assistant's; without it such a row fails."""
    overflow: Literal["error", "clamp", "truncate_left", "truncate_right"] = "error"
    """When prompt and max_tokens do not fit: fail the row, shorten the output, or cut the prompt."""


class SamplingSpec(Section):
    """How outputs are sampled; an input column of the same name wins for its row."""

    max_tokens: Int = 256
    min_tokens: Int = 0
    temperature: Float = 0.0
    top_p: Float = 1.0
    top_k: Int = 0
    min_p: Float = 0.0
    repetition_penalty: Float = 1.0
    presence_penalty: Float = 0.0
    frequency_penalty: Float = 0.0
    logit_bias: dict[Int, Float] = {}
    """Token id -> value added to its logit."""
    stop: Strings = ()
    """One string or a list of them."""
    stop_token_ids: tuple[Int, ...] = ()
    ignore_eos: bool = False
    seed: Int = 0
    logprobs: Int | None = None
    response_format: (
        Annotated[dict[str, Any], AfterValidator(check_response_format), WithJsonSchema(FORMAT_JSON_SCHEMA)] | None
    ) = None
    """What outputs must look like: {type: json_schema, json_schema: {name: ..., schema: ...}}, {type: json_object},
    {type: regex, regex: ...} or {type: choice, choice: [...]}."""


class OutputSpec(Section):
    """Where rows go."""

    path: Location
    """The output folder; local, s3:// or gs://."""
    if_exists: Literal["resume", "error", "overwrite", "skip"] = "resume"
    rows_per_part: Annotated[Int, Field(ge=1)] = 10_000
    """Rows in a part file, the unit of commit."""
    format: Literal["parquet", "openai-batch"] = "parquet"
    """openai-batch: beside data/, output.jsonl and errors.jsonl as a client of the OpenAI batch API expects them."""
    keep_columns: Literal["all", "none"] | tuple[str, ...] = "all"
    """Input columns carried to the output: all (but id, prompt, messages and sampling), none, or a list of names."""
    token_ids: bool = False
    """Also write the output's token ids."""


class ErrorsSpec(Section):
    """How many rows may fail."""

    max_failed_fraction: Annotated[Float, Field(ge=0, le=1)] = 0.01
    """Above this share of failed rows the job ends with exit code 2."""
    abort_after_consecutive: Annotated[Int, Field(ge=1)] = 100
    """Stop after so many failed rows in a run."""


class RunSpec(Section):
    """Order and limits of one run of the job."""

    order: Literal["auto", "input"] = "auto"
    """auto runs rows with a common prefix together, the longest first, and with a draft model also the rows of a group,
    within a window; the output keeps its order."""
    timeout_s: Annotated[Float, Field(gt=0, allow_inf_nan=False)] | None = None
    """A row that the engine has worked on for so many seconds fails with `timeout`."""
    grace_s: Annotated[Float, Field(ge=0, allow_inf_nan=False)] = 20.0
    """Seconds to save progress after SIGTERM."""
    max_runtime_s: Annotated[Float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Save progress and stop after so many seconds."""
    shard: Annotated[str, Field(pattern=r"^[0-9]+/[1-9][0-9]*$")] | None = None
    """i/n: only the i-th (from 0) of n contiguous ranges of rows."""


class EngineSpec(Section):
    """Sizes and switches of the engine; auto chooses from the model and the free memory."""

    max_num_seqs: Annotated[Int, Field(ge=1)] | Literal["auto"] = "auto"
    """Most rows that run at once."""
    max_num_batched_tokens: Annotated[Int, Field(ge=1)] | Literal["auto"] = "auto"
    """Token budget of a step, drafts not counted."""
    gpu_memory_utilization: Annotated[Float, Field(gt=0, le=1)] = 0.9
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")] = "auto"
    """auto, cpu, cuda or cuda:N."""
    deterministic: bool = False
    """Bit-equal results whatever the batch around a row."""


class MetricsSpec(Section):
    """Live metrics."""

    prometheus_port: Annotated[Int, Field(ge=0, le=65535)] | None = None
    """Serve the running job's counters on this port."""
