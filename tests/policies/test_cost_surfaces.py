"""Seconds of a step: measured tables with what they leave out, rooflines, and what recorded steps tell."""

import numpy as np
import pytest

from specrun.policies.fixed import Always
from specrun.policies.simulator import (
    Acceptance,
    DraftCost,
    RecordedSurface,
    Workload,
    a100,
    h100,
    roofline,
    simulate,
    staircase,
)


def test_a_table_is_read_between_its_rows_and_goes_on_beyond():
    surface = staircase([1, 10, 20], [1.0, 1.0, 3.0])
    assert surface.step_s(np.array([1, 5, 10, 15, 20]), 1, 0, 0) == pytest.approx([1e-3, 1e-3, 1e-3, 2e-3, 3e-3])
    assert surface.step_s(10_000, 1, 0, 0) == pytest.approx(3e-3 + 9980 * 0.2e-3)
    assert surface.step_s(5000, 1, 0, 0) == pytest.approx(surface.step_s(np.array([1, 5000]), 1, 0, 0)[1])


def test_what_the_tables_leave_out_is_added_by_the_formula():
    surface = h100(capture_sizes=np.zeros(0, np.int32))
    alone = float(surface.step_s(64, 64, 0, 0))
    dense = float(np.interp(64, surface.rows, surface.dense_s))
    head = (4096 * 32000 * 2 + 64 * 12 * 32000) / surface.bandwidth
    assert alone == pytest.approx(dense + head + 6e-4 + 64 * 2e-6, rel=1e-6)
    assert float(surface.step_s(64, 64, 100_000, 0)) - alone == pytest.approx(100_000 * 131072 / surface.bandwidth)
    # rows of a prefill have no logits
    assert float(surface.step_s(64, 64, 0, 32)) == pytest.approx(alone - 32 * 12 * 32000 / surface.bandwidth)


@pytest.mark.parametrize("make", [h100, a100])
def test_graphs_pad_and_steps_without_them_are_slow(make):
    surface = make()
    rows = np.array([250, 256, 512])
    assert surface.step_s(rows[:1], 1, 0, 0) == surface.step_s(rows[1:2], 1, 0, 0)
    assert surface.step_s(513, 1, 0, 0) >= surface.eager_s
    assert np.all(np.diff(surface.step_s(np.arange(1, 513), 1, 0, 0)) >= 0)


def test_a_roofline_is_flat_until_compute_takes_over():
    surface = roofline("H200", num_params=7e9, capture_sizes=np.zeros(0, np.int32), vocabulary=0, launch_s=0.0)
    few, more, many = (float(surface.step_s(n, 0, 0, 0)) for n in (1, 100, 2000))
    assert few == pytest.approx(14e9 / (4.8e12 * 0.77))
    assert more == pytest.approx(few)
    assert many == pytest.approx(2 * 7e9 * 2000 / (9.89e14 * 0.6))
    with pytest.raises(ValueError, match="H100"):
        roofline("Z80")


def test_recorded_steps_tell_what_others_cost():
    truth = staircase(
        [1, 64, 65, 128, 256], [5.0, 5.5, 8.0, 8.5, 12.0], kv_bytes_per_token=1e5, bandwidth=2e12, launch_s=1e-3
    )
    lengths = np.random.default_rng(0).integers(20, 120, 150).astype(np.int32)
    job = Workload("job", lengths, lengths, truth, DraftCost("ngram"), Acceptance.stationary(0.6), max_num_seqs=32)
    parts = [simulate(job, Always(length)) for length in (1, 2, 3)]
    names = ("num_batched_tokens", "num_running", "num_context_tokens", "num_prefill_tokens", "seconds")
    rows, running, context, prefill, seconds = (np.concatenate([getattr(p, n) for p in parts]) for n in names)
    seconds = seconds.copy()
    seconds[::50] *= 20  # something else ran
    surface = RecordedSurface.from_steps(rows, running, context, prefill, seconds)
    assert surface.error < 0.02
    for num_rows, num_context in ((32, 3000), (60, 2500), (100, 3000)):
        predicted = float(surface.step_s(num_rows, 32, num_context, 0))
        assert predicted == pytest.approx(float(truth.step_s(num_rows, 32, num_context, 0)), rel=0.05)
    assert np.all(surface.slopes >= 0)
    assert surface.step_s(10_000, 32, 0, 0) > surface.step_s(256, 32, 0, 0)
    with pytest.raises(ValueError, match="no step"):
        RecordedSurface.from_steps([], [], [], [], [])


def test_one_recorded_step_is_enough():
    surface = RecordedSurface.from_steps([10], [10], [0], [0], [0.02])
    assert surface.step_s(np.array([10, 20]), 10, 0, 0) == pytest.approx([0.02, 0.02], rel=1e-3)
