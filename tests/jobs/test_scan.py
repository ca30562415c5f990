"""What a first pass over the input finds, and reading from the middle with it."""

import gzip
import json
import os
import random

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrun.jobs import jsonl, lines
from specrun.jobs.errors import InputError
from specrun.jobs.json_line import parse_lines
from specrun.jobs.prompts import PromptSource
from tests.jobs.prompt_inputs import job, read, source, write_lines, write_parquet

NUM_ROWS = 3000


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Many chunks, marks and batches in a small file."""
    monkeypatch.setattr(lines, "CHUNK_BYTES", 700)
    monkeypatch.setattr(lines, "MARK_ROWS", 50)
    monkeypatch.setattr(jsonl, "BATCH_ROWS", 16)


@pytest.fixture(params=["one_group", "many_groups", "jsonl", "jsonl.gz", "jsonl.zst"])
def numbered(request, tmp_path):
    """NUM_ROWS over three files, prompt and k being the row's index; JSONL has blank and bad lines between."""
    for part in range(3):
        rows = range(part * 1000, part * 1000 + 1000)
        path = tmp_path / f"{part}.{request.param}"
        if request.param.startswith("jsonl"):
            content = b"".join(_line(row) for row in rows)
            path.write_bytes(_packed(request.param, content))
        else:
            data = {"prompt": [str(row) if row % 7 else None for row in rows], "k": list(rows)}
            size = 1000 if request.param == "one_group" else 30
            write_parquet(path.with_suffix(".parquet"), data, row_group_size=size)
    return tmp_path


def _line(row: int) -> bytes:
    filler = "x" * (row % 5 * 40)
    text = f'{{"prompt": "{row}", "k": {row}, "filler": "{filler}"}}' if row % 7 else '{"bad'
    return text.encode() + b"\r\n" + b" \n" * (row % 3)


def _packed(suffix: str, content: bytes) -> bytes:
    half = len(content) // 2
    if suffix.endswith("gz"):
        return gzip.compress(content[:half]) + gzip.compress(content[half:])
    return pa.compress(content, codec="zstd", asbytes=True) if suffix.endswith("zst") else content


def rows_of(found, *args, **kwargs):
    return [
        (row.row_index, row.prompt, row.error_message) for batch in found.batches(*args, **kwargs) for row in batch.rows
    ]


def test_any_range_is_the_same_as_that_range_of_all(numbered):
    found = source(numbered)
    whole = rows_of(found)
    assert [index for index, _, _ in whole] == list(range(NUM_ROWS))
    assert all(text == (str(index) if index % 7 else None) for index, text, _ in whole)
    rng = random.Random(0)
    ranges = [tuple(sorted(rng.sample(range(NUM_ROWS + 1), 2))) for _ in range(25)]
    for start, stop in [(0, 0), (1000, 2000), (999, 1001), (2999, 5000), (3000, None), *ranges]:
        assert rows_of(found, start=start, stop=stop) == whole[start:stop], (start, stop)


def test_shards_cover_all_rows_once(numbered):
    found = source(numbered, limit=2900)
    whole = rows_of(found)
    for count in (1, 2, 7, 200):
        pieces = [rows_of(found, start=2900 * i // count, stop=2900 * (i + 1) // count) for i in range(count)]
        assert [row for piece in pieces for row in piece] == whole


def test_skip_within_a_range(numbered):
    found = source(numbered)
    rng = random.Random(1)
    for _ in range(10):
        done: set[int] = set()
        for _ in range(6):
            first = rng.randrange(NUM_ROWS)
            done.update(range(first, first + rng.choice([1, 20, 400, 1500])))
        start, stop = sorted(rng.sample(range(NUM_ROWS + 1), 2))
        asked: list[tuple[int, int]] = []

        def skip(low, high, done=done, asked=asked):
            asked.append((low, high))
            return done.issuperset(range(low, high))

        seen = [index for index, _, _ in rows_of(found, skip, start, stop)]
        assert seen == sorted(set(seen)) and set(range(start, stop)) - done <= set(seen) <= set(range(start, stop))
        assert all(start <= low < high <= stop for low, high in asked)


def test_a_known_scan_gives_the_same_rows_and_reads_nothing(numbered, monkeypatch):
    first = source(numbered)
    known = json.loads(json.dumps(first.scan()))
    assert first.scan() == known, "JSON values"

    def refuse(*args):
        raise AssertionError("read again")

    monkeypatch.setattr(lines, "scan_lines", refuse)
    monkeypatch.setattr(jsonl, "scan_lines", refuse)
    monkeypatch.setattr("specrun.jobs.input_files.InputFile.content_hash", refuse)
    second = PromptSource(job(numbered), known)
    assert second.scan() == known and second.identity() == first.identity()
    assert second.passthrough_schema == first.passthrough_schema
    assert rows_of(second) == rows_of(first) and read(second)[1].equals(read(first)[1])


def test_a_scan_of_other_files_is_not_used(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", {"prompt": "a", "k": 1})
    known = source(file).scan()
    write_lines(file, {"prompt": "a", "k": 1}, {"prompt": "b", "k": "text"})
    changed = PromptSource(job(file), known)
    assert changed.num_rows == 2 and changed.passthrough_schema.field("k").type == pa.string()
    write_lines(tmp_path / "b.jsonl", {"prompt": "c"})
    assert PromptSource(job(tmp_path), changed.scan()).num_rows == 3
    assert PromptSource(job(file), {**changed.scan(), "kind": "parquet"}).scan() == changed.scan()
    os.utime(file, ns=(5, 5))
    assert PromptSource(job(file), changed.scan()).identity() == changed.identity()


def test_marks_lie_at_line_beginnings(tmp_path):
    file = tmp_path / "a.jsonl"
    content = b"".join(_line(row) for row in range(500))
    file.write_bytes(content)
    (seen,) = source(file).scan()["files"]
    assert seen["num_rows"] == 500 and 5 <= len(seen["offsets"]) <= 10
    for row, byte, line in seen["offsets"]:
        before = content[:byte]
        assert (before.count(b"\n") == line and not byte) or before.endswith(b"\n")
        assert sum(bool(text.strip()) for text in before.split(b"\n")) == row


def test_lines_before_the_range_are_not_parsed(tmp_path, monkeypatch):
    file = write_lines(tmp_path / "a.jsonl", *({"prompt": str(i)} for i in range(2000)))
    found = source(file)
    parsed = []

    def parse(file, numbered):
        parsed.extend(numbered)
        return parse_lines(file, numbered)

    monkeypatch.setattr("specrun.jobs.jsonl.parse_lines", parse)
    list(found.batches(start=1990))
    assert [number for number, _ in parsed] == list(range(1991, 2001))


def test_a_plain_file_is_not_read_before_the_range(tmp_path, monkeypatch):
    file = write_lines(tmp_path / "a.jsonl", *({"prompt": str(i)} for i in range(2000)))
    found = source(file)
    bytes_read = []
    real = lines.TextStream.read

    def counted(self, stop_byte=None):
        chunk = real(self, stop_byte)
        bytes_read.append(len(chunk))
        return chunk

    monkeypatch.setattr(lines.TextStream, "read", counted)
    rows_of(found, start=1000, stop=1010)
    rows_of(found, lambda low, high: low >= 20)
    assert sum(bytes_read) < file.stat().st_size / 4


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_file_that_loses_rows_while_it_is_read(tmp_path, name, monkeypatch):
    file = tmp_path / name
    content = b"".join(_line(row) for row in range(500))
    file.write_bytes(_packed(name, content))
    found = source(file)
    file.write_bytes(_packed(name, content[: len(content) // 2]))
    monkeypatch.setattr("specrun.jobs.input_files.InputFile.check_unchanged", lambda self: None)
    for start in (0, 400):
        with pytest.raises(InputError, match=rf"{name}: has fewer rows than before"):
            rows_of(found, start=start)
    assert len(rows_of(found, stop=100)) == 100


def test_a_file_that_grows_while_it_is_read(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", *({"prompt": str(i)} for i in range(100)))
    batches = source(file).batches()
    next(batches)
    with file.open("a") as stream:
        stream.write('{"prompt": "more"}\n')
    with pytest.raises(InputError, match=r"a.jsonl: changed while the job reads it"):
        list(batches)


PIECES = [b"{}", b"[", b"\n", b"\r\n", b" ", b"\n\n", b"\xef\xbb\xbf", b"\xff", b"\0", b"\r", b"x" * 30, b"\x1f"]


@settings(deadline=None, database=None)
@given(
    st.lists(st.sampled_from(PIECES), max_size=40),
    st.integers(1, 40),
    st.integers(1, 6),
    st.integers(0, 40),
    st.integers(0, 40),
)
def test_lines_are_the_same_however_a_file_is_cut(tmp_path_factory, pieces, chunk, mark_rows, one, other):
    content = b'{"prompt": "first"}' + b"".join(pieces)
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    path.write_bytes(content)
    bare = [line.strip(b" \t\r\n").removeprefix(b"\xef\xbb\xbf").lstrip(b" \t\r\n") for line in content.split(b"\n")]
    expected = [(number, line) for number, line in enumerate(bare, 1) if line]
    start, stop = sorted((one, other))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "CHUNK_BYTES", chunk)
        patch.setattr(lines, "MARK_ROWS", mark_rows)
        seen: list[tuple[int, bytes]] = []

        def parse(file, numbered):
            seen.extend(numbered)
            return parse_lines(file, numbered)

        patch.setattr("specrun.jobs.jsonl.parse_lines", parse)
        found = source(path)
        assert found.num_rows == len(expected)
        list(found.batches(start=start, stop=stop))
    assert seen == expected[start:stop]
