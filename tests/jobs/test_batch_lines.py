"""OpenAI batch lines as the input of a job."""

import json

import pyarrow as pa
import pytest
from pydantic import ValidationError

from specrun.jobs import batch_lines, jsonl, lines
from specrun.jobs.errors import InputError
from specrun.jobs.prompts import PromptSource
from tests.jobs.prompt_inputs import job, read, write_lines


def line(custom_id, url="/v1/chat/completions", **body):
    if url.endswith("chat/completions"):
        body = {"messages": [{"role": "user", "content": "hi"}], **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "m", **body}}


def source(path, known=None, **more):
    return PromptSource(job(path, format="openai-batch", **more), known)


def test_lines_become_rows(tmp_path):
    file = write_lines(
        tmp_path / "a.jsonl",
        line("one", max_tokens=5, temperature=0.5),
        "",
        line("two", "/v1/completions", prompt="go on", seed=3),
        line("three", stream=True),
        "{broken",
        {**line("five"), "method": "GET"},
        line("six", model="other"),
        "[]",
    )
    found = source(file)
    rows, table = read(found)
    assert [row.id for row in rows] == ["one", "two", "three", None, "five", "six", None]
    assert rows[0].messages == [{"role": "user", "content": "hi"}] and rows[0].prompt is None
    assert rows[0].params == {"max_tokens": 5, "temperature": 0.5}
    assert (rows[1].prompt, rows[1].messages, rows[1].params) == ("go on", None, {"seed": 3})
    assert [row.error_code for row in rows] == [
        *(None, None, "unsupported_parameter", "parse_error", "parse_error", "model_not_found", "parse_error"),
    ]
    assert all(row.prompt is None and row.messages is None and row.params == {} for row in rows[2:])
    assert "stream" in (rows[2].error_message or "")
    assert (rows[3].error_message or "").startswith("line 5 of a.jsonl: not JSON")
    assert found.params == ("max_tokens", "seed", "temperature")
    assert found.passthrough_schema == pa.schema([("url", pa.string()), ("model", pa.string())])
    chat = "/v1/chat/completions"
    assert table["url"].to_pylist() == [chat, "/v1/completions", chat, None, chat, chat, None]
    assert table["model"].to_pylist() == ["m", "m", "m", None, "m", "other", None]


@pytest.mark.parametrize(
    ("key", "more"),
    [
        ("input.columns", {"columns": {"prompt": "text"}}),
        ("output.keep_columns", {"keep": ["url"]}),
        ("prompt.system", {"prompt": {"system": "x"}}),
        ("prompt.template", {"prompt": {"template": "x"}}),
    ],
)
def test_keys_that_play_no_part_are_refused(tmp_path, key, more):
    with pytest.raises(ValidationError, match=f"{key} does not go with input.format: openai-batch"):
        job(tmp_path, format="openai-batch", **more)


def test_the_served_name(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", line("a", model="gpt"), line("b", model="m"))
    spec = job(file, format="openai-batch")
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"served_model_name": "gpt"})})
    rows, table = read(PromptSource(spec))
    assert [row.error_code for row in rows] == [None, "model_not_found"] and table.column_names == ["url", "model"]


def test_an_id_that_comes_twice_is_refused(tmp_path):
    first = write_lines(tmp_path / "1.jsonl", line("a"), "", "{broken", line("b"))
    second = write_lines(tmp_path / "2.jsonl", line("c"), line("d", stream=True))
    assert source(tmp_path).num_rows == 5
    write_lines(second, line("c"), line("a", stream=True))
    with pytest.raises(InputError) as caught:
        source(tmp_path)
    assert str(caught.value) == (
        f"custom_id 'a' stands on line 1 of {first} and on line 2 of {second}; give each request an id of its own"
    )
    write_lines(first, line("x"), "", line("x"), line("x"))
    with pytest.raises(InputError, match=r"custom_id 'x' stands on line 1 of .* and on line 3 of"):
        source(first, limit=1)


def test_ids_with_one_hash_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_lines, "hash", lambda text: 7, raising=False)
    file = write_lines(tmp_path / "a.jsonl", *(line(str(i)) for i in range(20)))
    assert source(file).num_rows == 20
    write_lines(file, *(line(str(i % 19)) for i in range(20)))
    with pytest.raises(InputError, match=r"custom_id '0' stands on line 1 of .* and on line 20"):
        source(file)


def test_a_known_scan(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(lines, "MARK_ROWS", 20)
    file = write_lines(tmp_path / "a.jsonl", *(line(str(i), logprobs=i == 3) for i in range(300)))
    found = source(file)
    known = json.loads(json.dumps(found.scan()))
    assert len(known["files"][0]["offsets"]) > 5 and "logprobs" in found.params
    monkeypatch.setattr(jsonl, "scan_lines", None)
    again = source(file, known)
    assert again.params == found.params and again.scan() == known
    assert [row.id for batch in again.batches(start=290) for row in batch.rows] == [str(i) for i in range(290, 300)]


def test_a_scan_made_for_another_format_or_model_is_not_used(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", line("a", seed=1), line("b", model="m2", logprobs=True))
    known = source(file).scan()
    assert source(file).params == ("seed",)
    spec = job(file, format="openai-batch")
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"served_model_name": "m2"})})
    assert PromptSource(spec, known).params == ("logprobs",)
    assert "custom_id" in PromptSource(job(file, columns={"prompt": "url"}), known).passthrough_schema.names


def test_no_lines(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\n")
    found = source(tmp_path / "a.jsonl")
    assert (found.num_rows, list(found.batches()), found.params) == (0, [], ())
