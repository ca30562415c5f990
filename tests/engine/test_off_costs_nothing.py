"""A drafter without weights that is never asked costs no operator: `policy: never` runs what `method: none` runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from specrun.engine import SamplingParams
from specrun.engine.drafters.base import Drafter
from specrun.engine.drafters.ngram import NgramDrafter
from specrun.engine.trace import StepRecord
from specrun.policies.base import SpecDecision, SpeculationPolicy, StepState
from specrun.policies.fixed import Always, Never
from tests.engine.tiny_models import make_prompts, make_requests, tiny_engine

StepOps = list[Counter[str]]


class OperatorCount(TorchDispatchMode):
    """Counts the operators that reach torch's dispatcher, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Zero(SpeculationPolicy):
    """Off, but not by the built-in policy."""

    def decide(self, state: StepState) -> SpecDecision:
        return SpecDecision(np.zeros(state.num_running, np.int32), "off")


def operators_by_step(policy: SpeculationPolicy, drafter: Drafter | None) -> tuple[StepOps, dict[int, list[int]]]:
    """Operators of each step of a run with prefill, decode and a shrinking batch, and the outputs."""
    engine = tiny_engine("llama", policy, drafter, max_draft_tokens=5)
    params = [SamplingParams(max_tokens=4 + 2 * i, ignore_eos=True, temperature=0.5 * (i % 2)) for i in range(6)]
    steps: StepOps = []
    with OperatorCount() as operators:

        def next_step(record: StepRecord) -> None:
            steps.append(operators.counts)
            operators.counts = Counter()

        engine.on_step = next_step
        outputs = {o.request_id: o.token_ids for o in engine.run(make_requests(make_prompts(6, seed=0), params))}
    return steps, outputs


@pytest.mark.parametrize("policy", [Never(), Zero()], ids=["never", "own"])
def test_off_runs_the_same_operators_step_by_step(policy):
    without, outputs = operators_by_step(Never(), None)
    off, off_outputs = operators_by_step(policy, NgramDrafter())
    assert len(without) > 10 and all(sum(step.values()) > 50 for step in without), "the count sees the model run"
    assert off == without
    assert off_outputs == outputs


def test_the_count_can_tell_the_difference():
    without, outputs = operators_by_step(Never(), None)
    on, on_outputs = operators_by_step(Always(5), NgramDrafter(min_match=1))
    assert on != without
    assert on_outputs == outputs
