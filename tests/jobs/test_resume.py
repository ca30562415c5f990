"""What a crash at each point leaves, and what the next attempt makes of it."""

import errno
import os
import shutil

import orjson
import pytest

from specrun.jobs import spill
from specrun.jobs.errors import ConfigError, OutputError, StorageError, TemporaryError
from specrun.jobs.ledger import Ledger
from specrun.jobs.schema import OutputRow
from tests.jobs.output_jobs import (
    assert_whole,
    close,
    expect,
    finish_job,
    manifest_of,
    names,
    open_writer,
    row,
    run,
    shard_folder,
    spill_file,
)


def test_resume_runs_only_what_is_not_done(tmp_path):
    writer = open_writer(tmp_path, 35)
    expect(writer)
    done = [*range(10), 12, 19, 34]
    writer.write([row(i) for i in done])
    close(writer)
    writer = open_writer(tmp_path, 35)
    assert [i for i in range(35) if writer.is_done(i)] == done
    assert writer.range_done(0, 10)
    assert writer.range_done(10, 10)
    assert not writer.range_done(0, 11)
    assert not writer.range_done(12, 13)
    assert writer.counts.num_rows == len(done)
    assert sorted(run(writer)) == [i for i in range(35) if i not in done]
    close(writer)
    assert_whole(tmp_path, 35)
    assert writer.counts.num_rows == writer.counts.num_ok == 35


def test_counts_cover_all_attempts(tmp_path):
    writer = open_writer(tmp_path, 20)
    expect(writer)
    failed = OutputRow(3, None, finish_reason="error", prompt_tokens=0, error_code="null_prompt", error_message="x")
    writer.write([failed, *(row(i) for i in range(12) if i != 3)])
    close(writer)
    writer = open_writer(tmp_path, 20)
    expect(writer)
    writer.write([row(i, finish_reason="length") for i in range(12, 20)])
    for counts in (writer.counts, open_after(writer, tmp_path, 20).counts):
        assert (counts.num_rows, counts.num_ok, counts.num_failed) == (20, 19, 1)
        assert counts.error_codes == {"null_prompt": 1}
        assert counts.finish_reasons == {"stop": 11, "error": 1, "length": 8}
        assert (counts.num_prompt_tokens, counts.num_output_tokens) == (57, 38)


def open_after(writer, out, num_rows):
    close(writer)
    again = open_writer(out, num_rows)
    close(again)
    return again


@pytest.mark.parametrize(
    "tail",
    [b'[14,"torn te', b'[14,"x"]\n', b"\x00" * 50, b"{}\n", b'[99,"x","stop",null,1,1,null,null]\n', b"[14]"],
    ids=["torn", "short", "zeros", "object", "foreign row", "no end"],
)
def test_a_torn_spill_costs_only_the_rows_behind_the_tear(tmp_path, tail):
    writer = open_writer(tmp_path, 20)
    expect(writer)
    writer.write([row(11), row(13)])
    close(writer)
    with open(spill_file(tmp_path, 1), "ab") as file:
        file.write(tail)
    writer = open_writer(tmp_path, 20)
    assert [i for i in range(20) if writer.is_done(i)] == [11, 13]
    assert len(run(writer)) == 18
    close(writer)
    assert_whole(tmp_path, 20)


def test_passthrough_columns_are_read_again(tmp_path):
    writer = open_writer(tmp_path, 10)
    expect(writer)
    writer.write([row(3)])
    close(writer)
    source = spill_file(tmp_path, 0).with_suffix(".arrow")
    source.write_bytes(source.read_bytes()[:-100])
    writer = open_writer(tmp_path, 10)
    assert len(run(writer)) == 9
    close(writer)
    assert_whole(tmp_path, 10)


def test_a_full_part_that_was_not_committed_is_committed_when_read_again(tmp_path, monkeypatch):
    def fail(self, part, tmp):
        raise StorageError("disk full")

    writer = open_writer(tmp_path, 10)
    expect(writer)
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "commit", fail)
        with pytest.raises(StorageError):
            writer.write([row(i) for i in range(10)])
    assert names(tmp_path) == []
    close(writer)
    writer = open_writer(tmp_path, 10)
    assert run(writer) == []
    close(writer)
    assert_whole(tmp_path, 10)


def test_an_exception_while_a_part_is_written_leaves_nothing_visible(tmp_path, monkeypatch):
    def tear(self, schema):
        yield next(tables(self, schema)).slice(0, 3)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tables = spill.PartSpill.tables
    writer = open_writer(tmp_path, 10)
    expect(writer)
    with monkeypatch.context() as patch:
        patch.setattr(spill.PartSpill, "tables", tear)
        with pytest.raises(StorageError, match="No space left"):
            writer.write([row(i) for i in range(10)])
    assert names(tmp_path) == []
    assert not any((tmp_path / ".specrun" / "shard-00000" / "tmp").iterdir())
    close(writer)
    writer = open_writer(tmp_path, 10)
    assert run(writer) == []
    close(writer)
    assert_whole(tmp_path, 10)


def test_a_part_that_reads_back_differently_is_not_committed(tmp_path, monkeypatch):
    tables = spill.PartSpill.tables
    writer = open_writer(tmp_path, 10)
    expect(writer)
    monkeypatch.setattr(spill.PartSpill, "tables", lambda self, schema: [next(tables(self, schema)).slice(0, 9)])
    with pytest.raises(OutputError, match="holds 9 rows, its footer says 10"):
        writer.write([row(i) for i in range(10)])
    assert names(tmp_path) == []
    close(writer)


def test_crash_between_rename_and_journal(tmp_path, monkeypatch):
    def rename_only(self, part, tmp):
        self.folder.publish(tmp, part.path)
        raise KeyboardInterrupt

    writer = open_writer(tmp_path, 20)
    expect(writer)
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "commit", rename_only)
        with pytest.raises(KeyboardInterrupt):
            writer.write([row(i) for i in range(10)])
    close(writer)
    assert spill_file(tmp_path, 0).exists()
    assert not (tmp_path / ".specrun" / "shard-00000" / "journal.jsonl").exists()
    writer = open_writer(tmp_path, 20)
    assert writer.range_done(0, 10)
    assert not spill_file(tmp_path, 0).exists()
    assert sorted(run(writer)) == list(range(10, 20))
    close(writer)
    assert_whole(tmp_path, 20)


def test_a_part_that_is_gone_runs_again(tmp_path):
    writer = open_writer(tmp_path)
    run(writer)
    close(writer)
    (tmp_path / "data" / "part-00000-000001.parquet").unlink()
    writer = open_writer(tmp_path)
    assert sorted(run(writer)) == list(range(10, 20))
    close(writer)
    assert_whole(tmp_path, 30)


@pytest.mark.parametrize("keep", [0, 10, 600])
def test_a_damaged_part_runs_again(tmp_path, keep):
    writer = open_writer(tmp_path)
    run(writer)
    close(writer)
    part = tmp_path / "data" / "part-00000-000002.parquet"
    part.write_bytes(part.read_bytes()[:keep])
    writer = open_writer(tmp_path)
    assert sorted(run(writer)) == list(range(20, 30))
    close(writer)
    assert_whole(tmp_path, 30)


def test_leftovers_of_a_torn_commit_are_swept(tmp_path):
    close(open_writer(tmp_path))
    leftover = tmp_path / ".specrun" / "shard-00000" / "tmp" / "part-00000-000000.parquet"
    leftover.write_bytes(b"PAR1")
    close(open_writer(tmp_path))
    assert not leftover.exists()


@pytest.mark.parametrize(("num_rows", "rows_per_part"), [(20, 5), (20, 15), (15, 10)])
def test_parts_of_other_ranges_are_an_error(tmp_path, num_rows, rows_per_part):
    """Their fingerprint says the job's, so only a broken index can bring this about."""
    finish_job(tmp_path, 20)
    (tmp_path / "_SUCCESS").unlink()
    (tmp_path / ".specrun" / "index.json").unlink()
    message = r"part-00000-00000[01].parquet holds rows \d+ to \d+, which is not its range; set output.if_exists: over"
    with pytest.raises(OutputError, match=message):
        open_writer(tmp_path, num_rows, rows_per_part=rows_per_part)
    assert names(tmp_path) == ["part-00000-000000.parquet", "part-00000-000001.parquet"]


def test_parts_behind_the_last_row_are_an_error(tmp_path):
    finish_job(tmp_path, 20)
    (tmp_path / "_SUCCESS").unlink()
    (tmp_path / ".specrun" / "index.json").unlink()
    with pytest.raises(OutputError, match=r"part-00000-000001.parquet holds rows 10 to 19, which is not its range"):
        open_writer(tmp_path, 10)


@pytest.mark.parametrize("index", ["whole", "gone", "torn"])
def test_parts_of_another_configuration_are_an_error(tmp_path, index):
    finish_job(tmp_path, 20)
    shutil.rmtree(shard_folder(tmp_path))
    (tmp_path / "manifest.json").unlink()
    path = tmp_path / ".specrun" / "index.json"
    if index == "gone":
        path.unlink()
    elif index == "torn":
        path.write_bytes(path.read_bytes()[:100])
    message = "part-00000-000000.parquet" if index != "whole" else "sampling.seed: 0 -> 1"
    with pytest.raises(ConfigError, match=message) as caught:
        open_writer(tmp_path, 20, fingerprint={"model": {"path": "tiny"}, "sampling": {"temperature": 0, "seed": 1}})
    assert "holds results of another configuration" in str(caught.value)
    assert len(names(tmp_path)) == 2


@pytest.mark.parametrize("content", [b"{torn", b"[]", b'{"version": 2}', b"null", None])
def test_spill_without_manifest_is_not_trusted(tmp_path, content):
    writer = open_writer(tmp_path, 10)
    expect(writer)
    writer.write([row(1)])
    close(writer)
    path = shard_folder(tmp_path) / "manifest.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    writer = open_writer(tmp_path, 10)
    assert not writer.is_done(1)
    close(writer)


def test_attempts_count_on_without_the_manifest(tmp_path):
    """A retry tells the parts that are through by their attempt, which must not begin again at 1."""
    for _ in range(3):
        finish_job(tmp_path, 20)
        (tmp_path / "data" / "part-00000-000001.parquet").unlink()
    assert manifest_of(tmp_path)["attempt"] == 3
    finish_job(tmp_path, 20)
    (shard_folder(tmp_path) / "manifest.json").unlink()
    (tmp_path / "_SUCCESS").unlink()
    writer = open_writer(tmp_path, 20)
    assert writer._ledger.attempt == 5
    close(writer)


def test_a_writer_that_lost_the_lock_stops(tmp_path):
    writer = open_writer(tmp_path, 10)
    expect(writer)
    lock = shard_folder(tmp_path) / "lock"
    holder = {"pid": 1, "hostname": "elsewhere", "start_time": 1.0, "boot_id": "", "namespace": ""}
    lock.write_bytes(orjson.dumps(holder))
    for call in (writer.checkpoint, writer.secure, lambda: writer._ledger.save("running")):
        with pytest.raises(TemporaryError, match="process 1 on elsewhere has taken over"):
            call()
    with pytest.raises(TemporaryError):
        writer.write([row(i) for i in range(10)])
    assert names(tmp_path) == []
    close(writer)
    assert lock.exists()
