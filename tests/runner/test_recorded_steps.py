"""What recorded steps tell: the cost of others, how often a draft model is right, and the size of the KV cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specrun.jobs.errors import StorageError
from specrun.jobs.shard import Shard
from specrun.jobs.store import open_store
from specrun.runner.recorded import NUMBERS, RecordedShard
from specrun.runner.recorded_acceptance import recorded_rates
from specrun.runner.recorded_steps import Steps, read_steps
from specrun.runner.step_cost import RecordedCosts, step_errors


def steps_of(**columns: Any) -> Steps:
    """Steps in which all that is not given is 0."""
    num = len(next(iter(columns.values())))
    zeros = {name: np.zeros(num) for name in ("attempt", *NUMBERS)}
    return Steps(zeros | {name: np.asarray(column, np.float64) for name, column in columns.items()})


def a_surface(rng: np.random.Generator, num: int, noise: float = 0.0) -> Steps:
    requests = rng.integers(1, 64, num)
    lengths = rng.integers(0, 5, num)
    prefill = rng.integers(0, 3, num) * 40
    context = requests * rng.integers(50, 900, num)
    rows = requests * (1 + lengths) + prefill
    seconds = 0.01 + 2e-4 * np.maximum(rows, 96) + 1e-6 * context + 5e-5 * requests + 1e-5 * prefill
    drafts = np.where(lengths > 0, 1e-4 + 1e-5 * requests, 0)
    return steps_of(
        num_running=requests,
        num_prefill_tokens=prefill,
        num_batched_tokens=rows,
        num_context_tokens=context,
        num_drafts=np.where(lengths > 0, requests, 0),
        num_draft_tokens=requests * lengths,
        max_draft_len=lengths,
        verify_s=seconds * np.exp(noise * rng.standard_normal(num)),
        draft_s=drafts,
    )


def test_costs_are_found_again_between_the_recorded_steps():
    costs = RecordedCosts.fit(a_surface(np.random.default_rng(0), 600))
    for rows, requests in ((20, 20), (96, 48), (200, 50)):
        true = 0.01 + 2e-4 * max(rows, 96) + 1e-6 * requests * 400 + 5e-5 * requests
        assert costs.step_s(rows, requests, requests * 400, 0) == pytest.approx(true, rel=0.05)
    assert costs.draft_s(32, 3) == pytest.approx(1e-4 + 32e-5, rel=0.1)
    assert costs.step_s(800, 60, 24_000, 0) == pytest.approx(0.01 + 0.16 + 0.024 + 0.003, rel=0.15)
    assert costs.is_known(100) and not costs.is_known(10_000)


def test_errors_are_those_of_steps_that_were_not_fitted():
    errors = step_errors(a_surface(np.random.default_rng(1), 600, noise=0.1))
    assert errors is not None
    assert abs(errors.total) < 0.03 and 0.04 < errors.p50 < 0.12
    assert step_errors(a_surface(np.random.default_rng(1), 20)) is None


def test_a_step_that_compiles_does_not_bend_the_curve():
    steps = a_surface(np.random.default_rng(2), 400)
    steps["verify_s"][0] += 0.5
    costs = RecordedCosts.fit(steps)
    assert costs.step_s(20, 20, 8000, 0) == pytest.approx(0.01 + 0.0192 + 0.008 + 0.001, rel=0.1)


@pytest.mark.parametrize("num_blocks", [7, 640, 3072, 99_991])
def test_the_size_of_the_kv_cache_shows_in_its_usage(num_blocks):
    used = np.random.default_rng(3).integers(0, num_blocks, 50)
    assert steps_of(kv_usage=1 - (num_blocks - used) / num_blocks).num_kv_blocks() == num_blocks


def test_steps_are_read_in_the_order_in_which_they_ran(tmp_path):
    folder = tmp_path / "metrics" / "steps"
    folder.mkdir(parents=True)

    def write(name, **columns):
        pq.write_table(pa.table(columns), folder / f"part-{name}.parquet")

    write("00000-0010-000000", attempt=[10], num_running=[5], draft_s=[0.5])
    write("00000-0002-000001", attempt=[2], num_running=[4])  # as an older version wrote them
    write("00000-0002-000000", attempt=[2, 2], num_running=[2, 3], draft_s=[0.25, 0.25])
    write("00001-0001-000000", attempt=pa.array([], pa.int32()))
    (folder / "notes.txt").write_text("not ours")
    ((shard, steps),) = read_steps(open_store(str(tmp_path)), ["num_running", "draft_s"])
    assert (shard, len(steps), steps.num_attempts) == (0, 4, 2)
    assert steps["num_running"].tolist() == [2, 3, 4, 5] and steps["draft_s"].tolist() == [0.25, 0.25, 0, 0.5]
    write("00002-0001-000000", something=[1])
    with pytest.raises(StorageError, match=r"part-00002-0001-000000.parquet cannot be read .*; move it away"):
        list(read_steps(open_store(str(tmp_path)), ["num_running"]))


def test_acceptance_is_found_again_by_position_and_over_time():
    rng = np.random.default_rng(4)
    num, drafts, length = 400, 8, 3
    rates = np.array([0.8, 0.6, 0.5])
    factors = np.where(np.arange(num) < num // 2, 1.0, 0.5)
    right = rng.random((num, drafts, length)) < rates * factors[:, None, None]
    accepted = np.logical_and.accumulate(right, axis=2)
    steps = steps_of(
        num_drafts=np.full(num, drafts),
        num_draft_tokens=np.full(num, drafts * length),
        max_draft_len=np.full(num, length),
        num_accepted_tokens=accepted.sum(axis=(1, 2)),
        num_generation_tokens=drafts + accepted.sum(axis=(1, 2)),
    )
    report = {"num_accepted_tokens_per_pos": accepted.sum(axis=(0, 1)).tolist()}
    found = recorded_rates(RecordedShard(Shard(), 0, 1, report, steps))
    assert found is not None
    generated = np.cumsum(steps["num_generation_tokens"])
    nothing = np.zeros(1, np.int64)
    for place, factor in ((num // 4, 1.0), (3 * num // 4, 0.5)):
        at = found.probabilities(nothing, nothing, np.zeros((1, length), np.int64), int(generated[place]))[0]
        assert np.cumprod(at).sum() == pytest.approx(np.cumprod(rates * factor).sum(), rel=0.12)
