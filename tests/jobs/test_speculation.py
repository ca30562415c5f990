"""The speculation section: which keys go together, and what a job writes down about them."""

import os

import pytest
import yaml

from specrun.jobs.errors import ConfigError
from specrun.jobs.spec import JobSpec, json_schema
from specrun.jobs.speculation import METHODS
from tests.jobs.spec_files import BASE, load, problems, reload

SYNTHETIC = "synthetic: {replay: old, acceptance_rates: [0.8, 0.6]}"
HASH = "sha256:" + "0123456789abcdef" * 4
OTHER = "sha256:" + "f" * 64


def section(text):
    return BASE + f"speculation: {{{text}}}\n"


@pytest.mark.parametrize(
    "text",
    [
        "method: none",
        "method: ngram, max_draft_tokens: 3",
        "method: suffix, warm_from: old, index_tokens: 5000, save_index: true",
        "method: suffix, warm_from: [old, 's3://bucket/old/*', '/a/part-*.parquet']",
        "method: draft_model, model: org/small, revision: main",
        "method: suffix+draft_model, model: org/small, warm_from: old",
        "method: auto",
        "method: auto, model: org/small, warm_from: old, save_index: true",
        f"method: synthetic, {SYNTHETIC}",
        "method: synthetic, synthetic: {replay: old, acceptance_rates: [1], groups: {factors: [1, 0.5], "
        "rows_per_group: 4}, over_time: [[0, 1.0], [5000, 0.2]], by_context: [[0, 1]], confidence: none, seed: 3}",
    ],
)
def test_what_goes_together(tmp_path, monkeypatch, text):
    spec = load(tmp_path, section(text))
    monkeypatch.chdir(tmp_path)
    again = reload(tmp_path, spec)
    assert again.resolved_yaml() == spec.resolved_yaml() and again.speculation.method == spec.speculation.method


@pytest.mark.parametrize(
    "method", [method for method in METHODS if method not in ("draft_model", "suffix+draft_model")]
)
def test_a_resolved_job_takes_every_default(tmp_path, method):
    """Written out, the defaults of other methods' keys are no reason to refuse it."""
    extra = f", {SYNTHETIC}" if method == "synthetic" else ""
    spec = load(tmp_path, section(f"method: {method}{extra}"))
    assert yaml.safe_load(spec.resolved_yaml())["speculation"]["index_tokens"] == 4_000_000
    assert reload(tmp_path, spec).speculation.method == method


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("method: draft_model", "model is missing; method draft_model needs a draft model, name its checkpoint"),
        ("method: suffix+draft_model", "model is missing; method suffix+draft_model needs a draft model"),
        (
            "method: ngram, model: m",
            "model does not go with method ngram; remove it, or choose draft_model, suffix+draft_model or auto",
        ),
        ("model: m", "model does not go with method none; remove it, or choose draft_model"),
        ("method: suffix, revision: main", "revision does not go with method suffix; remove it"),
        ("method: auto, revision: main", "revision is that of a draft model and there is none; name it as model, or"),
        (f"method: auto, content_hash: '{HASH}'", "content_hash is that of a draft model and there is none"),
        ("method: ngram, warm_from: old", "warm_from does not go with method ngram; remove it, or choose suffix"),
        ("method: draft_model, model: m, save_index: true", "save_index does not go with method draft_model"),
        ("index_tokens: 5000", "index_tokens does not go with method none; remove it, or choose suffix, suffix+draft"),
        ("method: synthetic", "synthetic is missing; method synthetic needs its keys replay and acceptance_rates"),
        (f"method: ngram, {SYNTHETIC}", "synthetic does not go with method ngram; remove it, or choose synthetic"),
    ],
)
def test_what_does_not_go_together(tmp_path, text, expected):
    (found,) = problems(tmp_path, section(text))
    assert found.startswith("job.yaml: speculation: ") and expected in found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("method: suffix, warm_from: []", "speculation.warm_from: must not be an empty list"),
        ("method: suffix, warm_from: [3]", "speculation.warm_from: must be text, got 3; quote it"),
        ("method: suffix, warm_from: ['http://x/y']", "speculation.warm_from: must be a local path or one of s3://"),
        ("method: suffix, warm_from: 's3://a:hunter2@b/c'", "speculation.warm_from: must not hold credentials"),
        ("method: suffix, index_tokens: 10", "speculation.index_tokens: must be greater than or equal to 1000, got 10"),
        ("method: suffix, save_index: 3", "speculation.save_index: must be "),
        ("method: draft_model, model: m, content_hash: abc", "speculation.content_hash: must be of the form"),
        (
            "method: synthetic, synthetic: {replay: old, acceptance_rates: []}",
            "speculation.synthetic.acceptance_rates: must not be an empty list",
        ),
        ("method: synthetic, synthetic: {replay: old}", "synthetic.acceptance_rates: missing; it has no default"),
        (
            "method: synthetic, synthetic: {replay: old, acceptance_rates: [0.8, 1.5]}",
            "speculation.synthetic.acceptance_rates: must be less than or equal to 1, got 1.5",
        ),
        (
            "method: synthetic, synthetic: {replay: old, acceptance_rates: [1], over_time: [[5, 1], [0, 1]]}",
            "speculation.synthetic: over_time must name its points in ascending order of tokens",
        ),
        (
            "method: synthetic, synthetic: {replay: old, acceptance_rate: [1]}",
            "speculation.synthetic.acceptance_rate: unknown key; did you mean acceptance_rates?",
        ),
        ("warm_form: old", "speculation.warm_form: unknown key; did you mean warm_from?"),
    ],
)
def test_a_wrong_value_is_told_by_its_key(tmp_path, text, expected):
    found = problems(tmp_path, section(text))
    assert any(expected in line for line in found) and "hunter2" not in str(found)


def test_resolved_paths_are_absolute(tmp_path, monkeypatch):
    (tmp_path / "here" / "small").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", "/home/someone")
    here = f"{tmp_path}/here"

    def resolved(text):
        return yaml.safe_load(load(tmp_path, section(text)).resolved_yaml())["speculation"]

    values = resolved("method: suffix+draft_model, model: small, warm_from: ['a/*', ~/b, /c, 's3://bucket/d']")
    assert values["model"] == f"{here}/small"
    assert values["warm_from"] == [f"{here}/a/*", "/home/someone/b", "/c", "s3://bucket/d"]
    assert resolved("method: suffix, warm_from: a")["warm_from"] == [f"{here}/a"]
    assert resolved("method: draft_model, model: org/small")["model"] == "org/small"
    assert resolved(f"method: synthetic, {SYNTHETIC}")["synthetic"]["replay"] == f"{here}/old"


@pytest.mark.parametrize(
    "warm_from", ["'${DAY}/out'", "['old', '${DAY}/out']", "['${ROOT}/out']", "'s3://${DAY}/out'", "'~/${DAY}'"]
)
def test_a_variable_is_not_written_down(tmp_path, monkeypatch, warm_from):
    monkeypatch.setenv("DAY", "hunter2-day")
    monkeypatch.setenv("ROOT", "/hunter2-root")
    for folder in ("here", "elsewhere"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    model = "model: '${DAY}/small', revision: '${DAY}'"
    spec = load(tmp_path, section(f"method: suffix+draft_model, {model}, warm_from: {warm_from}"))
    text = spec.resolved_yaml()
    assert "hunter2" not in text and "${DAY}/small" in text
    given = [os.path.abspath(os.path.expanduser(p)) if "://" not in p else p for p in spec.speculation.warm_from or ()]
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = JobSpec.parse(text, "resolved.yaml").speculation
    assert [os.path.expanduser(p) for p in again.warm_from or ()] == given and again.model == "hunter2-day/small"


def test_no_key_of_speculation_is_in_the_fingerprint(tmp_path):
    base = load(tmp_path).fingerprint_fields()
    for text in ("method: suffix, warm_from: old, index_tokens: 5000", "method: auto, model: m, revision: r"):
        assert load(tmp_path, section(text)).fingerprint_fields() == base


def test_json_schema():
    properties = json_schema()["$defs"]["SpeculationSpec"]["properties"]
    assert properties["method"]["enum"] == list(METHODS)
    one, many, _ = properties["warm_from"]["anyOf"]
    assert (one["type"], many["type"], many["items"]) == ("string", "array", {"type": "string"})
    assert all(
        "description" in properties[key] for key in ("method", "model", "content_hash", "warm_from", "synthetic")
    )
    assert set(json_schema()["$defs"]["SyntheticSpec"]["required"]) == {"replay", "acceptance_rates"}


FOUND = {"revision": "abc123", "content_hash": HASH}


def test_pins_are_written_and_hold(tmp_path):
    spec = load(tmp_path, section("method: draft_model, model: org/small, revision: main"))
    pinned = spec.pinned({"model": {"revision": None, "content_hash": OTHER}, "speculation": FOUND})
    assert spec.speculation.content_hash is None
    again = reload(tmp_path, pinned)
    assert (again.model.revision, again.model.content_hash) == (None, OTHER)
    assert (again.speculation.revision, again.speculation.content_hash) == ("abc123", HASH)
    assert again.fingerprint_fields() == spec.fingerprint_fields()
    assert again.pinned({"speculation": FOUND}) == again


@pytest.mark.parametrize(("name", "key"), [("model", "path"), ("speculation", "model")])
def test_other_content_is_refused(tmp_path, name, key):
    text = section("method: draft_model, model: some/small")
    spec = load(tmp_path, text, [f"{name}.content_hash={OTHER}"])
    with pytest.raises(ConfigError) as caught:
        spec.pinned({name: FOUND})
    message = str(caught.value)
    assert message.startswith(f"{name}.content_hash: the files of {name}.{key} 'some/")
    assert f"{HASH}, the job asks for {OTHER}; put those files back" in message and "\n" not in message


def test_a_pin_takes_the_place_of_a_variable_only_where_it_says_more(tmp_path, monkeypatch):
    monkeypatch.setenv("BRANCH", "main")
    monkeypatch.setenv("COMMIT", "abc123")
    spec = load(tmp_path, BASE, ["model.revision=${BRANCH}"]).pinned({"model": FOUND})
    assert yaml.safe_load(spec.resolved_yaml())["model"]["revision"] == "abc123"
    spec = load(tmp_path, BASE, ["model.revision=${COMMIT}"]).pinned({"model": FOUND})
    resolved = yaml.safe_load(spec.resolved_yaml())["model"]
    assert (resolved["revision"], resolved["content_hash"]) == ("${COMMIT}", HASH)
    assert spec.secret_keys == ["model.revision"]
