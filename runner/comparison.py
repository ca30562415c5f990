"""The runs of a bench, what they say about each policy, and whether the outputs agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ..engine.request import RequestOutput
from .contender import NEVER

Outputs = Mapping[int, RequestOutput]
"""Row index -> finished request."""


@dataclass(frozen=True, slots=True)
class Fork:
    """A row whose tokens differ from those of the run it is compared with."""

    row: int
    position: int
    """First output token that differs."""


@dataclass(frozen=True, slots=True)
class BenchRun:
    """One pass over the rows under one policy at one batch size."""

    policy: str
    batch: int
    repetition: int
    order: int
    """Place in the repetition, from 0."""
    makespan_s: float
    num_steps: int
    host_s: float
    """Seconds of all steps outside the forward pass and sampling: scheduling, policy, drafting, commit."""
    decode_step_s: float
    """Median seconds of a step without prefill."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generation_tokens: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_preemptions: int
    num_failed: int
    forks: list[Fork]
    """Against the first run of `never` at this batch size."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A policy at a batch size: medians over its repetitions, rates over all of them."""

    policy: str
    batch: int
    makespan_s: float
    tokens_per_s: float
    acceptance_rate: float | None
    """Accepted over verified draft tokens; None without drafts."""
    mean_acceptance_length: float | None
    """Tokens of a verification that carried drafts: 1 + accepted / drafts."""
    speedup: float
    """Makespan of never over this one's, in the same repetition; median, and the two ends."""
    speedup_min: float
    speedup_max: float
    host_ms_per_step: float
    decode_step_ms: float
    fork_rate: float
    """Share of rows that differ from never."""
    first_fork: float | None
    """Median position of the first token that differs."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """All runs of a bench."""

    is_exact: bool
    """Whether every run must give the same tokens: deterministic mode or float64."""
    num_rows: int
    runs: list[BenchRun]
    batch_forks: dict[int, list[Fork]]
    """Batch size -> rows of `never` that differ from `never` at the smallest batch size, no speculation in either."""

    def summaries(self) -> list[Summary]:
        """One for each batch size and policy, in the order in which they first ran."""
        keys = dict.fromkeys((run.batch, run.policy) for run in self.runs)
        return [self._summary(batch, policy) for batch, policy in keys]

    def difference(self) -> str | None:
        """The first row that differs where none may; None when all is well."""
        if not self.is_exact:
            return None
        for batch, forks in self.batch_forks.items():
            if forks:
                return f"{_describe(forks[0])} between {NEVER} at batch {batch} and at batch {min(self.batch_forks)}"
        for run in self.runs:
            if run.forks:
                return f"{_describe(run.forks[0])} between {run.policy} and {NEVER} at batch {run.batch}"
        return None

    def _summary(self, batch: int, policy: str) -> Summary:
        runs = self._runs_of(batch, policy)
        base = {run.repetition: run.makespan_s for run in self._runs_of(batch, NEVER)}
        speedups = [base[run.repetition] / run.makespan_s for run in runs]
        drafts, drafted, accepted = (
            sum(getattr(run, name) for run in runs)
            for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        )
        forks = [fork for run in runs for fork in run.forks]
        return Summary(
            policy=policy,
            batch=batch,
            makespan_s=median(run.makespan_s for run in runs),
            tokens_per_s=median(run.num_generation_tokens / run.makespan_s for run in runs),
            acceptance_rate=accepted / drafted if drafted else None,
            mean_acceptance_length=1 + accepted / drafts if drafts else None,
            speedup=median(speedups),
            speedup_min=min(speedups),
            speedup_max=max(speedups),
            host_ms_per_step=median(1000 * run.host_s / run.num_steps for run in runs),
            decode_step_ms=median(1000 * run.decode_step_s for run in runs),
            fork_rate=len(forks) / (self.num_rows * len(runs)),
            first_fork=median(fork.position for fork in forks) if forks else None,
        )

    def _runs_of(self, batch: int, policy: str) -> list[BenchRun]:
        return [run for run in self.runs if (run.batch, run.policy) == (batch, policy)]


def find_forks(outputs: Outputs, reference: Outputs) -> list[Fork]:
    """Rows of two runs over the same input that do not end in the same tokens for the same reason."""
    forks = []
    for row, output in sorted(outputs.items()):
        other = reference[row]
        if _outcome(output) != _outcome(other):
            forks.append(Fork(row, _first_difference(output.token_ids, other.token_ids)))
    return forks


def _outcome(output: RequestOutput) -> tuple[object, ...]:
    return output.token_ids, output.finish_reason, output.stop_reason, output.error


def _first_difference(tokens: Sequence[int], others: Sequence[int]) -> int:
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(others)))


def _describe(fork: Fork) -> str:
    return f"row {fork.row} differs from output token {fork.position} on"
