"""A job that finds an output already: its own, another's, or files of someone else."""

import orjson
import pyarrow as pa
import pytest

from specrun.jobs.errors import ConfigError, OutputError
from specrun.jobs.store import LocalStore
from tests.jobs.output_jobs import (
    assert_whole,
    close,
    expect,
    finish_job,
    is_finished,
    names,
    open_ledger,
    row,
    shard_folder,
    spill_file,
    writer_of,
)

OTHER = {"model": {"path": "other"}, "sampling": {"temperature": 0, "seed": 0}}


def tree(out):
    return {str(path.relative_to(out)): path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}


def test_a_finished_job_is_left_alone(tmp_path):
    assert not is_finished(tmp_path)
    finish_job(tmp_path)
    before = tree(tmp_path)
    assert is_finished(tmp_path)
    assert is_finished(tmp_path, OTHER, "skip")
    assert not is_finished(tmp_path, OTHER)
    assert not is_finished(tmp_path, if_exists="overwrite")
    assert not is_finished(tmp_path, if_exists="error")
    ledger = open_ledger(tmp_path)
    assert ledger.is_finished
    ledger.close()
    after = tree(tmp_path)
    del before[".specrun/shard-00000/lock.guard"], after[".specrun/shard-00000/lock.guard"]
    assert after == before


def test_skip_takes_any_finished_job(tmp_path):
    finish_job(tmp_path)
    ledger = open_ledger(tmp_path, fingerprint=OTHER, if_exists="skip")
    assert ledger.is_finished
    ledger.close()


@pytest.mark.parametrize("change", ["gone", "shorter", "foreign"])
def test_a_finished_job_whose_data_has_changed_is_not_finished(tmp_path, change):
    finish_job(tmp_path)
    part = tmp_path / "data" / "part-00000-000000.parquet"
    if change == "gone":
        part.unlink()
    elif change == "shorter":
        part.write_bytes(part.read_bytes()[:-1])
    else:
        part.with_name("part-00007-000000.parquet").write_bytes(part.read_bytes())
    assert not is_finished(tmp_path)


def test_a_changed_fingerprint_is_refused_with_its_differences(tmp_path):
    finish_job(tmp_path)
    before = tree(tmp_path)
    changed = {"model": {"path": "tiny", "revision": "abc"}, "sampling": {"temperature": 0.7, "seed": 0}}
    with pytest.raises(ConfigError) as caught:
        open_ledger(tmp_path, fingerprint=changed)
    message = str(caught.value)
    assert "sampling.temperature: 0 -> 0.7; model.revision: absent" in message or (
        "model.revision: absent -> " in message and "sampling.temperature: 0 -> 0.7" in message
    )
    assert "output.if_exists: overwrite" in message
    assert "\n" not in message
    assert "seed" not in message
    after = tree(tmp_path)
    del before[".specrun/shard-00000/lock.guard"], after[".specrun/shard-00000/lock.guard"]
    assert after == before


def test_error_wants_a_folder_that_holds_nothing_but_this_very_job_unfinished(tmp_path):
    open_ledger(tmp_path / "new", if_exists="error").close()
    open_ledger(tmp_path / "new", if_exists="error").close()
    with pytest.raises(OutputError, match="is not empty; set output"):
        open_ledger(tmp_path / "new", fingerprint=OTHER, if_exists="error")
    finish_job(tmp_path / "new")
    with pytest.raises(OutputError, match="is not empty; set output"):
        open_ledger(tmp_path / "new", if_exists="error")
    (tmp_path / "empty").mkdir()
    open_ledger(tmp_path / "empty", if_exists="error").close()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="is not empty; set output"):
        open_ledger(tmp_path / "full", if_exists="error")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]


def test_overwrite_removes_only_what_a_job_made(tmp_path):
    finish_job(tmp_path)
    made = ["report.json", "job.resolved.yaml", "metrics.prom", "metrics/job.parquet", "errors.jsonl", "output.jsonl"]
    made += ["metrics/steps/part-00000-0001-000000.parquet", "metrics/steps/part-00003-0012-000123.parquet"]
    made += [f".specrun/shard-00000/{name}" for name in ("retry.json", "report.json", "spill/part-000000.jsonl")]
    for name in made:
        (tmp_path / name).write_bytes(b"old")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "metrics" / "steps" / "mine.parquet").write_text("mine")
    ledger = open_ledger(tmp_path, fingerprint=OTHER, if_exists="overwrite")
    assert (ledger.parts, ledger.lost, ledger.attempt, ledger.is_finished) == ({}, [], 1, False)
    ledger.close()
    assert (tmp_path / "notes.txt").exists()
    assert (tmp_path / "metrics" / "steps" / "mine.parquet").exists()
    assert not any((tmp_path / name).exists() for name in [*made, "_SUCCESS", "manifest.json"])
    assert not any((tmp_path / "data").iterdir())
    finish_job(tmp_path, fingerprint=OTHER)


def test_an_overwrite_that_stops_half_way_leaves_no_wrong_job(tmp_path, monkeypatch):
    """Stops it before each removal in turn; a resume of the old job then makes it whole again."""
    real = LocalStore.delete
    left = 0

    def counted(store, name):
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        real(store, name)

    for allowed in range(100):
        out = tmp_path / str(allowed)
        finish_job(out)
        left = allowed
        with monkeypatch.context() as patch:
            patch.setattr(LocalStore, "delete", counted)
            try:
                open_ledger(out, fingerprint=OTHER, if_exists="overwrite").close()
                break
            except KeyboardInterrupt:
                pass
        assert is_finished(out) == (allowed == 0)
        finish_job(out)
        assert_whole(out, 30)
    assert allowed > 8


@pytest.mark.parametrize("if_exists", ["resume", "overwrite"])
@pytest.mark.parametrize("name", ["mine.parquet", ".hidden", "part-0.parquet"])
def test_foreign_files_in_data_are_refused(tmp_path, if_exists, name):
    finish_job(tmp_path)
    (tmp_path / "data" / name).write_bytes(b"mine")
    with pytest.raises(OutputError, match=f"not specrun's \\({name}\\)"):
        open_ledger(tmp_path, if_exists=if_exists)
    assert (tmp_path / "data" / "part-00000-000000.parquet").exists()
    assert not (shard_folder(tmp_path) / "lock").exists()


def test_a_foreign_parquet_file_under_our_name_is_refused(tmp_path):
    open_ledger(tmp_path).close()
    pa.parquet.write_table(pa.table({"a": [1]}), tmp_path / "data" / "part-00000-000000.parquet")
    with pytest.raises(OutputError, match="not a part that specrun wrote"):
        open_ledger(tmp_path)


def test_an_index_under_which_nothing_was_done_is_replaced(tmp_path):
    """Someone corrects a job that could not begin, and submits it again to the same place."""
    ledger = open_ledger(tmp_path)
    expect(writer_of(ledger))  # rows were read, none was finished
    ledger.close()
    assert spill_file(tmp_path, 0).with_suffix(".arrow").stat().st_size
    finish_job(tmp_path, 12, fingerprint=OTHER)
    index = orjson.loads((tmp_path / ".specrun" / "index.json").read_bytes())
    assert (index["fingerprint"]["model.path"], index["num_rows"]) == ("other", 12)
    assert len(names(tmp_path)) == 2


@pytest.mark.parametrize("num_rows", [1, 10])
def test_an_index_under_which_a_row_was_done_is_kept(tmp_path, num_rows):
    writer = writer_of(open_ledger(tmp_path))
    expect(writer)
    writer.write([row(i) for i in range(num_rows)])
    close(writer)
    before = (tmp_path / ".specrun" / "index.json").read_bytes()
    with pytest.raises(ConfigError, match=r'model.path: "tiny" -> "other"'):
        open_ledger(tmp_path, fingerprint=OTHER)
    assert (tmp_path / ".specrun" / "index.json").read_bytes() == before
