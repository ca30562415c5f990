"""What a job writes down about itself: paths that hold elsewhere, and no value of a variable, which may be secret."""

import json
import traceback
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from specrun.jobs.errors import ConfigError
from specrun.jobs.fingerprint import Fingerprint
from specrun.jobs.spec import JobSpec
from tests.jobs.spec_files import BASE, load, problems, reload


@pytest.mark.parametrize("key", ["input", "output"])
@pytest.mark.parametrize("location", ["s3://bucket/a/b", "gs://bucket/a", "s3://b/a?region=eu-west-1", "/a/@b", "a@b"])
def test_locations(tmp_path, key, location):
    spec = load(tmp_path, BASE, [f"{key}.path={location}"])
    assert getattr(spec, key).path == location


@pytest.mark.parametrize("key", ["input", "output"])
@pytest.mark.parametrize("scheme", ["http", "https", "file", "hdfs", "S3", "s3a", "abfss", ""])
def test_unknown_schemes_are_refused(tmp_path, key, scheme):
    (found,) = problems(tmp_path, BASE, [f"{key}.path={scheme}://bucket/x"])
    assert found == f"--set: {key}.path: must be a local path or one of s3://, gs://"


@pytest.mark.parametrize("key", ["input", "output"])
@pytest.mark.parametrize(
    "location",
    [
        "s3://AKIA1234:hunter2@bucket/x",
        "s3://AKIA1234:hunt/er2@bucket/x",
        "gs://hunter2@bucket/x",
        "s3://bucket/x?access_key=AKIA1234&secret_key=hunter2",
        "s3://bucket/x?region=eu&X-Amz-Signature=hunter2",
        "gs://bucket/x?Access_Token=hunter2",
    ],
)
def test_credentials_in_locations_are_refused_and_not_shown(tmp_path, key, location):
    (found,) = problems(tmp_path, BASE, [f"{key}.path={location}"])
    expected = "must not hold credentials; give them in the environment, as in AWS_ACCESS_KEY_ID"
    assert found == f"--set: {key}.path: {expected}"


def test_resolved_yaml_round_trip(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKEN", "a${NOT_A_VARIABLE}b")
    spec = load(
        tmp_path,
        """
        name: "x-{date}"
        model: {path: m, revision: "123"}
        speculation: {method: ngram, policy: {name: always, num_draft_tokens: 3, table: [[1, 64, 3]]}}
        input: {path: /in, columns: {id: doc, prompt: text}}
        prompt: {system: "${TOKEN}", template: "a: {{ text }}\\n${TOKEN} 'q' ü", chat_template: default}
        sampling: {logit_bias: {7: -1.5}, stop: "x", temperature: 1.0e-3}
        output: {path: "/out/{date}", keep_columns: [a, b]}
        engine: {max_num_seqs: 8}
        """,
    )
    again = reload(tmp_path, spec)
    assert again == spec
    assert again.prompt.system == "a${NOT_A_VARIABLE}b"
    assert again.fingerprint_fields() == spec.fingerprint_fields()
    assert again.secret_keys == spec.secret_keys


def test_resolved_yaml_holds_no_value_of_a_variable(tmp_path, monkeypatch):
    """Wherever a variable may stand, also where validation makes something else of the value."""
    for name in ("WORD", "OTHER"):
        monkeypatch.setenv(name, f"hunter2-{name}")
    monkeypatch.setenv("SEED", "123456789")
    monkeypatch.setenv("SCALE", "0.987654321")
    spec = load(
        tmp_path,
        """
        name: "n-${WORD}-{date}"
        model: {path: "${WORD}/model", revision: "${WORD}", served_model_name: "x${OTHER}y"}
        speculation: {policy: {name: "m:${WORD}", deep: [{a: "${WORD}"}, ["${OTHER}"]], t: {1: "${WORD}"}}}
        input: {path: "/in/${WORD}/*.jsonl", columns: {id: "${WORD}", prompt: "${OTHER}"}}
        prompt: {system: "${WORD} and ${OTHER}", template: "$${KEEP} {{ x }} ${WORD}"}
        sampling: {stop: [a, "${WORD}", "${OTHER}"], seed: "${SEED}", logit_bias: {7: "${SCALE}"}}
        output: {path: "/out/${WORD}/{date}", keep_columns: [a, "${WORD}"]}
        run: {max_runtime_s: "${SEED}"}
        """,
    )
    text = spec.resolved_yaml()
    for value in ("hunter2", "123456789", "987654321"):
        assert value not in text
    resolved = yaml.safe_load(text)
    today = datetime.now().date().isoformat()
    assert resolved["name"] == f"n-${{WORD}}-{today}"
    assert resolved["sampling"]["stop"] == ["a", "${WORD}", "${OTHER}"]
    assert resolved["sampling"]["logit_bias"] == {"7": "${SCALE}"}
    assert resolved["output"] == {
        **{"path": f"/out/${{WORD}}/{today}", "if_exists": "resume", "rows_per_part": 10000, "format": "parquet"},
        **{"keep_columns": ["a", "${WORD}"], "token_ids": False},
    }
    assert resolved["prompt"]["template"] == "$${KEEP} {{ x }} ${WORD}"
    again = reload(tmp_path, spec)
    assert again.sampling == spec.sampling and again.prompt == spec.prompt and again.output == spec.output
    monkeypatch.setenv("WORD", "rotated")
    assert reload(tmp_path, spec).prompt.system == "rotated and hunter2-OTHER"


@pytest.mark.parametrize("line", ["speculation: {policy: '${WORD}'}", "sampling: {stop: '${WORD}'}"])
def test_a_variable_in_place_of_a_section_or_a_list(tmp_path, monkeypatch, line):
    monkeypatch.setenv("WORD", "hunter2:Policy")
    spec = load(tmp_path, BASE + line + "\n")
    assert "hunter2" not in spec.resolved_yaml()
    again = reload(tmp_path, spec)
    assert (again.speculation, again.sampling) == (spec.speculation, spec.sampling)


def test_a_variable_given_by_set(tmp_path, monkeypatch):
    monkeypatch.setenv("WORD", "hunter2")
    spec = load(
        tmp_path, BASE, ["prompt.system=${WORD}", "sampling.stop=[x, '${WORD}']", "speculation.policy.key=${WORD}"]
    )
    assert spec.prompt.system == "hunter2" and spec.sampling.stop == ("x", "hunter2")
    assert "hunter2" not in spec.resolved_yaml()
    assert sorted(spec.secret_keys) == ["prompt.system", "sampling.stop.1", "speculation.policy.key"]
    assert reload(tmp_path, spec).sampling.stop == ("x", "hunter2")


def test_the_fingerprint_of_a_job_holds_no_value_of_a_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("WORD", "hunter2")
    monkeypatch.setenv("SEED", "123456789")
    plain = BASE + "prompt: {system: hunter2}\nsampling: {stop: [hunter2], seed: 123456789, logit_bias: {7: 1}}\n"
    text = plain.replace("hunter2", "'${WORD}'").replace("123456789", "'${SEED}'")
    spec, same = load(tmp_path, text), load(tmp_path, plain)
    secret = Fingerprint(spec.fingerprint_fields(), spec.secret_keys)
    stored = json.dumps(secret.to_json())
    assert "hunter2" not in stored and "123456789" not in stored
    assert secret.hash == Fingerprint(same.fingerprint_fields()).hash
    monkeypatch.setenv("WORD", "hunter3")
    changed = load(tmp_path, text)
    changes = Fingerprint(changed.fingerprint_fields(), changed.secret_keys).changes(secret.to_json())
    assert sorted(change.partition(":")[0] for change in changes) == ["prompt.system", "sampling.stop"]
    assert not any("hunter" in change for change in changes)


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("sampling: {max_tokens: '${WORD}'}", "sampling.max_tokens"),
        ("sampling: {stop_token_ids: [1, '${WORD}']}", "sampling.stop_token_ids"),
        ("sampling: {logit_bias: {7: '${WORD}'}}", "sampling.logit_bias"),
        ("sampling: '${WORD}'", "sampling"),
        ("speculation: {method: '${WORD}'}", "speculation.method"),
        ("engine: {device: '${WORD}'}", "engine.device"),
        ("run: {shard: '${WORD}'}", "run.shard"),
        ("run: ['${WORD}']", "run"),
        ("output: {path: 'http://${WORD}/x'}", "output.path"),
        ("output: {path: 's3://${WORD}@bucket/x'}", "output.path"),
        ("prompt: {chat_template: 'templates/${WORD}.jinja'}", "prompt.chat_template"),
    ],
)
def test_a_problem_with_a_variable_does_not_show_its_value(tmp_path, monkeypatch, line, key):
    monkeypatch.setenv("WORD", "hunter2")
    base = BASE.replace("output: {path: out}\n", "") if line.startswith("output") else BASE
    (found,) = problems(tmp_path, base + line + "\n")
    assert f"{key}: " in found
    assert "hunter2" not in found
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, base + line + "\n")
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_a_problem_with_a_plain_value_shows_it(tmp_path, monkeypatch):
    monkeypatch.setenv("WORD", "hunter2")
    found = problems(tmp_path, BASE + "sampling: {max_tokens: many, seed: '${WORD}', top_k: few}\n")
    assert found == [
        "job.yaml: sampling.max_tokens: must be a whole number, got 'many'",
        "job.yaml: sampling.top_k: must be a whole number, got 'few'",
        "job.yaml: sampling.seed: must be a whole number, got the value of an environment variable",
    ]


def test_resolved_paths_are_absolute(tmp_path, monkeypatch):
    """So that a retry or a finalize that begins elsewhere finds what the job found."""
    (tmp_path / "here" / "m").mkdir(parents=True)
    (tmp_path / "here" / "chat.jinja").write_text("x")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("NAME", "a")
    text = """
    model: {path: m}
    input: {path: "in/../*.jsonl"}
    prompt: {chat_template: chat.jinja}
    output: {path: ~/out}
    """
    resolved = yaml.safe_load(load(tmp_path, text).resolved_yaml())
    assert resolved["model"]["path"] == f"{tmp_path}/here/m"
    assert resolved["input"]["path"] == f"{tmp_path}/here/*.jsonl"
    assert resolved["prompt"]["chat_template"] == f"{tmp_path}/here/chat.jinja"
    assert resolved["output"]["path"] == "/home/someone/out"
    remote = ["input.path=s3://bucket/in/*.jsonl", "output.path=gs://bucket/out", "model.path=org/model"]
    resolved = yaml.safe_load(load(tmp_path, text, remote).resolved_yaml())
    assert [resolved[key]["path"] for key in ("input", "output", "model")] == [
        given.partition("=")[2] for given in remote
    ]
    assert (
        yaml.safe_load(load(tmp_path, text, ["model.path=package:m"]).resolved_yaml())["model"]["path"] == "package:m"
    )


@pytest.mark.parametrize("path", ["out/${NAME}", "${NAME}/out", "${ROOT}/out", "s3://${NAME}/out", "~/${NAME}"])
def test_resolved_paths_with_a_variable_are_absolute_too(tmp_path, monkeypatch, path):
    monkeypatch.setenv("NAME", "a")
    monkeypatch.setenv("ROOT", "/a")
    for folder in ("here ${x}", "elsewhere"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "here ${x}")
    spec = load(tmp_path, BASE, [f"output.path={path}"])
    expected = Path(spec.output.path).expanduser().absolute() if "://" not in path else spec.output.path
    resolved = spec.resolved_yaml()
    assert path in resolved
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = JobSpec.parse(resolved, "resolved.yaml").output.path
    assert (Path(again).expanduser() if "://" not in path else again) == expected


@pytest.mark.parametrize("shard", ["1/4", "${JOB_INDEX}/4"])
def test_resolved_yaml_is_of_the_job_and_not_of_a_shard(tmp_path, monkeypatch, shard):
    """All shards write the same, and whoever reads it later is none of them."""
    monkeypatch.setenv("JOB_INDEX", "1")
    spec = load(tmp_path, BASE, [f"run.shard={shard}"])
    assert spec.run.shard == "1/4"
    assert spec.resolved_yaml() == load(tmp_path).resolved_yaml()
    monkeypatch.delenv("JOB_INDEX")
    assert reload(tmp_path, spec).run.shard is None


def test_dates_are_resolved_once(tmp_path, monkeypatch):
    """A retry on the next day is of the same job."""
    monkeypatch.setenv("NAME", "a")
    spec = load(tmp_path, BASE, ["output.path=/out/{date}/${NAME}", "name=n-{date}"], datetime(2031, 2, 3))
    again = JobSpec.parse(spec.resolved_yaml(), "resolved.yaml", now=datetime(2032, 1, 1))
    assert (again.output.path, again.name) == ("/out/2031-02-03/a", "n-2031-02-03")
    assert spec.output.path == again.output.path
