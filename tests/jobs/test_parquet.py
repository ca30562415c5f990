"""Parquet input: columns, nulls, broken files, memory."""

import base64
import os
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.parquet import encryption

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


def test_nulls_wherever_they_can_stand(tmp_path):
    words = pa.DictionaryArray.from_arrays(pa.array([0, None, None], pa.int8()), pa.array(["a", "b"]))
    file = write_parquet(tmp_path / "a.parquet", {"k": words, "prompt": words, "max_tokens": pa.nulls(3)})
    rows, _ = read(source(file, {"id": "k"}))
    assert [(row.id, row.error_code, row.params) for row in rows] == [
        ("a", None, {}),
        *[(None, "null_prompt", {})] * 2,
    ]
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    chats: list[Any] = [None, [], [None], [{"role": None, "content": None}], [{"role": "user", "content": None}]]
    chats += [[{"role": "user", "content": "x"}, None], [{"role": "user", "content": "x"}]]
    for kind in (pa.list_(message), pa.large_list(message)):
        file = write_parquet(tmp_path / "b.parquet", {"chat": pa.array(chats, kind)})
        rows, _ = read(source(file, {"messages": "chat"}))
        assert [row.error_code for row in rows] == ["null_prompt", *["invalid_messages"] * 5, None]
    file = write_parquet(tmp_path / "c.parquet", {"chat": pa.nulls(2)})
    assert [row.error_code for row in read(source(file, {"messages": "chat"}))[0]] == ["null_prompt"] * 2


def test_messages_too_deep_for_anything(tmp_path):
    deep = '[{"role": "user", "content": "x", "extra": ' + "[" * 900 + "]" * 900 + "}]"
    file = write_parquet(tmp_path / "a.parquet", {"chat": [deep, '[{"role": "user", "content": "x"}]']})
    assert [row.error_code for row in read(source(file, {"messages": "chat"}))[0]] == ["invalid_messages", None]


def test_missing_columns(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", {"prompts": ["a"], "num": [1]})
    with pytest.raises(ConfigError, match=r"has no column 'prompt'; found prompts, num; did you mean prompts"):
        source(file)
    with pytest.raises(ConfigError, match=r"output.keep_columns: .* has no column 'm'"):
        source(file, {"prompt": "prompts"}, keep=["m"])
    write_parquet(tmp_path / "b.parquet", {"other": ["a"]})
    with pytest.raises(ConfigError, match=r"b.parquet has no column 'prompts'"):
        source(tmp_path, {"prompt": "prompts"})


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
    broken = {"empty": b"", "cut": good[:-10], "lines": b'{"prompt": "a"}\n' * 9}
    broken |= {
        "sealed": b"PARE" + good[4:-4] + b"PARE",
        "small": b"PAR1",
        "footer": good[:-8] + b"\xff\xff\xff\x7fPAR1",
    }
    broken |= {"zeros": bytes(len(good)), "rubbish": good[:-400] + bytes(392) + good[-8:]}
    for name, content in broken.items():
        bad = tmp_path / f"{name}.parquet"
        bad.write_bytes(content)
        with pytest.raises(InputError, match=rf"{name}.parquet: cannot be read: .*; write the file again"):
            source(tmp_path)
        bad.unlink()


def test_a_page_that_is_broken_is_an_input_error(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", {"prompt": [f"row {i}" for i in range(5000)]})
    good = file.read_bytes()
    for broken in (good[:4] + b"\x99" * 2996 + good[3000:], good[10:]):
        file.write_bytes(broken)
        with pytest.raises(InputError, match=r"a.parquet: cannot be read"):
            list(source(file).batches())


def test_checksums_are_checked_where_a_file_has_them(tmp_path):
    texts = [os.urandom(8).hex() for _ in range(1000)]
    file = tmp_path / "a.parquet"
    options = {"write_page_checksum": True, "compression": "none", "use_dictionary": False}
    good = write_parquet(file, {"prompt": texts}, **options).read_bytes()
    assert prompts(source(file)) == texts
    file.write_bytes(good.replace(texts[500].encode(), b"0123456789abcdef", 1))
    with pytest.raises(InputError, match=r"a.parquet: cannot be read: .*[Cc][Rr][Cc]"):
        list(source(file).batches())


def test_columns_under_lock_and_key(tmp_path):
    class Kms(encryption.KmsClient):  # type: ignore[misc]
        def wrap_key(self, key_bytes, master_key_identifier):
            return base64.b64encode(key_bytes)

        def unwrap_key(self, wrapped_key, master_key_identifier):
            return base64.b64decode(wrapped_key)

    connection = encryption.KmsConnectionConfig()
    for plain in (False, True):
        config = encryption.EncryptionConfiguration("k", column_keys={"k": ["prompt"]}, plaintext_footer=plain)
        properties = encryption.CryptoFactory(lambda _: Kms()).file_encryption_properties(connection, config)
        file = write_parquet(tmp_path / "a.parquet", {"prompt": ["a"]}, encryption_properties=properties)
        with pytest.raises(InputError, match=r"a.parquet: cannot be read: .*decrypt"):
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


def test_a_required_field_may_be_absent_elsewhere(tmp_path):
    schema = pa.schema([pa.field("prompt", pa.string()), pa.field("num", pa.int32(), nullable=False)])
    write_parquet(tmp_path / "a.parquet", pa.table({"prompt": ["a"], "num": [1]}, schema))
    write_parquet(tmp_path / "b.parquet", {"prompt": ["b"]})
    assert read(source(tmp_path))[1]["num"].to_pylist() == [1, None]


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
