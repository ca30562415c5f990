"""What a fingerprint stores, shows and compares; secrets leave nothing but their hashes."""

import json

import orjson
import pytest

from specrun.jobs.errors import ConfigError
from specrun.jobs.fingerprint import Fingerprint
from tests.jobs.output_jobs import close, expect, open_ledger, row, writer_of


def changes(old, new, **kwargs):
    return Fingerprint(new, **kwargs).changes(Fingerprint(old).to_json())


def test_values_are_flat():
    values = {"a": {"b": 1, "none": None, "empty": {}}, "files": [{"size": 1}, {"size": 2}], "stop": ["x", "y"]}
    assert Fingerprint(values).to_json() == {
        **{"a.b": 1, "a.none": None, "a.empty": {}, "files[0].size": 1, "files[1].size": 2, "stop": ["x", "y"]}
    }


def test_changes_name_both_values():
    old = {"a": {"b": 1, "gone": True}, "files": [{"path": "x", "size": 1}, {"path": "y"}], "long": "s" * 200}
    new = {"a": {"b": 2}, "files": [{"path": "x", "size": 2}], "long": "t" * 200}
    found = changes(old, new)
    assert found[:3] == ["a.b: 1 -> 2", "a.gone: true -> absent", "files[0].size: 1 -> 2"]
    assert found[3] == 'files[1].path: "y" -> absent'
    assert len(found[4]) < 140
    assert changes(old, old) == []
    assert changes({"a": 0}, {"a": 0, "new": [1]}) == ["new: absent -> [1]"]


def test_labels_stand_for_the_beginning_of_a_key():
    new = {"files": [{"size": 1, "hash": "a"}, {"size": 2, "hash": "c"}]}
    old = {"files": [{"size": 1, "hash": "a"}, {"size": 2, "hash": "b"}]}
    labels = {"files[1].": "input file in/b.jsonl ", "files[0].": "input file in/a.jsonl "}
    assert changes(old, new, labels=labels) == ['input file in/b.jsonl hash: "b" -> "c"']
    assert changes(new, old, labels=labels)[0].startswith("input file in/b.jsonl hash")


def test_the_hash_is_of_the_values_and_of_nothing_else():
    values = {"a": {"b": 1, "c": [1, 2]}, "d": "x"}
    same = Fingerprint({"d": "x", "a": {"c": (1, 2), "b": 1}}, ["d"], {"a.": "label "})
    assert Fingerprint(values).hash == same.hash
    for other in ({"a": {"b": 2, "c": [1, 2]}, "d": "x"}, {"a": {"b": 1, "c": [2, 1]}, "d": "x"}, {"d": "x"}):
        assert Fingerprint(other).hash != same.hash
    assert Fingerprint({"d": "y"}, ["d"]).hash != Fingerprint({"d": "x"}, ["d"]).hash
    assert Fingerprint({"a": 1}).hash != Fingerprint({"a": "1"}).hash


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"prompt": {"system": "hunter2"}}, "prompt.system"),
        ({"sampling": {"stop": ["a", "hunter2"]}}, "sampling.stop.1"),
        ({"sampling": {"stop": ["hunter2"]}}, "sampling.stop"),
        ({"input": {"columns": {"id": "hunter2"}}}, "input.columns"),
        ({"list": [{"x": "hunter2"}]}, "list"),
        ({"list": [{"x": ["hunter2"]}]}, "list[0].x"),
    ],
)
def test_a_secret_is_stored_and_shown_as_its_hash(values, key):
    secret = Fingerprint(values, [key])
    text = json.dumps(secret.to_json())
    assert "hunter2" not in text
    assert "sha256:" in text
    assert secret.changes(secret.to_json()) == []
    assert "hunter2" not in " ".join(secret.changes({}))
    other = Fingerprint(orjson.loads(orjson.dumps(values).replace(b"hunter2", b"hunter3")), [key])
    (change,) = other.changes(secret.to_json())
    assert "hunter" not in change
    assert change.count("sha256:") == 2


def test_only_the_secret_is_hidden():
    stored = Fingerprint({"a": {"key": "s", "keys": "t", "other": "u"}}, ["a.key"]).to_json()
    assert (stored["a.keys"], stored["a.other"]) == ("t", "u")
    assert stored["a.key"].startswith("sha256:")


def test_a_value_equals_its_hash():
    """It makes no difference whether a value came from the environment, in this attempt or in the first."""
    plain, secret = Fingerprint({"a": "hunter2"}), Fingerprint({"a": "hunter2"}, ["a"])
    assert plain.hash == secret.hash
    assert plain.changes(secret.to_json()) == secret.changes(plain.to_json()) == []
    assert Fingerprint({"a": "other"}).changes(secret.to_json()) != []


def test_types_tell():
    assert changes({"a": 1}, {"a": True}) == ["a: 1 -> true"]
    assert changes({"a": None, "b": 0}, {"b": 0}) == ["a: null -> absent"]
    assert changes({"a": 0}, {"a": 0.0}) == ["a: 0 -> 0.0"]


def test_a_job_never_stores_or_shows_a_secret(tmp_path):
    def known(value, seed=0):
        return Fingerprint(
            {"prompt": {"system": value}, "stop": ["x", value], "seed": seed}, ["prompt.system", "stop.1"]
        )

    writer = writer_of(open_ledger(tmp_path, 30, fingerprint=known("hunter2")))
    expect(writer)
    writer.write([row(i) for i in range(12)])
    close(writer)
    with pytest.raises(ConfigError, match=r"prompt.system: .*sha256:.* seed: 0 -> 1") as caught:
        open_ledger(tmp_path, 30, fingerprint=known("hunter3", seed=1))
    assert "hunter" not in str(caught.value)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 4
    assert not any(b"hunter" in path.read_bytes() for path in files)
