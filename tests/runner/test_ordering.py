"""Requests may run in another order; what comes out may not change."""

from __future__ import annotations

import random

import numpy as np
import pytest

from specrun.engine import Request, SamplingParams
from specrun.engine.request import FinishReason, RequestOutput
from specrun.runner import ordering
from specrun.runner.ordering import RequestWindow, running_order
from specrun.runner.pipeline import MAX_FAILURE_RUNS, Ending, FailureRun, _Aborted
from specrun.runner.row_lengths import RowLengths
from specrun.runner.sampling import RowSampling
from tests.engine.tiny_models import essence, make_prompts, run, tiny_engine
from tests.runner.pipelines import StubPipeline


def make(prompts, max_tokens=4):
    return [Request(i, list(prompt), SamplingParams(max_tokens=max_tokens)) for i, prompt in enumerate(prompts)]


def ids(requests):
    return [request.request_id for request in requests]


def test_common_prefixes_together_and_the_longest_first():
    head, other = [7, 300, 70_000, 9], [7, 301, 1, 1]
    prompts = [[1], [*head, 5], [2, 2, 2], [*other, 1, 1, 1], [*head, 4], [*other, 1], [*head, 5, 5, 5, 5]]
    order = ids(running_order(make(prompts)))
    assert order == [4, 1, 6, 5, 3, 2, 0]


def test_half_of_the_shorter_prompt_makes_neighbours():
    assert ids(running_order(make([[1, 2, 8, 8], [5, 5, 5, 5], [1, 2, 9, 9]]))) == [0, 2, 1]
    assert ids(running_order(make([[1, 2, 8, 8, 8], [5, 5, 5, 5, 5], [1, 2, 9, 9, 9]]))) == [0, 1, 2]
    assert ids(running_order(make([[1], [5, 5], [1, 2, 3]]))) == [0, 2, 1]


def test_max_tokens_counts_and_ties_keep_the_input_order():
    requests = make([[9], [8], [7], [6]])
    requests[2] = Request(2, [7], SamplingParams(max_tokens=50))
    assert ids(running_order(requests)) == [2, 0, 1, 3]
    assert ids(running_order(make([[5]] * 6))) == list(range(6)) and running_order([]) == []


def grouped(lengths, groups, max_tokens=4):
    """Rows without anything in common, of these prompt lengths and groups."""
    requests = make([[100 + i] * length for i, length in enumerate(lengths)], max_tokens)
    for request, group in zip(requests, groups, strict=True):
        request.group = group
    return requests


def test_groups_run_together_and_within_them_the_longest_first():
    requests = grouped([5, 7, 6, 8, 5, 9], [0, 1, 0, 1, 0, 1])
    assert ids(running_order(requests, by_group=True)) == [2, 0, 4, 5, 3, 1]
    assert ids(running_order(requests)) == [5, 3, 1, 2, 0, 4]


def test_the_group_of_the_longest_outputs_runs_first():
    requests = grouped([5, 5, 5, 5], [0, 1, 0, 1])
    requests[3].sampling_params = SamplingParams(max_tokens=9)
    assert ids(running_order(requests, by_group=True)) == [3, 1, 0, 2]
    requests, lengths = grouped([5] * 4, [0, 1, 0, 1], max_tokens=50), RowLengths()
    past = grouped([1] * 40, [0, 1] * 20, max_tokens=50)
    lengths.expect(past)
    for request in past:
        tokens = [0] * (30 if request.group else 10)
        lengths.add(RequestOutput(request.request_id, tokens, FinishReason.STOP))
    assert ids(running_order(requests, by_group=True)) == [0, 2, 1, 3]
    assert ids(running_order(requests, by_group=True, lengths=lengths)) == [1, 3, 0, 2]


def test_rows_far_longer_than_most_do_not_wait_for_their_group():
    requests = grouped([5, 5, 5, 60, 5, 6], [0, 0, 0, 1, 1, 1])
    assert ids(running_order(requests, by_group=True)) == [3, 0, 1, 2, 5, 4]


def test_a_common_prefix_counts_for_more_than_a_group():
    requests = make([[7] * 8, [1], [7] * 9, [2]])
    for request in requests[2:]:
        request.group = 1
    assert ids(running_order(requests, by_group=True)) == [0, 2, 1, 3]


def test_too_few_finished_rows_say_nothing():
    lengths = RowLengths()
    requests = grouped([1] * 15, [2] * 15)
    lengths.expect(requests)
    for request in requests:
        lengths.add(RequestOutput(request.request_id, [0], FinishReason.LENGTH))
    assert lengths.mean_output_tokens(np.array([2, 0, 5])).tolist() == [np.inf] * 3
    assert lengths.num_expected == lengths.num_finished == lengths.num_at_limit == lengths.num_finished_tokens == 15


def test_the_order_is_that_of_the_requests_alone():
    requests = make(dict.fromkeys(map(tuple, make_prompts(200, seed=1))))
    expected = ids(running_order(requests))
    assert sorted(expected) == list(range(len(requests)))
    for seed in range(5):
        random.Random(seed).shuffle(requests)
        assert ids(running_order(requests)) == expected


def test_windows_begin_small_and_are_bounded():
    window = RequestWindow()
    sizes, held = [], 0
    for start in range(0, 30_000, 100):
        lists = window.add(make([[start + i] for i in range(100)]))
        held += 100
        if lists:
            assert sum(map(len, lists)) == held and len(lists) == ordering.LISTS
            sizes.append(held)
            held = 0
    assert sizes[:5] == [600, 1100, 2100, 4100, 8200] and set(sizes[4:]) == {8200}
    assert sum(map(len, window.flush())) == held and window.flush() == []


def test_windows_are_bounded_by_tokens():
    window = RequestWindow()
    assert window.add(make([[5] * 100_000] * 10)) == []
    assert sum(map(len, window.add(make([[5] * 100_000])))) == 11


PROMPTS = [f"{'common words before it ' * (i % 3)}{i} {'long ' * (i % 7)}" if i % 11 else None for i in range(3000)]


@pytest.mark.parametrize("options", [{}, {"seed": 3, "max_num_seqs": 40}, {"fail_on": "long", "max_num_seqs": 7}])
def test_rows_are_those_of_the_input_order(options):
    plain, ordered = StubPipeline("input", 10_000, **options), StubPipeline("auto", 10_000, **options)
    assert plain.run(PROMPTS) is ordered.run(PROMPTS) is Ending.DONE
    assert ordered.rows.by_index() == plain.rows.by_index() and len(plain.rows.written) == 3000
    assert ordered.rows.order != plain.rows.order


def test_input_order_is_kept_where_it_is_asked_for():
    plain = StubPipeline("input", max_num_seqs=1)
    plain.run([f"{'w ' * (i % 5)}x" for i in range(1500)])
    assert plain.rows.order == list(range(1500))


def test_the_longest_run_first():
    pipeline = StubPipeline(max_num_seqs=1)
    pipeline.run([f"{i} {'w ' * (i % 13)}" for i in range(512)])
    lengths = [row.prompt_tokens for row in pipeline.rows.written]
    assert lengths == sorted(lengths, reverse=True)


def test_the_reader_does_not_run_far_ahead():
    pipeline = StubPipeline(max_num_seqs=64)
    num_answered = ahead = 0

    def on_step(record):
        nonlocal ahead, num_answered
        num_answered += record.num_running
        ahead = max(ahead, pipeline.num_read - num_answered)

    pipeline.on_step = on_step
    assert pipeline.run([f"{i} {'w ' * (i % 13)}" for i in range(40_000)]) is Ending.DONE
    assert ahead <= 3 * ordering.MAX_WINDOW


@pytest.mark.parametrize("order", ["auto", "input"])
def test_a_run_of_failures_in_the_input_aborts(order):
    pipeline = StubPipeline(order, fail_on="BOOM", max_num_seqs=8)
    prompts = [f"{i} ok" for i in range(700)] + [f"{i} BOOM {'w ' * (i % 9)}" for i in range(20_000)]
    assert pipeline.run(prompts) is Ending.ABORTED
    assert 100 <= sum(row.error_code == "engine_error" for row in pipeline.rows.written) < 9000


def test_failures_that_only_run_side_by_side_do_not_abort():
    """A tenth of the rows fails, and these are the longest: they all come first."""
    pipeline = StubPipeline(fail_on="BOOM")
    prompts = [f"BOOM {i} {'w ' * 9}" if i % 10 == 3 else f"{i} ok" for i in range(4000)]
    assert pipeline.run(prompts) is Ending.DONE
    assert sum(row.error_code is not None for row in pipeline.rows.written) == 400


def test_what_was_read_before_an_abort_is_run():
    pipeline = StubPipeline()
    assert pipeline.run([f"{i}" for i in range(5000)] + [None] * 200) is Ending.ABORTED
    assert sum(row.error_code is None for row in pipeline.rows.written) == 5000


def test_a_stop_keeps_what_has_finished_and_the_rest_runs_later():
    prompts = [f"{i} {'w ' * (i % 17)}" for i in range(5000)]
    whole = StubPipeline()
    whole.run(prompts)
    first = StubPipeline(max_num_seqs=32)
    first.on_step = lambda record: first.stop.request("enough") if record.step == 20 else None
    assert first.run(prompts) is Ending.PREEMPTED
    done = set(first.rows.order)
    assert len(done) == len(first.rows.order) == 21 * 32
    second = StubPipeline()
    assert second.run(prompts, is_done=done.__contains__) is Ending.DONE
    assert not done & set(second.rows.order)
    both = sorted(first.rows.written + second.rows.written, key=lambda row: row.row_index)
    assert [row.text for row in both] == [row.text for row in whole.rows.by_index()]


def test_runs_of_failures_are_found_in_any_order():
    for seed in range(20):
        rng = random.Random(seed)
        failed = [i for i in range(600) if rng.random() < 0.6]
        longest = max(map(len, "".join("x" if i in failed else " " for i in range(600)).split()))
        rng.shuffle(failed)
        failures = FailureRun(longest + 1)
        for row in failed:
            failures.add(row)
        failures = FailureRun(longest)
        with pytest.raises(_Aborted):
            for row in failed:
                failures.add(row)


def test_failures_far_apart_take_no_more_memory():
    failures = FailureRun(3)
    for row in range(0, 4 * MAX_FAILURE_RUNS, 2):
        failures.add(row)
    assert len(failures._length) == MAX_FAILURE_RUNS


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_any_permutation_gives_the_same_tokens(temperature):
    """On a real model in fp64: alone, in batches, shuffled and in running order; a row's seed depends on nothing but
    the row."""
    prompts = make_prompts(24, seed=5)
    sampling = RowSampling({"max_tokens": 10, "temperature": temperature, "seed": 7})

    def requests():
        return [Request(i, list(p), sampling.params(i, f"doc-{i}", {})) for i, p in enumerate(prompts)]

    expected = {i: essence(o) for i, o in run(tiny_engine("llama", max_num_seqs=1), requests()).items()}
    orders = [requests(), requests()[::-1], running_order(requests())]
    random.Random(0).shuffle(orders[0])
    for order in orders:
        for max_num_seqs in (4, 24):
            outputs = run(tiny_engine("llama", max_num_seqs=max_num_seqs), order_of(order, requests()))
            assert {i: essence(o) for i, o in outputs.items()} == expected


def order_of(order, fresh):
    """Fresh requests in the order of those that an engine has written into."""
    return [fresh[request.request_id] for request in order]
