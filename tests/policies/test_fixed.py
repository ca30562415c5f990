"""never and always."""

import numpy as np
import pytest

from specrun.policies import Proposals
from specrun.policies.fixed import Always, Never


def test_never_drafts_nothing(make_state, lengths):
    decision = Never().decide(make_state(3))
    assert lengths(decision) == [0, 0, 0]
    assert decision.reason == "never"


def test_always_drafts_its_length_for_every_request(make_state, lengths):
    decision = Always(num_draft_tokens=3).decide(make_state(2))
    assert lengths(decision) == [3, 3]
    assert decision.reason == "always 3"


def test_always_takes_the_limit_when_it_has_no_length(make_state, lengths):
    assert lengths(Always().decide(make_state(2, max_draft_tokens=4))) == [4, 4]


def test_always_is_cut_to_the_limit(make_state, lengths):
    decision = Always(num_draft_tokens=9).decide(make_state(1, max_draft_tokens=5))
    assert lengths(decision) == [5]
    assert decision.reason == "always 5"


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "3"])
def test_always_refuses_other_lengths(value):
    with pytest.raises(ValueError, match="num_draft_tokens must be a whole number of at least 1"):
        Always(num_draft_tokens=value)


def test_a_policy_with_decide_alone_verifies_every_draft(make_state, make_feedback):
    state = make_state(2)
    drafted = np.array([2, 0], dtype=np.int32)
    proposals = Proposals(state, drafted, drafted, np.ones((2, 5), dtype=np.float32))
    assert Always().trim(proposals).tolist() == [2, 0]
    Always().observe(make_feedback(state, drafted, drafted))
