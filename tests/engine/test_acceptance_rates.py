"""Set acceptance: factors multiply, lines bend and jump, and a bad setting is refused by its key."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specrun.engine.drafters.acceptance_rates import AcceptanceRates


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "acceptance_rates is missing"),
        ({"acceptance_rates": []}, "acceptance_rates must be a list"),
        ({"acceptance_rates": 0.5}, "acceptance_rates must be a list"),
        ({"acceptance_rates": [0.5, 1.5]}, r"acceptance_rates\[1\] must be a number from 0 to 1, got 1.5"),
        ({"acceptance_rates": [True]}, r"acceptance_rates\[0\]"),
        ({"acceptance_rates": [0.5], "rate": 1}, "rate is not a key; there are acceptance_rates, groups"),
        ({"acceptance_rates": [0.5], "groups": [1]}, "groups must have the keys factors, rows_per_group"),
        ({"acceptance_rates": [0.5], "groups": {"rows_per_group": 2}}, "groups.factors is missing"),
        ({"acceptance_rates": [0.5], "groups": {"factors": []}}, "groups.factors must be a list"),
        ({"acceptance_rates": [0.5], "groups": {"factors": [1, -1]}}, r"groups.factors\[1\] must be a number"),
        ({"acceptance_rates": [0.5], "groups": {"factors": [1], "rows_per_group": 0}}, "groups.rows_per_group"),
        ({"acceptance_rates": [0.5], "groups": {"factors": [1], "rows": 3}}, "groups.rows is not a key"),
        ({"acceptance_rates": [0.5], "over_time": 3}, "over_time must be a list"),
        ({"acceptance_rates": [0.5], "over_time": [[1, 2, 3]]}, r"over_time\[0\] must be a point"),
        ({"acceptance_rates": [0.5], "over_time": [[5, 1], [4, 1]]}, r"over_time\[1\] is at 4 tokens"),
        ({"acceptance_rates": [0.5], "by_context": [[0, math.nan]]}, r"by_context\[0\] must be a number"),
    ],
)
def test_refuses_bad_settings_by_their_key(options, message):
    with pytest.raises(ValueError, match=message):
        AcceptanceRates.parse(options)


def test_lines_are_straight_between_points_and_may_jump():
    rates = AcceptanceRates([1.0], over_time=[[10, 0.2], [20, 0.4], [20, 0.8], [30, 0.6]])
    zero = np.zeros(1, np.int64)
    got = [rates.probabilities(zero, zero, zero[:, None], n)[0, 0] for n in (0, 10, 15, 19, 20, 25, 30, 99)]
    np.testing.assert_allclose(got, [0.2, 0.2, 0.3, 0.38, 0.8, 0.7, 0.6, 0.6])


def test_probabilities_are_clipped():
    rates = AcceptanceRates.parse({"acceptance_rates": [0.9], "groups": {"factors": [2.0]}, "over_time": None})
    zero = np.zeros(1, np.int64)
    assert rates.probabilities(zero, zero, zero[:, None], 0).tolist() == [[1.0]]
