"""JobSpec: strict YAML, overrides, expansion, one line a problem."""

import json
from dataclasses import fields
from datetime import datetime

import pytest
from pydantic import ValidationError

from specrun.engine.request import SamplingParams
from specrun.jobs import errors
from specrun.jobs.errors import ConfigError
from specrun.jobs.sections import SamplingSpec
from specrun.jobs.spec import JobSpec, json_schema
from tests.jobs.spec_files import BASE, load, problems


def test_defaults(tmp_path):
    spec = load(tmp_path)
    assert spec.name == "job"
    assert spec.input.columns.prompt == "prompt" and spec.input.columns.messages is None
    assert spec.speculation.policy.name == "goodput"
    assert spec.sampling.seed == 0 and spec.sampling.stop == ()
    assert spec.engine.max_num_seqs == "auto"


def test_frozen(tmp_path):
    with pytest.raises(ValidationError):
        load(tmp_path).sampling.seed = 3


def test_sampling_mirrors_the_engine():
    names = [field.name for field in fields(SamplingParams)]
    # A request has a grammar of its own in its place.
    assert list(SamplingSpec.model_fields) == [*names, "response_format"]
    spec, params = SamplingSpec(), SamplingParams()
    assert spec.response_format is None
    for name in names:
        assert getattr(spec, name) == getattr(params, name), name


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "speculation: {max_draft_token: 3}",
            "job.yaml: speculation.max_draft_token: unknown key; did you mean max_draft_tokens?",
        ),
        ("max_tokens: 3", "job.yaml: max_tokens: unknown key; did you mean sampling.max_tokens?"),
        ("sampling: {max_tokens: yes}", "job.yaml: sampling.max_tokens: must be a number, not true or false"),
        ("sampling: {top_p: high}", "job.yaml: sampling.top_p: must be a number, got 'high'"),
        ("engine: {max_num_seqs: many}", "job.yaml: engine.max_num_seqs: must be a whole number or 'auto', got 'many'"),
        ("name: 12", "job.yaml: name: must be text, got 12; quote it"),
        ("run: 5", "job.yaml: run: must be keys and values, got 5"),
        ("speculation: {max_draft_tokens: 0}", "must be greater than or equal to 1, got 0"),
        ("errors: {max_failed_fraction: 1.5}", "must be less than or equal to 1, got 1.5"),
        ("speculation: {method: eagle}", "must be 'none', 'ngram', 'suffix', 'draft_model', "),
        ("engine: {device: tpu}", "job.yaml: engine.device: must be of the form"),
        ("run: {grace_s: .nan}", "job.yaml: run.grace_s: must be"),
        ("prompt: {system: Hi, chat_template: none}", "job.yaml: prompt.system needs a chat template"),
        ("prompt: {chat_template: nowhere.jinja}", "prompt.chat_template: cannot read 'nowhere.jinja'"),
        ("1: 2", "job.yaml: 1: unknown key"),
    ],
)
def test_one_line_for_a_problem(tmp_path, line, expected):
    (found,) = problems(tmp_path, BASE + line + "\n")
    assert expected in found


def test_every_problem_has_its_line(tmp_path):
    found = problems(tmp_path, "version: 2\nmodel: {pth: x}\ninput: {path: a, limit: 0}\n")
    assert found == [
        "job.yaml: version: must be 1, got 2",
        "job.yaml: model.path: missing; it has no default",
        "job.yaml: model.pth: unknown key; did you mean path?",
        "job.yaml: input.limit: must be greater than or equal to 1, got 0",
        "job.yaml: output: missing; it has no default",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "name: a\nmodel: {path: x}\nname: b\n",
            "job.yaml: line 3, column 1: key 'name' is given twice (first on line 1)",
        ),
        ("sampling: {seed: 1, seed: 2}\n", "line 1, column 21: key 'seed' is given twice"),
        ("a: b: c\n", "job.yaml: line 1, column 5: mapping values are not allowed here"),
        ("name: 'a\n", "job.yaml: line 2, column 1: "),
        ("output: {path: out/{date}, if_exists: error}\n", 'quote a value that holds braces, as in path: "out/{date}"'),
        ("- a\n", "a job is a mapping of keys, not list"),
        ("? [a]\n: b\n", "a key must be plain text"),
        ("name: !!python/object:os.system x\n", "could not determine a constructor"),
    ],
)
def test_bad_yaml(tmp_path, text, expected):
    (found,) = problems(tmp_path, text)
    assert expected in found


def test_unreadable_job_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the job file: No such file"):
        JobSpec.load(tmp_path / "none.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"name: \xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        JobSpec.load(tmp_path / "bytes.yaml")


def test_name_is_the_file_name_unless_given(tmp_path):
    (tmp_path / "nightly.v2.yaml").write_text(BASE)
    assert JobSpec.load(tmp_path / "nightly.v2.yaml").name == "nightly"


def test_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("ROOT", "/data")
    monkeypatch.setenv("BUDGET", "17")
    monkeypatch.delenv("MISSING", raising=False)
    spec = load(
        tmp_path,
        """
        model: {path: "${ROOT}/model"}
        input: {path: in}
        output: {path: "${ROOT}/${BUDGET}"}
        prompt: {template: "cost $${BUDGET} {{ x }}"}
        sampling: {max_tokens: "${BUDGET}", stop: ["${ROOT}"]}
        """,
    )
    assert (spec.model.path, spec.output.path) == ("/data/model", "/data/17")
    assert spec.sampling.max_tokens == 17 and spec.sampling.stop == ("/data",)
    assert spec.prompt.template == "cost ${BUDGET} {{ x }}"
    (found,) = problems(tmp_path, BASE + "prompt: {system: '${MISSING}'}\n")
    assert "job.yaml: prompt.system: environment variable MISSING is not set" in found


def test_date_in_names_and_paths_only(tmp_path):
    spec = load(
        tmp_path,
        """
        name: nightly-{date}
        model: {path: "m-{date}"}
        input: {path: "in/{date}/*.parquet"}
        output: {path: "out/{date}"}
        prompt: {template: "{date}"}
        """,
        now=datetime(2031, 2, 3, 23, 59),
    )
    assert spec.name == "nightly-2031-02-03" and spec.model.path == "m-2031-02-03"
    assert spec.input.path == "in/2031-02-03/*.parquet" and spec.output.path == "out/2031-02-03"
    assert spec.prompt.template == "{date}"
    assert load(tmp_path, BASE + "name: 2031-02-03\n").name == "2031-02-03"  # a date stays text


def test_set(tmp_path):
    spec = load(
        tmp_path,
        BASE + "speculation: {policy: never}\n",
        [
            "sampling.max_tokens=7",
            "sampling.stop=[a, 'b']",
            "speculation.policy.k=3",
            "prompt.template=Title: {{ x }}",
            "input.columns={id: doc}",
            "engine.deterministic=true",
            "model.revision=",
        ],
    )
    assert spec.sampling.max_tokens == 7 and spec.sampling.stop == ("a", "b")
    assert spec.speculation.policy.name == "never" and spec.speculation.policy.kwargs == {"k": 3}
    assert spec.prompt.template == "Title: {{ x }}"
    assert spec.input.columns.id == "doc" and spec.input.columns.prompt == "prompt"
    assert spec.engine.deterministic and spec.model.revision is None


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("sampling.max_token=3", "--set: sampling.max_token: unknown key; did you mean max_tokens?"),
        ("samplin.max_tokens=3", "--set: samplin: unknown key; did you mean sampling?"),
        ("sampling.max_tokens=x", "--set: sampling.max_tokens: must be a whole number, got 'x'"),
        ("version.x=3", "--set version.x=3: version holds one value, not further keys"),
        ("name", "--set name: write it as section.key=value"),
        ("sampling..x=1", "--set sampling..x=1: write it as section.key=value"),
    ],
)
def test_bad_set(tmp_path, override, expected):
    assert problems(tmp_path, BASE, [override]) == [expected]


def test_policy(tmp_path):
    assert load(tmp_path, BASE + "speculation: {policy: 'mine:P'}\n").speculation.policy.name == "mine:P"
    policy = load(tmp_path, BASE + "speculation: {policy: {name: always, num_draft_tokens: 3}}\n").speculation.policy
    assert (policy.name, policy.kwargs) == ("always", {"num_draft_tokens": 3})


def test_columns_and_messages(tmp_path):
    chat = BASE.replace("in.parquet", "in.parquet, columns: {messages: chat}")
    assert load(tmp_path, chat).input.columns.prompt is None
    both = BASE.replace("in.parquet", "in.parquet, columns: {messages: chat, prompt: p}")
    assert problems(tmp_path, both) == ["job.yaml: input.columns: prompt and messages exclude each other; keep one"]
    for extra in ("template: x", "system: x", "chat_template: none"):
        (found,) = problems(tmp_path, chat + f"prompt: {{{extra}}}\n")
        assert "input.columns.messages" in found


@pytest.mark.parametrize("shard", ["1", "a/2", "1/0", "-1/2", "1/2/3", "1.0/2"])
def test_a_shard_that_is_none(tmp_path, shard):
    (found,) = problems(tmp_path, BASE, [f"run.shard={shard}"])
    assert found.startswith("--set: run.shard: must ")


def test_fingerprint_has_what_changes_outputs_only(tmp_path):
    base = load(tmp_path).fingerprint_fields()
    json.dumps(base)
    same = [
        "speculation.method=ngram",
        "speculation.policy=never",
        "engine.max_num_seqs=4",
        "name=other",
        "run.grace_s=1",
    ]
    # What a revision or a path stands for is known by its content, which the fingerprint has besides.
    same += ["model.revision=x", "model.path=y", "input.path=y", "run.shard=0/2", "run.order=input"]
    same += ["output.path=elsewhere", "errors.max_failed_fraction=1", "metrics.prometheus_port=9000"]
    assert load(tmp_path, BASE, same).fingerprint_fields() == base
    for other in (
        "sampling.seed=1",
        "sampling.stop=x",
        "sampling.response_format={type: json_object}",
        "prompt.system=x",
        "prompt.template=x",
        "model.dtype=float32",
        "input.limit=3",
        "input.columns.prompt=text",
        "output.rows_per_part=5",
        "output.keep_columns=none",
        "engine.deterministic=true",
        "engine.device=cpu",
    ):
        assert load(tmp_path, BASE, [other]).fingerprint_fields() != base, other


def test_fingerprint_of_a_job_without_a_response_format_is_as_before_there_were_any(tmp_path):
    """A job that was begun then goes on."""
    assert "response_format" not in load(tmp_path).fingerprint_fields()["sampling"]
    assert (
        "response_format"
        not in load(tmp_path, BASE, ["sampling.response_format={type: text}"]).fingerprint_fields()["sampling"]
    )


def test_fingerprint_sees_the_order_of_keys_in_a_schema(tmp_path):
    """It is the order of the output's."""
    form = "sampling.response_format={type: json_schema, json_schema: {schema: {properties: {A: {}, B: {}}}}}"
    forms = [form, form.replace("A: {}, B: {}", "B: {}, A: {}")]
    one, other = (load(tmp_path, BASE, [each]).fingerprint_fields() for each in forms)
    assert one != other


def test_fingerprint_sees_the_text_of_a_chat_template(tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text("one")
    spec = load(tmp_path, BASE, [f"prompt.chat_template={file}"])
    assert spec.chat_template_text() == "one"
    before = spec.fingerprint_fields()
    file.write_text("two")
    assert spec.fingerprint_fields() != before
    assert str(tmp_path) not in json.dumps(before)


def test_json_schema():
    schema = json_schema()
    assert schema["additionalProperties"] is False and set(schema["required"]) == {"model", "input", "output"}
    definitions = schema["$defs"]
    assert definitions["PolicySpec"]["type"] == ["object", "string"]
    assert definitions["SamplingSpec"]["properties"]["stop"]["anyOf"][0] == {"type": "string"}
    assert definitions["ModelSpec"]["properties"]["path"]["description"].startswith("A local folder")


def test_exit_codes():
    names = ("ConfigError", "InputError", "InputMissing", "OutputError", "StorageError", "TemporaryError")
    assert [getattr(errors, name).exit_code for name in names] == [78, 65, 66, 73, 74, 75]
