"""A job: one strict YAML file, validated and resolved."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import PrivateAttr, ValidationError, model_validator

from .errors import ConfigError
from .fields import Text
from .job_file import KeyPath, apply_overrides, escape, expand, hide, parse_job, put_back, read_job_file
from .problems import describe
from .response_format import parse_response_format
from .sections import (
    ColumnsSpec,
    EngineSpec,
    ErrorsSpec,
    InputSpec,
    MetricsSpec,
    ModelSpec,
    OutputSpec,
    PromptSpec,
    RunSpec,
    SamplingSpec,
    Section,
)
from .speculation import SpeculationSpec


class JobSpec(Section):
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

    _templates: dict[KeyPath, str] = PrivateAttr(default_factory=dict)
    """Values that came from the environment, as the file has them."""

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

    @model_validator(mode="after")
    def _batch_lines_say_it_all(self) -> JobSpec:
        if self.input.format == "openai-batch":
            if self.input.columns != ColumnsSpec(prompt="prompt"):
                raise ValueError("input.columns does not go with input.format: openai-batch; remove it")
            for key in ("template", "system"):
                if getattr(self.prompt, key) is not None:
                    raise ValueError(f"prompt.{key} does not go with input.format: openai-batch; put it into the lines")
            if not isinstance(self.output.keep_columns, str):
                raise ValueError("output.keep_columns does not go with input.format: openai-batch; remove it")
        elif self.output.format == "openai-batch" and self.input.columns.id is None:
            raise ValueError("output.format: openai-batch needs input.columns.id, which becomes the custom_id")
        return self

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = (), now: datetime | None = None) -> JobSpec:
        """Read a job file, apply `--set` overrides, expand `${ENV}` and `{date}`, and check it all.

        Relative paths in it are relative to the working directory. Raises ConfigError, one line a problem.
        """
        return cls.parse(read_job_file(Path(path)), str(path), overrides, now)

    @classmethod
    def parse(cls, text: str, file: str, overrides: Sequence[str] = (), now: datetime | None = None) -> JobSpec:
        """As load(), for a text that came from `file`."""
        values = parse_job(text, file)
        set_paths = apply_overrides(values, overrides)
        values.setdefault("name", Path(file).name.split(".")[0])
        templates = expand(values, file, now or datetime.now())
        try:
            spec = cls.model_validate(values)
        except ValidationError as exc:
            raise ConfigError(describe(exc, cls, file, set_paths, secret=templates)) from exc
        spec._templates = templates
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
            written = self._templates.get(("prompt", "chat_template"))
            shown = written or self.prompt.chat_template
            raise ConfigError(
                f"prompt.chat_template: cannot read {shown!r} ({reason}); "
                "write default, none or the path of a Jinja file"
            ) from (None if written else exc)

    def fingerprint_fields(self) -> dict[str, Any]:
        """Everything here that can change an output row or where it stands.

        The model's files and the input's content are not here: their paths alone cannot change a row.
        """
        parts: dict[str, Any] = {
            "model": {"dtype", "max_model_len", "trust_remote_code"},
            "input": {"columns", "limit"},
            "prompt": True,
            "sampling": True,
            "output": {"rows_per_part", "format", "keep_columns", "token_ids"},
            "engine": {"deterministic"},
        }
        if self.input.format == "openai-batch":
            parts["model"].add("served_model_name")
            parts["input"].add("format")
        fields = self.model_dump(mode="json", include=parts)
        text = self.chat_template_text()
        if text is not None:
            fields["prompt"]["chat_template"] = f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
        del fields["input"]["columns"]["group"]
        # No key where there is no form, so that a job from before there were any goes on.
        del fields["sampling"]["response_format"]
        if (form := parse_response_format(self.sampling.response_format)) is not None:
            # As one text, since a fingerprint knows no order of keys and that of a schema's decides the output's.
            fields["sampling"]["response_format"] = f"{form.type}: {form.value}"
        # One device of a kind rounds like another.
        fields["engine"]["device"] = self.engine.device.partition(":")[0]
        return fields

    @property
    def secret_keys(self) -> list[str]:
        """Keys (a.b.c) whose values came from the environment and are never written down."""
        return [".".join(path) for path in self._templates]

    def hide(self, text: str) -> str:
        """`text` for people: values from the environment in it are shown as the `${NAME}` that they came from."""
        return hide(text, self._templates.values())

    def resolved_yaml(self) -> str:
        """The job with every default written out and relative paths made absolute; `${NAME}` stays as it was written.

        JobSpec.load() gives the same job back, wherever it is called.
        """
        values = self.model_dump(mode="json", exclude={"run": {"shard"}})
        templates = {path: text for path, text in self._templates.items() if path != ("run", "shard")}
        resolved = escape(values)
        for path, is_location in self._paths():
            given = os.path.expanduser(_value(values, path))
            local = os.path.abspath(given)
            # A model may be a hub id and a chat template a word, so of these only what is there is a path.
            if "://" not in given and (is_location or os.path.exists(local)):
                _value(resolved, path[:-1])[path[-1]] = escape(local)
                written = _written(templates, path)
                if written is not None and not os.path.isabs(given):
                    templates[written] = os.path.join(escape(os.getcwd()), templates[written])
        put_back(resolved, templates)
        return yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True, width=1000)

    def _paths(self) -> Iterator[tuple[tuple[str | int, ...], bool]]:
        """Where paths stand, and whether what stands there is one in any case."""
        yield from ((("input", "path"), True), (("output", "path"), True))
        yield from ((("model", "path"), False), (("prompt", "chat_template"), False))
        speculation = self.speculation
        if speculation.model is not None:
            yield ("speculation", "model"), False
        if speculation.policy.name == "goodput" and isinstance(speculation.policy.kwargs.get("profile"), str):
            yield ("speculation", "policy", "profile"), True
        for place in range(len(speculation.warm_from or ())):
            yield ("speculation", "warm_from", place), True
        if speculation.synthetic is not None:
            yield ("speculation", "synthetic", "replay"), True

    def pinned(self, found: Mapping[str, Mapping[str, str | None]]) -> JobSpec:
        """The job with the revision and the content_hash that were found for the models of these sections.

        A `${NAME}` stays where it stands for the very value. Raises ConfigError where the job asks for other content.
        """
        sections: dict[str, Section] = {}
        spec = self.model_copy()
        spec._templates = dict(self._templates)
        for name, pins in found.items():
            section: ModelSpec | SpeculationSpec = getattr(self, name)
            if section.content_hash not in (None, pins["content_hash"]):
                key = "path" if name == "model" else "model"
                raise ConfigError(
                    f"{name}.content_hash: the files of {name}.{key} {getattr(section, key)!r} have "
                    f"{pins['content_hash']}, the job asks for {section.content_hash}; put those files back, or, for "
                    f"a job that begins anew, set {name}.content_hash: null"
                )
            update = {key: value for key, value in pins.items() if value not in (None, getattr(section, key))}
            sections[name] = section.model_copy(update=update)
            for key in update:
                spec._templates.pop((name, key), None)
        return spec.model_copy(update=sections)


def _value(values: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        values = values[key]
    return values


def _written(templates: Mapping[KeyPath, str], path: tuple[str | int, ...]) -> KeyPath | None:
    """The key under which a value came from the environment: its own, or its list's, written as one value."""
    own = tuple(map(str, path))
    return own if own in templates else own[:-1] if own[:-1] in templates else None


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a job file, for editors."""
    return JobSpec.model_json_schema()
