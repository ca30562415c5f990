"""Cases t19 to t24: every way in which a line of JSON can be broken or odd, as whole jobs."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specrun.jobs.errors import InputError
from specrun.runner.cli import run_command
from tests.runner.conftest import Job

GOOD = b'{"prompt": "x"}'
BROKEN: dict[str, tuple[bytes, str]] = {
    "no brace": (b'{"prompt": "x"', "parse_error"),
    "no quote": (b'{"prompt": "x}', "parse_error"),
    "two objects": (b'{"prompt": "x"}{"prompt": "y"}', "parse_error"),
    "comma behind": (b'{"prompt": "x",}', "parse_error"),
    "single quotes": (b"{'prompt': 'x'}", "parse_error"),
    "words": (b"hello", "parse_error"),
    "list": (b'["x"]', "parse_error"),
    "string": (b'"x"', "parse_error"),
    "number": (b"7", "parse_error"),
    "null": (b"null", "parse_error"),
    "raw control character": (b'{"prompt": "a\x01b"}', "parse_error"),
    "zeros of a torn write": (b"\x00" * 30, "parse_error"),
    "too deep": (b"[" * 100_000, "parse_error"),
    "too deep in a value": (b'{"prompt": "x", "deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "parse_error"),
    "number of too many digits": (b'{"prompt": "x", "num": ' + b"9" * 5000 + b"}", "parse_error"),
    "number that no float holds": (b'{"prompt": "x", "num": 1e400}', "parse_error"),
    "not UTF-8": (b'{"prompt": "\xff"}', "encoding_error"),
    "half a character": (b'{"prompt": "\xe2\x82"}', "encoding_error"),
    "raw surrogate": (b'{"prompt": "\xed\xa0\x80"}', "encoding_error"),
    "lone surrogate": (rb'{"prompt": "\ud800"}', "encoding_error"),
    "lone surrogate elsewhere": (rb'{"prompt": "x", "note": ["\udfff"]}', "encoding_error"),
    "lone surrogate in a key": (rb'{"prompt": "x", "\ud800": 1}', "encoding_error"),
    "bad escape": (rb'{"prompt": "\x41"}', "parse_error"),
    "number for a prompt": (b'{"prompt": 7}', "parse_error"),
    "list for a prompt": (b'{"prompt": ["x"]}', "parse_error"),
    "truth for a prompt": (b'{"prompt": true}', "parse_error"),
    "object for a prompt": (b'{"prompt": {"a": 1}}', "parse_error"),
    "null for a prompt": (b'{"prompt": null}', "null_prompt"),
    "no prompt": (b'{"other": "x"}', "null_prompt"),
    "empty object": (b"{}", "null_prompt"),
    "empty prompt": (b'{"prompt": ""}', "empty_prompt"),
}


def write(job: Job, *lines: bytes, end: bytes = b"\n") -> Job:
    (job.folder / "in.jsonl").write_bytes(b"".join(line + end for line in lines))
    return job.set(errors__max_failed_fraction=1.0)


def codes(job: Job) -> list[str | None]:
    return [row["error_code"] for row in job.rows()]


def texts(job: Job) -> list[str | None]:
    return [row["text"] for row in job.rows()]


@pytest.mark.parametrize("name", BROKEN)
def test_t19_one_bad_line_fails_its_row_alone(job: Job, name: str) -> None:
    line, code = BROKEN[name]
    assert write(job, b'{"prompt": "a", "num": 1}', line, b'{"prompt": "c", "num": 3}').run().exit_code == 0
    assert codes(job) == [None, code, None] and texts(job) == ["a", None, "c"]
    assert [row["num"] for row in job.rows()] in ([1, None, 3], ["1", None, "3"])
    if code in ("parse_error", "encoding_error") and "for a prompt" not in name:
        assert "line 2 of in.jsonl" in job.rows()[1]["error_message"]


# A file whose every line lacks the column is a mistake of the job and not of its lines.
@pytest.mark.parametrize("name", [name for name in BROKEN if name != "no prompt"])
def test_t19_nothing_but_bad_lines(job: Job, name: str) -> None:
    line, code = BROKEN[name]
    assert write(job, line, line).run().exit_code == 0
    assert codes(job) == [code, code]


def test_t19_a_line_number_counts_blank_lines_and_files(job: Job) -> None:
    (job.folder / "in").mkdir()
    (job.folder / "in" / "1.jsonl").write_bytes(GOOD + b"\n\n \n")
    (job.folder / "in" / "2.jsonl").write_bytes(b"\n\n" + GOOD + b"\n\n{\n")
    job.config["input"]["path"] = str(job.folder / "in")
    assert job.set(errors__max_failed_fraction=1.0).run().exit_code == 0
    rows = job.rows()
    assert len(rows) == 3 and "line 5 of 2.jsonl" in rows[2]["error_message"]


def test_t20_only_newlines_end_lines(job: Job) -> None:
    odd = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\u00a0h"
    lines = [json.dumps({"prompt": "x", "note": odd}, ensure_ascii=False) for _ in range(2)]
    # A BOM, CRLF, and no newline at the end.
    (job.folder / "in.jsonl").write_bytes(("\ufeff" + "\r\n".join(lines)).encode())
    assert job.run().exit_code == 0
    assert [row["note"] for row in job.rows()] == [odd, odd] and codes(job) == [None, None]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b" \t\r\n", b"\n\n", b"\n\r\n"])
@pytest.mark.parametrize("has_last_end", [True, False])
def test_t20_line_ends(job: Job, end: bytes, has_last_end: bool) -> None:
    content = end.join([GOOD, GOOD, GOOD]) + end * has_last_end
    (job.folder / "in.jsonl").write_bytes(content)
    assert job.run().exit_code == 0
    assert texts(job) == ["x", "x", "x"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("fault", ["none", "truncated", "empty", "plain text", "two members", "garbage behind"])
def test_t20_compressed_lines(job: Job, suffix: str, fault: str) -> None:
    lines = GOOD + b"\n" + b'{"prompt": "y"}\n'
    whole = gzip.compress(lines) if suffix == ".gz" else pa.compress(lines, "zstd", asbytes=True)
    content = {
        "none": whole,
        "truncated": whole[:-5],
        "empty": b"",
        "plain text": lines,
        "two members": whole + whole,
        "garbage behind": whole + b"garbage",
    }[fault]
    path = job.folder / f"in.jsonl{suffix}"
    path.write_bytes(content)
    job.config["input"]["path"] = str(path)
    if fault in ("none", "two members"):
        assert job.run().exit_code == 0
        assert texts(job) == ["x", "y"] * (1 if fault == "none" else 2)
        return
    with pytest.raises(InputError) as raised:
        job.run()
    assert str(path) in str(raised.value) and job.builder.num_loads == 0


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_t20_other_encodings_are_told(job: Job, encoding: str, capsys: pytest.CaptureFixture[str]) -> None:
    (job.folder / "in.jsonl").write_bytes('{"prompt": "x"}\n{"prompt": "y"}\n'.encode(encoding))
    code = run_command(["submit", str(job.file)], job.stub())
    err = capsys.readouterr().err
    if encoding in ("utf-16", "utf-32"):  # with a mark at the beginning
        assert code == 65 and "in.jsonl" in err and "UTF-" in err
    else:
        assert code in (2, 65) and not job.is_success


DATES = ["2024-01-01", "2024-01-02 10:00:00", "2024-01-03T10:00:00Z"]
ODD_TEXTS = [*DATES, "1", "1e5", "NaN", "null", "true", "None", "[]", '{"a": 1}', "0x1f", " padded ", "\U0001f600"]


def test_t22_text_stays_text(job: Job) -> None:
    job.jsonl([{"prompt": text, "copy": text} for text in ODD_TEXTS])
    assert job.run().exit_code == 0
    assert [row["copy"] for row in job.rows()] == ODD_TEXTS
    assert texts(job) == [text.strip() for text in ODD_TEXTS]  # the stub joins words by single spaces
    schema = pq.read_schema(next((job.out / "data").iterdir()))
    assert schema.field("copy").type == pa.string() and schema.field("text").type == pa.large_string()


IDS: list[tuple[bytes, str | None]] = [
    (b"12345678901234567890", "12345678901234567890"),
    (b"123456789012345678901234567890123", "123456789012345678901234567890123"),
    (b'"x"', "x"),
    (b"1", "1"),
    (b"-0", "0"),
    (b"1.50", "1.50"),
    (b"0.1000", "0.1000"),
    (b'"007"', "007"),
    (b'""', ""),
    (b"null", None),
    (b"true", "true"),
    (b'["a", 1]', '["a", 1]'),
    (b'"../../etc/passwd"', "../../etc/passwd"),
    (rb'"\u0000\n"', "\x00\n"),
]


def test_t23_ids_stay_as_they_are_written(job: Job) -> None:
    lines = [b'{"prompt": "x", "custom_id": ' + written + b"}" for written, _ in IDS]
    write(job, *lines, GOOD)
    job.config["input"]["columns"] = {"id": "custom_id", "prompt": "prompt"}
    assert job.run().exit_code == 0
    got = [row["id"] for row in job.rows()]
    assert got[4] in ("0", "-0")
    got[4] = "0"
    assert got == [*(want for _, want in IDS), None]
    assert codes(job) == [None] * (len(IDS) + 1)


def test_t23_numbers_that_no_column_holds_are_carried_as_text(job: Job) -> None:
    values = ["12345678901234567890", "1", "-9223372036854775808", "9223372036854775807"]
    lines = [b'{"prompt": "x", "num": ' + value.encode() + b"}" for value in values]
    assert write(job, *lines, GOOD).run().exit_code == 0
    assert [row["num"] for row in job.rows()] == [*values, None]


def test_t23_columns_of_mixed_types_are_carried_as_json(job: Job) -> None:
    values: list[Any] = ["x", 1, 1.5, True, None, ["é", None], {"a": {"b": []}}]
    assert job.jsonl([{"prompt": "x", "v": value} for value in values]).run().exit_code == 0
    got = [row["v"] for row in job.rows()]
    assert got[4] is None
    assert [json.loads(text) for text in got if text is not None] == [v for v in values if v is not None]


@pytest.mark.parametrize("num_bytes", [3 << 20, 40 << 20])
def test_t24_a_long_line_costs_its_row_at_most(job: Job, num_bytes: int) -> None:
    job.jsonl([{"prompt": "a"}, {"prompt": "w" * num_bytes, "num": 1}, {"prompt": "w " * 5000}, {"prompt": "c"}])
    job.set(errors__max_failed_fraction=1.0)
    assert job.run().exit_code == 0
    assert codes(job) == [None, None, "prompt_too_long", None]
    assert len(job.rows()[1]["text"]) == num_bytes


def test_t24_a_line_beyond_every_limit_costs_its_row(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specrun.jobs.lines.MAX_LINE_BYTES", 1000)
    job.jsonl([{"prompt": "a"}, {"prompt": "w" * 200_000}, {"prompt": "c"}]).set(errors__max_failed_fraction=1.0)
    assert job.run().exit_code == 0
    assert codes(job) == [None, "parse_error", None] and texts(job) == ["a", None, "c"]
    assert "line 2 of in.jsonl: more than 1000 bytes" in job.rows()[1]["error_message"]
