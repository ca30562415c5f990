"""From a job to the things that run it: tokenizer, policy, drafter, engine. The only place that knows both sides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..engine.checkpoint import Checkpoint, max_model_len, resolve_checkpoint
from ..engine.config import EngineConfig
from ..engine.errors import ModelError
from ..jobs.errors import ConfigError
from ..jobs.spec import JobSpec
from ..policies.base import SpeculationPolicy
from ..policies.registry import PolicyError, make_policy
from .drafting import DrafterLoader, about_draft_model, choose_method
from .fingerprint import checkpoint_identity
from .grammar import GrammarCompiler
from .pipeline import JobEngine
from .profile import profile_identity, with_costs
from .sampling import Compile, check_job_format
from .tokenizer import TextTokenizer, Tokenizer

if TYPE_CHECKING:
    from ..engine.target import Target


class Builder(Protocol):
    """Where run_job gets its parts from; tests bring their own. Subclass it: what only some jobs need has a default."""

    def identity(self, spec: JobSpec) -> dict[str, Any]:
        """What of the model decides the outputs, for the fingerprint; quick, loads nothing."""
        ...

    def draft_identity(self, spec: JobSpec) -> dict[str, Any] | None:
        """The same of the draft model; None for a job that runs none."""
        return None

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
        """The engine with its weights loaded; ModelError or EngineError when that fails, ConfigError where nothing can
        follow the job's own response format."""
        ...

    def grammars(self, tokenizer: TextTokenizer, engine: JobEngine | None = None) -> Compile | None:
        """What makes the grammars of rows with a response format; without it such rows fail. Without an engine it may
        only serve to see whether a format is any good."""
        return None


class ModelBuilder(Builder):
    """Builds the real parts of one job.

    policy_folder: where a user's own policy module may lie, such as the job file's folder. warn: hears what of earlier
    outputs could not be used.
    """

    def __init__(self, policy_folder: Path | None = None, warn: Callable[[str], None] = lambda text: None) -> None:
        self._policy_folder = policy_folder
        self._warn = warn
        self._tokenizer: TextTokenizer | None = None
        self._checkpoint: Checkpoint | None = None
        self._draft_checkpoint: Checkpoint | None = None
        self._identities: dict[Checkpoint, dict[str, Any]] = {}

    def checkpoint(self, spec: JobSpec) -> Checkpoint:
        """The model's files, looked up once; ModelError when there are none."""
        if self._checkpoint is None:
            self._checkpoint = resolve_checkpoint(spec.model.path, spec.model.revision)
        return self._checkpoint

    def draft_checkpoint(self, spec: JobSpec) -> Checkpoint:
        """Those of the draft model, which the job must name."""
        if self._draft_checkpoint is None:
            assert spec.speculation.model is not None
            with about_draft_model():
                self._draft_checkpoint = resolve_checkpoint(spec.speculation.model, spec.speculation.revision)
        return self._draft_checkpoint

    def identity(self, spec: JobSpec) -> dict[str, Any]:
        """See Builder."""
        return self._identity(self.checkpoint(spec))

    def draft_identity(self, spec: JobSpec) -> dict[str, Any] | None:
        """See Builder."""
        if not choose_method(spec.speculation).has_draft_model:
            return None
        return self._identity(self.draft_checkpoint(spec))

    def _identity(self, checkpoint: Checkpoint) -> dict[str, Any]:
        if checkpoint not in self._identities:
            self._identities[checkpoint] = checkpoint_identity(checkpoint)
        return self._identities[checkpoint]

    def policy(self, spec: JobSpec) -> SpeculationPolicy:
        """See Builder. With method none the policy is checked, and then never asked."""
        policy = spec.speculation.policy
        if "search_path" in policy.kwargs:
            raise ConfigError("speculation.policy: unknown key search_path")
        try:
            kwargs = with_costs(policy.name, policy.kwargs, profile_identity(spec))
            made = make_policy(policy.name, search_path=self._policy_folder, **kwargs)
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
        """See Builder. Loaded once."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_checkpoint(self.checkpoint(spec), spec.model.trust_remote_code)
        return self._tokenizer

    def engine(self, spec: JobSpec, tokenizer: TextTokenizer, policy: SpeculationPolicy) -> JobEngine:
        """See Builder."""
        from ..engine.engine import Engine
        from ..engine.target import Target

        config = engine_config(spec)
        target = Target.load(self.checkpoint(spec), config)
        policy_spec = spec.speculation.policy
        with_costs(policy_spec.name, policy_spec.kwargs, profile_identity(spec, target))  # only now is the device known
        # Once more: only now it is known whether the model ends its outputs at all.
        check_job_format(spec, GrammarCompiler(tokenizer, target.vocab_size, target.eos_token_ids).compile)
        drafter = self.drafters(spec, config, target, tokenizer).make()
        return Engine(target, config, policy, drafter, tokenizer.token_bytes())

    def grammars(self, tokenizer: TextTokenizer, engine: JobEngine | None = None) -> Compile:
        """See Builder; `engine` is one of engine()'s."""
        from ..engine.engine import Engine

        if engine is None:  # whatever the model ends its outputs with: here an id past all others
            num_ids = len(tokenizer.token_bytes())
            return GrammarCompiler(tokenizer, num_ids + 1, [num_ids]).compile
        assert isinstance(engine, Engine)
        return GrammarCompiler(tokenizer, engine.target.vocab_size, engine.target.eos_token_ids).compile

    def drafters(
        self, spec: JobSpec, config: EngineConfig, target: Target, tokenizer: TextTokenizer, with_own: bool = True
    ) -> DrafterLoader:
        """What makes drafters for a target that is loaded; arguments as DrafterLoader's."""
        return DrafterLoader(spec, config, target, tokenizer, lambda: self.draft_checkpoint(spec), self._warn, with_own)


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
