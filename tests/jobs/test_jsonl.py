"""JSONL input: lines, bad lines, ids, types, compression."""

import gzip

import pyarrow as pa
import pytest

from specrun.jobs import jsonl
from specrun.jobs.errors import ConfigError, InputError
from tests.jobs.prompt_inputs import codes, prompts, read, source, write_lines


def test_line_ends_bom_and_blank_lines(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes('\ufeff{"prompt": "a\u2028b\u0085c"}\r\n\r\n  \n{"prompt": "d"}'.encode())
    assert prompts(source(file)) == ["a\u2028b\u0085c", "d"]
    file.write_bytes(b"\xef\xbb\xbf\n\n")
    assert (source(file).num_rows, codes(source(file))) == (0, [])
    file.write_bytes(b"")
    assert list(source(file, {"id": "k"}, keep=["z"]).batches()) == []


def test_bad_lines(tmp_path):
    file = tmp_path / "a.jsonl"
    lines = [
        b'{"prompt": "x"',
        b"",
        b'{"prompt": "good", "n": 1}',
        b"[1]",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
    ]
    lines += [
        b'{"prompt": 3}',
        b'{"prompt": null}',
        b"{}",
        b'{"prompt": ""}',
        b"[" * 100_000,
        b'{"prompt": "\\ud83d\\ude00"}',
    ]
    file.write_bytes(b"\n".join(lines))
    rows, table = read(source(file))
    assert [(row.prompt, row.error_code) for row in rows] == [
        (None, "parse_error"),
        ("good", None),
        (None, "parse_error"),
        (None, "encoding_error"),
        (None, "encoding_error"),
        (None, "parse_error"),
        (None, "null_prompt"),
        (None, "null_prompt"),
        (None, "empty_prompt"),
        (None, "parse_error"),
        ("\U0001f600", None),
    ]
    assert (rows[0].error_message or "").startswith("line 1 of a.jsonl: not JSON: Expecting ',' delimiter")
    assert rows[2].error_message == "line 4 of a.jsonl: not a JSON object but list"
    assert rows[5].error_message == "'prompt' is int, not text; quote it"
    assert table["n"].to_pylist() == [None, 1] + [None] * 9


def test_only_bad_lines(tmp_path):
    assert codes(source(write_lines(tmp_path / "a.jsonl", "{", "{"))) == ["parse_error"] * 2


def test_ids_as_written(tmp_path):
    lines = [
        '{"i": 12345678901234567890123}',
        '{"i": "x"}',
        '{"i": 1.50}',
        '{"i": true}',
        "{}",
        '{"i": null}',
        '{"i": 7}',
    ]
    rows, _ = read(source(write_lines(tmp_path / "a.jsonl", *lines), {"id": "i", "prompt": "i"}))
    assert [row.id for row in rows] == ["12345678901234567890123", "x", "1.50", "true", None, None, "7"]


def test_dates_stay_text(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", {"prompt": "2024-01-01", "d": "2024-01-02 10:00:00"})
    rows, table = read(source(file))
    assert rows[0].prompt == "2024-01-01" and table["d"].to_pylist() == ["2024-01-02 10:00:00"]
    assert table.schema.field("d").type == pa.string()


def test_jsonl_passthrough_types(tmp_path):
    one = {
        "prompt": "a",
        "s": "x",
        "i": 1,
        "f": 0.1,
        "b": True,
        "mixed": 1,
        "list": [1, "ü"],
        "big": 2**63,
        "none": None,
    }
    two = {"prompt": "b", "s": None, "i": None, "mixed": "1", "list": {"k": None}, "big": 1, "late": 5}
    write_lines(tmp_path / "1.jsonl", one)
    write_lines(tmp_path / "2.jsonl", two)
    rows, table = read(source(tmp_path))
    kinds = dict(zip(table.schema.names, map(str, table.schema.types), strict=True))
    assert kinds == {
        **{"s": "string", "i": "int64", "f": "double", "b": "bool", "late": "int64"},
        **{"mixed": "string", "list": "string", "big": "string", "none": "string"},
    }
    assert table.to_pylist() == [
        {
            "s": "x",
            "i": 1,
            "f": 0.1,
            "b": True,
            "mixed": "1",
            "list": '[1, "ü"]',
            "big": "9223372036854775808",
            "none": None,
            "late": None,
        },
        {
            "s": None,
            "i": None,
            "f": None,
            "b": None,
            "mixed": '"1"',
            "list": '{"k": null}',
            "big": "1",
            "none": None,
            "late": 5,
        },
    ]
    assert [row.prompt for row in rows] == ["a", "b"]


def test_jsonl_missing_column(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", {"promt": "a"})
    with pytest.raises(ConfigError, match=r"has no column 'prompt'; found promt; did you mean promt"):
        source(file)


def test_long_line(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", {"prompt": "x" * 3_000_000}, {"prompt": "y"})
    assert [len(text or "") for text in prompts(source(file))] == [3_000_000, 1]


def test_a_line_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 100)
    with pytest.raises(InputError, match=r"a.jsonl: line 2 has more than 100 bytes"):
        source(write_lines(tmp_path / "a.jsonl", {"prompt": "y"}, {"prompt": "x" * 200}))


def test_keys_without_number_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "MAX_COLUMNS", 10)
    with pytest.raises(InputError, match=r"more than 10 different keys"):
        source(write_lines(tmp_path / "a.jsonl", *({"prompt": "a", f"k{i}": 1} for i in range(20))))


def test_compressed(tmp_path):
    content = b"".join(b'{"prompt": "%d"}\n' % i for i in range(5000))
    half = len(content) // 2
    packed = {"gz": gzip.compress, "zst": lambda data: pa.compress(data, codec="zstd", asbytes=True)}
    for suffix, compress in packed.items():
        file = tmp_path / f"a.jsonl.{suffix}"
        file.write_bytes(compress(content[:half]) + compress(content[half:]))  # concatenated, as logrotate does
        assert prompts(source(file)) == [str(i) for i in range(5000)]
        whole = compress(content)
        for broken in (whole[: len(whole) // 2], b"", b"not compressed", whole[:40] + b"\0\0\0\0" + whole[44:]):
            file.write_bytes(broken)
            with pytest.raises(InputError, match=rf"a.jsonl.{suffix}: "):
                source(file)
        file.unlink()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (gzip.compress(b"{}", mtime=0), "is gzip data"),
        ("{}".encode("utf-16"), "UTF-16"),
        (b"PAR1....", "is a Parquet file"),
    ],
)
def test_misnamed_jsonl(tmp_path, content, said):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=rf"a.jsonl: .*{said}"):
        source(tmp_path)
