"""A simulated job that a forecaster watches as it would watch a real one."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from specrun.engine.request import FinishReason, Request, RequestOutput, SamplingParams
from specrun.engine.trace import EngineStats, StepRecord
from specrun.policies.base import Int32, SpeculationPolicy
from specrun.policies.simulator import Guesses, Result, Simulation, Workload
from specrun.runner.forecast import Forecast, Forecaster
from specrun.runner.row_lengths import RowLengths


class NotedGuesser:
    """A guesser that tells which rows have finished."""

    def __init__(self, guesser: Any, lengths: RowLengths, output_lens: Int32, limit: int) -> None:
        self._guesser, self._lengths, self._output_lens, self._limit = guesser, lengths, output_lens, limit

    def draft(self, *arguments: Any) -> Guesses:
        return self._guesser.draft(*arguments)  # type: ignore[no-any-return]

    def expected(self, *arguments: Any) -> Any:
        return self._guesser.expected(*arguments)

    def finish(self, request: int) -> None:
        self._guesser.finish(request)
        num_tokens = int(self._output_lens[request])
        reason = FinishReason.LENGTH if num_tokens == self._limit else FinishReason.STOP
        self._lengths.add(RequestOutput(request, [0] * num_tokens, reason))


def foresee(workload: Workload, policy: SpeculationPolicy, load_drafter: bool = True) -> tuple[Forecast | None, Result]:
    """Run the job to its end; what was foreseen, and what came."""
    lengths, stats = RowLengths(), EngineStats()
    limit = int(workload.max_tokens or np.max(workload.output_lens))
    lengths.expect(
        [Request(i, [0] * int(n), SamplingParams(max_tokens=limit)) for i, n in enumerate(workload.prompt_lens)]
    )
    simulation = Simulation(workload, policy, 0, load_drafter)
    simulation.guesser = NotedGuesser(simulation.guesser, lengths, workload.output_lens, limit)
    forecaster = Forecaster(policy, workload.num_rows, workload.max_num_seqs, lengths, stats)
    found: Forecast | None = None
    while simulation.batching.has_unfinished:
        simulation.step()
        if found is None:
            record = last_record(simulation.result())
            stats.add(record)
            found = forecaster.add(record)
    return found, simulation.result()


def last_record(result: Result) -> StepRecord:
    """The record of the last step of a result."""
    last: dict[str, Any] = {name: getattr(result, name)[-1].item() for name in COLUMNS}
    drafts, running = int(result.draft_tokens[-1]), int(last["num_running"])
    values: dict[str, Any] = {field.name: 0 for field in fields(StepRecord)}
    values.update(
        last,
        step=result.num_steps - 1,
        reason="",
        num_scheduled=running + bool(last["num_prefill_tokens"]),
        num_drafts=min(drafts, running),
        num_draft_tokens=drafts,
        max_draft_len=-(-drafts // max(1, running)),
        num_accepted_tokens=int(result.accepted_tokens[-1]),
        num_generation_tokens=int(result.committed_tokens[-1]),
        draft_s=float(result.draft_s[-1]),
        verify_s=float(result.seconds[-1] - result.draft_s[-1]),
    )
    return StepRecord(**values)


COLUMNS = ("num_running", "num_waiting", "num_batched_tokens", "num_prefill_tokens", "num_context_tokens")
