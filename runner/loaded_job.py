"""A job with its model in memory, to be measured on its own rows as often as it takes. Writes nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..engine.config import EngineConfig
from ..engine.request import Request
from ..jobs.errors import ConfigError
from ..jobs.prompts import PromptSource
from ..jobs.spec import JobSpec
from .build import ModelBuilder, engine_config
from .conversation import PromptText
from .drafting import DrafterLoader
from .fingerprint import pin
from .grammar import GrammarCompiler
from .grouping import RequestGroups
from .requests import RequestBuilder
from .run import job_sampling
from .sampling import Compile, check_job_format
from .tokenizer import TextTokenizer

if TYPE_CHECKING:
    from ..engine.drafters.base import Drafter
    from ..engine.target import Target


@dataclass(frozen=True, slots=True)
class LoadedJob:
    """What engines are made of, and the requests to run in each; see requests.fresh_request()."""

    spec: JobSpec
    """Pinned to its models."""
    source: PromptSource
    tokenizer: TextTokenizer
    config: EngineConfig
    """Without a time limit: every engine must finish the same rows."""
    target: Target
    requests: list[Request]
    num_skipped: int
    """Bad rows."""
    drafters: DrafterLoader

    @classmethod
    def load(cls, spec: JobSpec, builder: ModelBuilder) -> LoadedJob:
        """Raises JobError, ModelError or EngineError; ConfigError when no row is good."""
        from ..engine.target import Target

        source = PromptSource(spec)
        spec = pin(spec, builder.identity(spec), builder.draft_identity(spec))
        tokenizer = builder.tokenizer(spec)
        config = replace(engine_config(spec), request_timeout_s=None)
        target = Target.load(builder.checkpoint(spec), config)
        compile = GrammarCompiler(tokenizer, target.vocab_size, target.eos_token_ids).compile
        requests, num_skipped = _requests(spec, source, tokenizer, target.max_model_len, compile)
        drafters = builder.drafters(spec, config, target, tokenizer, with_own=False)
        return cls(spec, source, tokenizer, config, target, requests, num_skipped, drafters)

    def make_drafter(self, method: str | None = None) -> Drafter | None:
        """A drafter for the next engine, as DrafterLoader.make(); the last one is of no use after this."""
        self.drafters.release()  # as the target's KV cache: before the next one is sized
        return self.drafters.make(method)


def _requests(
    spec: JobSpec, source: PromptSource, tokenizer: TextTokenizer, max_model_len: int, compile: Compile
) -> tuple[list[Request], int]:
    """All good rows of the job, and how many bad ones were left out."""
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
