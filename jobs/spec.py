"""A job: one strict YAML file, validated and resolved. Every key that specrun understands is in this file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .errors import ConfigError
from .fields import Float, Int, LocalPath, Strings, Text
from .job_file import apply_overrides, escape, expand, read_job_file
from .problems import describe


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class ModelSpec(_Section):
    """The target model."""

    path: Text
    """A local folder, a .gguf file, a hub id or package:NAME."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: Annotated[Int, Field(ge=1)] | None = None
    """Most tokens, prompt and output, in a row; null is what the model was made for."""
    trust_remote_code: bool = False
    """Let a checkpoint run Python code that it brings along."""


class PolicySpec(_Section):
    """Who decides how far to speculate; keys besides `name` go to the policy."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"type": ["object", "string"]})

    name: Text = "batch_threshold"
    """A known policy or module:Class."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @property
    def kwargs(self) -> dict[str, Any]:
        """The policy's own keys."""
        return dict(self.model_extra or {})


class SpeculationSpec(_Section):
    """How drafts are made and who decides about them."""

    method: Literal["none", "ngram"] = "none"
    max_draft_tokens: Annotated[Int, Field(ge=1)] = 5
    """Most draft tokens for a request in a step."""
    policy: PolicySpec = PolicySpec()


class ColumnsSpec(_Section):
    """Which input columns hold what."""

    id: Text | None = None
    prompt: Text | None = None
    """Text column; "prompt" when neither prompt nor messages is given."""
    messages: Text | None = None
    """Conversation column: a list of role and content, or that as JSON text."""

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


class InputSpec(_Section):
    """Where rows come from."""

    path: LocalPath
    """A file, a folder or a glob of *.parquet, *.jsonl, *.jsonl.gz or *.jsonl.zst."""
    format: Literal["auto", "parquet", "jsonl"] = "auto"
    columns: ColumnsSpec = ColumnsSpec(prompt="prompt")
    limit: Annotated[Int, Field(ge=1)] | None = None
    """Only the first rows."""


class PromptSpec(_Section):
    """From columns to the text that the model sees."""

    system: str | None = None
    """System message before each prompt."""
    template: Text | None = None
    """Jinja template of the prompt; every input column is a variable."""
    chat_template: Text = "default"
    """default (the model's own), none (plain text) or the path of a Jinja file."""
    overflow: Literal["error", "clamp", "truncate_left", "truncate_right"] = "error"
    """When prompt and max_tokens do not fit: fail the row, shorten the output, or cut the prompt."""


class SamplingSpec(_Section):
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


class OutputSpec(_Section):
    """Where rows go."""

    path: LocalPath
    """The output folder."""
    if_exists: Literal["resume", "error", "overwrite", "skip"] = "resume"
    rows_per_part: Annotated[Int, Field(ge=1)] = 10_000
    """Rows in a part file, the unit of commit."""
    format: Literal["parquet"] = "parquet"
    keep_columns: Literal["all", "none"] | tuple[str, ...] = "all"
    """Input columns carried to the output: all (but id, prompt, messages and sampling), none, or a list of names."""
    token_ids: bool = False
    """Also write the output's token ids."""


class ErrorsSpec(_Section):
    """How many rows may fail."""

    max_failed_fraction: Annotated[Float, Field(ge=0, le=1)] = 0.01
    """Above this share of failed rows the job ends with exit code 2."""
    abort_after_consecutive: Annotated[Int, Field(ge=1)] = 100
    """Stop after so many failed rows in a run."""


class RunSpec(_Section):
    """Limits of one run of the job."""

    grace_s: Annotated[Float, Field(ge=0, allow_inf_nan=False)] = 20.0
    """Seconds to save progress after SIGTERM."""
    max_runtime_s: Annotated[Float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Save progress and stop after so many seconds."""


class EngineSpec(_Section):
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


class MetricsSpec(_Section):
    """Live metrics."""

    prometheus_port: Annotated[Int, Field(ge=0, le=65535)] | None = None
    """Serve the running job's counters on this port."""


class JobSpec(_Section):
    """A whole job.yaml, frozen."""

    version: Literal[1] = 1
    name: Text = "job"
    model: ModelSpec
    speculation: SpeculationSpec = SpeculationSpec()
    input: InputSpec
    prompt: PromptSpec = PromptSpec()
    sampling: SamplingSpec = SamplingSpec()
    output: OutputSpec
    errors: ErrorsSpec = ErrorsSpec()
    run: RunSpec = RunSpec()
    engine: EngineSpec = EngineSpec()
    metrics: MetricsSpec = MetricsSpec()

    @model_validator(mode="after")
    def _prompt_fits_columns(self) -> JobSpec:
        chat = self.prompt.chat_template != "none"
        if self.input.columns.messages is not None:
            for key in ("template", "system"):
                if getattr(self.prompt, key) is not None:
                    raise ValueError(f"prompt.{key} does not go with input.columns.messages; put it into the messages")
            if not chat:
                raise ValueError("input.columns.messages needs a chat template; remove prompt.chat_template: none")
        if self.prompt.system is not None and not chat:
            raise ValueError("prompt.system needs a chat template; remove prompt.chat_template: none")
        return self

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = (), now: datetime | None = None) -> JobSpec:
        """Read a job file, apply `--set` overrides, expand `${ENV}` and `{date}`, and check it all.

        Relative paths in it are relative to the working directory. Raises ConfigError, one line a problem.
        """
        file = Path(path)
        values = read_job_file(file)
        set_paths = apply_overrides(values, overrides)
        values.setdefault("name", file.name.split(".")[0])
        expand(values, str(file), now or datetime.now())
        try:
            spec = cls.model_validate(values)
        except ValidationError as exc:
            raise ConfigError(describe(exc, cls, str(file), set_paths)) from exc
        spec.chat_template_text()
        return spec

    def chat_template_text(self) -> str | None:
        """The text of the chat template file; None for default and none. Raises ConfigError when it cannot be read."""
        if self.prompt.chat_template in ("default", "none"):
            return None
        try:
            return Path(self.prompt.chat_template).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            reason = (exc.strerror if isinstance(exc, OSError) else None) or str(exc)
            raise ConfigError(
                f"prompt.chat_template: cannot read {self.prompt.chat_template!r} ({reason}); "
                "write default, none or the path of a Jinja file"
            ) from exc

    def fingerprint_fields(self) -> dict[str, Any]:
        """Everything here that can change an output row or where it stands; PromptSource.identity() has the data."""
        parts: dict[str, Any] = {
            "model": True,
            "input": {"columns", "limit"},
            "prompt": True,
            "sampling": True,
            "output": {"rows_per_part", "format", "keep_columns", "token_ids"},
            "engine": {"deterministic"},
        }
        fields = self.model_dump(mode="json", include=parts)
        text = self.chat_template_text()
        if text is not None:
            fields["prompt"]["chat_template"] = f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
        # One device of a kind rounds like another.
        fields["engine"]["device"] = self.engine.device.partition(":")[0]
        return fields

    def resolved_yaml(self) -> str:
        """The job with every default written out; JobSpec.load gives the same job back."""
        return yaml.safe_dump(escape(self.model_dump(mode="json")), sort_keys=False, allow_unicode=True, width=1000)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a job file, for editors."""
    return JobSpec.model_json_schema()
