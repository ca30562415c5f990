"""The oracle is a bound: no fixed draft length is better on a job that stays the same."""

from dataclasses import replace

import numpy as np
import pytest

from specrun.policies.fixed import Always, Never
from specrun.policies.simulator import Acceptance, DraftCost, Oracle, Workload, a100, h100, simulate, staircase

HEAD = DraftCost("eagle3", 3.5e-4, 1.5e-6, passes="k", catch_up_s_per_token=6e-7, stand_by_fraction=0.6)
LOOK_UP = DraftCost("ngram", 2e-5, 2e-6)
MIXED = np.tile([0, 1], 60).astype(np.int32)


def job(process, surface=None, cost=HEAD, num_rows=120, batch=48, prompt=200, **fields):
    lengths = np.random.default_rng(1).integers(20, 100, num_rows).astype(np.int32)
    prompts = np.full(num_rows, prompt, np.int32)
    return Workload("job", prompts, lengths, surface or h100(), cost, process, max_num_seqs=batch, **fields)


STATIONARY = {
    "high": job(Acceptance.stationary(0.8)),
    "low": job(Acceptance.stationary(0.2)),
    "small batch": job(Acceptance.stationary(0.7), num_rows=12, batch=4),
    "a100": job(Acceptance.stationary(0.6), surface=a100(), batch=128),
    "look-up": job(Acceptance(np.array([0.8]), availability=np.array([0.3])), cost=LOOK_UP, batch=128),
    "mixed": job(Acceptance.by_group(MIXED, [0.9, 0.2]), groups=MIXED),
    "prefill": job(Acceptance.stationary(0.6), prompt=1500, num_rows=60),
    "prefill is all": job(Acceptance.stationary(0.6), prompt=1500, num_rows=60, max_num_batched_tokens=512),
    "little KV": job(Acceptance.stationary(0.7), kv_tokens=8000),
}


@pytest.mark.parametrize("name", STATIONARY)
def test_no_fixed_length_is_better(name):
    workload = STATIONARY[name]
    best = min(simulate(workload, policy).makespan_s for policy in (Never(), *(Always(k) for k in (1, 2, 3, 5))))
    assert simulate(workload, Oracle()).makespan_s <= 1.005 * best


def test_it_follows_acceptance():
    process = Acceptance.stationary(0.85).with_phases((0.3, 0.1), (0.7, 1.0))
    workload = job(process, batch=48)
    result = simulate(workload, Oracle())
    decoding = result.num_running == 48
    collapsed = (result.progress > 0.3) & (result.progress < 0.69) & decoding
    assert result.mean_draft_len[~collapsed & decoding].mean() > 2
    assert result.mean_draft_len[collapsed].mean() < 0.5
    assert result.makespan_s < min(simulate(workload, policy).makespan_s for policy in (Never(), Always(2), Always(4)))


def test_it_lets_a_drafter_go_that_is_cheaper_to_catch_up():
    idle = replace(HEAD, per_pass_s=2e-3)
    workload = job(Acceptance.stationary(0.05), cost=idle)
    result = simulate(workload, Oracle())
    assert result.draft_s.sum() == 0
    assert simulate(workload, Never()).draft_s.sum() > 0


def test_it_leaves_the_cliff_alone():
    surface = staircase([1, 100, 101, 400], [5.0, 5.0, 50.0, 60.0])
    result = simulate(job(Acceptance.stationary(0.9), surface=surface, cost=LOOK_UP), Oracle())
    decoding = result.num_prefill_tokens == 0
    assert result.num_batched_tokens[decoding].max() <= 100


def test_it_needs_a_simulation():
    with pytest.raises(ValueError, match="simulation"):
        Oracle().decide(None)  # type: ignore[arg-type]
