"""What another policy would have done to a job that has run: its rows again under each policy, without the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ..engine.trace import EngineStats
from ..jobs.errors import ConfigError
from ..jobs.spec import JobSpec
from ..jobs.speculation import DRAFT_MODEL_METHODS
from .build import Builder
from .contender import JOB, NEVER, NONE, Contender, parse_contenders
from .drafting import choose_method
from .recorded import RecordedShard, Recording
from .retry import stored_job
from .shard_replay import ReplayedShard, ShardReplay, is_estimate
from .simulation_report import ORACLE, RECORDED, SimulatedRun, Simulation
from .step_cost import StepErrors, step_errors

Progress = Callable[[str], None]

DEFAULT_POLICIES = "goodput,batch_threshold,acceptance_gate"


def find_job(what: str, overrides: Sequence[str] = ()) -> tuple[JobSpec, Path | None]:
    """The job of a job file and the file's folder, or that of the output folder of a job that has run, and None.

    Raises as JobSpec.load() and stored_job().
    """
    path = Path(what).expanduser()
    if path.is_file() or path.suffix in (".yaml", ".yml"):
        return JobSpec.load(path, overrides), path.parent
    return stored_job(what, overrides), None


def all_contenders(policies: str, spec: JobSpec, folder: Path) -> list[Contender]:
    """`never`, every fixed draft length, the job's own policy, then what else was asked for.

    Raises click.BadParameter as parse_contenders().
    """
    drafts = spec.speculation.method != NONE
    fixed = [f"always:{k}" for k in range(1, spec.speculation.max_draft_tokens + 1)] if drafts else []
    if not drafts and policies == DEFAULT_POLICIES:
        policies = ""
    contenders = parse_contenders(",".join([*fixed, *([JOB] if drafts else []), policies]), spec, folder)
    return contenders if drafts else [*contenders, Contender(JOB, NEVER)]


def simulate_recorded(
    spec: JobSpec,
    contenders: Sequence[Contender],
    builder: Builder,
    progress: Progress = lambda line: None,
    warn: Progress = lambda line: None,
) -> Simulation:
    """Run the rows of a finished job under every policy. Loads its tokenizer and no weights, writes nothing.

    spec: of stored_job(); contenders: of all_contenders(). Raises JobError or ModelError, one line with the mend.
    """
    recording = Recording.read(spec)
    check_replayable(recording, contenders)
    replays = [ShardReplay.of(recording, shard, builder, warn) for shard in recording.shards]
    runs = []
    for contender in contenders:
        progress(f"simulating {contender.label}")
        parts = [replay.run(contender) for replay in replays]
        runs.append(_sum(contender.label, parts))
    if choose_method(spec.speculation).method != NONE:
        progress(f"simulating the {ORACLE}")
        runs.append(_sum(ORACLE, [replay.run_oracle() for replay in replays]))
    recorded = recorded_run(recording.shards)
    largest = max(recording.shards, key=lambda shard: len(shard.steps))
    simulation = Simulation([recorded, *runs], {}, [])
    return _judged(simulation, recording, replays, step_errors(largest.steps))


def check_replayable(recording: Recording, contenders: Sequence[Contender]) -> None:
    """ConfigError where a contender needs what was not recorded."""
    own = choose_method(recording.spec.speculation).method
    where = recording.location
    for method in {contender.method or own for contender in contenders if contender.has_drafter}:
        if method in DRAFT_MODEL_METHODS and method != own:
            raise ConfigError(
                f"{method} cannot be replayed on {where}, which ran {own}: a draft model says nothing without its "
                "weights; compare it with specrun bench"
            )
        if method in DRAFT_MODEL_METHODS:
            if all(not shard.steps["num_draft_tokens"].any() for shard in recording.shards):
                raise ConfigError(
                    f"{where}: its draft model never drafted, so nothing says how often it is right; run the job with "
                    "policy always first, or use specrun bench"
                )
        elif method != NONE and not recording.has_token_ids:
            raise ConfigError(
                f"{where} holds texts but no token ids, and {method} drafts from those; run the job with "
                "output.token_ids: true"
            )


def recorded_run(shards: Iterable[RecordedShard]) -> SimulatedRun:
    """What happened, lost attempts included."""
    stats = []
    for shard in shards:
        steps = shard.steps
        totals = EngineStats(num_steps=len(steps), busy_s=float(steps.seconds.sum()))
        for name in (
            "num_generation_tokens",
            "num_drafts",
            "num_draft_tokens",
            "num_accepted_tokens",
            "num_preemptions",
        ):
            setattr(totals, name, int(steps[name].sum()))
        stats.append(totals)
    return SimulatedRun.of(RECORDED, stats)


def _judged(
    simulation: Simulation, recording: Recording, replays: Sequence[ShardReplay], errors: StepErrors | None
) -> Simulation:
    """With what there is to say about how far to trust it."""
    spec = recording.spec
    recorded, own = simulation.run(RECORDED), simulation.run(JOB)
    error = own.makespan_s / recorded.makespan_s - 1
    counters = ("num_steps", "num_generation_tokens", "num_draft_tokens", "num_accepted_tokens")
    same = all(getattr(own, name) == getattr(recorded, name) for name in counters)
    kind = "estimate" if is_estimate(spec) else "replay"
    facts: dict[str, Any] = {
        "job": spec.name,
        "output": recording.location,
        "kind": kind,
        "method": choose_method(spec.speculation).method,
        "policy": spec.speculation.policy.name,
        "num_rows": len(recording.outputs),
        "num_failed_rows": recording.num_failed,
        "num_shards": len(recording.shards),
        "num_attempts": max(shard.steps.num_attempts for shard in recording.shards),
        "makespan_error": error,
        "same_as_recorded": same,
        "num_kv_blocks": [replay.config.num_kv_blocks for replay in replays],
        "max_num_seqs": [replay.config.max_num_seqs for replay in replays],
    }
    notes = [
        f"{len(recording.outputs):,} rows, {kind}; makespan: seconds in engine steps, predicted from the recorded ones",
        f"the model's error: under the job's own policy it predicts {own.makespan_s:,.2f} s, "
        f"{recorded.makespan_s:,.2f} s were recorded ({error:+.1%})",
        _fidelity(own, recorded, same, facts),
    ]
    if errors is not None:
        facts |= {"step_error_total": errors.total, "step_error_p50": errors.p50, "step_error_p95": errors.p95}
        notes[1] += (
            f"; each half of the steps predicted from the other half: {errors.total:+.1%} in all, by step "
            f"{errors.p50:.0%} in the median and {errors.p95:.0%} at the 95th percentile"
        )
    if recording.num_failed:
        notes.append(
            f"{recording.num_failed:,} failed rows are left out; what they cost is in the recorded seconds only"
        )
    if any(run.policy == ORACLE for run in simulation.runs):
        notes.append(
            f"{ORACLE}: in each step the best uniform draft length by what would be accepted, which no policy can know"
        )
    return Simulation(simulation.runs, facts, notes)


def _fidelity(own: SimulatedRun, recorded: SimulatedRun, same: bool, facts: dict[str, Any]) -> str:
    """How the replay of the job's own policy compares with what happened."""
    if same:
        return (
            f"under it the replay takes the recorded {recorded.num_steps:,} steps, drafts the same "
            f"{recorded.num_draft_tokens:,} tokens and has the same {recorded.num_accepted_tokens:,} accepted"
        )
    reasons = []
    if facts["kind"] == "estimate":
        reasons.append("a draft model is imitated by its recorded acceptance")
    if facts["num_attempts"] > 1:
        reasons.append(f"the job took {facts['num_attempts']} attempts, the replay one")
    if facts["num_failed_rows"]:
        reasons.append("failed rows are left out")
    why = f" ({'; '.join(reasons)})" if reasons else " (its choices hang on seconds, or rows came to the engine late)"
    return (
        f"under it the replay takes {own.num_steps:,} steps where {recorded.num_steps:,} were recorded, drafts "
        f"{own.num_draft_tokens:,} tokens for {recorded.num_draft_tokens:,} and has {own.num_accepted_tokens:,} "
        f"accepted for {recorded.num_accepted_tokens:,}{why}"
    )


def _sum(label: str, parts: Sequence[ReplayedShard]) -> SimulatedRun:
    unseen_s = sum(part.unseen_s for part in parts)
    return SimulatedRun.of(label, [p.stats for p in parts], unseen_s, any(p.drafting_measured for p in parts))
