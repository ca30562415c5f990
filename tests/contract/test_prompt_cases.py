"""Cases t26 to t35 on the stub: lengths, conversations and parameters of rows, as whole jobs."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.runner.conftest import Job

LENGTHS = [47, 48, 49, 63, 64, 65]


def words(count: int) -> str:
    return " ".join(f"w{i}" for i in range(count))


def outcomes(job: Job) -> list[str | None]:
    return [row["error_code"] or row["finish_reason"] for row in job.rows()]


@pytest.mark.parametrize(
    ("overflow", "reasons", "prompt_tokens", "output_tokens"),
    [
        ("error", ["length"] * 2 + ["prompt_too_long"] * 4, LENGTHS, [16, 16, 0, 0, 0, 0]),
        ("clamp", ["length"] * 4 + ["prompt_too_long"] * 2, LENGTHS, [16, 16, 15, 1, 0, 0]),
        ("truncate_left", ["length"] * 6, [47, 48, 48, 48, 48, 48], [16] * 6),
        ("truncate_right", ["length"] * 6, [47, 48, 48, 48, 48, 48], [16] * 6),
    ],
)
def test_t26_lengths_around_the_limit(
    job: Job, overflow: str, reasons: list[str], prompt_tokens: list[int], output_tokens: list[int]
) -> None:
    job.jsonl([{"prompt": words(length)} for length in LENGTHS])
    job.set(prompt__overflow=overflow, errors__max_failed_fraction=1.0, sampling__max_tokens=16)
    assert job.run(max_model_len=64).exit_code == 0
    rows = job.rows()
    assert [row["row_index"] for row in rows] == list(range(6))
    assert outcomes(job) == reasons
    assert [row["prompt_tokens"] for row in rows] == prompt_tokens
    assert [row["output_tokens"] for row in rows] == output_tokens
    first = "w17" if overflow == "truncate_left" else "w0"
    assert rows[5]["text"] is None or rows[5]["text"].split()[0] == first


def test_t26_each_row_has_its_own_budget(job: Job) -> None:
    job.jsonl([{"prompt": words(60), "max_tokens": n} for n in (3, 4, 5, 64, None)])
    job.set(errors__max_failed_fraction=1.0, sampling__max_tokens=4)
    assert job.run(max_model_len=64).exit_code == 0
    assert outcomes(job) == ["length", "length", "prompt_too_long", "prompt_too_long", "length"]


USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "so"}
BAD_MESSAGES: dict[str, Any] = {
    "empty list": [],
    "no list": "hello",
    "json of no list": '{"role": "user", "content": "hi"}',
    "broken json": '[{"role": "user"',
    "a string in it": ["hi"],
    "a null in it": [USER, None],
    "no role": [{"content": "hi"}],
    "null role": [{"role": None, "content": "hi"}],
    "empty role": [{"role": "", "content": "hi"}],
    "no content": [{"role": "user"}],
    "null content": [{"role": "user", "content": None}],
    "number for content": [{"role": "user", "content": 7}],
    "an image": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
def test_t28_a_bad_conversation_fails_its_row_alone(job: Job, name: str) -> None:
    job.jsonl([{"chat": [USER]}, {"chat": BAD_MESSAGES[name]}, {"chat": [USER]}])
    job.config["input"]["columns"] = {"messages": "chat"}
    job.set(errors__max_failed_fraction=1.0)
    assert job.run(has_chat_template=True).exit_code == 0
    assert outcomes(job) == ["stop", "invalid_messages", "stop"]
    assert job.rows()[1]["error_message"]


def test_t28_a_null_conversation_is_a_null_prompt(job: Job) -> None:
    job.jsonl([{"chat": [USER]}, {"chat": None}, {}])
    job.config["input"]["columns"] = {"messages": "chat"}
    assert job.set(errors__max_failed_fraction=1.0).run(has_chat_template=True).exit_code == 0
    assert outcomes(job) == ["stop", "null_prompt", "null_prompt"]


def test_t28_structs_of_parquet_and_json_text_give_the_same(job: Job, tmp_path_factory: pytest.TempPathFactory) -> None:
    chats: list[Any] = [[USER], [{"role": "system", "content": "s"}, USER, ASSISTANT, USER], [], None]
    role = pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.string())])
    columns = [
        pa.array(chats, pa.list_(role)),
        pa.array(chats, pa.large_list(role)),
        pa.array([None if chat is None else json.dumps(chat) for chat in chats]),
    ]
    found = []
    for column in columns:
        one = Job(tmp_path_factory.mktemp("job")).parquet(pa.table({"chat": column}))
        one.config["input"]["columns"] = {"messages": "chat"}
        assert one.set(errors__max_failed_fraction=1.0).run(has_chat_template=True).exit_code == 0
        found.append([(row["text"], row["error_code"]) for row in one.rows()])
    assert found[0] == found[1] == found[2]
    assert [code for _, code in found[0]] == [None, None, "invalid_messages", "null_prompt"]


ROWS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 4}, "length"),
    ({"max_tokens": None}, "length"),
    ({"max_tokens": 4.0}, "length"),
    ({"max_tokens": 9999}, "prompt_too_long"),
    ({"max_tokens": 0}, "invalid_params"),
    ({"max_tokens": -1}, "invalid_params"),
    ({"max_tokens": 2.5}, "invalid_params"),
    ({"max_tokens": "4"}, "invalid_params"),
    ({"max_tokens": True}, "invalid_params"),
    ({"temperature": 0}, "length"),
    ({"temperature": -1}, "invalid_params"),
    ({"temperature": float("nan")}, "invalid_params"),
    ({"temperature": float("inf")}, "invalid_params"),
    ({"temperature": "hot"}, "invalid_params"),
    ({"top_p": 0}, "invalid_params"),
    ({"top_p": 1.5}, "invalid_params"),
    ({"top_k": -2}, "invalid_params"),
    ({"min_p": 2}, "invalid_params"),
    ({"min_tokens": 99}, "invalid_params"),
    ({"repetition_penalty": 0}, "invalid_params"),
    ({"presence_penalty": 3}, "invalid_params"),
    ({"frequency_penalty": float("nan")}, "invalid_params"),
    ({"stop": "zz"}, "length"),
    ({"stop": ["b", "c"]}, "length"),
    ({"stop": [""]}, "invalid_params"),
    ({"stop": 7}, "invalid_params"),
    ({"stop_token_ids": [3]}, "length"),
    ({"stop_token_ids": ["x"]}, "invalid_params"),
    ({"logit_bias": {"5": 1}}, "length"),
    ({"logit_bias": {"x": 1}}, "invalid_params"),
    ({"logit_bias": {"5": float("nan")}}, "invalid_params"),
    ({"ignore_eos": "false"}, "invalid_params"),
    ({"seed": 1 << 70}, "length"),
    ({"seed": -1}, "length"),
    ({"seed": "x"}, "invalid_params"),
    ({"logprobs": 5}, "unsupported_parameter"),
]


@pytest.mark.parametrize(("params", "outcome"), ROWS, ids=[json.dumps(params) for params, _ in ROWS])
def test_t34_a_rows_own_parameters(job: Job, params: dict[str, Any], outcome: str) -> None:
    job.jsonl([{"prompt": words(20)}, {"prompt": words(20), **params}, {"prompt": words(20)}])
    job.set(errors__max_failed_fraction=1.0, sampling__max_tokens=6)
    assert job.run(max_model_len=64).exit_code == 0
    assert outcomes(job) == ["length", outcome, "length"]
    if outcome in ("invalid_params", "unsupported_parameter"):
        assert next(iter(params)) in job.rows()[1]["error_message"]
    budget = 4 if params.get("max_tokens") == 4 else 6
    assert [row["output_tokens"] for row in job.rows()] == [6, budget if outcome == "length" else 0, 6]


def test_t34_columns_of_parquet(job: Job) -> None:
    columns = {
        "prompt": [words(20)] * 3,
        "max_tokens": pa.array([4, None, 9999], pa.int64()),
        "temperature": pa.array([0, None, -1], pa.float32()),
        "stop": pa.array([["a"], None, ["b", "c"]], pa.list_(pa.string())),
    }
    job.parquet(pa.table(columns)).set(errors__max_failed_fraction=1.0, sampling__max_tokens=6)
    assert job.run(max_model_len=64).exit_code == 0
    assert outcomes(job) == ["length", "length", "invalid_params"]
    assert [row["output_tokens"] for row in job.rows()] == [4, 6, 0]
    # They are the row's parameters and no data.
    assert not {"max_tokens", "temperature", "stop"} & set(pq.read_schema(next((job.out / "data").iterdir())).names)


def test_t34_nan_of_parquet(job: Job) -> None:
    job.parquet(pa.table({"prompt": ["a", "b"], "temperature": [float("nan"), 0.0]}))
    assert job.set(errors__max_failed_fraction=1.0).run().exit_code == 0
    assert outcomes(job) == ["invalid_params", "stop"]


def test_t34_clamped_where_the_job_says_so(job: Job) -> None:
    job.jsonl([{"prompt": words(20), "max_tokens": 9999}]).set(prompt__overflow="clamp")
    assert job.run(max_model_len=30).exit_code == 0
    assert job.rows()[0]["output_tokens"] == 10


def test_t50_a_loop_ends_at_max_tokens_and_is_counted(job: Job) -> None:
    job.jsonl([{"prompt": "the " * 500}, {"prompt": "a b"}]).set(sampling__max_tokens=16)
    assert job.run().exit_code == 0
    assert outcomes(job) == ["length", "stop"]
    assert job.report()["finish_reasons"] == {"length": 1, "stop": 1}
