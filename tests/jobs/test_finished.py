"""Whether all shards of a job are done, and what stands for the whole of it."""

import orjson
import pytest

from specrun.jobs.errors import InputMissing, OutputError, TemporaryError
from specrun.jobs.finished import FinishedJob, error_line
from specrun.jobs.folder import OutputFolder
from specrun.jobs.metrics import JobMetrics, write_report
from specrun.jobs.shard import Shard
from tests.jobs.output_jobs import close, failed_row, names, open_writer, row, run, run_shard, shard_folder

ROWS = 50
COUNT = 3
TERMS = {"max_failed_fraction": 0.1, "format": "openai-batch", "model": "tiny"}


@pytest.fixture
def out(tmp_path):
    """A job of three shards, rows 0-15, 16-32 and 33-49, two parts each, with two failed rows."""
    for index in range(COUNT):
        run_shard(tmp_path, ROWS, 10, f"{index}/{COUNT}", make_row=outcome, **TERMS)
    return tmp_path


def outcome(index):
    return failed_row(index, "timeout") if index in (17, 40) else row(index)


def gather(out):
    return FinishedJob.gather(OutputFolder(str(out)))


def part(out, shard, sequence):
    return out / "data" / f"part-{shard:05d}-{sequence:06d}.parquet"


def edit_manifest(out, shard, **values):
    path = shard_folder(out, shard) / "manifest.json"
    path.write_bytes(orjson.dumps({**orjson.loads(path.read_bytes()), **values}))


def test_a_job_of_shards(out):
    job = gather(out)
    assert [p.name for p in job.parts] == names(out)
    assert [(p.row_start, p.row_stop) for p in job.parts] == [
        (0, 10),
        (10, 16),
        (16, 26),
        (26, 33),
        (33, 43),
        (43, 50),
    ]
    assert (job.counts.num_ok, job.counts.num_failed, job.counts.error_codes) == (48, 2, {"timeout": 2})
    assert (job.index.num_shards, job.index.num_rows) == (COUNT, ROWS)
    assert (job.terms.max_failed_fraction, job.terms.format, job.terms.model) == (0.1, "openai-batch", "tiny")
    assert job.reports == [{}, {}, {}]


def test_reports_of_the_shards(out):
    folder = OutputFolder(str(out)).shard(Shard(1, COUNT))
    written = write_report(folder, folder.report, JobMetrics(job="nightly"))
    assert gather(out).reports == [{}, written, {}]


def test_the_manifest_of_the_job(out):
    job = gather(out)
    manifest = orjson.loads(orjson.dumps(job.manifest("done")))
    assert (manifest["state"], manifest["num_rows"], manifest["num_shards"]) == ("done", ROWS, COUNT)
    assert [entry["name"] for entry in manifest["parts"]] == names(out)
    assert {entry["name"]: entry["bytes"] for entry in manifest["parts"]} == {
        path.name: path.stat().st_size for path in (out / "data").iterdir()
    }
    assert manifest["fingerprint"]["model.path"] == "tiny"


def test_the_manifest_leaves_the_marks_of_the_input_out(tmp_path):
    scan = {"files": [{"path": "a.jsonl", "size": 3, "hash": "x", "offsets": [[0, 0, 1]]}], "kinds": {"x": "int"}}
    run_shard(tmp_path, scan=scan)
    assert gather(tmp_path).manifest("done")["inputs"] == [{"path": "a.jsonl", "size": 3, "hash": "x"}]


def test_failed_rows(out):
    lines = [orjson.loads(error_line(failed)) for failed in gather(out).failed_rows(OutputFolder(str(out)))]
    assert lines == [
        {"row_index": i, "id": f"id-{i}", "error_code": "timeout", "error_message": f"row {i} failed"} for i in (17, 40)
    ]
    assert error_line((1, None, "timeout", "two\nlines\u2028")).count(b"\n") == 1


def test_all_rows_in_order(out):
    output = OutputFolder(str(out))
    rows = [row for batch in gather(out).batches(output) for row in batch.to_pylist()]
    assert [row["id"] for row in rows] == [f"id-{i}" for i in range(ROWS)]
    assert [row["text"] for row in rows] == [outcome(i).text for i in range(ROWS)]
    assert gather(out).has_column(output, "text")
    assert not gather(out).has_column(output, "logprobs")


def test_gathering_again_is_the_same(out):
    assert gather(out) == gather(out)


def test_no_job(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(InputMissing, match=r"holds no job \(.specrun/index.json is missing\); give a job's output"):
            gather(folder)
    assert not (tmp_path / "none").exists()


def test_missing_shards_are_named(tmp_path):
    run_shard(tmp_path, ROWS, 10, "1/3")
    with pytest.raises(TemporaryError, match=r"1 of 3 shards are done, missing 0, 2; run those, then finalize again"):
        gather(tmp_path)


def test_many_missing_shards_are_counted(tmp_path):
    run_shard(tmp_path, ROWS, 10, "3/40")
    with pytest.raises(TemporaryError, match=r"missing 0, 1, 2, 4, 5, 6, 7, 8, 9, 10, \.\.\. \(39 in all\)"):
        gather(tmp_path)


@pytest.mark.parametrize("damage", ["gone", "torn", "running", "preempted", "another job's"])
def test_a_shard_is_missing_until_its_manifest_says_done(out, damage):
    path = shard_folder(out, 1) / "manifest.json"
    if damage == "gone":
        path.unlink()
    elif damage == "torn":
        path.write_bytes(path.read_bytes()[:-20])
    elif damage == "another job's":
        edit_manifest(out, 1, fingerprint="0" * 64)
    else:
        edit_manifest(out, 1, state=damage)
    with pytest.raises(TemporaryError, match="2 of 3 shards are done, missing 1;"):
        gather(out)


def test_a_shard_that_runs_again_is_missing(out):
    part(out, 1, 0).unlink()
    writer = open_writer(out, ROWS, 10, "1/3")
    with pytest.raises(TemporaryError, match="missing 1;"):
        gather(out)
    assert len(run(writer)) == 10
    writer._ledger.complete()
    close(writer)
    assert len(gather(out).parts) == 6


@pytest.mark.parametrize("shard", [0, 2])
def test_a_missing_part_names_its_shard(out, shard):
    part(out, shard, 1).unlink()
    message = rf"part-0000{shard}-000001.parquet is missing or has changed; submit its shard \({shard}/3\) again"
    with pytest.raises(OutputError, match=message):
        gather(out)
    run_shard(out, ROWS, 10, f"{shard}/3", make_row=outcome)
    assert gather(out).counts.num_rows == ROWS


@pytest.mark.parametrize("change", [-1, 1])
def test_a_part_of_another_size_names_its_shard(out, change):
    content = part(out, 1, 0).read_bytes()
    part(out, 1, 0).write_bytes(content[:-1] if change < 0 else content + b"x")
    with pytest.raises(OutputError, match=r"part-00001-000000.parquet is missing or has changed; .* \(1/3\) again"):
        gather(out)
    run_shard(out, ROWS, 10, "1/3", make_row=outcome)
    assert gather(out).counts.num_rows == ROWS


@pytest.mark.parametrize("name", ["part-00003-000000.parquet", "part-00001-000002.parquet", "mine.parquet", ".x"])
def test_foreign_files_are_named(out, name):
    (out / "data" / name).write_bytes(part(out, 0, 0).read_bytes())
    with pytest.raises(OutputError, match=rf"holds files that are not of this job \({name}\); move them away"):
        gather(out)


@pytest.mark.parametrize(
    ("shard", "keep", "gap"), [(0, [1], "0 to 9"), (1, [0], "26 to 32"), (2, [0], "43 to 49"), (2, [], "33 to 49")]
)
def test_a_gap_is_named(out, shard, keep, gap):
    """A manifest that says done and lists too little: nothing else would tell that rows are missing."""
    manifest = orjson.loads((shard_folder(out, shard) / "manifest.json").read_bytes())
    edit_manifest(out, shard, parts=[manifest["parts"][i] for i in keep])
    for i in {0, 1} - {*keep}:
        part(out, shard, i).unlink()
    with pytest.raises(OutputError, match=f"rows {gap} are in no part; submit again"):
        gather(out)


def test_parts_that_overlap_are_refused(out):
    """Shards of another division that some mistake let in: no row may count twice."""
    manifest = orjson.loads((shard_folder(out, 1) / "manifest.json").read_bytes())
    edit_manifest(out, 1, parts=[{**manifest["parts"][0], "row_start": 12}, manifest["parts"][1]])
    with pytest.raises(OutputError, match="rows 12 to 15 are in two parts; submit again"):
        gather(out)


def test_a_job_without_rows(tmp_path):
    for index in range(2):
        run_shard(tmp_path, 0, 10, f"{index}/2")
    job = gather(tmp_path)
    assert [p.name for p in job.parts] == ["part-00000-000000.parquet"]
    assert job.counts.num_rows == 0
