"""Cases t25, t28 and t35 where they speak of the OpenAI batch API: lines, and parameters that are not honoured."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from specrun.jobs.errors import InputError
from specrun.runner.cli import run_command
from tests.runner.conftest import Job

CHAT = "/v1/chat/completions"


def line(custom_id: Any = "a", url: Any = CHAT, method: Any = "POST", **body: Any) -> dict[str, Any]:
    what: dict[str, Any] = {"prompt": "hi there"} if url == "/v1/completions" else {"messages": [USER]}
    return {"custom_id": custom_id, "method": method, "url": url, "body": {"model": "stub", **what, **body}}


USER = {"role": "user", "content": "hi there"}


@pytest.fixture
def batch(job: Job) -> Job:
    job.config["input"]["format"] = "openai-batch"
    return job.set(output__format="openai-batch", errors__max_failed_fraction=1.0)


def results(job: Job, name: str = "output.jsonl") -> dict[str, Any]:
    path = job.out / name
    lines = [json.loads(text) for text in path.read_text("utf-8").splitlines()] if path.exists() else []
    assert len({found["custom_id"] for found in lines}) == len(lines)
    return {found["custom_id"]: found for found in lines}


def test_t25_each_line_has_its_result_or_its_error(batch: Job) -> None:
    lines = [
        line("chat", max_tokens=3),
        line("completion", "/v1/completions"),
        line("stream", stream=True),
        line("no stream", stream=False),
        line("get", method="GET"),
        line("embeddings", "/v1/embeddings"),
        line("unknown key", surprise=1),
        line("other model", model="gpt-9"),
        line("no body") | {"body": None},
        line("empty messages", messages=[]),
        line("two answers", n=2),
        line("one answer", n=1, user="u", metadata={"k": "v"}),
        "{broken",
    ]
    assert batch.jsonl(lines).run(has_chat_template=True).exit_code == 0
    codes = {row["id"]: row["error_code"] for row in batch.rows()}
    assert codes == {
        "chat": None,
        "completion": None,
        "stream": "unsupported_parameter",
        "no stream": None,
        "get": "parse_error",
        "embeddings": "unsupported_parameter",
        "unknown key": "unsupported_parameter",
        "other model": "model_not_found",
        "no body": "parse_error",
        "empty messages": "invalid_messages",
        "two answers": "unsupported_parameter",
        "one answer": None,
        None: "parse_error",
    }
    good, bad = results(batch), results(batch, "errors.jsonl")
    assert set(good) == {key for key, code in codes.items() if code is None}
    assert set(bad) == {key for key, code in codes.items() if code is not None}
    assert len(good) + len(bad) == len(lines)


def test_t25_results_are_what_a_client_expects(batch: Job) -> None:
    batch.jsonl([line("chat", max_tokens=2), line("plain", "/v1/completions"), line("logprobs", logprobs=True)])
    assert batch.run(has_chat_template=True).exit_code == 0
    found = results(batch)
    assert all(result["error"] is None and result["response"]["status_code"] == 200 for result in found.values())
    chat = ChatCompletion.model_validate(found["chat"]["response"]["body"], strict=True)
    assert chat.model == "stub" and chat.usage is not None
    assert chat.choices[0].message.role == "assistant" and chat.choices[0].finish_reason == "length"
    assert (chat.usage.completion_tokens, chat.usage.total_tokens) == (2, chat.usage.prompt_tokens + 2)
    plain = Completion.model_validate(found["plain"]["response"]["body"], strict=True)
    assert (plain.choices[0].text, plain.choices[0].finish_reason) == ("hi there", "stop")
    logprobs = ChatCompletion.model_validate(found["logprobs"]["response"]["body"], strict=True).choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None


@pytest.mark.parametrize("command", ["validate", "submit"])
def test_t25_two_lines_of_one_custom_id(batch: Job, capsys: pytest.CaptureFixture[str], command: str) -> None:
    batch.jsonl([line("a"), line("b"), line("a")])
    builder = batch.stub(has_chat_template=True)
    assert run_command([command, str(batch.file)], builder) == 65
    err = capsys.readouterr().err
    assert "'a'" in err or '"a"' in err
    assert "1" in err and "3" in err and "in.jsonl" in err
    assert builder.num_loads == 0
    with pytest.raises(InputError):
        batch.run()


def test_t25_the_served_model_name(batch: Job) -> None:
    batch.jsonl([line("a", model="my-model"), line("b", model="stub")]).set(model__served_model_name="my-model")
    assert batch.run(has_chat_template=True).exit_code == 0
    assert [row["error_code"] for row in batch.rows()] == [None, "model_not_found"]


ASSISTANT = {"role": "assistant", "content": "so it"}


@pytest.mark.parametrize("goes_on", [False, True])
def test_t28_a_last_message_of_the_assistant(job: Job, goes_on: bool) -> None:
    job.jsonl([{"chat": [USER]}, {"chat": [USER, ASSISTANT]}, {"chat": [USER, ASSISTANT, USER]}])
    job.config["input"]["columns"] = {"messages": "chat"}
    job.set(errors__max_failed_fraction=1.0, prompt__continue_final_message=goes_on)
    assert job.run(has_chat_template=True).exit_code == 0
    rows = job.rows()
    assert [row["error_code"] for row in rows] == [None, None if goes_on else "template_error", None]
    if goes_on:
        assert rows[1]["text"].endswith("so it") and rows[0]["text"].endswith("assistant:")
    else:
        assert "prompt.continue_final_message" in rows[1]["error_message"]


UNSUPPORTED: list[tuple[str, Any]] = [
    ("n", 2),
    ("best_of", 2),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "required"),
    ("response_format", {"type": "structural_tag"}),
    ("guided_grammar", "root ::= x"),
    ("structured_outputs", {"grammar": "root ::= x"}),
    ("functions", [{"name": "f"}]),
    ("stream", True),
    ("echo", True),
    ("suffix", "x"),
    ("top_logprobs", 3),
    ("prompt_logprobs", 1),
    ("modalities", ["audio"]),
    ("prediction", {"type": "content", "content": "x"}),
    ("reasoning_effort", "high"),
    ("web_search_options", {}),
]


@pytest.mark.parametrize(("key", "value"), UNSUPPORTED, ids=[f"{k}-{i}" for i, (k, _) in enumerate(UNSUPPORTED)])
def test_t35_an_openai_parameter_is_honoured_or_fails_its_row(batch: Job, key: str, value: Any) -> None:
    batch.jsonl([line("before"), line("x", **{key: value}), line("after")])
    assert batch.run(has_chat_template=True).exit_code == 0
    rows = batch.rows()
    assert [row["error_code"] for row in rows] == [None, "unsupported_parameter", None]
    assert rows[1]["error_message"].startswith(key)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("response_format", {"type": "text"}),
        ("tool_choice", "none"),
        ("n", 1),
        ("seed", 5),
        ("stop", None),
        ("user", "u"),
    ],
)
def test_t35_what_changes_nothing_is_accepted(batch: Job, key: str, value: Any) -> None:
    batch.jsonl([line("x", **{key: value})])
    assert batch.run(has_chat_template=True).exit_code == 0
    assert batch.rows()[0]["error_code"] is None


@pytest.mark.parametrize("key", ["n", "best_of", "tools", "tool_choice", "guided_grammar"])
@pytest.mark.parametrize("value", ["x", 2, {"type": "json_object"}])
def test_t35_a_column_of_such_a_name_is_no_silent_data(job: Job, key: str, value: Any) -> None:
    """It fails the rows that have it, unless the job lists it as data in output.keep_columns."""
    job.jsonl([{"prompt": "a"}, {"prompt": "b", key: value}]).set(errors__max_failed_fraction=1.0)
    assert job.run().exit_code == 0
    rows = job.rows()
    assert [row["error_code"] for row in rows] == [None, "unsupported_parameter"]
    assert rows[1]["error_message"].startswith(key)


MALFORMED: list[tuple[str, Any]] = [
    ("response_format", {"type": "json"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "s"}}),
    ("response_format", {"type": "json_object", "schema": {}}),
    ("response_format", {"type": "choice", "choice": []}),
    ("guided_json", "x"),
    ("guided_regex", ""),
    ("guided_choice", ["a", 1]),
    ("structured_outputs", {"json": "x"}),
    ("structured_outputs", {"json": {}, "regex": "a"}),
]


@pytest.mark.parametrize(("key", "value"), MALFORMED, ids=[f"{k}-{i}" for i, (k, _) in enumerate(MALFORMED)])
def test_t35_a_malformed_response_format_fails_its_row(batch: Job, key: str, value: Any) -> None:
    batch.jsonl([line("before"), line("x", **{key: value}), line("after")])
    assert batch.run(has_chat_template=True).exit_code == 0
    rows = batch.rows()
    assert [row["error_code"] for row in rows] == [None, "invalid_response_format", None]
    assert rows[1]["error_message"].startswith(key)


@pytest.mark.parametrize("key", ["response_format", "guided_json", "structured_outputs"])
@pytest.mark.parametrize("value", ["x", 2])
def test_t35_a_malformed_column_fails_its_row(job: Job, key: str, value: Any) -> None:
    job.jsonl([{"prompt": "a"}, {"prompt": "b", key: value}]).set(errors__max_failed_fraction=1.0)
    assert job.run().exit_code == 0
    rows = job.rows()
    assert [row["error_code"] for row in rows] == [None, "invalid_response_format"]
    assert rows[1]["error_message"].startswith(key)


@pytest.mark.parametrize("name", ["prompt_logprobs", "bad_words", "allowed_token_ids"])
def test_t35_parameters_of_vllm_that_are_not_ours(job: Job, name: str) -> None:
    job.jsonl([{"prompt": "a"}, {"prompt": "b", name: 1}]).set(errors__max_failed_fraction=1.0)
    assert job.run().exit_code == 0
    assert [row["error_code"] for row in job.rows()] == [None, "unsupported_parameter"]
