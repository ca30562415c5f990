"""JSONL input: lines, bad lines, ids, types, compression."""

import bz2
import gzip
import json
import lzma

import pyarrow as pa
import pytest

from specrun.jobs import jsonl, lines
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
        b'{"prompt": "good", "num": 1}',
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
    assert table["num"].to_pylist() == [None, 1] + [None] * 9


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"prompt": "x"}{"prompt": "y"}', "Extra data at character 16"),
        (b'{"prompt": "x"},', "Extra data"),
        (b"{'prompt': 'x'}", "Expecting property name"),
        (b'{"prompt": "x", "prompt": "y"}', "the key 'prompt' stands twice in one object"),
        (b'{"prompt": "x", "o": {"a": 1, "a": 1}}', "the key 'a' stands twice"),
        (b'{"prompt": "x", "\\ud800": 1, "\\ud800": 2}', "stands twice"),
        (b"\0" * 4096, "Expecting value"),
        (b'{"prompt": "a\0b"}', "Invalid control character"),
        (b'{"prompt": "a\rb"}', "Invalid control character"),
        (b'{"prompt": "\\x"}', "Invalid \\escape"),
        (b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}", "a number has too many digits"),
        (b'{"prompt": "x", "f": -1e999}', "the number -1e999 is too large"),
        (b'{"prompt": "x", "n": 01}', "Expecting ',' delimiter"),
        (b'{"prompt": "x", "n": undefined}', "Expecting value"),
        (
            b'{"prompt": "x", "d": ' + b"[" * 100 + b"]" * 100 + b"}",
            "more than 100 lists and objects within each other",
        ),
        (b'{"prompt": "x", "d": ' + b'{"k":' * 800 + b"1" + b"}" * 800 + b"}", "more than 100 lists"),
        (b'{"k":' * 100_000, "more than 100 lists"),
        (b'"text"', "not a JSON object but str"),
        (b"null", "not a JSON object but NoneType"),
        (b"NaN", "not a JSON object but float"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_lines_that_are_no_rows(tmp_path, line, said):
    good = b'{"prompt": "good"}'
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([good, line, good]))
    rows, _ = read(source(tmp_path))
    assert [row.error_code for row in rows] == [None, "parse_error", None]
    message = rows[1].error_message or ""
    assert message.startswith("line 2 of a.jsonl: not ") and said in message and len(message) < 200


@pytest.mark.parametrize(
    "text", [b"\xed\xa0\x80", b"\xc0\x80", b"\xf5\x80\x80\x80", b"caf\xe9", b"\\uDFFF", b"\\ud800\\u0041"]
)
def test_text_that_is_no_unicode(tmp_path, text):
    for line in (b'{"prompt": "' + text + b'"}', b'{"prompt": "x", "o": [{"' + text + b'": 1}]}'):
        (tmp_path / "a.jsonl").write_bytes(line + b'\n{"prompt": "good"}')
        assert codes(source(tmp_path)) == ["encoding_error", None]


def test_lines_that_are_rows(tmp_path):
    lines = [
        b'{"prompt": "a\\u0000b"}',
        b'\xef\xbb\xbf{"prompt": "put together"}',
        b'\t {"prompt": "indented"} \r',
        '{"prompt": "\u2028\u2029\u0085"}'.encode(),
        b'{"prompt": "\\ud83d\\ude00\\/"}',
        b'{"prompt": "deep", "d": ' + b"[" * 99 + b"]" * 99 + b"}",
        b'{"": "no name", "prompt": "x"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines) + b"\n\xef\xbb\xbf")
    rows, table = read(source(tmp_path))
    assert [row.prompt for row in rows] == [
        *("a\0b", "put together", "indented", "\u2028\u2029\u0085", "\U0001f600/", "deep", "x"),
    ]
    assert table["d"][5].as_py() == "[" * 99 + "]" * 99 and table[""][6].as_py() == "no name"


def test_numbers_that_json_does_not_know(tmp_path):
    lines = [
        '{"prompt": "a", "f": NaN, "temperature": NaN}',
        '{"prompt": "b", "f": -Infinity, "o": [NaN]}',
        '{"prompt": "c", "f": 0.1}',
    ]
    rows, table = read(source(write_lines(tmp_path / "a.jsonl", *lines)))
    assert str(rows[0].params) == "{'temperature': nan}", "for the check of parameters to refuse"
    assert str(table["f"].to_pylist()) == "[nan, -inf, 0.1]" and table["o"].to_pylist() == [None, "[NaN]", None]


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


@pytest.mark.parametrize(
    ("numbers", "kind"),
    [
        ("-9223372036854775808 9223372036854775807", "int64"),
        ("9223372036854775808 1", "string"),
        ("-9223372036854775809", "string"),
        ("18446744073709551616", "string"),
        ("123456789012345678901234567890", "string"),
        ("1e300 -0.0", "double"),
        ("12345678901234567890.0", "double"),
    ],
)
def test_numbers_keep_their_digits(tmp_path, numbers, kind):
    file = write_lines(tmp_path / "a.jsonl", *(f'{{"prompt": "a", "x": {x}}}' for x in numbers.split()))
    _, table = read(source(file))
    assert str(table["x"].type) == kind
    if kind == "string":
        assert table["x"].to_pylist() == numbers.split()
    else:
        assert table["x"].to_pylist() == json.loads(f"[{numbers.replace(' ', ',')}]")


def test_jsonl_missing_column(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", {"promt": "a"})
    with pytest.raises(ConfigError, match=r"has no column 'prompt'; found promt; did you mean promt"):
        source(file)


def test_long_line(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", {"prompt": "x" * 3_000_000}, {"prompt": "y"})
    assert [len(text or "") for text in prompts(source(file))] == [3_000_000, 1]


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_a_line_that_is_too_long_is_one_bad_row(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 100)
    monkeypatch.setattr(lines, "CHUNK_BYTES", chunk)
    good = '{"prompt": "' + "x" * 86 + '"}'
    assert len(good) == 100
    file = write_lines(tmp_path / "a.jsonl", good, {"prompt": "x" * 200}, {"prompt": "y"}, {"prompt": "z" * 5000})
    rows, _ = read(source(file))
    assert [row.error_code for row in rows] == [None, "parse_error", None, "parse_error"]
    assert rows[1].error_message == "line 2 of a.jsonl: more than 100 bytes; split the row"
    assert rows[2].prompt == "y"


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
        cut = (whole[: len(whole) // 2], whole[:-1], whole + whole[:-4], whole + whole[:3])
        trailing = (whole + b'{"prompt": "more"}\n', whole + bytes(512))
        for broken in (*cut, *trailing, b"", b"not compressed", whole[:40] + b"\0\0\0\0" + whole[44:]):
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
        ("{}".encode("utf-16-le"), "UTF-16"),
        ("{}".encode("utf-16-be"), "UTF-16"),
        (bz2.compress(b"{}"), "bzip2"),
        (lzma.compress(b"{}"), "xz"),
        (b"PK\x03\x04..", "zip"),
        (b"ARROW1\0\0", "is an Arrow file"),
    ],
)
def test_misnamed_jsonl(tmp_path, content, said):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=rf"a.jsonl: .*{said}"):
        source(tmp_path)


def test_packed_twice(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(gzip.compress(b"{}")))
    with pytest.raises(InputError, match=r"a.jsonl.gz: is gzip data"):
        source(tmp_path)
