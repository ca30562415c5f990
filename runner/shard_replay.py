"""Rows whose outputs are known, again under another policy or with another drafter, without the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from ..engine.checkpoint import Checkpoint
from ..engine.config import EngineConfig
from ..engine.trace import EngineStats, StepRecord
from ..jobs.errors import ConfigError
from ..jobs.spec import JobSpec
from ..jobs.speculation import DRAFT_MODEL_METHODS
from .build import Builder, engine_config
from .contender import Contender
from .drafting import DrafterLoader, choose_method
from .recorded import JobRows, RecordedShard, Recording
from .recorded_acceptance import recorded_rates
from .step_cost import RecordedCosts

if TYPE_CHECKING:
    from ..engine.drafters.base import Drafter
    from ..engine.target import Target
    from .replay_engine import RecordedTarget, ReplayEngine, StepCosts

MakeDrafter = Callable[[str], "Drafter | None"]
"""A new drafter by a speculation.method, with nothing learned."""


@dataclass(frozen=True, slots=True)
class ReplayedShard:
    """One engine's rows under one policy."""

    stats: EngineStats
    unseen_s: float
    """Seconds of steps whose row count was never measured."""
    drafting_measured: bool
    """Whether nobody knew what drafting costs, so that it was measured here."""


@dataclass(frozen=True, slots=True)
class ShardReplay:
    """Runs the rows of one shard as often as it is asked to."""

    outputs: dict[int, list[int]]
    rows: JobRows
    costs: StepCosts
    target: RecordedTarget
    config: EngineConfig
    """With num_kv_blocks and max_num_seqs."""
    method: str
    """The job's own way to draft, whose costs are known."""
    make_drafter: MakeDrafter
    with_grammars: bool = True
    """Whether the outputs are such that the rows' grammars can follow them."""

    @classmethod
    def of(
        cls, recording: Recording, shard: RecordedShard, builder: Builder, warn: Callable[[str], None]
    ) -> ShardReplay:
        """Encodes the shard's prompts and fits what its steps cost. Raises as Recording.rows()."""
        spec, steps = recording.spec, shard.steps
        longest = max(recording.num_prompt_tokens[row] + len(ids) for row, ids in recording.outputs.items())
        target, config = replay_target(
            spec, str(shard.report.get("device") or "cpu"), builder.max_model_len(spec) or longest
        )
        num_blocks = steps.num_kv_blocks()
        if num_blocks and num_blocks * config.block_size >= longest:
            config = replace(config, num_kv_blocks=num_blocks)
        tokenizer = builder.tokenizer(spec)
        loader = DrafterLoader(spec, config, cast("Target", target), tokenizer, _no_draft_model, warn, with_own=False)

        def make_drafter(method: str) -> Drafter | None:
            return stand_in(recording, shard, method) if method in DRAFT_MODEL_METHODS else loader.make(method)

        return cls(
            recording.outputs,
            recording.rows(shard, builder, target.max_model_len),
            RecordedCosts.fit(steps),
            target,
            config,
            choose_method(spec.speculation).method,
            make_drafter,
            recording.has_token_ids,
        )

    def run(self, contender: Contender) -> ReplayedShard:
        """All rows under a policy that knows nothing yet."""
        from .replay_engine import ReplayEngine

        method = contender.method or self.method
        limit = max(self.config.max_draft_tokens, contender.num_draft_tokens)
        config = replace(self.config, max_draft_tokens=limit)
        drafter = self.make_drafter(method) if contender.has_drafter else None
        # Another drafter than the recorded one costs something else.
        costs = self.costs if method == self.method else self.costs.without_drafting()
        return self._drive(ReplayEngine(self.outputs, costs, self.target, config, contender.policy(), drafter))

    def run_oracle(self) -> ReplayedShard:
        """All rows under the best uniform draft length of each step."""
        from .replay_engine import OracleEngine

        drafter = self.make_drafter(self.method)
        return self._drive(OracleEngine(self.outputs, self.costs, self.target, self.config, drafter))

    def _drive(self, engine: ReplayEngine) -> ReplayedShard:
        unseen_s = drafting_s = 0.0

        def on_step(record: StepRecord) -> None:
            nonlocal unseen_s, drafting_s
            drafting_s += record.draft_s
            if not engine.costs.is_known(record.num_batched_tokens):
                unseen_s += record.verify_s + record.draft_s

        engine.on_step = on_step
        for output in engine.run(self.rows.fresh(self.with_grammars)):
            if output.error is not None:
                raise ConfigError(
                    f"row {output.request_id} cannot be replayed ({output.error}); the recorded steps do not tell how "
                    "large the KV cache was: run the job again without a retry"
                )
        is_measured = drafting_s > 0 and engine.costs.draft_s(1, 1) is None
        return ReplayedShard(engine.stats, unseen_s, is_measured)


def replay_target(spec: JobSpec, device: str, max_model_len: int) -> tuple[RecordedTarget, EngineConfig]:
    """What stands in for the model, and the job's engine settings with room in the KV cache for every request."""
    from ..engine.engine import MAX_NUM_SEQS
    from .replay_engine import RecordedDevice, RecordedTarget

    target = RecordedTarget(RecordedDevice(device), max_model_len)
    config = engine_config(spec)
    num_seqs = config.max_num_seqs or MAX_NUM_SEQS.get(target.device.type, MAX_NUM_SEQS["cpu"])
    num_blocks = num_seqs * -(-max_model_len // config.block_size)
    return target, replace(config, request_timeout_s=None, max_num_seqs=num_seqs, num_kv_blocks=num_blocks)


def stand_in(recording: Recording, shard: RecordedShard, method: str) -> Drafter | None:
    """Right as often as the shard's draft model was, though not in the same places; None where it never drafted."""
    from ..engine.drafters.synthetic import SyntheticDrafter

    rates = recorded_rates(shard)
    if rates is None:
        return None
    drafter = SyntheticDrafter(recording.outputs, rates, seed=0, confidence="none")
    drafter.kind = method
    return drafter


def is_estimate(spec: JobSpec) -> bool:
    """Whether the job's drafter can only be imitated."""
    return choose_method(spec.speculation).has_draft_model


def _no_draft_model() -> Checkpoint:
    raise AssertionError("a replay runs no draft model")
