"""The workloads that policies are judged on: they can be built, are the same for a seed, and run to their end."""

import pickle

import numpy as np
import pytest

from specrun.policies import make_policy
from specrun.policies.simulator import Oracle, simulate
from specrun.policies.simulator.suite import CASES, DEVELOPMENT_SEEDS, HELD_OUT_SEEDS, SURFACES, workloads


@pytest.mark.parametrize("surface", SURFACES)
def test_every_workload_is_built_and_is_the_same_for_a_seed(surface):
    first, again, other = (workloads(surface, seed) for seed in (0, 0, 1))
    assert [workload.name for workload in first] == list(CASES)
    for one, same, different in zip(first, again, other, strict=True):
        assert pickle.dumps(one) == pickle.dumps(same), one.name
        assert not np.array_equal(one.output_lens, different.output_lens), one.name
        assert one.description
        assert one.max_draft_tokens > 0


def test_a_workload_has_the_same_rows_on_both_machines():
    for h100, a100 in zip(workloads("h100", 3), workloads("a100", 3), strict=True):
        assert np.array_equal(h100.prompt_lens, a100.prompt_lens), h100.name
        assert np.array_equal(h100.output_lens, a100.output_lens), h100.name


def test_jumps_of_acceptance_belong_to_workloads_that_are_not_stationary():
    for workload in workloads("h100", 0):
        case = CASES[workload.name]
        assert not (case.changes and workload.is_stationary), workload.name
        assert list(case.changes) == [start for start, _ in getattr(workload.process, "phases", ()) if case.changes]


def test_the_suite_has_the_eighteen_of_the_reference_and_others_that_were_held_out():
    held_out = [name for name, case in CASES.items() if case.is_held_out]
    assert {f"A{number}" for number in range(1, 19)} <= {name.rstrip("ab") for name in CASES}
    assert len(held_out) >= 6
    assert not {*DEVELOPMENT_SEEDS} & {*HELD_OUT_SEEDS}


def test_the_short_job_runs_to_its_end_and_the_oracle_is_faster_than_never():
    (workload,) = workloads("h100", 0, ["B5"])
    never = simulate(workload, make_policy("never"), 0, load_drafter=False)
    oracle = simulate(workload, Oracle(), 0)
    assert never.num_tokens == oracle.num_tokens == workload.num_output_tokens
    assert never.num_draft_tokens == 0
    assert oracle.makespan_s < 0.9 * never.makespan_s


@pytest.mark.parametrize(("surface", "names"), [("h200", None), ("h100", ["A99"])])
def test_unknown_names_are_refused(surface, names):
    with pytest.raises(ValueError, match=r"must be h100 or a100|no workload 'A99'"):
        workloads(surface, 0, names)
