"""From finished shards to a finished job: by whom, when, and what it leaves."""

import json
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specrun.jobs.errors import OutputError, TemporaryError
from specrun.jobs.folder import OutputFolder
from specrun.runner.cli import run_command
from specrun.runner.finalize import finalize_job


def finalize(job):
    """As `specrun finalize OUT`; the exit code."""
    output = OutputFolder(str(job.out))
    with output.finalizing() as folder:
        return finalize_job(folder, list).exit_code


def contents(job):
    return {path.relative_to(job.out): path.read_bytes() for path in job.out.rglob("*") if path.is_file()}


@pytest.fixture
def sharded(job):
    """Three shards, of which the first has failed rows."""
    job.jsonl([{"prompt": None if i in (3, 11) else f"word {i}"} for i in range(30)])
    return job.set(output__rows_per_part=4, errors__max_failed_fraction=0.1)


def test_before_all_shards_are_done(sharded, capsys):
    for index, missing in ((1, "0, 2"), (2, "0")):
        sharded.run_shard(index, 3)
        before = contents(sharded)
        assert run_command(["finalize", str(sharded.out)]) == 75
        assert f"missing {missing}; run those" in capsys.readouterr().err
        assert contents(sharded) == before and not sharded.is_success
    assert run_command(["finalize", str(sharded.out), "--json"]) == 75
    out, err = capsys.readouterr()
    assert json.loads(out)["exit_code"] == 75 and json.loads(out)["error"] in err


def test_a_shard_under_way_is_missing(sharded):
    for index in (0, 2):
        sharded.run_shard(index, 3)
    assert sharded.preempt(5, "run.shard=1/3", max_num_seqs=1).exit_code == 75
    with pytest.raises(TemporaryError, match=r"2 of 3 shards are done, missing 1"):
        finalize(sharded)


def test_many_missing_shards_are_told_in_short(sharded, capsys):
    sharded.run_shard(0, 200)
    assert run_command(["finalize", str(sharded.out)]) == 75
    assert "missing 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, ... (199 in all)" in capsys.readouterr().err


def test_again_changes_nothing(sharded, capsys):
    for index in (1, 0, 2):
        sharded.run_shard(index, 3)
    before = contents(sharded)
    for _ in range(2):
        assert run_command(["finalize", str(sharded.out)]) == 0
        assert contents(sharded) == before
    out, err = capsys.readouterr()
    assert dict(line.split(None, 1) for line in out.splitlines())["rows"] == "30" and not err
    assert [line["row_index"] for line in sharded.error_lines()] == [3, 11]


def test_after_the_last_shard_could_not(sharded):
    """A crash between the last shard's end and _SUCCESS."""
    for index in range(3):
        sharded.run_shard(index, 3)
    before = contents(sharded)
    for name in ("_SUCCESS", "manifest.json", "report.json", "errors.jsonl", "metrics.prom", "metrics/job.parquet"):
        (sharded.out / name).unlink()
    assert finalize(sharded) == 0
    assert contents(sharded).keys() == before.keys()
    assert {path for path, content in contents(sharded).items() if content != before[path]} == set()


def test_several_at_once(sharded):
    for index in range(3):
        sharded.run_shard(index, 3)
    before = contents(sharded)
    codes: list[int] = []
    begin = threading.Barrier(6)

    def work():
        begin.wait()
        codes.extend(finalize(sharded) for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0] * 30 and contents(sharded) == before
    assert [path.name for path in sorted((sharded.out / ".specrun").iterdir())] == [
        "index.json",
        *(f"shard-0000{index}" for index in range(3)),
    ]


def test_the_verdict_of_whoever_finalizes(sharded, capsys):
    sharded.set(errors__max_failed_fraction=0.05)
    assert [sharded.run_shard(index, 3).exit_code for index in (2, 0, 1)] == [0, 0, 2]
    for _ in range(2):
        assert run_command(["finalize", str(sharded.out)]) == 2
        assert "2 of 30 rows failed, more than errors.max_failed_fraction allows" in capsys.readouterr().err
    assert not sharded.is_success and sharded.report()["exit_code"] == 2
    assert json.loads((sharded.out / "manifest.json").read_bytes())["state"] == "failed_rows"


@pytest.mark.parametrize("again", range(3))
def test_a_milder_judgement_needs_one_shard_to_hear_of_it(sharded, again):
    sharded.set(errors__max_failed_fraction=0.05)
    assert [sharded.run_shard(index, 3).exit_code for index in range(3)] == [0, 0, 2]
    sharded.set(errors__max_failed_fraction=0.1)
    result = sharded.run_shard(again, 3)
    assert (result.exit_code, sharded.builder.num_loads, sharded.is_success) == (0, 0, True)


def test_a_job_of_one_shard(sharded):
    assert sharded.run().exit_code == 0
    before = contents(sharded)
    assert finalize(sharded) == 0 and contents(sharded) == before


def test_what_is_no_job(job, capsys):
    assert run_command(["finalize", str(job.out)]) == 66
    assert "holds no job" in capsys.readouterr().err and not job.out.exists()
    job.out.mkdir()
    (job.out / "notes.txt").write_text("mine")
    assert run_command(["finalize", str(job.out)]) == 66
    assert [path.name for path in job.out.iterdir()] == ["notes.txt"]


def test_a_part_that_changed_after_its_commit(sharded):
    for index in range(3):
        sharded.run_shard(index, 3)
    part = sharded.out / "data" / "part-00001-000001.parquet"
    pq.write_table(pa.table({"a": [1]}), part)
    with pytest.raises(OutputError, match=r"part-00001-000001\.parquet .* submit its shard \(1/3\) again"):
        finalize(sharded)


def test_a_file_too_many_in_data(sharded):
    for index in range(3):
        sharded.run_shard(index, 3)
    (sharded.out / "data" / "part-00003-000000.parquet").write_bytes(b"")
    with pytest.raises(OutputError, match=r"part-00003-000000\.parquet"):
        finalize(sharded)


def test_files_of_ones_own_beside_data_stay(sharded):
    (sharded.out / "notes").mkdir(parents=True)
    (sharded.out / "notes" / "mine.txt").write_text("mine")
    for index in range(3):
        sharded.run_shard(index, 3)
    assert finalize(sharded) == 0 and (sharded.out / "notes" / "mine.txt").read_text() == "mine"


def test_finalize_json(sharded, capsys):
    for index in range(3):
        sharded.run_shard(index, 3)
    assert run_command(["finalize", str(sharded.out), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["num_rows"] == 30 and json.loads(out)["exit_code"] == 0 and not err
