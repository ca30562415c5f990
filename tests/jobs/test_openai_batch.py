"""Input lines of the OpenAI batch API: honoured, accepted or refused by name, and never an exception."""

import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrun.engine.request import SamplingParams
from specrun.jobs.openai_batch import BatchRequest, parse_line
from specrun.jobs.openai_body import BODY_KEYS, CHAT_URL, COMPLETIONS_URL
from specrun.jobs.row_errors import ROW_ERRORS
from tests.jobs.openai_lines import MODEL, USER, chat, completion, line, refusal


def test_t25_a_chat_line():
    assert chat(max_tokens=3, temperature=0.5) == BatchRequest(
        "a", CHAT_URL, MODEL, [USER], None, {"max_tokens": 3, "temperature": 0.5}, None
    )


def test_t25_a_completions_line():
    assert completion() == BatchRequest("a", COMPLETIONS_URL, MODEL, None, "once", {}, None)


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"method": "GET"}, "parse_error", "method: must be POST, got 'GET'"),
        ({"method": "post"}, "parse_error", "method: must be POST"),
        ({"method": None}, "parse_error", "method: must be POST, got null"),
        ({"url": "/v1/embeddings"}, "unsupported_parameter", "url: '/v1/embeddings'; use /v1/chat/completions"),
        ({"url": "/v1/chat/completions/"}, "unsupported_parameter", "url: "),
        ({"url": 5}, "parse_error", "url: must be"),
        ({"url": None}, "parse_error", "url: must be"),
        ({"body": None}, "parse_error", "body: must be an object, got null"),
        ({"body": "{}"}, "parse_error", "body: must be an object, got '{}'"),
        ({"body": []}, "parse_error", "body: must be an object, got a list"),
        ({"priority": 1}, "unsupported_parameter", "priority: a line has custom_id, method, url, body alone"),
    ],
)
def test_an_envelope_that_is_none(change, code, text):
    request = parse_line({**line(), **change}, MODEL)
    found, message = refusal(request)
    assert found == code and message.startswith(text)
    assert request.custom_id == "a"


@pytest.mark.parametrize("custom_id", [None, 5, 1.5, True, ["a"], {"a": 1}])
def test_a_custom_id_that_is_no_text(custom_id):
    request = parse_line({**line(), "custom_id": custom_id}, MODEL)
    code, message = refusal(request)
    assert request.custom_id is None
    assert code == "parse_error" and message.startswith("custom_id: ")


def test_a_missing_custom_id():
    record = line()
    del record["custom_id"]
    assert refusal(parse_line(record, MODEL))[0] == "parse_error"


@pytest.mark.parametrize(
    "custom_id", ["", "../../etc/passwd", "/a", "a\nb", "\x00", " a ", "ä\u2028", "12345678901234567890"]
)
def test_a_custom_id_comes_back_as_it_is(custom_id):
    assert parse_line({**line(), "custom_id": custom_id}, MODEL).custom_id == custom_id


@pytest.mark.parametrize("record", [None, [], "x", 3, True, {}])
def test_a_line_that_is_no_object(record):
    assert refusal(parse_line(record, MODEL))[0] == "parse_error"


class TestModel:
    def test_another_model(self):
        request = chat(model="gpt-4o")
        assert refusal(request)[0] == "model_not_found"
        assert "'gpt-4o'" in refusal(request)[1] and "model.served_model_name" in refusal(request)[1]
        assert request.model == "gpt-4o"

    @pytest.mark.parametrize("model", [5, ["x"], {}, True])
    def test_no_text(self, model):
        assert refusal(chat(model=model))[0] == "invalid_params"

    def test_absent_is_the_one_that_is_served(self):
        assert chat(model=None).error is None
        assert chat(model=None).model is None


class TestMessages:
    def test_null_counts_as_absent(self):
        assert chat(messages=[{**USER, "name": None, "tool_calls": None}]).messages == [USER]

    def test_an_answer_as_clients_dump_it(self):
        answer: dict[str, Any] = {
            "role": "assistant",
            "content": "yes",
            "refusal": None,
            "annotations": [],
            "tool_calls": [],
        }
        assert chat(messages=[USER, answer]).messages == [USER, {"role": "assistant", "content": "yes"}]

    def test_a_developer_message_is_a_system_message(self):
        request = chat(messages=[{"role": "developer", "content": "be brief"}, USER])
        assert request.messages == [{"role": "system", "content": "be brief"}, USER]

    def test_text_parts_are_joined(self):
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "prompt_cache_breakpoint": {}}]
        assert chat(messages=[{"role": "user", "content": parts}]).messages == [{"role": "user", "content": "a\nb"}]

    @pytest.mark.parametrize(
        ("messages", "code", "text"),
        [
            (None, "null_prompt", "messages: is missing"),
            ("hi", "invalid_messages", "messages: must be a list of messages, got 'hi'"),
            ([], "invalid_messages", "messages: must be a list of messages, got an empty list"),
            (USER, "invalid_messages", "messages: must be a list of messages, got an object"),
            (["hi"], "invalid_messages", "messages[0]: must be an object"),
            ([USER, {"content": "x"}], "invalid_messages", "messages[1].role: must be one of"),
            ([{"role": "wizard", "content": "x"}], "invalid_messages", "messages[0].role: "),
            ([{"role": ["user"], "content": "x"}], "invalid_messages", "messages[0].role: "),
            ([{"role": "user"}], "invalid_messages", "messages[0].content: must be text"),
            ([{"role": "user", "content": 5}], "invalid_messages", "messages[0].content: must be text"),
            ([{"role": "user", "content": []}], "invalid_messages", "messages[0].content: must be text"),
            ([{"role": "user", "content": ["x"]}], "invalid_messages", "messages[0].content[0]: must be"),
            (
                [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
                "invalid_messages",
                'messages[0].content[0]: must be {"type": "text", "text": "..."}, got type \'image_url\'',
            ),
            ([{"role": "user", "content": [{"type": "text"}]}], "invalid_messages", "messages[0].content[0].text: "),
            (
                [{"role": "user", "content": [{"type": "text", "text": "x", "lang": "de"}]}],
                "unsupported_parameter",
                "messages[0].content[0].lang: ",
            ),
            ([{**USER, "name": "Ada"}], "unsupported_parameter", "messages[0].name: "),
            ([{"role": "tool", "content": "x"}], "unsupported_parameter", "messages[0].role: tool"),
            (
                [USER, {"role": "assistant", "tool_calls": [{"id": "x"}]}],
                "unsupported_parameter",
                "messages[1].tool_calls: ",
            ),
        ],
    )
    def test_what_no_template_should_see(self, messages, code, text):
        found, message = refusal(chat(messages=messages))
        assert found == code and message.startswith(text)


class TestPrompt:
    @pytest.mark.parametrize(
        ("prompt", "code"),
        [
            (None, "null_prompt"),
            ("", "empty_prompt"),
            (5, "invalid_params"),
            ({}, "invalid_params"),
            (["a"], "unsupported_parameter"),
            ([1, 2], "unsupported_parameter"),
            ([[1], [2]], "unsupported_parameter"),
            ([], "unsupported_parameter"),
        ],
    )
    def test_no_single_text(self, prompt, code):
        found, message = refusal(completion(prompt=prompt))
        assert found == code and message.startswith("prompt: ")


# What a JSON parser may give, among it what only Python's takes for JSON.
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4))
NAMES = {each.name for each in fields(SamplingParams)}


def mostly(good: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """One of 24 draws is anything: many lines pass all checks, and any check may be the one that a line fails."""
    return st.integers(1, 24).flatmap(lambda number: JSON if number == 24 else good)


TEXT_PARTS = st.lists(
    mostly(st.fixed_dictionaries({"type": st.just("text"), "text": st.text()})), min_size=1, max_size=2
)
ROLES = st.sampled_from(["user", "system", "developer", "assistant"])
MESSAGES = st.fixed_dictionaries(
    {"role": ROLES, "content": mostly(st.text() | TEXT_PARTS)}, optional={"name": st.none()}
)
CONVERSATIONS = st.lists(mostly(MESSAGES), min_size=1, max_size=2)
MAINS = st.fixed_dictionaries({"messages": mostly(CONVERSATIONS)}) | st.fixed_dictionaries(
    {"prompt": mostly(st.text())}
)
PARAMETERS = st.fixed_dictionaries(
    {},
    optional={
        "model": mostly(st.just(MODEL)),
        "logit_bias": mostly(st.dictionaries(st.integers(0, 9).map(str), st.floats(-9, 9))),
        "stop": mostly(st.text() | st.lists(st.text(), max_size=3)),
        "max_tokens": mostly(st.integers(1, 9)),
        "max_completion_tokens": mostly(st.integers(1, 9)),
        "logprobs": mostly(st.booleans() | st.just(0)),
    },
)
BODIES = st.builds(lambda main, parameters: {**main, **parameters}, MAINS, PARAMETERS)
EXTRA_KEYS: st.SearchStrategy[dict[str, Any]] = st.just({}) | st.dictionaries(
    st.sampled_from(sorted(BODY_KEYS[CHAT_URL] | BODY_KEYS[COMPLETIONS_URL])) | st.text(), JSON
)
LINES = st.fixed_dictionaries(
    {
        "custom_id": mostly(st.text()),
        "method": mostly(st.just("POST")),
        "url": mostly(st.sampled_from([CHAT_URL, COMPLETIONS_URL])),
        "body": mostly(st.builds(lambda body, extra: {**body, **extra}, BODIES, EXTRA_KEYS)),
    }
)


@given(mostly(LINES))
def test_any_line_gives_a_request_or_an_error(record):
    request = parse_line(json.loads(json.dumps(record)), MODEL)
    given_id = record.get("custom_id") if isinstance(record, dict) else None
    assert request.custom_id == (given_id if isinstance(given_id, str) else None)
    if request.error is not None:
        code, message = refusal(request)
        assert code in ROW_ERRORS and message.isprintable()
    else:
        assert (request.messages is None) != (request.prompt is None)
        assert request.params.keys() <= NAMES
        assert all(message.keys() == {"role", "content"} for message in request.messages or ())


@given(PARAMETERS, st.data())
def test_a_key_of_any_value_is_honoured_or_refused_by_name(body, data):
    """Nothing is ignored: a further key that is not accepted by the tables fails the line, whatever the rest holds."""
    key = data.draw(
        st.text(min_size=1).filter(lambda name: name not in BODY_KEYS[CHAT_URL] | BODY_KEYS[COMPLETIONS_URL])
    )
    value = data.draw(JSON.filter(lambda value: value is not None))
    code, message = refusal(chat(**{**body, "model": MODEL, key: value}))
    assert code == "unsupported_parameter" and message.isprintable()


@given(st.integers(1, 900))
def test_any_depth(depth):
    deep: Any = 1
    for _ in range(depth):
        deep = [deep]
    for key in ("n", "tools", "metadata", "messages", "stop", "logit_bias", "model", "unknown"):
        assert chat(**{key: deep}).error is not None
    assert parse_line(deep, MODEL).error is not None
