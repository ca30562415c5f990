"""Response formats: one form from every spelling, and what is wrong with the others."""

import json
from datetime import date
from typing import Any

import pyarrow as pa
import pytest

from specrun.jobs.columns import plan_columns
from specrun.jobs.response_format import (
    FORMAT_JSON_SCHEMA,
    FORMAT_KEYS,
    MAX_DEPTH,
    ResponseFormat,
    parse_response_format,
    read_format,
)
from specrun.jobs.row_errors import RowFailure
from specrun.jobs.spec import json_schema
from tests.jobs.openai_lines import chat, completion, refusal
from tests.jobs.prompt_inputs import job, read, source, write_lines, write_parquet
from tests.jobs.spec_files import BASE, load, problems, reload

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"const": None}}, "required": ["b"]}
TEXT = '{"type":"object","properties":{"b":{"type":"string"},"a":{"const":null}},"required":["b"]}'
JSON_SCHEMA = {"name": "n", "schema": SCHEMA, "strict": True, "description": "d"}

FORMS: list[tuple[dict[str, Any], ResponseFormat | None]] = [
    ({"type": "text"}, None),
    ({"type": "json_object"}, ResponseFormat("json_object")),
    ({"type": "json_schema", "json_schema": JSON_SCHEMA}, ResponseFormat("json_schema", TEXT)),
    ({"type": "json_schema", "json_schema": {"schema": json.dumps(SCHEMA)}}, ResponseFormat("json_schema", TEXT)),
    ({"type": "json_schema", "json_schema": {"schema": {}}}, ResponseFormat("json_schema", "{}")),
    ({"type": "regex", "regex": "[a-ü]+"}, ResponseFormat("regex", "[a-ü]+")),
    ({"type": "choice", "choice": ["ja", 'n"ein']}, ResponseFormat("choice", '["ja","n\\"ein"]')),
]

VLLM: list[tuple[dict[str, Any], ResponseFormat]] = [
    ({"guided_json": SCHEMA}, ResponseFormat("json_schema", TEXT)),
    ({"guided_json": TEXT}, ResponseFormat("json_schema", TEXT)),
    ({"guided_json": {}}, ResponseFormat("json_schema", "{}")),
    ({"guided_regex": "a|b"}, ResponseFormat("regex", "a|b")),
    ({"guided_choice": ["a", "b"]}, ResponseFormat("choice", '["a","b"]')),
    ({"structured_outputs": {"json": SCHEMA}}, ResponseFormat("json_schema", TEXT)),
    ({"structured_outputs": {"json": TEXT, "regex": None}}, ResponseFormat("json_schema", TEXT)),
    ({"structured_outputs": {"regex": "a"}}, ResponseFormat("regex", "a")),
    ({"structured_outputs": {"choice": ["a"], "json_object": False}}, ResponseFormat("choice", '["a"]')),
    ({"structured_outputs": {"json_object": True}}, ResponseFormat("json_object")),
    ({"response_format": {"type": "text"}, "guided_regex": "a"}, ResponseFormat("regex", "a")),
]

WRONG: list[tuple[Any, str]] = [
    ("json_object", "response_format: is not JSON: Expecting value at character 1"),
    ('{"type": "text"', "response_format: is not JSON: "),
    ('{"type": NaN}', "response_format: is not JSON: NaN is no number"),
    ('{"type": "text", "type": "text"}', "response_format: is not JSON: a key stands twice in one object"),
    ('["text"]', "response_format: must be an object or that as JSON text, got a list"),
    (7, "response_format: must be an object or that as JSON text, got 7"),
    ([], "response_format: must be an object or that as JSON text, got a list"),
    ({}, "response_format.type: must be one of text, json_object, json_schema, regex, choice, got null"),
    ({"type": "json"}, "response_format.type: must be one of .*, got 'json'"),
    ({"type": ["text"]}, "response_format.type: must be one of .*, got a list"),
    ({"type": "text", "regex": "a"}, "response_format.regex: does not go with type text; remove it"),
    ({"type": "text", "text": "a"}, "response_format.text: does not go with type text; remove it"),
    (
        {"type": "json_object", "schema": {}},
        "response_format.schema: does not go with type json_object; write type: js",
    ),
    (
        {"type": "json_schema", "name": "n", "schema": {}},
        "response_format.name: .* write type: json_schema, json_schema",
    ),
    ({"type": "json_schema"}, r"response_format.json_schema: must be \{name: ..., schema: ...\}, got null"),
    ({"type": "json_schema", "json_schema": "{}"}, "response_format.json_schema: must be .*, got '{}'"),
    (
        {"type": "json_schema", "json_schema": {"name": "n"}},
        "response_format.json_schema.schema: is missing; put the JS",
    ),
    (
        {"type": "json_schema", "json_schema": {"schema": 5}},
        "response_format.json_schema.schema: must be a JSON schema",
    ),
    ({"type": "json_schema", "json_schema": {"schema": "true"}}, "response_format.json_schema.schema: .*, got true"),
    ({"type": "json_schema", "json_schema": {"schema": "{"}}, "response_format.json_schema.schema: is not JSON: "),
    (
        {"type": "json_schema", "json_schema": {"schema": {}, "name": 5}},
        "response_format.json_schema.name: must be text",
    ),
    (
        {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}},
        "response_format.json_schema.strict: must be t",
    ),
    (
        {"type": "json_schema", "json_schema": {"schema": {}, "type": "x"}},
        "response_format.json_schema.type: is not kno",
    ),
    ({"type": "json_schema", "json_schema": {"schema": {1: {}}}}, ".*schema: every key must be text, got 1; quote it"),
    (
        {"type": "json_schema", "json_schema": {"schema": {"const": date(2024, 1, 31)}}},
        ".*schema: holds a value that JSON",
    ),
    (
        {"type": "json_schema", "json_schema": {"schema": {"minimum": float("nan")}}},
        ".*schema: holds a value that JSON",
    ),
    (
        {"type": "json_schema", "json_schema": {"schema": {"const": "\ud800"}}},
        ".*schema: holds half of a surrogate pair",
    ),
    ({"type": "regex"}, "response_format.regex: must be a regular expression, got null"),
    ({"type": "regex", "regex": ""}, "response_format.regex: must be a regular expression, got ''"),
    ({"type": "regex", "regex": "\ud800"}, "response_format.regex: holds half of a surrogate pair"),
    ({"type": "choice", "choice": []}, "response_format.choice: must be a list of at least one text"),
    ({"type": "choice", "choice": "a"}, "response_format.choice: must be a list of at least one text, got 'a'"),
    ({"type": "choice", "choice": ["a", True]}, r"response_format.choice\[1\]: must be text, got true; quote it"),
    ({"type": "choice", "choice": ["a", None]}, r"response_format.choice\[1\]: must be text, got null$"),
]


@pytest.mark.parametrize(("value", "expected"), FORMS)
@pytest.mark.parametrize("from_column", [False, True])
def test_every_form_as_object_and_as_text(value, expected, from_column):
    if not (from_column and value.get("json_schema", {}).get("schema") == SCHEMA):
        assert parse_response_format(value, from_column) == expected
    assert parse_response_format(json.dumps(value), from_column) == expected
    assert parse_response_format(expected) == expected
    assert hash(expected) == hash(parse_response_format(json.dumps(value)))


@pytest.mark.parametrize(("params", "expected"), VLLM)
def test_vllms_keys(params, expected):
    assert read_format(params) == {"response_format": expected}


@pytest.mark.parametrize(("value", "message"), WRONG, ids=[str(i) for i in range(len(WRONG))])
@pytest.mark.parametrize("from_column", [False, True])
def test_a_wrong_one_is_named(value, message, from_column):
    with pytest.raises(RowFailure, match=f"^{message}") as caught:
        parse_response_format(value, from_column)
    assert caught.value.code == "invalid_response_format"
    assert len(str(caught.value)) < 250 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("params", "code", "message"),
    [
        (
            {"response_format": {"type": "grammar"}},
            "unsupported_parameter",
            "response_format.type: grammar is not supp",
        ),
        (
            {"response_format": {"type": "structural_tag"}},
            "unsupported_parameter",
            "response_format.type: structural_t",
        ),
        ({"structured_outputs": {"grammar": "x"}}, "unsupported_parameter", "structured_outputs.grammar: is not supp"),
        (
            {"structured_outputs": {"whitespace_pattern": "x"}},
            "unsupported_parameter",
            "structured_outputs.whitespace_",
        ),
        ({"structured_outputs": "x"}, "invalid_response_format", "structured_outputs: is not JSON"),
        ({"structured_outputs": 5}, "invalid_response_format", "structured_outputs: must be an object"),
        ({"structured_outputs": {"json": "x"}}, "invalid_response_format", "structured_outputs.json: is not JSON"),
        (
            {"structured_outputs": {"json_object": "x"}},
            "invalid_response_format",
            "structured_outputs.json_object: must",
        ),
        (
            {"structured_outputs": {"json": {}, "regex": "x"}},
            "invalid_response_format",
            "structured_outputs: json and r",
        ),
        ({"guided_json": "x"}, "invalid_response_format", "guided_json: is not JSON"),
        ({"guided_json": 2}, "invalid_response_format", "guided_json: must be a JSON schema"),
        ({"guided_regex": ""}, "invalid_response_format", "guided_regex: must be a regular expression"),
        ({"guided_choice": "x"}, "invalid_response_format", "guided_choice: must be a list of at least one text"),
        (
            {"guided_regex": "a", "guided_json": {}},
            "invalid_response_format",
            "guided_regex: a second format beside guide",
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "invalid_response_format",
            "structured_outputs: a second format beside response_format; give one of them",
        ),
    ],
    ids=str,
)
def test_a_wrong_one_of_vllms_is_named(params, code, message):
    with pytest.raises(RowFailure) as caught:
        read_format(params)
    assert (caught.value.code, str(caught.value)[: len(message)]) == (code, message)


@pytest.mark.parametrize("params", [{}, {"temperature": 1}, {"response_format": None}, {"guided_choice": []}])
def test_a_row_that_says_nothing(params):
    assert read_format(params) == read_format(params, from_column=True) == {}


def test_plain_text_is_something_to_say():
    assert read_format({"response_format": {"type": "text"}}) == {"response_format": None}


def test_the_order_of_keys_is_kept():
    one, other = ("".join(f'"{key}": 1, ' for key in keys) for keys in ("ab", "ba"))
    assert read_format({"guided_json": f'{{{one}"c": 1}}'}) != read_format({"guided_json": f'{{{other}"c": 1}}'})


def test_too_deep():
    deep: dict[str, Any] = {}
    for _ in range(MAX_DEPTH):
        deep = {"items": deep}
    assert read_format({"guided_json": deep})
    for value in ({"items": deep}, json.dumps({"items": deep}), '{"a":' * 100_000):
        with pytest.raises(RowFailure, match=r"guided_json: .*(within each other|not JSON)"):
            read_format({"guided_json": value})


# Structs of Parquet: every key in every row


def test_a_structs_empty_fields_are_absent():
    blank = {"type": None, "json_schema": {"name": None, "schema": {"type": None}}, "choice": None}
    assert read_format({"response_format": blank}, from_column=True) == {}
    assert read_format({"structured_outputs": {"json": {"type": None}, "regex": None}}, from_column=True) == {}
    assert read_format({"response_format": {**blank, "type": "text"}}, from_column=True) == {"response_format": None}
    filled = {"type": "regex", "regex": "a", "json_schema": {"schema": {"type": None}}}
    assert parse_response_format(filled, from_column=True) == ResponseFormat("regex", "a")


def test_a_lone_null_constant_in_a_struct_is_refused():
    value = {"type": "object", "properties": {"a": {"const": None}}}
    with pytest.raises(
        RowFailure, match=r'^guided_json: const: null alone .*; write "type": "null", or give it as JSON'
    ):
        read_format({"guided_json": value}, from_column=True)
    with pytest.raises(RowFailure, match=r"^guided_json: const: null"):
        read_format({"guided_json": {"const": None}}, from_column=True)
    assert read_format({"guided_json": json.dumps(value)}, from_column=True)
    assert read_format({"guided_json": {"const": None}}) == {
        "response_format": ResponseFormat("json_schema", '{"const":null}')
    }


def formats(found):
    return [read_format(row.params, from_column=True) for row in read(found)[0]]


def test_parquet_structs(tmp_path):
    properties = {"name": {"type": "string", "pattern": "a+"}, "age": {"type": "integer", "enum": [1, 2]}}
    schema = {"type": "object", "properties": properties, "required": ["name"]}
    values = [
        None,
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        {"type": "regex", "regex": "a"},
        {"type": "choice", "choice": ["a", "b"]},
        {"type": "choice"},
        {"type": "yaml"},
    ]
    file = write_parquet(tmp_path / "a.parquet", {"prompt": ["p"] * len(values), "response_format": values})
    rows, carried = read(source(file))
    assert carried.column_names == []
    found = [read_format(row.params, from_column=True) for row in rows[:6]]
    assert found == [{}, *({"response_format": parse_response_format(value)} for value in values[1:6])]
    for row, key in zip(rows[6:], ("response_format.choice", "response_format.type"), strict=True):
        with pytest.raises(RowFailure, match=f"^{key}: "):
            read_format(row.params, from_column=True)


def test_parquet_text_and_vllms_columns(tmp_path):
    texts = [json.dumps(value) for value, _ in FORMS]
    for kind in (pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.binary()):
        table = pa.table({"prompt": ["p"] * len(texts), "response_format": pa.array(texts, pa.string()).cast(kind)})
        found = formats(source(write_parquet(tmp_path / "a.parquet", table)))
        assert found == [{"response_format": expected} for _, expected in FORMS]
    columns = {"prompt": ["p"] * 4, "guided_regex": ["a", None, None, None]}
    columns |= {"guided_choice": [[], ["x"], [], None], "guided_json": [None, None, "{}", None]}
    columns |= {"structured_outputs": [None, None, None, {"regex": "b", "choice": None}]}
    expected = [ResponseFormat("regex", "a"), ResponseFormat("choice", '["x"]')]
    expected += [ResponseFormat("json_schema", "{}"), ResponseFormat("regex", "b")]
    found = formats(source(write_parquet(tmp_path / "b.parquet", columns)))
    assert found == [{"response_format": form} for form in expected]


def test_jsonl(tmp_path):
    lines = [{"prompt": "p", "response_format": value} for value, _ in FORMS if "const" not in json.dumps(value)]
    lines += [{"prompt": "p", "response_format": json.dumps(value)} for value, _ in FORMS]
    lines += [{"prompt": "p", **params} for params, _ in VLLM if params != {"guided_json": SCHEMA}]
    lines = [line for line in lines if '"const": null' not in json.dumps(line)]
    found = formats(source(write_lines(tmp_path / "a.jsonl", {"prompt": "p"}, *lines)))
    assert found == [{}, *(read_format(line) for line in lines)]


@pytest.mark.parametrize("name", sorted(FORMAT_KEYS))
def test_a_column_counts_wherever_else_it_is_used(tmp_path, name):
    """As other parameters that are honoured, and unlike those that are not."""
    spec = job(tmp_path, keep=[name, "temperature"])
    plan = plan_columns(spec, ["prompt", name, "temperature", "guided_grammar"], None, "i")
    assert plan.params == (name, "temperature", "guided_grammar") and plan.passthrough == (name, "temperature")
    plan = plan_columns(job(tmp_path, columns={"prompt": name}), [name], None, "i")
    assert plan.params == () and plan.prompt == name


# OpenAI bodies


@pytest.mark.parametrize("request_of", [chat, completion])
def test_openai_lines(request_of):
    for value, expected in FORMS:
        assert request_of(response_format=value).params == {"response_format": expected}
    for params, expected in VLLM:
        assert request_of(**params).params == {"response_format": expected}
    assert request_of(structured_outputs={}, guided_choice=[], guided_json=None).params == {}
    assert request_of(guided_json={"const": None}).params["response_format"].value == '{"const":null}'


def test_wrong_ones_in_openai_lines():
    for value, _ in WRONG:
        if isinstance(value, dict):
            with pytest.raises(RowFailure) as caught:
                parse_response_format(value)
            assert refusal(chat(response_format=value)) == ("invalid_response_format", str(caught.value))
    for key, value in (
        ("response_format", "{}"),
        ("structured_outputs", "{}"),
        ("guided_json", 1),
        ("guided_choice", {}),
    ):
        assert refusal(chat(**{key: value}))[0] == "invalid_params"
    assert refusal(chat(response_format={"type": "grammar"}))[0] == "unsupported_parameter"
    assert refusal(chat(structured_outputs={"grammar": "x"}))[0] == "unsupported_parameter"
    code, message = refusal(chat(guided_grammar="root ::= x"))
    assert code == "unsupported_parameter"
    assert message.startswith("guided_grammar: ") and message.endswith(
        "; use guided_json, guided_regex or guided_choice"
    )
    assert refusal(chat(guided_regex="a", guided_json={}))[0] == "invalid_response_format"


# Jobs


@pytest.mark.parametrize(("value", "expected"), FORMS)
def test_in_a_job(tmp_path, value, expected):
    spec = load(tmp_path, BASE + f"sampling: {{response_format: {json.dumps(value)}}}\n")
    assert parse_response_format(spec.sampling.response_format) == expected
    assert reload(tmp_path, spec).sampling == spec.sampling
    again = load(tmp_path, BASE, [f"sampling.response_format={json.dumps(value)}"])
    assert again.sampling == spec.sampling
    asks_for_nothing = expected is None  # type text, which is as good as no format
    assert (spec.fingerprint_fields() == load(tmp_path).fingerprint_fields()) == asks_for_nothing


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("json_object", "must be keys and values, got 'json_object'"),
        ("{type: jsn}", "type: must be one of text, json_object, json_schema, regex, choice"),
        ("{}", "type: must be one of text"),
        ("{type: choice, choice: [yes, no]}", "choice[0]: must be text; quote it"),
        ("{type: json_schema, json_schema: {}}", "json_schema.schema: is missing; put the JSON schema there"),
        ("{type: json_schema, json_schema: {schema: {1: {}}}}", "json_schema.schema: every key must be text; quote it"),
        ("{type: regex, regex: ''}", "regex: must be a regular expression"),
        ("{type: structural_tag}", "type: structural_tag is not supported; use json_schema, regex, choice"),
    ],
)
def test_a_wrong_one_in_a_job(tmp_path, value, expected):
    (found,) = problems(tmp_path, BASE + f"sampling: {{response_format: {value}}}\n")
    assert found.startswith(f"job.yaml: sampling.response_format: {expected}")


def test_values_of_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("WORD", "hunter2")
    line = "sampling: {response_format: {type: json_schema, json_schema: {schema: {const: '${WORD}'}}}}\n"
    spec = load(tmp_path, BASE + line)
    assert parse_response_format(spec.sampling.response_format) == ResponseFormat("json_schema", '{"const":"hunter2"}')
    assert "hunter2" not in spec.resolved_yaml()
    assert reload(tmp_path, spec).sampling == spec.sampling
    assert spec.secret_keys == ["sampling.response_format.json_schema.schema.const"]
    for value in (
        "'${WORD}'",
        "{type: '${WORD}'}",
        "{type: choice, choice: '${WORD}'}",
        "{type: text, regex: '${WORD}'}",
        "{type: json_schema, json_schema: '${WORD}'}",
        "{type: json_schema, json_schema: {schema: '${WORD}'}}",
        "{type: json_schema, json_schema: {schema: {}, strict: '${WORD}'}}",
    ):
        (found,) = problems(tmp_path, BASE + f"sampling: {{response_format: {value}}}\n")
        assert found.startswith("job.yaml: sampling.response_format: ") and "hunter2" not in found


def test_editors_know_it():
    found = json_schema()["$defs"]["SamplingSpec"]["properties"]["response_format"]
    assert found["anyOf"] == [FORMAT_JSON_SCHEMA, {"type": "null"}] and "json_schema" in found["description"]
