"""What a crash at each point leaves, and what the next attempt makes of it."""

import errno
import os

import orjson
import pytest

from specrun.jobs import spill
from specrun.jobs.errors import ConfigError, OutputError, StorageError, TemporaryError
from specrun.jobs.ledger import Ledger
from specrun.jobs.schema import OutputRow
from tests.jobs.output_jobs import (
    assert_whole,
    crash,
    expect,
    names,
    open_writer,
    row,
    run,
    spill_file,
)


def test_resume_runs_only_what_is_not_done(tmp_path):
    writer = open_writer(tmp_path)
    expect(writer, 35)
    done = [*range(10), 12, 19, 34]
    writer.write([row(i) for i in done])
    crash(writer)
    writer = open_writer(tmp_path)
    assert [i for i in range(35) if writer.is_done(i)] == done
    assert writer.range_done(0, 10)
    assert writer.range_done(10, 10)
    assert not writer.range_done(0, 11)
    assert not writer.range_done(12, 13)
    assert writer.counts.num_rows == len(done)
    assert sorted(run(writer, 35)) == [i for i in range(35) if i not in done]
    writer.close()
    assert_whole(tmp_path, 35)
    assert writer.counts.num_rows == writer.counts.num_ok == 35


def test_counts_cover_all_attempts(tmp_path):
    writer = open_writer(tmp_path)
    expect(writer, 20)
    failed = OutputRow(3, None, finish_reason="error", prompt_tokens=0, error_code="null_prompt", error_message="x")
    writer.write([failed, *(row(i) for i in range(12) if i != 3)])
    crash(writer)
    writer = open_writer(tmp_path)
    expect(writer, 20)
    writer.write([row(i, finish_reason="length") for i in range(12, 20)])
    for counts in (writer.counts, open_after(writer, tmp_path).counts):
        assert (counts.num_rows, counts.num_ok, counts.num_failed) == (20, 19, 1)
        assert counts.error_codes == {"null_prompt": 1}
        assert counts.finish_reasons == {"stop": 11, "error": 1, "length": 8}
        assert (counts.num_prompt_tokens, counts.num_output_tokens) == (57, 38)


def open_after(writer, out):
    crash(writer)
    again = open_writer(out)
    again.close()
    return again


@pytest.mark.parametrize(
    "tail",
    [b'[14,"torn te', b'[14,"x"]\n', b"\x00" * 50, b"{}\n", b'[99,"x","stop",null,1,1,null,null]\n', b"[14]"],
    ids=["torn", "short", "zeros", "object", "foreign row", "no end"],
)
def test_a_torn_spill_costs_only_the_rows_behind_the_tear(tmp_path, tail):
    writer = open_writer(tmp_path)
    expect(writer, 20)
    writer.write([row(11), row(13)])
    crash(writer)
    with open(spill_file(tmp_path, 1), "ab") as file:
        file.write(tail)
    writer = open_writer(tmp_path)
    assert [i for i in range(20) if writer.is_done(i)] == [11, 13]
    assert len(run(writer, 20)) == 18
    writer.close()
    assert_whole(tmp_path, 20)


def test_passthrough_columns_are_read_again(tmp_path):
    writer = open_writer(tmp_path)
    expect(writer, 10)
    writer.write([row(3)])
    crash(writer)
    source = spill_file(tmp_path, 0).with_suffix(".arrow")
    source.write_bytes(source.read_bytes()[:-100])
    writer = open_writer(tmp_path)
    assert len(run(writer, 10)) == 9
    writer.close()
    assert_whole(tmp_path, 10)


def test_a_full_part_that_was_not_committed_is_committed_when_read_again(tmp_path, monkeypatch):
    def fail(self, part, tmp):
        raise StorageError("disk full")

    writer = open_writer(tmp_path)
    expect(writer, 10)
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "commit", fail)
        with pytest.raises(StorageError):
            writer.write([row(i) for i in range(10)])
    assert names(tmp_path) == []
    crash(writer)
    writer = open_writer(tmp_path)
    assert run(writer, 10) == []
    writer.close()
    assert_whole(tmp_path, 10)


def test_an_exception_while_a_part_is_written_leaves_nothing_visible(tmp_path, monkeypatch):
    def tear(self, schema, num_rows):
        yield from tables(self, schema, 3)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tables = spill.PartSpill.tables
    writer = open_writer(tmp_path)
    expect(writer, 10)
    with monkeypatch.context() as patch:
        patch.setattr(spill.PartSpill, "tables", tear)
        with pytest.raises(StorageError, match="No space left"):
            writer.write([row(i) for i in range(10)])
    assert names(tmp_path) == []
    assert not any((tmp_path / ".specrun" / "tmp").iterdir())
    crash(writer)
    writer = open_writer(tmp_path)
    assert run(writer, 10) == []
    writer.close()
    assert_whole(tmp_path, 10)


def test_a_part_that_reads_back_differently_is_not_committed(tmp_path, monkeypatch):
    tables = spill.PartSpill.tables
    writer = open_writer(tmp_path)
    expect(writer, 10)
    monkeypatch.setattr(spill.PartSpill, "tables", lambda self, schema, num_rows: tables(self, schema, num_rows - 1))
    with pytest.raises(OutputError, match="holds 9 rows, its footer says 10"):
        writer.write([row(i) for i in range(10)])
    assert names(tmp_path) == []
    writer.close()


def test_crash_between_rename_and_journal(tmp_path, monkeypatch):
    def rename_only(self, part, tmp):
        self.folder.publish(tmp, self.folder.data / part.name)
        raise KeyboardInterrupt

    writer = open_writer(tmp_path)
    expect(writer, 20)
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "commit", rename_only)
        with pytest.raises(KeyboardInterrupt):
            writer.write([row(i) for i in range(10)])
    crash(writer)
    assert spill_file(tmp_path, 0).exists()
    assert not (tmp_path / ".specrun" / "journal.jsonl").exists()
    writer = open_writer(tmp_path)
    assert writer.range_done(0, 10)
    assert not spill_file(tmp_path, 0).exists()
    assert sorted(run(writer, 20)) == list(range(10, 20))
    writer.close()
    assert_whole(tmp_path, 20)


def test_a_part_that_is_gone_runs_again(tmp_path):
    writer = open_writer(tmp_path)
    run(writer, 30)
    writer.close()
    (tmp_path / "data" / "part-00000-000001.parquet").unlink()
    writer = open_writer(tmp_path)
    assert sorted(run(writer, 30)) == list(range(10, 20))
    writer.close()
    assert_whole(tmp_path, 30)


@pytest.mark.parametrize("keep", [0, 10, 600])
def test_a_damaged_part_runs_again(tmp_path, keep):
    writer = open_writer(tmp_path)
    run(writer, 30)
    writer.close()
    part = tmp_path / "data" / "part-00000-000002.parquet"
    part.write_bytes(part.read_bytes()[:keep])
    writer = open_writer(tmp_path)
    assert sorted(run(writer, 30)) == list(range(20, 30))
    writer.close()
    assert_whole(tmp_path, 30)


def test_leftovers_of_a_torn_commit_are_swept(tmp_path):
    crash(open_writer(tmp_path))
    leftover = tmp_path / ".specrun" / "tmp" / "part-00000-000000.parquet"
    leftover.write_bytes(b"PAR1")
    crash(open_writer(tmp_path))
    assert not leftover.exists()


@pytest.mark.parametrize(
    ("rows_per_part", "message"), [(5, "holds rows 0..10, which is not its range"), (15, "short but not the last part")]
)
def test_parts_of_other_ranges_are_an_error(tmp_path, rows_per_part, message):
    writer = open_writer(tmp_path)
    run(writer, 20)
    writer.close()
    with pytest.raises(OutputError, match=message):
        open_writer(tmp_path, rows_per_part=rows_per_part)


def test_input_that_goes_on_behind_the_last_part_is_an_error(tmp_path):
    writer = open_writer(tmp_path)
    run(writer, 15)
    crash(writer)
    writer = open_writer(tmp_path)
    with pytest.raises(OutputError, match=r"part-00000-000001.parquet ends at row 15 and the input goes on"):
        expect(writer, 20)
    writer.close()


def test_parts_of_another_configuration_are_an_error_without_manifest(tmp_path):
    writer = open_writer(tmp_path)
    run(writer, 20)
    writer.close()
    (tmp_path / "manifest.json").unlink()
    crash(open_writer(tmp_path))
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ConfigError, match=r"part-00000-000000.parquet holds results of another configuration"):
        open_writer(tmp_path, fingerprint={"sampling": {"seed": 1}})


def test_spill_without_manifest_is_not_trusted(tmp_path):
    writer = open_writer(tmp_path)
    expect(writer, 10)
    writer.write([row(1)])
    crash(writer)
    (tmp_path / "manifest.json").write_bytes(b"{torn")
    writer = open_writer(tmp_path, fingerprint={"sampling": {"seed": 1}})
    assert not writer.is_done(1)
    writer.close()


def test_a_writer_that_lost_the_lock_stops(tmp_path):
    writer = open_writer(tmp_path)
    expect(writer, 10)
    lock = tmp_path / ".specrun" / "lock"
    lock.write_bytes(orjson.dumps({"pid": 1, "hostname": "elsewhere", "start_time": 1.0}))
    with pytest.raises(TemporaryError, match="process 1 on elsewhere has taken over"):
        writer.checkpoint()
    with pytest.raises(TemporaryError):
        writer.write([row(i) for i in range(10)])
    assert names(tmp_path) == []
    writer.close()
    assert lock.exists()
