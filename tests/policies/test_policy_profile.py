"""A saved profile as the beginning of goodput's knowledge."""

import json

import numpy as np
import pytest

from specrun.jobs.errors import ConfigError
from specrun.policies import StepFeedback, make_policy
from specrun.policies.cost_model import CostModel
from specrun.policies.goodput import Goodput
from specrun.runner.profile import with_costs, write_profile

IDENTITY = {"model": "sha256:aa", "device": "cpu"}


@pytest.fixture
def profile(tmp_path, make_state):
    costs = CostModel()
    state = make_state(num_running=4)
    none = np.zeros(4, np.int32)
    for _ in range(20):
        costs.observe(StepFeedback(state, none, none, none, none, none + 1, 4, 0.0, 0.02, 0.001))
    path = tmp_path / "profile.json"
    write_profile(path, IDENTITY, costs, {})
    return path


def test_goodput_begins_with_what_the_profile_says(profile):
    policy = make_policy("goodput", **with_costs("goodput", {"profile": str(profile)}, IDENTITY))
    assert isinstance(policy, Goodput)
    assert float(policy.cost.step_s(4, 4, 400, 0)) == pytest.approx(0.021, rel=0.02)


def test_a_profile_of_another_model_is_refused(profile):
    with pytest.raises(
        ConfigError, match=r"profile\.json was measured with another model: 'sha256:aa', this job has 'b'"
    ):
        with_costs("goodput", {"profile": str(profile)}, {"model": "b"})


@pytest.mark.parametrize("content", ["", "[]", '{"version": 1}', '{"version": 99, "identity": {}, "cost_model": {}}'])
def test_what_is_no_profile_is_refused(tmp_path, content):
    (tmp_path / "p.json").write_text(content)
    with pytest.raises(ConfigError, match=r"is no profile of this version .* save one with specrun calibrate"):
        with_costs("goodput", {"profile": str(tmp_path / "p.json")}, IDENTITY)


def test_a_profile_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.json: No such file or directory"):
        with_costs("goodput", {"profile": str(tmp_path / "gone.json")})


def test_other_keys_stay(profile):
    keys = with_costs("goodput", {"num_draft_tokens": 3}, IDENTITY)
    assert keys == {"num_draft_tokens": 3}
    assert json.loads(profile.read_text())["identity"] == IDENTITY
