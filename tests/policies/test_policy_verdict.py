"""The judge of the policies' table: flips, recoveries and criteria from plain numbers."""

import numpy as np
import pytest

from examples.benchmarks.policy_cells import Cell, Recovery, Track, read_cells
from examples.benchmarks.policy_verdict import Table, verdicts, verdicts_of_the_rest


def _track(speeds, is_on=None, tokens_a_step=100):
    """A run of steps that commit as many tokens each, at these tokens a second."""
    speeds = np.asarray(speeds, np.float64)
    return Track(
        seconds=tokens_a_step / speeds,
        tokens=np.cumsum(np.full(len(speeds), float(tokens_a_step))),
        time=np.cumsum(tokens_a_step / speeds),
        num_running=np.full(len(speeds), 50, np.int32),
        draft_len=np.ones(len(speeds)),
        is_on=np.ones(len(speeds), np.bool_) if is_on is None else np.asarray(is_on, np.bool_),
    )


def _cell(contender, makespan_s, **changed):
    fields = {
        "workload": "A1",
        "surface": "h100",
        "seed": 10,
        "contender": contender,
        "key": "",
        "makespan_s": makespan_s,
        "num_steps": 1000,
        "num_tokens": 100_000,
        "num_drafted": 0,
        "num_accepted": 0,
        "flips": 0,
        "flips_later": 0,
        "mean_draft_len": 1.0,
        "late_draft_len": 1.0,
        "tail_s": 1.0,
        "num_preemptions": 0,
        "speeds": [],
        "rest_s": {},
        "recoveries": [],
        "facts": {},
        "cpu_s": 0.0,
    }
    return Cell(**{**fields, **changed})


def _missed(cells, stationary=True, judge=verdicts):
    """Criteria that are judged and not met, each by a word of it."""
    found = judge(Table(cells, {"A1": stationary}), "goodput")
    words = ("harm", "median", "worst", "stationary workload", "not stationary", "speculating", "from off", "flips")
    assert all(word in verdict.criterion for word, verdict in zip(words, found, strict=True))
    return {word for word, verdict in zip(words, found, strict=True) if verdict.num_judged and not verdict.passed}


def test_flips_are_the_most_in_any_thousand_steps():
    is_on = np.zeros(3000, bool)
    is_on[100:110] = is_on[1050:1060] = is_on[1105:1106] = is_on[2900:2901] = True
    assert _track(np.full(3000, 10.0), is_on).flips() == 5  # from the one at step 110 to the one at 1,106
    assert _track(np.full(3000, 10.0), is_on).flips(first=500) == 4
    assert _track(np.full(3000, 10.0)).flips() == 0


def test_recovery_ends_with_the_first_window_at_the_oracles_speed():
    speeds = np.concatenate([np.full(500, 200.0), np.full(100, 50.0), np.full(400, 100.0)])
    recovery = _track(speeds).recovery(0.5, oracle_speed=100.0)
    assert recovery.was_on
    assert 95 <= recovery.steps <= 100  # a window may hold a few slow steps and still be within 5 %
    assert recovery.tokens == 100 * recovery.steps
    assert recovery.within(0, 100) and recovery.within(10_000, 0) and not recovery.within(2000, 64)
    assert _track(speeds).recovery(0.5, oracle_speed=130.0).tokens is None
    assert not _track(speeds, np.zeros(1000)).recovery(0.5, oracle_speed=100.0).was_on
    assert _track(speeds).speed_between(0.6, 0.7) == pytest.approx(100.0)


def test_a_policy_as_fast_as_the_oracle_meets_everything():
    cells = [_cell("never", 100.0), _cell("always:3", 80.0), _cell("oracle", 80.0), _cell("goodput", 79.9)]
    assert _missed(cells) == set()
    assert _missed(cells, stationary=False) == set()


@pytest.mark.parametrize(
    ("changed", "stationary", "missed"),
    [
        ({"makespan_s": 102.5}, True, {"harm", "median", "worst", "stationary workload"}),
        ({"makespan_s": 84.0}, True, {"median", "stationary workload"}),
        ({"makespan_s": 80.7}, True, set()),
        ({"makespan_s": 80.0}, False, {"not stationary"}),
        ({"makespan_s": 79.0, "flips": 21}, True, {"flips"}),
        ({"makespan_s": 79.0, "recoveries": [Recovery(9, True, 2001, 65)]}, True, {"speculating"}),
        ({"makespan_s": 79.0, "recoveries": [Recovery(9, True, 5000, 64)]}, True, set()),
        ({"makespan_s": 79.0, "recoveries": [Recovery(9, False, 1001, 3)]}, True, {"from off"}),
        ({"makespan_s": 79.0, "recoveries": [Recovery(9, False, None, None)]}, True, {"from off"}),
    ],
)
def test_each_miss_is_found(changed, stationary, missed):
    cells = [_cell("never", 100.0), _cell("always:3", 80.0), _cell("oracle", 80.0)]
    assert _missed([*cells, _cell("goodput", **changed)], stationary) == missed


def test_the_rest_of_a_job_is_judged_without_its_first_steps():
    cells = [_cell("never", 100.0), _cell("always:3", 80.0), _cell("oracle", 80.0)]
    rest = {"self": 40.0, "never": 50.0, "oracle": 40.0, "fixed": 40.0}
    slow_start = _cell("goodput", 110.0, rest_s=rest, flips=40, flips_later=2)
    assert _missed([*cells, slow_start], judge=verdicts_of_the_rest) == set()
    assert "harm" in _missed([*cells, slow_start])
    still_slow = _cell("goodput", 110.0, rest_s={**rest, "self": 51.5}, flips_later=21)
    missed = {"harm", "median", "worst", "stationary workload", "flips"}
    assert _missed([*cells, still_slow], judge=verdicts_of_the_rest) == missed
    assert _missed([*cells, _cell("goodput", 110.0)], judge=verdicts_of_the_rest) == set()  # too little is left


def test_cells_survive_a_file_and_a_cut_line(tmp_path):
    cell = _cell("goodput", 1.5, recoveries=[Recovery(1, True, None, None)], facts={"brier": 0.1})
    (tmp_path / "cells.jsonl").write_text(cell.to_json() + "\n" + cell.to_json()[:40])
    assert list(read_cells(tmp_path / "cells.jsonl")) == [cell]
    assert list(read_cells(tmp_path / "none.jsonl")) == []
