"""From a name in a job to a policy, and the errors on the way."""

import sys
from pathlib import Path

import pytest

from specrun.policies import PolicyError, make_policy
from specrun.policies.acceptance_gate import AcceptanceGate
from specrun.policies.batch_threshold import BatchThreshold
from specrun.policies.fixed import Always, Never

EXAMPLES = Path(__file__).parents[2] / "examples"

OWN_MODULE = """
from dataclasses import dataclass
from specrun.policies import SpecDecision, SpeculationPolicy

class Own(SpeculationPolicy):
    def __init__(self, length, pace=1):
        if pace < 1:
            raise RuntimeError("pace must be at least 1\\nor else")
        self.length = length
    def decide(self, state):
        return SpecDecision.uniform(state, self.length, "own")

@dataclass
class Plain(SpeculationPolicy):
    length: int = 2
    def decide(self, state):
        return SpecDecision.uniform(state, self.length, "plain")

class Anything(SpeculationPolicy):
    def __init__(self, **keys):
        self.keys = keys
    def decide(self, state):
        return SpecDecision.uniform(state, 0, "anything")

class Duck:
    def decide(self, state):
        return SpecDecision.uniform(state, 0, "duck")

class Undecided(SpeculationPolicy):
    pass

number = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder beside a job with the module own_policies; the import leaves no trace."""
    (tmp_path / "own_policies.py").write_text(OWN_MODULE)
    (tmp_path / "broken_policy.py").write_text("import no_such_dependency\n")
    (tmp_path / "garbled_policy.py").write_text("class :\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def message(*args, **kwargs):
    with pytest.raises(PolicyError) as caught:
        make_policy(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "keys", "kind"),
    [
        ("never", {}, Never),
        ("always", {"num_draft_tokens": 3}, Always),
        ("batch_threshold", {"disable_above": 4, "min_dwell": 2}, BatchThreshold),
        ("acceptance_gate", {"low": 0.5, "window": 64}, AcceptanceGate),
    ],
)
def test_built_in_policies(name, keys, kind):
    for _ in range(2):  # a class without __init__ looks different once it has been used
        assert type(make_policy(name, **keys)) is kind


def test_unknown_name_lists_the_known_ones():
    text = message("batch_treshold")
    assert "no policy 'batch_treshold' (did you mean 'batch_threshold'?)" in text
    assert "never, always, batch_threshold, acceptance_gate or module:Class" in text
    assert "did you mean" not in message("xyzzy")


def test_unknown_key_lists_the_allowed_ones():
    for _ in range(2):
        assert message("never", k=3) == "policy 'never' has no key 'k'; it takes none"
    assert message("always", num_draft_token=3) == (
        "policy 'always' has no key 'num_draft_token' (did you mean 'num_draft_tokens'?); allowed: num_draft_tokens"
    )


def test_bad_value_names_policy_and_key():
    assert message("always", num_draft_tokens=0) == (
        "policy 'always': num_draft_tokens must be a whole number of at least 1, got 0"
    )


def test_own_policy_beside_the_job(own, make_state, lengths):
    policy = make_policy("own_policies:Own", search_path=own, length=2)
    assert lengths(policy.decide(make_state(3))) == [2, 2, 2]
    assert lengths(make_policy("own_policies:Plain", search_path=own).decide(make_state(1))) == [2]
    assert make_policy("own_policies:Anything", search_path=own, any_key=1)


def test_own_policy_in_the_current_folder(own, monkeypatch):
    monkeypatch.chdir(own)
    assert make_policy("own_policies:Plain", length=4)


def test_own_policy_with_wrong_keys(own):
    assert message("own_policies:Own", search_path=own) == (
        "policy 'own_policies:Own' needs the key 'length'; allowed: length, pace"
    )
    assert "has no key 'lenght' (did you mean 'length'?)" in message("own_policies:Own", search_path=own, lenght=1)
    assert message("own_policies:Own", search_path=own, length=1, pace=0).endswith("pace must be at least 1")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        (":Own", "is not of the form module:Class"),
        ("own_policies:", "is not of the form module:Class"),
        ("no_such_module:Own", "no module 'no_such_module' in "),
        ("own_policies.deeper:Own", "no module 'own_policies.deeper' in "),
        ("broken_policy:Own", "importing broken_policy failed with ModuleNotFoundError: No module named 'no_such_dep"),
        ("garbled_policy:Own", "importing garbled_policy failed with SyntaxError"),
        ("own_policies:Owm", "own_policies.py (did you mean 'Own'?)"),
        ("own_policies:number", "no class 'number'"),
        ("own_policies:Duck", "Duck must be a subclass of specrun.policies.SpeculationPolicy"),
        ("own_policies:Undecided", "Undecided must define decide(self, state) -> SpecDecision"),
    ],
)
def test_own_policy_that_cannot_be_made(own, name, part):
    assert part in message(name, search_path=own)


def test_a_file_beside_the_job_does_not_shadow_the_standard_library(own):
    (own / "fractions.py").write_text("raise SystemError('shadowed')\n")
    sys.modules.pop("fractions", None)
    assert "no class 'Own'" in message("fractions:Own", search_path=own)


def test_example_policy(own, make_state, lengths):
    policy = make_policy("my_policy:TailPolicy", search_path=EXAMPLES / "custom_policy")
    assert lengths(policy.decide(make_state(4, num_waiting=10))) == [0] * 4
    assert lengths(policy.decide(make_state(2))) == [5, 5]
