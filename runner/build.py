"""From a job to the things that run it: tokenizer, policy, drafter, engine. The only place that knows both sides."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..engine.checkpoint import Checkpoint, max_model_len, resolve_checkpoint
from ..engine.config import EngineConfig
from ..engine.errors import ModelError
from ..jobs.errors import ConfigError
from ..jobs.spec import JobSpec
from ..policies.base import SpeculationPolicy
from ..policies.registry import PolicyError, make_policy
from .fingerprint import checkpoint_identity
from .pipeline import JobEngine
from .tokenizer import TextTokenizer, Tokenizer

if TYPE_CHECKING:
    from ..engine.drafters.base import Drafter


class Builder(Protocol):
    """Where run_job gets its parts from; tests bring their own."""

    def identity(self, spec: JobSpec) -> dict[str, Any]:
        """What of the model decides the outputs, for the fingerprint; quick, loads nothing."""
        ...

    def policy(self, spec: JobSpec) -> SpeculationPolicy:
        """The policy of the job; ConfigError when there is no such policy."""
        ...

    def max_model_len(self, spec: JobSpec) -> int | None:
        """Most tokens in a row as far as it is known without weights, for `validate`."""
        ...

    def tokenizer(self, spec: JobSpec) -> TextTokenizer:
        """The model's tokenizer; ModelError when there is none."""
        ...

    def engine(self, spec: JobSpec, tokenizer: TextTokenizer, policy: SpeculationPolicy) -> JobEngine:
        """The engine with its weights loaded; ModelError or EngineError when that fails."""
        ...


class ModelBuilder:
    """Builds the real parts. policy_folder: where a user's own policy module may lie, such as the job file's folder."""

    def __init__(self, policy_folder: Path | None = None) -> None:
        self._policy_folder = policy_folder
        self._checkpoint: Checkpoint | None = None

    def checkpoint(self, spec: JobSpec) -> Checkpoint:
        """The model's files, looked up once; ModelError when there are none."""
        if self._checkpoint is None:
            self._checkpoint = resolve_checkpoint(spec.model.path, spec.model.revision)
        return self._checkpoint

    def identity(self, spec: JobSpec) -> dict[str, Any]:
        """See Builder."""
        return checkpoint_identity(self.checkpoint(spec))

    def policy(self, spec: JobSpec) -> SpeculationPolicy:
        """See Builder. With method none the policy is checked, and then never asked."""
        policy = spec.speculation.policy
        if "search_path" in policy.kwargs:
            raise ConfigError("speculation.policy: unknown key search_path")
        try:
            made = make_policy(policy.name, search_path=self._policy_folder, **policy.kwargs)
            return make_policy("never") if spec.speculation.method == "none" else made
        except PolicyError as exc:
            raise ConfigError(f"speculation.policy: {exc}") from exc

    def max_model_len(self, spec: JobSpec) -> int | None:
        """See Builder."""
        from transformers import AutoConfig

        checkpoint = self.checkpoint(spec)
        try:
            config = AutoConfig.from_pretrained(
                checkpoint.folder, trust_remote_code=spec.model.trust_remote_code, **checkpoint.from_pretrained_kwargs()
            )
        except Exception as exc:  # transformers raises OSError, ValueError, KeyError, ImportError and more here
            reason = " ".join(str(exc).split()) or type(exc).__name__
            raise ModelError(f"model.path {checkpoint.name!r}: its configuration does not load: {reason}") from exc
        return max_model_len(config.get_text_config(), spec.model.max_model_len)

    def tokenizer(self, spec: JobSpec) -> TextTokenizer:
        """See Builder."""
        return Tokenizer.from_checkpoint(self.checkpoint(spec), spec.model.trust_remote_code)

    def engine(self, spec: JobSpec, tokenizer: TextTokenizer, policy: SpeculationPolicy) -> JobEngine:
        """See Builder."""
        from ..engine.engine import Engine

        drafter = make_drafter(spec.speculation.method)
        checkpoint = self.checkpoint(spec)
        return Engine.load(checkpoint, engine_config(spec), policy, drafter, tokenizer.token_bytes())


def make_drafter(method: str) -> Drafter | None:
    """The drafter of a `speculation.method`; None for `none`."""
    from ..engine.drafters.ngram import NgramDrafter

    return NgramDrafter() if method == "ngram" else None


def engine_config(spec: JobSpec) -> EngineConfig:
    """The engine's settings as the job has them; "auto" leaves the choice to the engine."""
    engine = spec.engine
    return EngineConfig(
        max_num_seqs=None if engine.max_num_seqs == "auto" else engine.max_num_seqs,
        max_num_batched_tokens=None if engine.max_num_batched_tokens == "auto" else engine.max_num_batched_tokens,
        max_model_len=spec.model.max_model_len,
        max_draft_tokens=spec.speculation.max_draft_tokens,
        dtype=spec.model.dtype,
        device=engine.device,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        deterministic=engine.deterministic,
        request_timeout_s=spec.run.timeout_s,
        trust_remote_code=spec.model.trust_remote_code,
    )
