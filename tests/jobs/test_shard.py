"""Shards: which rows each has, where its number comes from, and several that write into one output."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrun.jobs.errors import ConfigError, OutputError, TemporaryError
from specrun.jobs.finished import FinishedJob
from specrun.jobs.folder import OutputFolder
from specrun.jobs.ledger import Ledger
from specrun.jobs.parts import PartRanges
from specrun.jobs.shard import Shard
from tests.jobs.output_jobs import (
    FINGERPRINT,
    assert_whole,
    batch,
    close,
    declare_done,
    expect,
    finish_job,
    make_ledger,
    manifest_of,
    names,
    open_ledger,
    open_writer,
    row,
    run,
    run_shard,
    shard_folder,
    spill_file,
    writer_of,
)


@given(st.integers(1, 300), st.integers(0, 5000), st.integers(1, 700))
def test_shards_and_parts_cover_all_rows_once(count, num_rows, rows_per_part):
    row = 0
    sizes = []
    for index in range(count):
        shard = Shard(index, count)
        start, stop = shard.rows(num_rows)
        assert start == row
        sizes.append(stop - start)
        ranges = PartRanges.of(shard, num_rows, rows_per_part)
        assert (ranges.start, ranges.stop, ranges.num_rows) == (start, stop, stop - start)
        for sequence in range(ranges.num_parts):
            first, last = ranges.rows(sequence)
            assert first == row
            assert num_rows == 0 or 0 < last - first <= rows_per_part
            assert all(ranges.sequence(i) == sequence for i in {first, max(first, last - 1)} if num_rows)
            row = last
        assert row == stop
    assert row == num_rows
    assert max(sizes) - min(sizes) <= 1


def test_a_job_without_rows_has_one_part():
    assert [PartRanges.of(Shard(i, 3), 0, 10).num_parts for i in range(3)] == [1, 0, 0]
    assert [PartRanges.of(Shard(i, 3), 1, 10).num_parts for i in range(3)] == [0, 0, 1]


@pytest.mark.parametrize(
    ("given", "environ", "expected"),
    [
        (None, {}, Shard(0, 1)),
        ("2/3", {}, Shard(2, 3)),
        (None, {"JOB_COMPLETION_INDEX": "2", "JOB_COMPLETIONS": "3"}, Shard(2, 3)),
        (None, {"JOB_COMPLETION_INDEX": "0", "JOB_COMPLETIONS": "1"}, Shard(0, 1)),
        (None, {"JOB_COMPLETION_INDEX": "0"}, Shard(0, 1)),
        ("1/2", {"JOB_COMPLETION_INDEX": "2", "JOB_COMPLETIONS": "3"}, Shard(1, 2)),
        ("1/2", {"JOB_COMPLETION_INDEX": "2"}, Shard(1, 2)),
    ],
)
def test_the_number_of_a_shard(given, environ, expected):
    assert Shard.of(given, environ) == expected


@pytest.mark.parametrize(
    ("given", "environ", "message"),
    [
        ("3/3", {}, "shard 3/3 is out of range; shards of 3 are 0 to 2"),
        (None, {"JOB_COMPLETION_INDEX": "3", "JOB_COMPLETIONS": "3"}, "3/3 is out of range; shards of 3 are 0 to 2"),
        (None, {"JOB_COMPLETION_INDEX": "-1", "JOB_COMPLETIONS": "3"}, "-1/3 is out of range"),
        (None, {"JOB_COMPLETION_INDEX": "0", "JOB_COMPLETIONS": "0"}, "0/0 is out of range"),
        (None, {"JOB_COMPLETION_INDEX": "1"}, "set JOB_COMPLETIONS to the job's spec.completions, or give --shard i/n"),
        (None, {"JOB_COMPLETIONS": "3"}, "JOB_COMPLETION_INDEX must be a number too; give --shard i/n instead"),
        (None, {"JOB_COMPLETIONS": "3", "JOB_COMPLETION_INDEX": ""}, "JOB_COMPLETION_INDEX must be a number too"),
        (None, {"JOB_COMPLETIONS": "three", "JOB_COMPLETION_INDEX": "1"}, "give --shard i/n instead"),
    ],
)
def test_a_wrong_number_of_a_shard(given, environ, message):
    with pytest.raises(ConfigError) as caught:
        Shard.of(given, environ)
    assert message in str(caught.value)


@pytest.mark.parametrize(("count", "num_rows"), [(2, 31), (3, 100), (4, 3), (3, 0), (1, 25)])
def test_shards_one_after_the_other_are_one_job(tmp_path, count, num_rows):
    ran = []
    for index in reversed(range(count)):
        ran += run_shard(tmp_path, num_rows, 10, f"{index}/{count}")
    declare_done(tmp_path)
    assert sorted(ran) == list(range(num_rows))
    assert_whole(tmp_path, num_rows)
    assert num_rows or names(tmp_path) == ["part-00000-000000.parquet"]
    known = make_ledger(tmp_path, num_rows, 10, f"0/{count}")._fingerprint
    assert Ledger.finished(OutputFolder(str(tmp_path)), known)


def test_shards_side_by_side_write_into_one_output(tmp_path):
    """Threads stand in for processes: each has its own ledger and nothing in common but the folder."""
    count, num_rows, errors = 6, 400, []
    gate = threading.Barrier(count)

    def shard(index):
        try:
            gate.wait()
            run_shard(tmp_path, num_rows, 10, f"{index}/{count}", seed=index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=shard, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    declare_done(tmp_path)
    assert_whole(tmp_path, num_rows)
    assert [FinishedJob.gather(OutputFolder(str(tmp_path))).counts.num_ok] == [num_rows]


def test_a_shard_has_its_own_files_only(tmp_path):
    first, second = (open_writer(tmp_path, 40, 10, shard=f"{i}/2") for i in range(2))
    for writer in (first, second):
        expect(writer)
    first.write([row(i) for i in range(10)])
    second.write([row(i) for i in range(20, 35)])
    assert names(tmp_path) == ["part-00000-000000.parquet", "part-00001-000000.parquet"]
    assert spill_file(tmp_path, 1, shard=1).exists()
    assert (first.counts.num_rows, second.counts.num_rows) == (10, 15)
    close(first)
    assert not (shard_folder(tmp_path, 0) / "lock").exists()
    assert (shard_folder(tmp_path, 1) / "lock").exists()
    close(second)
    again = open_writer(tmp_path, 40, 10, shard="0/2")
    assert (again._ledger.attempt, list(again._ledger.parts)) == (2, [0])
    assert sorted(run(again)) == list(range(10, 20))
    close(again)
    assert manifest_of(tmp_path, 1)["attempt"] == 1
    assert manifest_of(tmp_path, 1)["row_start"] == 20


def test_a_row_of_another_shard_is_an_error(tmp_path):
    writer = open_writer(tmp_path, 40, 10, shard="1/2")
    for start, stop in ((19, 21), (0, 5), (39, 41)):
        with pytest.raises(ValueError, match=rf"rows {start} to {stop - 1} are not all in the shard's 20 to 39"):
            writer.expect(start, *batch(start, stop))
    close(writer)
    assert not any(spill_file(tmp_path, 0, shard=1).parent.iterdir())


def test_one_process_for_a_shard(tmp_path):
    ledger = open_ledger(tmp_path, shard="0/2")
    with pytest.raises(TemporaryError, match=r"shard-00000/lock: process .* is writing to this output"):
        open_ledger(tmp_path, shard="0/2")
    open_ledger(tmp_path, shard="1/2").close()
    ledger.close()


def test_overwrite_does_not_go_with_shards(tmp_path):
    run_shard(tmp_path, 30, 10, "0/2")
    with pytest.raises(ConfigError, match=r"output.if_exists: overwrite does not go with shards \(1/2\)"):
        open_ledger(tmp_path, shard="1/2", if_exists="overwrite")
    assert names(tmp_path) == ["part-00000-000000.parquet", "part-00000-000001.parquet"]


def test_overwrite_waits_for_every_shard_of_the_old_job(tmp_path):
    live = open_ledger(tmp_path, shard="1/2")
    run_shard(tmp_path, 30, 10, "0/2")
    with pytest.raises(TemporaryError, match=r"shard-00001/lock: process .* is writing to this output"):
        open_ledger(tmp_path, if_exists="overwrite")
    assert len(names(tmp_path)) == 2
    live.close()
    finish_job(tmp_path, 25, if_exists="overwrite")
    assert_whole(tmp_path, 25)


def test_error_lets_the_shards_of_a_new_job_begin(tmp_path):
    for index in (1, 0):
        run_shard(tmp_path, 30, 10, f"{index}/2", if_exists="error")
    declare_done(tmp_path)
    assert_whole(tmp_path, 30)
    with pytest.raises(OutputError, match="is not empty"):
        open_ledger(tmp_path, shard="0/2", if_exists="error")


def test_error_does_not_take_shards_that_begin_for_another_job(tmp_path):
    """A shard makes its folders, takes its lock and proves the disk before it writes the index."""
    OutputFolder(str(tmp_path)).shard(Shard(0, 2)).create()
    (tmp_path / ".specrun" / "shard-00000" / "lock").write_bytes(b"{}")
    (tmp_path / ".specrun-probe").write_bytes(b"")
    with pytest.raises(OutputError, match="is not empty"):
        open_ledger(tmp_path, if_exists="error")
    open_ledger(tmp_path, shard="1/2", if_exists="error").close()


@pytest.mark.parametrize("name", ["notes.txt", "data/part-00001-000000.parquet"])
def test_error_with_shards_wants_an_empty_folder(tmp_path, name):
    (tmp_path / "data").mkdir()
    (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(OutputError, match="is not empty"):
        open_ledger(tmp_path, shard="0/2", if_exists="error")
    assert (tmp_path / name).read_bytes() == b"mine"


def test_error_refuses_the_shards_of_another_job(tmp_path):
    run_shard(tmp_path, 30, 10, "0/2")
    with pytest.raises(OutputError, match="is not empty"):
        open_ledger(tmp_path, shard="1/2", fingerprint={**FINGERPRINT, "more": 1}, if_exists="error")


def test_a_shard_without_rows_is_done_at_once(tmp_path):
    ledger = open_ledger(tmp_path, 2, 10, "0/3")
    writer = writer_of(ledger)
    assert (ledger.ranges.num_rows, ledger.ranges.num_parts) == (0, 0)
    writer.finish()
    ledger.complete()
    ledger.close()
    assert names(tmp_path) == []
    assert manifest_of(tmp_path)["state"] == "done"
