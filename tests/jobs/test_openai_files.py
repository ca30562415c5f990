"""Result and error lines as a client of the OpenAI batch API reads them, checked with the client's own types."""

import json
import tracemalloc
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.shared import ErrorObject

from specrun.jobs.openai_batch import parse_line
from specrun.jobs.openai_body import CHAT_URL, COMPLETIONS_URL
from specrun.jobs.openai_files import result_lines
from specrun.jobs.row_errors import ROW_ERRORS
from specrun.jobs.schema import output_schema

MODEL, CREATED = "org/model", 1_790_000_000
PASSTHROUGH = pa.schema([("url", pa.string()), ("model", pa.string())])
OK = {"text": "yes", "finish_reason": "stop", "prompt_tokens": 3, "output_tokens": 2}
TOKENS = [b"", b"yes", b" no", "é".encode()[:1], "é".encode()[1:]]


def table(*rows: dict[str, Any], passthrough: pa.Schema = PASSTHROUGH, optional: bool = False) -> pa.Table:
    schema = output_schema(passthrough, optional, optional)
    filled = [
        {**dict.fromkeys(schema.names), "prompt_tokens": 0, "output_tokens": 0, "row_index": index, **row}
        for index, row in enumerate(rows)
    ]
    return pa.Table.from_pylist(filled, schema)


def read(part: pa.Table, token_bytes: list[bytes] | None = None) -> list[tuple[bool, dict[str, Any]]]:
    lines = []
    for is_result, line in result_lines(part.to_batches(), MODEL, CREATED, token_bytes):
        text = line.decode()
        assert text.endswith("\n") and len(text.splitlines()) == 1
        lines.append((is_result, json.loads(text)))
    return lines


def failed(code: str, message: str = "why") -> dict[str, Any]:
    return {"id": "a", "url": CHAT_URL, "finish_reason": "error", "error_code": code, "error_message": message}


def test_a_chat_completion():
    ((is_result, line),) = read(table({"id": "a", "url": CHAT_URL, "model": MODEL, **OK}))
    assert is_result
    assert line == {
        "id": "batch_req_0",
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": "req_0",
            "body": {
                "id": "chatcmpl-0",
                "object": "chat.completion",
                "created": CREATED,
                "model": MODEL,
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "yes", "refusal": None},
                        "logprobs": None,
                        "finish_reason": "stop",
                    }
                ],
                "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
            },
        },
        "error": None,
    }
    body = ChatCompletion.model_validate(line["response"]["body"], strict=True)
    assert no_extras(body)
    assert body.choices[0].message.content == "yes"


def test_a_completion():
    ((_, line),) = read(table({"id": "a", "url": COMPLETIONS_URL, **OK, "finish_reason": "length"}))
    body = Completion.model_validate(line["response"]["body"], strict=True)
    assert no_extras(body)
    assert (body.id, body.object, body.choices[0].text) == ("cmpl-0", "text_completion", "yes")
    assert body.choices[0].finish_reason == "length"


def no_extras(model: Any) -> bool:
    """Whether the client's types know every field: they let others pass."""
    if isinstance(model, list):
        return all(no_extras(each) for each in model)
    return not hasattr(model, "model_extra") or (
        not model.model_extra and all(no_extras(getattr(model, name)) for name in type(model).model_fields)
    )


def test_an_empty_answer_is_text():
    ((_, line),) = read(table({"id": "a", "url": CHAT_URL, **OK, "text": ""}))
    assert line["response"]["body"]["choices"][0]["message"]["content"] == ""


@pytest.mark.parametrize(
    ("code", "status", "api_code", "kind"),
    [
        ("null_prompt", 400, "null_prompt", "invalid_request_error"),
        ("empty_prompt", 400, "empty_prompt", "invalid_request_error"),
        ("template_error", 400, "template_error", "invalid_request_error"),
        ("parse_error", 400, "parse_error", "invalid_request_error"),
        ("invalid_messages", 400, "invalid_messages", "invalid_request_error"),
        ("encoding_error", 400, "encoding_error", "invalid_request_error"),
        ("invalid_params", 400, "invalid_params", "invalid_request_error"),
        ("unsupported_parameter", 400, "unsupported_parameter", "invalid_request_error"),
        ("prompt_too_long", 400, "context_length_exceeded", "invalid_request_error"),
        ("model_not_found", 404, "model_not_found", "invalid_request_error"),
        ("engine_error", 500, "engine_error", "server_error"),
        ("a_code_of_tomorrow", 500, "a_code_of_tomorrow", "server_error"),
    ],
)
def test_an_answer_that_is_an_error(code, status, api_code, kind):
    ((is_result, line),) = read(table(failed(code)))
    assert not is_result
    assert line["error"] is None and line["custom_id"] == "a"
    assert line["response"]["status_code"] == status
    error = ErrorObject.model_validate(line["response"]["body"]["error"], strict=True)
    assert no_extras(error)
    assert (error.code, error.type, error.message, error.param) == (api_code, kind, "why", None)


@pytest.mark.parametrize("code", ROW_ERRORS)
def test_every_error_code_has_its_place(code):
    ((_, line),) = read(table(failed(code)))
    assert (line["response"] is None) == (code == "timeout")
    if code != "timeout":  # what the engine does not answer for is the request's own fault
        assert (line["response"]["status_code"] == 500) == (code == "engine_error")


def test_no_answer_in_time():
    ((is_result, line),) = read(table(failed("timeout", "not done after 5 s (run.timeout_s)")))
    assert not is_result
    assert line["response"] is None
    assert line["error"] == {"code": "request_timeout", "message": "not done after 5 s (run.timeout_s)"}


@pytest.mark.parametrize(
    ("code", "message", "param"),
    [
        ("invalid_params", "temperature: must not be negative, got -1", "temperature"),
        ("unsupported_parameter", "tools: a list is not supported; leave it out", "tools"),
        ("invalid_messages", "messages[0].role: must be one of ...", "messages[0].role"),
        ("model_not_found", "model: 'x' is not served", "model"),
        ("template_error", "UndefinedError: no such thing", None),
        ("parse_error", "line 3 of a.jsonl: not JSON: Expecting value", None),
        ("engine_error", "RuntimeError: out of luck", None),
    ],
)
def test_an_error_names_the_parameter(code, message, param):
    ((_, line),) = read(table(failed(code, message)))
    assert line["response"]["body"]["error"]["param"] == param


def test_a_row_without_custom_id_is_found_by_its_index():
    ((_, line),) = read(table({**failed("parse_error"), "id": None, "url": None, "row_index": 41}))
    assert line["custom_id"] is None
    assert line["id"] == "batch_req_41"


WITH_LOGPROBS = {"id": "a", **OK, "logprobs": [-0.5, float("-inf")], "token_ids": [1, 2], "text": "yes no"}


class TestLogprobs:
    def test_chat(self):
        ((_, line),) = read(table({**WITH_LOGPROBS, "url": CHAT_URL}, optional=True), TOKENS)
        body = ChatCompletion.model_validate(line["response"]["body"], strict=True)
        assert no_extras(body)
        logprobs = body.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        assert [(each.token, bytes(each.bytes or []), each.logprob) for each in logprobs.content] == [
            ("yes", b"yes", -0.5),
            (" no", b" no", -9999.0),
        ]

    def test_completion(self):
        ((_, line),) = read(table({**WITH_LOGPROBS, "url": COMPLETIONS_URL}, optional=True), TOKENS)
        body = Completion.model_validate(line["response"]["body"], strict=True)
        assert no_extras(body)
        logprobs = body.choices[0].logprobs
        assert logprobs is not None
        assert (logprobs.tokens, logprobs.token_logprobs) == (["yes", " no"], [-0.5, -9999.0])
        assert logprobs.text_offset == [0, 3]

    def test_torn_characters_keep_their_bytes(self):
        row = {**WITH_LOGPROBS, "url": CHAT_URL, "token_ids": [3, 4], "text": "é"}
        ((_, line),) = read(table(row, optional=True), TOKENS)
        content = line["response"]["body"]["choices"][0]["logprobs"]["content"]
        assert [each["bytes"] for each in content] == [[0xC3], [0xA9]]
        assert {each["token"] for each in content} == {"\ufffd"}

    @pytest.mark.parametrize(
        ("text", "token_ids", "offsets"),
        [
            ("é", [3, 4], [0, 0]),
            ("\ufffd", [3, 0], [0, 0]),
            ("y", [1, 2], [0, 3]),
            ("other", [1, 2], None),
            ("yes", [1, 99], [0, 3]),
        ],
        ids=["torn", "cut", "before a stop string", "spelled otherwise", "above the vocabulary"],
    )
    def test_offsets_are_those_of_the_text(self, text, token_ids, offsets):
        row = {**WITH_LOGPROBS, "url": COMPLETIONS_URL, "text": text, "token_ids": token_ids}
        ((_, line),) = read(table(row, optional=True), TOKENS)
        assert line["response"]["body"]["choices"][0]["logprobs"]["text_offset"] == offsets

    @pytest.mark.parametrize("url", [CHAT_URL, COMPLETIONS_URL])
    @pytest.mark.parametrize("token_bytes", [None, TOKENS])
    def test_without_tokens_the_numbers_stand_alone(self, url, token_bytes):
        row = {**WITH_LOGPROBS, "url": url}
        if token_bytes is not None:
            row["token_ids"] = None
        ((_, line),) = read(table(row, optional=True), token_bytes)
        body = line["response"]["body"]
        (ChatCompletion if url == CHAT_URL else Completion).model_validate(body, strict=True)
        logprobs = body["choices"][0]["logprobs"]
        assert logprobs.pop("token_logprobs") == [-0.5, -9999.0]
        assert set(logprobs.values()) == {None}

    def test_a_row_that_did_not_ask_has_none(self):
        row = {**WITH_LOGPROBS, "url": CHAT_URL, "logprobs": None}
        ((_, line),) = read(table(row, optional=True), TOKENS)
        assert line["response"]["body"]["choices"][0]["logprobs"] is None


def test_other_columns_are_not_looked_into():
    names = pa.schema([("url", pa.string()), ("model", pa.string()), ("blob", pa.large_binary())])
    row = {"id": "a", **OK, "url": "https://example.org", "model": "theirs", "blob": b"\xff"}
    ((_, line),) = read(table(row, passthrough=names))
    assert line["response"]["body"]["object"] == "chat.completion"
    assert line["response"]["body"]["model"] == MODEL
    ((_, same),) = read(table({"id": "a", **OK}, passthrough=pa.schema([])))
    assert same == line


def test_the_same_rows_give_the_same_bytes():
    rows = [{"id": str(i), "url": CHAT_URL, **OK} for i in range(600)] + [failed("timeout")]
    part = table(*rows)
    whole = list(result_lines(part.to_batches(), MODEL, CREATED))
    cut = list(result_lines(part.to_batches(max_chunksize=7), MODEL, CREATED))
    assert whole == cut
    assert [json.loads(line)["custom_id"] for _, line in whole] == [*map(str, range(600)), "a"]


def test_memory_does_not_grow_with_the_part():
    part = table(*[{"id": "a", "url": CHAT_URL, **OK, "text": "x" * 1000}] * 256)

    def peak(repeats: int) -> int:
        tracemalloc.start()
        for _ in result_lines((batch for _ in range(repeats) for batch in part.to_batches()), MODEL, CREATED):
            pass
        _, high = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return high

    assert peak(20) < 1.5 * peak(2)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXTS, TEXTS, st.sampled_from([CHAT_URL, COMPLETIONS_URL]))
def test_any_text_and_custom_id_come_back(custom_id, text, url):
    body = {"messages": [{"role": "user", "content": text}]} if url == CHAT_URL else {"prompt": "x" + text}
    request = parse_line({"custom_id": custom_id, "method": "POST", "url": url, "body": body}, MODEL)
    ((is_result, line),) = read(table({"id": request.custom_id, "url": request.url, **OK, "text": text}))
    assert is_result and line["custom_id"] == custom_id
    choice = line["response"]["body"]["choices"][0]
    assert (choice["message"]["content"] if url == CHAT_URL else choice["text"]) == text


@given(st.from_regex(r"[a-z_]{1,20}", fullmatch=True), TEXTS)
def test_any_error_comes_back(code, message):
    ((is_result, line),) = read(table(failed(code, message)))
    assert not is_result
    error = line["error"] or line["response"]["body"]["error"]
    assert error["message"] == message
