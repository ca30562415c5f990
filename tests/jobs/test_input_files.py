"""Which files a job reads, in which order, and their identity."""

import hashlib
import os

import pytest

from specrun.jobs.errors import ConfigError, InputError, InputMissing
from tests.jobs.prompt_inputs import prompts, source, write_lines, write_parquet


def test_natural_order_and_ignored_names(tmp_path):
    for number in (10, 2, 1):
        write_parquet(tmp_path / f"part-{number}.parquet", {"prompt": [str(number)]})
    for name in ("_SUCCESS", ".part-0.parquet", "_part-0.parquet", "report.json", "x.parquet.crc"):
        (tmp_path / name).write_text("no data")
    (tmp_path / "errors").mkdir()
    write_parquet(tmp_path / "errors" / "e.parquet", {"prompt": ["no"]})
    for path in (tmp_path, tmp_path / "*", tmp_path / "part-*.parquet"):
        found = source(path)
        assert prompts(found) == ["1", "2", "10"]
        assert [file.name for file in found.files] == ["part-1.parquet", "part-2.parquet", "part-10.parquet"]
    (tmp_path / "_tmp").mkdir()
    write_parquet(tmp_path / "_tmp" / "t.parquet", {"prompt": ["no"]})
    assert prompts(source(tmp_path / "**" / "*.parquet")) == ["no", "1", "2", "10"]


def test_no_files_and_mixed_formats(tmp_path):
    with pytest.raises(InputMissing, match=r"no such file"):
        source(tmp_path / "none.parquet")
    with pytest.raises(InputMissing):
        source(tmp_path / "*.jsonl")
    write_parquet(tmp_path / "a.parquet", {"prompt": ["a"]})
    write_lines(tmp_path / "b.jsonl", {"prompt": "b"})
    with pytest.raises(ConfigError, match=r"mixes formats .*set input.format"):
        source(tmp_path)
    assert prompts(source(tmp_path, format="jsonl")) == ["b"]
    (tmp_path / "c.txt").write_text('{"prompt": "c"}\n')
    with pytest.raises(ConfigError, match=r"rename it or set input.format"):
        source(tmp_path / "c.txt")
    assert prompts(source(tmp_path / "c.txt", format="jsonl")) == ["c"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", {"prompt": "a"})
    file.chmod(0)
    with pytest.raises(InputMissing, match=r"Permission denied"):
        source(file)


def test_what_is_no_file(tmp_path):
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nothing")
    with pytest.raises(InputMissing, match=r"gone.jsonl: No such file"):
        source(tmp_path)
    (tmp_path / "gone.jsonl").unlink()
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in (tmp_path, tmp_path / "pipe.jsonl"):
        with pytest.raises(InputMissing, match=r"pipe.jsonl: is no regular file"):
            source(path)
    (tmp_path / "pipe.jsonl").unlink()
    (tmp_path / "folder.jsonl").mkdir()
    write_lines(tmp_path / "a.jsonl", {"prompt": "a"})
    assert prompts(source(tmp_path)) == ["a"]
    (tmp_path / os.fsdecode(b"caf\xe9.jsonl")).write_text("{}")
    with pytest.raises(InputError, match=r"caf.udce9.jsonl': the name of the file is not UTF-8; rename it"):
        source(tmp_path)


def test_a_name_with_glob_characters(tmp_path):
    folder = tmp_path / "set[1]"
    folder.mkdir()
    file = write_lines(folder / "a[b].jsonl", {"prompt": "a"})
    assert prompts(source(file)) == prompts(source(folder)) == ["a"]


def test_identity_follows_content(tmp_path):
    table, lines = tmp_path / "t.parquet", tmp_path / "l.jsonl"
    for file, write in (
        (table, lambda text: write_parquet(table, {"prompt": [text]})),
        (lines, lambda text: write_lines(lines, {"prompt": text})),
    ):
        write("abc")
        before = source(file).identity()
        assert before == [
            {"path": str(file), "size": file.stat().st_size, "hash": hashlib.sha256(file.read_bytes()).hexdigest()}
        ]
        os.utime(file, ns=(1, 1))
        assert source(file).identity() == before
        write("abd")
        assert source(file).identity()[0]["hash"] != before[0]["hash"]
