"""PromptSource over both formats: messages, templates, parameters, limit and skip."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from specrun.jobs import jsonl, parquet
from specrun.jobs.errors import ConfigError
from tests.jobs.prompt_inputs import codes, prompts, read, source, write_lines, write_parquet

# Messages, templates, parameters


def test_messages_from_structs_lose_empty_keys(tmp_path):
    chats = [
        [{"role": "user", "content": "hi", "name": None}],
        [{"role": "user", "content": "a", "name": "num"}, {"role": "assistant", "content": "b", "name": None}],
        [],
        None,
        [{"role": None, "content": "x", "name": None}],
        [{"role": "user", "content": None, "name": None}],
    ]
    file = write_parquet(tmp_path / "a.parquet", {"chat": chats, "num": range(6)})
    rows, table = read(source(file, {"messages": "chat"}))
    assert rows[0].messages == [{"role": "user", "content": "hi"}] and rows[0].prompt is None
    assert rows[1].messages == [{"role": "user", "content": "a", "name": "num"}, {"role": "assistant", "content": "b"}]
    assert [row.error_code for row in rows[2:]] == [
        "invalid_messages",
        "null_prompt",
        "invalid_messages",
        "invalid_messages",
    ]
    assert [row.error_message for row in rows[4:]] == [
        "message 0 has no role",
        "message 0 (user) must have text as content, only text models are run",
    ]
    assert table.column_names == ["num"]
    with pytest.raises(ConfigError, match=r"must be a list of {role, content} or JSON text"):
        source(file, {"messages": "num"})


def test_messages_from_json(tmp_path):
    good = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [{"id": "1"}]}]
    bad = ["no json", 5, [5], [{"content": "x"}], [{"role": "user", "content": [{"type": "image_url"}]}]]
    bad += ['[{"role": "user", "content": "\\ud800"}]', "{}", []]
    lines = [{"chat": good}, {"chat": json.dumps(good)}, *({"chat": chat} for chat in bad)]
    rows, _ = read(source(write_lines(tmp_path / "a.jsonl", *lines), {"messages": "chat"}))
    assert rows[0].messages == rows[1].messages == good
    assert {row.error_code for row in rows[2:]} == {"invalid_messages"}
    text = write_parquet(tmp_path / "b.parquet", {"chat": [json.dumps(good)]})
    assert read(source(text, {"messages": "chat"}))[0][0].messages == good


def test_template(tmp_path):
    file = write_parquet(
        tmp_path / "a.parquet", {"title": ["A", None, "C"], "tags": [["x", "y"], [], None], "num": [1, 2, 3]}
    )
    found = source(file, prompt={"template": "{{ title }}: {{ tags | join(',') }}"})
    rows, table = read(found)
    assert rows[0].prompt == "A: x,y"
    assert [row.error_code for row in rows] == [None, "template_error", "template_error"]
    assert "null value" in (rows[1].error_message or "")
    assert table.column_names == ["title", "tags", "num"]
    with pytest.raises(ConfigError, match=r"prompt.template: .* has no column 'titel'; .* did you mean title"):
        source(file, prompt={"template": "{{ titel }}"})
    assert prompts(source(file, prompt={"template": "{{ x | default('none') }}"})) == ["none"] * 3
    assert codes(source(file, prompt={"template": "{{ '' }}"})) == ["empty_prompt"] * 3


def test_template_over_the_prompt_column(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", {"q": ["a", None], "num": [1, 2]})
    rows, table = read(source(file, {"prompt": "q"}, prompt={"template": "Q: {{ q or 'x' }}\n"}))
    assert [(row.prompt, row.error_code) for row in rows] == [("Q: a\n", None), (None, "null_prompt")]
    assert table.column_names == ["num"]


def test_template_over_jsonl(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", {"a": "x", "b": {"c": 1}}, {"a": "y"}, "{")
    rows, table = read(source(file, prompt={"template": "{{ a }}{{ b.c }}"}))
    assert [row.prompt for row in rows] == ["x1", None, None]
    assert [row.error_code for row in rows] == [None, "template_error", "parse_error"]
    assert table["b"].to_pylist() == ['{"c": 1}', None, None]


def test_row_parameters(tmp_path):
    table = pa.table(
        {
            "prompt": ["a", "b", "c"],
            "max_tokens": pa.array([4.0, None, 9999.0]),  # as pandas stores whole numbers with gaps
            "temperature": [0.0, None, -1.0],
            "stop": [["a"], None, ["b", "c"]],
            "logit_bias": pa.array([[(7, 1.5)], None, []], pa.map_(pa.int32(), pa.float64())),
            "x": [1, 2, 3],
        }
    )
    rows, carried = read(source(write_parquet(tmp_path / "a.parquet", table)))
    assert [row.params for row in rows] == [
        {"max_tokens": 4.0, "temperature": 0.0, "stop": ["a"], "logit_bias": [(7, 1.5)]},
        {},
        {"max_tokens": 9999, "temperature": -1.0, "stop": ["b", "c"], "logit_bias": []},
    ]
    assert carried.column_names == ["x"]
    file = write_lines(tmp_path / "b.jsonl", {"prompt": "a", "stop": "x"}, {"prompt": "a", "stop": ["y"], "seed": 3})
    assert [row.params for row in read(source(file))[0]] == [{"stop": "x"}, {"stop": ["y"], "seed": 3}]


def test_a_prompt_column_of_any_name(tmp_path):
    for name in ("request", "row", "messages", "k k", "a.b"):
        file = write_lines(tmp_path / "a.jsonl", {name: "x"}, {name: "y"})
        assert prompts(source(file, {"prompt": name})) == ["x", "y"], name


# Runs of rows


@pytest.fixture(params=["one_group", "many_groups", "jsonl"])
def numbered(request, tmp_path: Path) -> Path:
    """3000 rows over three files; prompt is the row's index."""
    for part in range(3):
        texts = [str(i) for i in range(part * 1000, part * 1000 + 1000)]
        if request.param == "jsonl":
            write_lines(tmp_path / f"{part}.jsonl", *({"prompt": text, "num": int(text)} for text in texts))
        else:
            size = 1000 if request.param == "one_group" else 30
            data = {"prompt": texts, "num": [int(text) for text in texts]}
            write_parquet(tmp_path / f"{part}.parquet", data, row_group_size=size)
    return tmp_path


@pytest.mark.parametrize("limit", [1, 700, 1000, 1001, 2999, 5000])
def test_limit(numbered, limit):
    found = source(numbered, limit=limit)
    rows, table = read(found)
    assert found.num_rows == len(rows) == min(limit, 3000)
    assert table["num"].to_pylist() == [int(row.prompt or -1) for row in rows] == list(range(found.num_rows))
    assert [file.num_rows for file in found.files] == [1000] * 3


def test_skip(numbered):
    done = set(range(0, 700)) | set(range(1000, 2000)) | {2500}
    asked = []

    def skip(start: int, stop: int) -> bool:
        asked.append((start, stop))
        return done.issuperset(range(start, stop))

    seen = []
    for batch in source(numbered, limit=2990).batches(skip):
        assert not done.issuperset(range(batch.start, batch.start + len(batch.rows)))
        assert batch.rows[0].row_index == batch.start
        assert batch.passthrough["num"].to_pylist() == [row.row_index for row in batch.rows]
        seen += [row.row_index for row in batch.rows]
    assert seen == sorted(set(seen)) and set(range(2990)) - done <= set(seen)
    assert len(seen) < 2200
    assert all(0 <= start < stop <= 2990 for start, stop in asked)
    assert list(source(numbered).batches(lambda start, stop: True)) == []


def test_long_rows_come_in_small_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "BATCH_BYTES", 10_000)
    monkeypatch.setattr(jsonl, "BATCH_BYTES", 10_000)
    texts = [f"{i:04}" + "x" * 996 for i in range(100)]
    write_parquet(tmp_path / "a.parquet", {"prompt": texts}, use_dictionary=False)
    write_lines(tmp_path / "b.jsonl", *({"prompt": text} for text in texts))
    for name in ("a.parquet", "b.jsonl"):
        batches = list(source(tmp_path / name).batches())
        assert max(len(batch.rows) for batch in batches) <= 10
        assert [row.prompt for batch in batches for row in batch.rows] == texts
