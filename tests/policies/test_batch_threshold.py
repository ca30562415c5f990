"""The batch-size rule: limits, tables, band and dwell."""

from itertools import pairwise

import pytest

from specrun.policies.batch_threshold import BAND_PATIENCE, BatchThreshold


@pytest.fixture
def run(make_state):
    """Decide for each batch size in turn; the length of the first request of each."""

    def drive(policy, batches):
        return [int(policy.decide(make_state(batch)).num_draft_tokens[0]) for batch in batches]

    return drive


@pytest.fixture
def reason(make_state):
    return lambda policy, batch: policy.decide(make_state(batch)).reason


def flips(lengths):
    return sum(a != b for a, b in pairwise(lengths))


@pytest.mark.parametrize(("batch", "length"), [(1, 5), (8, 5), (9, 0), (256, 0)])
def test_default_speculates_up_to_eight(run, batch, length):
    assert run(BatchThreshold(), [batch]) == [length]


def test_own_limit_and_length(run):
    assert run(BatchThreshold(disable_above=64, num_draft_tokens=3), [64]) == [3]
    assert run(BatchThreshold(disable_above=64, num_draft_tokens=3), [65]) == [0]
    assert run(BatchThreshold(disable_above=64, num_draft_tokens=30), [64]) == [5]


def test_prefills_count(make_state):
    assert not BatchThreshold().decide(make_state(8, num_prefills=1)).num_draft_tokens.any()


def test_a_step_that_only_prefills_gives_an_empty_decision(make_state, lengths):
    assert lengths(BatchThreshold().decide(make_state(0, num_prefills=3))) == []


@pytest.mark.parametrize(
    ("batch", "length"), [(1, 5), (64, 5), (65, 3), (128, 3), (150, 3), (200, 1), (256, 1), (300, 1), (10_000, 1)]
)
def test_table_carries_on_over_gaps_and_past_its_end(run, batch, length):
    assert run(BatchThreshold(table=[[1, 64, 9], [65, 128, 3], [200, 256, 1]]), [batch]) == [length]


def test_table_may_end_in_off(run):
    table = [[1, 4, 2], [5, 512, 0]]
    assert run(BatchThreshold(table=table), [4]) == [2]
    assert run(BatchThreshold(table=table), [5]) == [0]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], "table must be a list of rows"),
        ("1-64:3", "table must be a list of rows"),
        ([[2, 8, 3]], r"table\[0\] must start at batch size 1, got 2"),
        ([[1, 8]], r"table\[0\] must be \[first, last, num_draft_tokens\], got \[1, 8\]"),
        ([[1, 8, 3], 9], r"table\[1\] must be"),
        ([[1, 8, -1]], r"table\[0\] num_draft_tokens must be a whole number of at least 0"),
        ([[1, 8.5, 1]], r"table\[0\] last batch size must be a whole number"),
        ([[1, 64, 3], [64, 128, 1]], r"table\[1\] starts at 64 but table\[0\] reaches to 64"),
        ([[1, 64, 3], [128, 100, 1]], r"table\[1\] ends at 100, before it starts at 128"),
    ],
)
def test_bad_tables_are_named(table, message):
    with pytest.raises(ValueError, match=message):
        BatchThreshold(table=table)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"disable_above": 0}, "disable_above must be a whole number of at least 1"),
        ({"num_draft_tokens": 0}, "num_draft_tokens must be"),
        ({"hysteresis": 1}, "hysteresis must be below 1"),
        ({"hysteresis": "wide"}, "hysteresis must be a number from 0 to 1"),
        ({"min_dwell": -1}, "min_dwell must be"),
        ({"table": [[1, 8, 3]], "disable_above": 8}, "table replaces disable_above"),
    ],
)
def test_bad_values_are_named(keys, message):
    with pytest.raises(ValueError, match=message):
        BatchThreshold(**keys)


def test_a_shrinking_batch_crosses_back_below_the_band(run):
    policy = BatchThreshold(disable_above=64, min_dwell=0)
    assert run(policy, [64, 65, 64, 49, 48, 64, 65]) == [5, 0, 0, 0, 5, 5, 0]


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("hysteresis", [0, 0.1, 0.25, 0.9])
def test_a_batch_of_one_always_comes_back(run, limit, hysteresis):
    policy = BatchThreshold(disable_above=limit, hysteresis=hysteresis, min_dwell=0)
    assert run(policy, [limit + 1, 1]) == [0, 5]


@pytest.mark.parametrize(("hysteresis", "back"), [(0.1, 9), (0.2, 8), (0.3, 7), (0.8, 2)])
def test_band_edge_is_free_of_rounding(run, hysteresis, back):
    policy = BatchThreshold(disable_above=10, hysteresis=hysteresis, min_dwell=0)
    assert run(policy, [11, back + 1, back]) == [0, 0, 5]


def test_dwell_holds_a_choice_for_its_steps(run):
    policy = BatchThreshold(min_dwell=4)
    assert run(policy, [4, 100, 4, 4, 4, 4]) == [5, 0, 0, 0, 0, 5]
    assert run(policy, [100] * 4) == [5, 5, 5, 0]


def test_no_flapping_around_the_limit(run):
    batches = [62 + (step * 7) % 5 for step in range(1000)]  # 62..66
    assert flips(run(BatchThreshold(disable_above=64), batches)) <= 1


def test_dwell_bounds_flips_of_a_batch_that_swings_past_the_band(run):
    assert flips(run(BatchThreshold(disable_above=8, min_dwell=8), [4, 40] * 500)) <= 1000 // 8 + 1


def test_a_batch_that_rests_in_the_band_is_taken_at_its_word(run):
    policy = BatchThreshold(disable_above=8)
    lengths = run(policy, [20] * 20 + [7] * (BAND_PATIENCE + 1))
    assert lengths[20:-1] == [0] * BAND_PATIENCE
    assert lengths[-1] == 5


def test_falling_through_several_tiers_at_once(run):
    policy = BatchThreshold(table=[[1, 16, 5], [17, 64, 3], [65, 128, 1], [129, 512, 0]], min_dwell=0)
    assert run(policy, [300, 60, 10, 17, 16, 200]) == [0, 1, 5, 3, 3, 0]


def test_reasons(reason):
    policy = BatchThreshold(disable_above=64, min_dwell=2)
    assert reason(policy, 64) == "batch 64 <= 64"
    assert reason(policy, 70) == "batch 70 > 64"
    assert reason(policy, 50) == "batch 50 in band 49-64"
    assert reason(policy, 48) == "batch 48 <= 64"
    assert reason(policy, 70) == "batch 70, dwell 2/2"
    table = [[1, 64, 3], [65, 128, 1], [129, 512, 0]]
    assert reason(BatchThreshold(table=table), 100) == "batch 100 in 65-128"
    assert reason(BatchThreshold(table=[[1, 64, 3]]), 100) == "batch 100"
