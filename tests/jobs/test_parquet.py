"""Parquet input: types, schemas, passthrough, broken files, memory."""

import os
from datetime import UTC, datetime
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specrun.jobs.errors import ConfigError, InputError, InputMissing
from specrun.jobs.prompts import PromptRow
from tests.jobs.prompt_inputs import prompts, read, source, write_parquet


def test_null_empty_and_blank_prompts(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", {"id": ["x", "y", None, "z"], "prompt": ["a", None, "", "  "]})
    rows, _ = read(source(file, {"id": "id"}))
    assert rows[0] == PromptRow(0, "x", "a", None, {}, None, None)
    assert [row.error_code for row in rows] == [None, "null_prompt", "empty_prompt", None]
    assert rows[2].id is None and rows[3].prompt == "  "
    assert rows[1].error_message == "column 'prompt' is null"


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string()), pa.binary()]
)
def test_text_types(tmp_path, kind):
    column = pa.array(["a", None, "ü"]).cast(kind)
    file = write_parquet(tmp_path / "a.parquet", {"prompt": column})
    assert prompts(source(file)) == ["a", None, "ü"]


@pytest.mark.parametrize("column", [[1, 2], [1.5, 2.5], [["a"], ["b"]]])
def test_other_prompt_types_are_refused(tmp_path, column):
    file = write_parquet(tmp_path / "a.parquet", {"prompt": column})
    with pytest.raises(ConfigError, match=r"column 'prompt' of .*a.parquet is .*; it must be text"):
        source(file)


@pytest.mark.parametrize("kind", [pa.binary(), pa.string()])
def test_bytes_that_are_not_utf8(tmp_path, kind):
    raw = pa.array([b"ok", b"a\xff", b"fine"])
    column = pa.Array.from_buffers(kind, 3, raw.buffers())
    file = write_parquet(tmp_path / "a.parquet", {"prompt": column})
    rows, _ = read(source(file))
    assert [row.error_code for row in rows] == [None, "encoding_error", None]
    assert [row.prompt for row in rows] == ["ok", None, "fine"]
    assert rows[1].error_message == "column 'prompt' is not UTF-8 at byte 1"


def test_integer_ids_are_text(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", {"n": pa.array([2**63, 1], pa.uint64()), "prompt": ["a", "b"]})
    rows, table = read(source(file, {"id": "n"}))
    assert [row.id for row in rows] == ["9223372036854775808", "1"]
    assert table.column_names == []
    with pytest.raises(ConfigError, match=r"input.columns.id: column 'prompt' of .* is double"):
        source(write_parquet(tmp_path / "b.parquet", {"prompt": [1.0]}), {"id": "prompt", "prompt": "prompt"})


def test_missing_columns(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", {"prompts": ["a"], "n": [1]})
    with pytest.raises(ConfigError, match=r"has no column 'prompt'; found prompts, n; did you mean prompts"):
        source(file)
    with pytest.raises(ConfigError, match=r"output.keep_columns: .* has no column 'm'"):
        source(file, {"prompt": "prompts"}, keep=["m"])
    write_parquet(tmp_path / "b.parquet", {"other": ["a"]})
    with pytest.raises(ConfigError, match=r"b.parquet has no column 'prompts'"):
        source(tmp_path, {"prompt": "prompts"})


def test_passthrough_keeps_types_and_bits(tmp_path):
    table = pa.table(
        {
            "prompt": ["a", "b"],
            "floats": pa.array([[0.1, 0.2], None], pa.list_(pa.float32())),
            "pair": pa.array([[0.1, 0.2], [3, 4]], pa.list_(pa.float32(), 2)),
            "when": pa.array([datetime(2020, 1, 1, tzinfo=UTC), None], pa.timestamp("ns", "Europe/Berlin")),
            "money": pa.array([Decimal("1.2345"), None], pa.decimal128(20, 4)),
            "nested": pa.array(
                [{"a": 1, "b": ["x"]}, None], pa.struct([("a", pa.int32()), ("b", pa.list_(pa.string()))])
            ),
            "map": pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int64())),
            "word": pa.array(["u", "v"]).dictionary_encode(),
            "blob": [b"\xff", b""],
            "empty": pa.nulls(2),
        }
    )
    file = write_parquet(tmp_path / "a.parquet", table)
    _, carried = read(source(file))
    stored = pq.read_table(file).drop_columns("prompt")
    assert carried.schema.types == stored.schema.types and carried.equals(stored)


def test_keep_columns(tmp_path):
    data = {"k": ["1"], "prompt": ["a"], "x": [1], "y": [2], "max_tokens": [3]}
    file = write_parquet(tmp_path / "a.parquet", data)
    assert read(source(file, {"id": "k"}))[1].column_names == ["x", "y"]
    assert read(source(file, {"id": "k"}, keep="none"))[1].column_names == []
    rows, table = read(source(file, {"id": "k"}, keep=["y", "prompt", "max_tokens"]))
    assert table.to_pylist() == [{"prompt": "a", "y": 2, "max_tokens": 3}]
    assert rows[0].params == {"max_tokens": 3}


def test_names_that_the_output_uses(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", {"id": [1], "prompt": ["a"], "text": ["b"]})
    with pytest.raises(ConfigError, match=r"column 'id', 'text' has a name that the output uses itself.*keep_columns"):
        source(file)
    with pytest.raises(ConfigError, match=r"set input.columns.id: id, or"):
        source(file, {"prompt": "text"})
    assert read(source(file, {"prompt": "text", "id": "id"}))[1].column_names == ["prompt"]


def test_no_rows(tmp_path):
    found = source(
        write_parquet(tmp_path / "a.parquet", {"prompt": pa.array([], pa.string()), "x": pa.array([], pa.int8())})
    )
    assert (found.num_rows, list(found.batches())) == (0, [])
    assert found.passthrough_schema == pa.schema([("x", pa.int8())])


def test_broken_files_are_named(tmp_path):
    good = write_parquet(tmp_path / "good.parquet", {"prompt": ["a"]}).read_bytes()
    for name, content in {"empty": b"", "cut": good[:-10], "lines": b'{"prompt": "a"}\n' * 9}.items():
        bad = tmp_path / f"{name}.parquet"
        bad.write_bytes(content)
        with pytest.raises(InputError, match=rf"{name}.parquet: cannot be read: .*; write the file again"):
            source(tmp_path)
        bad.unlink()


def test_a_page_that_is_broken_is_an_input_error(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", {"prompt": [f"row {i}" for i in range(5000)]})
    content = bytearray(file.read_bytes())
    content[4:3000] = b"\x99" * 2996
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"a.parquet: cannot be read"):
        list(source(file).batches())


def test_a_file_that_changes_is_noticed(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", {"prompt": ["a"]})
    found = source(file)
    write_parquet(file, {"prompt": ["a", "b"]})
    with pytest.raises(InputError, match=r"changed while the job reads it"):
        list(found.batches())
    file.unlink()
    with pytest.raises(InputMissing):
        list(found.batches())


def test_schemas_of_files_are_unified(tmp_path):
    write_parquet(tmp_path / "a.parquet", {"prompt": pa.nulls(1), "q": pa.nulls(1)})
    write_parquet(tmp_path / "b.parquet", {"q": pa.array([7], pa.int8()), "prompt": ["b"], "r": ["s"]})
    rows, table = read(source(tmp_path))
    assert [row.prompt for row in rows] == [None, "b"]
    assert table.to_pylist() == [{"q": None, "r": None}, {"q": 7, "r": "s"}]
    assert table.schema == pa.schema([("q", pa.int8()), ("r", pa.string())])
    write_parquet(tmp_path / "c.parquet", {"prompt": ["c"], "q": ["text"]})
    with pytest.raises(InputError, match=r"column 'q' is int8 in .*b.parquet and string in .*c.parquet"):
        source(tmp_path)


def test_a_required_field_may_be_absent_elsewhere(tmp_path):
    schema = pa.schema([pa.field("prompt", pa.string()), pa.field("n", pa.int32(), nullable=False)])
    write_parquet(tmp_path / "a.parquet", pa.table({"prompt": ["a"], "n": [1]}, schema))
    write_parquet(tmp_path / "b.parquet", {"prompt": ["b"]})
    assert read(source(tmp_path))[1]["n"].to_pylist() == [1, None]


def test_column_names_with_dots_and_twice(tmp_path):
    table = pa.table({"a": [{"b": 1}], "a.b": ["text"]})
    assert prompts(source(write_parquet(tmp_path / "a.parquet", table), {"prompt": "a.b"})) == ["text"]
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["prompt", "prompt"])
    with pytest.raises(InputError, match=r"has two columns named 'prompt'"):
        source(write_parquet(tmp_path / "b.parquet", twice))


def test_one_wide_row_group_streams(tmp_path):
    texts = pa.array([os.urandom(1000).hex() for _ in range(20_000)])
    file = write_parquet(tmp_path / "a.parquet", {"prompt": texts}, row_group_size=20_000, use_dictionary=False)
    del texts
    assert pq.read_metadata(file).num_row_groups == 1
    before = pa.total_allocated_bytes()
    peak = count = 0
    for batch in source(file).batches():
        peak = max(peak, pa.total_allocated_bytes() - before)
        count += len(batch.rows)
    assert count == 20_000
    assert peak < 12 << 20, "40 MB of text must not be held at once"
