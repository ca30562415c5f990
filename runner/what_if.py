"""What policies would do to a job that has not run: its rows and lengths, with an assumed acceptance and cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from numpy.typing import NDArray

from ..jobs.errors import ConfigError
from ..jobs.prompts import PromptSource
from ..jobs.spec import JobSpec
from ..policies.cost_model import CostModel
from ..policies.simulator.surface import GPUS, CostSurface, roofline
from .build import Builder, ModelBuilder
from .contender import NONE, Contender
from .drafting import choose_method
from .profile import read_profile
from .recorded import JobRows
from .shard_replay import ShardReplay, replay_target
from .simulation_report import ORACLE, SimulatedRun, Simulation

if TYPE_CHECKING:
    from ..engine.checkpoint import Checkpoint
    from ..engine.drafters.base import Drafter
    from .replay_engine import StepCosts

Float64 = NDArray[np.float64]

HOST_DRAFT_S = {"ngram": (2e-5, 2e-5), "suffix": (2e-4, 8e-6)}
"""Seconds of a step that drafts, and for each request, of drafters without weights: fitted to
examples/benchmarks/drafters.md. A drafter that is not here is taken to cost what suffix does."""
LAUNCH_S = 6e-4
"""Of a pass of a draft model, besides reading its weights."""
ASSUMED_PARAMS = 7e9
DEFAULT_GPU = "H100"
WEIGHT_FILES = (".safetensors", ".gguf")


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What nobody knows before a job has run."""

    acceptance_rates: tuple[float, ...] = (0.7,)
    """Chance of draft 1, 2, ... to be right if all before it were; the last one carries on."""
    output_tokens: int | None = None
    """Length of every output; None: max_tokens."""
    gpu: str = DEFAULT_GPU
    """Of policies.simulator.surface.GPUS, by whose roofline a step costs what it does;"""
    profile: Path | None = None
    """or a profile that was measured."""

    @classmethod
    def parse(
        cls, output_tokens: int | None, acceptance: str | None, gpu: str | None, profile: Path | None
    ) -> Assumptions:
        """Of the command's options; None stands for a default. Raises click.BadParameter."""
        if gpu is not None and gpu not in GPUS:
            raise click.BadParameter(f"{gpu!r} is not known; choose {', '.join(GPUS)}", param_hint="--gpu")
        rates = cls().acceptance_rates if acceptance is None else _parse_rates(acceptance)
        return cls(rates, output_tokens, gpu or DEFAULT_GPU, profile)


def simulate_job(
    spec: JobSpec,
    contenders: Sequence[Contender],
    builder: Builder,
    assumed: Assumptions,
    progress: Callable[[str], None] = lambda line: None,
) -> Simulation:
    """Run the rows of a job under every policy, with outputs that say nothing and drafts that are right by chance.

    Encodes the prompts and loads no weights. Raises JobError or ModelError, whose text is one line with the mend.
    """
    if (other := next((c for c in contenders if c.method is not None), None)) is not None:
        raise click.BadParameter(
            f"{other.label!r}: before a job has run all drafts are as good as was assumed; leave the method out, or "
            "choose another with --set speculation.method=...",
            param_hint="--policies",
        )
    costs, cost_text = _costs(spec, builder, assumed)
    replay = _replay(spec, builder, assumed, costs)
    runs = []
    for contender in contenders:
        progress(f"simulating {contender.label}")
        part = replay.run(contender)
        runs.append(SimulatedRun.of(contender.label, [part.stats]))
    if replay.method != NONE:
        progress(f"simulating the {ORACLE}")
        runs.append(SimulatedRun.of(ORACLE, [replay.run_oracle().stats]))
    num_prompt = [len(request.prompt_token_ids) for request in replay.rows.requests]
    facts: dict[str, Any] = {
        "job": spec.name,
        "kind": "what-if",
        "method": replay.method,
        "num_rows": len(num_prompt),
        "num_prompt_tokens": sum(num_prompt),
        "num_output_tokens": sum(map(len, replay.outputs.values())),
        "max_num_seqs": replay.config.max_num_seqs,
        "acceptance_rates": list(assumed.acceptance_rates),
        "cost": cost_text,
    }
    rates = ", ".join(f"{rate:.0%}" for rate in assumed.acceptance_rates)
    notes = [
        f"{len(num_prompt):,} rows with {sum(num_prompt):,} prompt tokens, {replay.config.max_num_seqs} at once; "
        f"assumed: {facts['num_output_tokens']:,} output tokens, drafts that are right with {rates}, {cost_text}",
        "nothing of this was measured on the job; once it has run, simulate its output.path",
        f"{ORACLE}: in each step the best uniform draft length by what would be accepted, which no policy can know",
    ]
    return Simulation(runs, facts, notes[: 2 + (replay.method != NONE)])


def _replay(spec: JobSpec, builder: Builder, assumed: Assumptions, costs: StepCosts) -> ShardReplay:
    """The job's rows, with outputs of the assumed length."""
    from ..engine.drafters.synthetic import AcceptanceRates, SyntheticDrafter

    rates = AcceptanceRates(assumed.acceptance_rates)
    method = choose_method(spec.speculation).method
    limit = builder.max_model_len(spec) or max(4096, spec.sampling.max_tokens)
    rows = JobRows.of(spec, builder, limit, range(PromptSource(spec).num_rows))
    if not rows.requests:
        raise ConfigError(f"input.path {spec.input.path!r} has no row to run; see specrun validate")
    most = assumed.output_tokens or limit
    outputs = {r.request_id: [0] * min(most, r.sampling_params.max_tokens) for r in rows.requests}
    device = "cpu" if spec.engine.device == "cpu" else "cuda"
    target, config = replay_target(spec, device, limit)

    def make_drafter(method: str) -> Drafter | None:
        if method == NONE:
            return None
        drafter = SyntheticDrafter(outputs, rates, seed=0, confidence="none")
        drafter.kind = method
        return drafter

    return ShardReplay(outputs, rows, costs, target, config, method, make_drafter, with_grammars=False)


@dataclass(frozen=True, slots=True)
class AssumedCosts:
    """Seconds by a cost surface, and by a formula for the drafter."""

    surface: CostSurface
    drafting: tuple[float, float, float]
    """Seconds of a step that drafts, for each request, and for each token of the longest draft."""

    def step_s(
        self, num_rows: Any, num_requests: int, num_context_tokens: float, num_prefill_tokens: int
    ) -> Float64 | float:
        """See StepCosts."""
        return self.surface.step_s(num_rows, num_requests, num_context_tokens, num_prefill_tokens)

    def draft_s(self, num_drafting: int, longest: Any) -> Float64 | float | None:
        """See StepCosts."""
        once, per_request, per_length = self.drafting
        return once + per_request * num_drafting + per_length * np.asarray(longest, np.float64)

    def without_drafting(self) -> StepCosts:
        """See StepCosts; not asked for."""
        return self

    def is_known(self, num_rows: int) -> bool:
        """See StepCosts."""
        return True


@dataclass(frozen=True, slots=True)
class ProfileCosts:
    """Seconds by a saved cost model; of a drafter that it has not seen, by formula."""

    model: CostModel
    unseen: AssumedCosts

    def step_s(
        self, num_rows: Any, num_requests: int, num_context_tokens: float, num_prefill_tokens: int
    ) -> Float64 | float:
        """See StepCosts."""
        return self.model.step_s(num_rows, num_requests, num_context_tokens, num_prefill_tokens)

    def draft_s(self, num_drafting: int, longest: Any) -> Float64 | float | None:
        """See StepCosts."""
        seconds = self.model.draft_s(num_drafting, longest)
        return seconds if np.any(seconds > 0) else self.unseen.draft_s(num_drafting, longest)

    def without_drafting(self) -> StepCosts:
        """See StepCosts; not asked for."""
        return self

    def is_known(self, num_rows: int) -> bool:
        """See StepCosts."""
        return True


def _costs(spec: JobSpec, builder: Builder, assumed: Assumptions) -> tuple[StepCosts, str]:
    """What a step is taken to cost, and how to say so."""
    target = builder.checkpoint(spec) if isinstance(builder, ModelBuilder) else None
    num_params = _num_params(target) or ASSUMED_PARAMS
    surface = roofline(assumed.gpu, num_params)
    method = choose_method(spec.speculation)
    once, per_request = HOST_DRAFT_S.get(method.method, HOST_DRAFT_S["suffix"])
    per_pass = 0.0
    if method.has_draft_model and isinstance(builder, ModelBuilder):
        draft_params = _num_params(builder.draft_checkpoint(spec)) or ASSUMED_PARAMS / 10
        per_pass = float(roofline(assumed.gpu, draft_params).dense_s[0]) + LAUNCH_S
    costs = AssumedCosts(surface, (once, per_request, per_pass))
    if assumed.profile is None:
        return costs, f"a model of {num_params / 1e9:.2g} billion parameters on one {assumed.gpu} by its roofline"
    # Of another machine or model too: what if the job ran there?
    model = CostModel.from_json(read_profile(assumed.profile, key="--profile"))
    return ProfileCosts(model, costs), f"steps as in {assumed.profile}"


def _num_params(checkpoint: Checkpoint | None) -> float | None:
    """Parameters of a checkpoint, taking each for two bytes."""
    if checkpoint is None:
        return None
    files = [checkpoint.folder / checkpoint.gguf_file] if checkpoint.gguf_file else list(checkpoint.folder.iterdir())
    num_bytes = sum(file.stat().st_size for file in files if file.suffix in WEIGHT_FILES)
    return num_bytes / 2 or None


def _parse_rates(text: str) -> tuple[float, ...]:
    """Numbers from 0 to 1 of a comma-separated list. Raises click.BadParameter."""
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        raise click.BadParameter(f"{text!r} is not a list of chances such as 0.8,0.7", param_hint="--acceptance")
    return rates
