"""A cost model that has seen a few steps."""

from dataclasses import replace

import numpy as np

from specrun.policies.cost_model import CostModel
from tests.policies.states import feedback_of, state_of


def measured_costs() -> CostModel:
    """Of steps that take 10 ms and 1 ms for each row, all of them requests that decode."""
    costs = CostModel()
    for num_rows in (1, 2, 4, 8, 16, 4, 2):
        nothing = np.zeros(num_rows, np.int32)
        step = feedback_of(state_of(num_rows), nothing, nothing)
        costs.observe(replace(step, draft_s=0.0, verify_s=0.01 + 0.001 * num_rows, other_s=0.0))
    return costs
