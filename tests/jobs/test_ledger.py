"""Lock, fingerprint, manifest, journal, and what to do with an output that is there already."""

import errno
import os

import orjson
import pyarrow as pa
import pytest

from specrun.jobs.errors import ConfigError, OutputError, StorageError
from specrun.jobs.ledger import Ledger, fingerprint_changes
from specrun.jobs.outputs import OutputWriter
from specrun.jobs.schema import OutputRow

FINGERPRINT = {"model": {"path": "tiny"}, "sampling": {"temperature": 0, "seed": 0}}


def open_ledger(out, fingerprint=FINGERPRINT, if_exists="resume", **kwargs):
    ledger = Ledger(out, fingerprint, if_exists, **kwargs)
    ledger.open()
    return ledger


def finish_job(out, num_rows=3, fingerprint=FINGERPRINT, if_exists="resume"):
    ledger = open_ledger(out, fingerprint, if_exists)
    writer = OutputWriter(ledger, pa.schema([]), rows_per_part=2)
    for i in range(num_rows):
        if not writer.is_done(i):
            writer.expect(i, [None], pa.RecordBatch.from_struct_array(pa.array([{}], pa.struct([]))))
            writer.write([OutputRow(i, None, "x", "stop")])
    writer.finish(num_rows)
    ledger.complete(num_rows)
    writer.close()


def tree(out):
    return {str(path.relative_to(out)): path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}


def test_a_new_job(tmp_path):
    out = tmp_path / "deep" / "out"
    ledger = open_ledger(out, inputs=[{"path": "a.jsonl", "size": 3}])
    assert (ledger.attempt, ledger.is_complete, ledger.parts, ledger.lost) == (1, False, {}, [])
    assert sorted(path.name for path in out.iterdir()) == [".specrun", "data", "manifest.json", "metrics"]
    manifest = orjson.loads((out / "manifest.json").read_bytes())
    assert manifest["state"] == "running"
    assert manifest["fingerprint"] == FINGERPRINT
    assert manifest["inputs"] == [{"path": "a.jsonl", "size": 3}]
    ledger.close()
    ledger.close()
    assert not (out / ".specrun" / "lock").exists()


def test_manifest_of_a_finished_job(tmp_path):
    finish_job(tmp_path)
    manifest = orjson.loads((tmp_path / "manifest.json").read_bytes())
    assert (manifest["version"], manifest["state"], manifest["attempt"], manifest["num_rows"]) == (1, "done", 1, 3)
    size = (tmp_path / "data" / "part-00000-000001.parquet").stat().st_size
    last = {"name": "part-00000-000001.parquet", "rows": 1, "row_start": 2, "row_stop": 3, "bytes": size}
    assert manifest["parts"][1:] == [last]
    assert (tmp_path / "_SUCCESS").read_bytes() == b""


def test_a_finished_job_is_left_alone(tmp_path):
    assert not Ledger.finished(tmp_path, FINGERPRINT)
    finish_job(tmp_path)
    before = tree(tmp_path)
    assert Ledger.finished(tmp_path, FINGERPRINT)
    assert Ledger.finished(tmp_path, {"model": ("other",)}, "skip")
    assert not Ledger.finished(tmp_path, {"model": "other"})
    assert not Ledger.finished(tmp_path, FINGERPRINT, "overwrite")
    assert not Ledger.finished(tmp_path, FINGERPRINT, "error")
    ledger = open_ledger(tmp_path)
    assert (ledger.is_complete, ledger.attempt) == (True, 1)
    ledger.close()
    after = tree(tmp_path)
    del before[".specrun/lock.guard"], after[".specrun/lock.guard"]
    assert after == before


def test_skip_takes_any_finished_job(tmp_path):
    finish_job(tmp_path)
    ledger = open_ledger(tmp_path, {"model": "other"}, "skip")
    assert ledger.is_complete
    ledger.close()


def test_a_finished_job_whose_part_is_gone_is_not_finished(tmp_path):
    finish_job(tmp_path)
    (tmp_path / "data" / "part-00000-000000.parquet").unlink()
    assert not Ledger.finished(tmp_path, FINGERPRINT)
    ledger = open_ledger(tmp_path)
    assert not ledger.is_complete
    assert ledger.lost == ["part-00000-000000.parquet"]
    assert not (tmp_path / "_SUCCESS").exists()
    ledger.close()
    finish_job(tmp_path)
    assert Ledger.finished(tmp_path, FINGERPRINT)


def test_a_torn_journal_line_costs_nothing(tmp_path):
    journal = tmp_path / ".specrun" / "journal.jsonl"
    finish_job(tmp_path)
    (tmp_path / "_SUCCESS").unlink()
    journal.write_bytes(journal.read_bytes() + b'\n{"name":"part-00000-0000')
    ledger = open_ledger(tmp_path)
    assert (sorted(ledger.parts), ledger.lost, ledger.attempt) == ([0, 1], [], 2)
    ledger.close()
    (tmp_path / "data" / "part-00000-000001.parquet").unlink()
    finish_job(tmp_path)
    names = [orjson.loads(line)["name"] for line in journal.read_bytes().split(b"\n") if line.endswith(b"}")]
    assert names == ["part-00000-000000.parquet", "part-00000-000001.parquet", "part-00000-000001.parquet"]


def test_a_changed_fingerprint_is_refused_with_its_differences(tmp_path):
    finish_job(tmp_path)
    before = tree(tmp_path)
    changed = {"model": {"path": "tiny", "revision": "abc"}, "sampling": {"temperature": 0.7, "seed": 0}}
    with pytest.raises(ConfigError) as caught:
        open_ledger(tmp_path, changed)
    message = str(caught.value)
    assert "sampling.temperature: 0 -> 0.7; model.revision: absent" in message or (
        "model.revision: absent -> " in message and "sampling.temperature: 0 -> 0.7" in message
    )
    assert "output.if_exists: overwrite" in message
    assert "\n" not in message
    assert "seed" not in message
    after = tree(tmp_path)
    assert before.keys() == after.keys()
    assert before["manifest.json"] == after["manifest.json"]


def test_fingerprint_changes():
    old = {"a": {"b": 1, "gone": True}, "files": [{"path": "x", "size": 1}, {"path": "y"}], "long": "s" * 200}
    new = {"a": {"b": 2}, "files": [{"path": "x", "size": 2}], "long": "t" * 200}
    changes = fingerprint_changes(old, new)
    assert changes[:3] == ["a.b: 1 -> 2", "a.gone: true -> absent", "files[0].size: 1 -> 2"]
    assert changes[3] == 'files[1].path: "y" -> absent'
    assert len(changes[4]) < 140
    assert fingerprint_changes(old, old) == []


def test_equal_values_of_other_types_are_no_change(tmp_path):
    open_ledger(tmp_path, {"stop": ("a", "b")}).close()
    open_ledger(tmp_path, {"stop": ["a", "b"]}).close()


def test_a_manifest_of_another_version(tmp_path):
    open_ledger(tmp_path).close()
    (tmp_path / "manifest.json").write_bytes(orjson.dumps({"version": 9}))
    with pytest.raises(ConfigError, match=r"manifest.json has version 9, this specrun reads 1"):
        open_ledger(tmp_path)


def test_error_wants_an_empty_folder(tmp_path):
    open_ledger(tmp_path / "new", if_exists="error").close()
    with pytest.raises(OutputError, match="is not empty; set output"):
        open_ledger(tmp_path / "new", if_exists="error")
    (tmp_path / "empty").mkdir()
    open_ledger(tmp_path / "empty", if_exists="error").close()


def test_overwrite_removes_only_what_a_job_made(tmp_path):
    finish_job(tmp_path)
    made = ["report.json", "job.resolved.yaml", "metrics.prom", "metrics/job.parquet"]
    made += ["metrics/steps/part-00000-0001-000000.parquet"]
    for name in made:
        (tmp_path / name).write_bytes(b"old")
    (tmp_path / "notes.txt").write_text("mine")
    ledger = open_ledger(tmp_path, {"model": "other"}, "overwrite")
    assert (ledger.parts, ledger.attempt, ledger.is_complete) == ({}, 1, False)
    ledger.close()
    assert (tmp_path / "notes.txt").exists()
    assert not any((tmp_path / name).exists() for name in [*made, "_SUCCESS"])
    assert not any((tmp_path / "data").iterdir())
    finish_job(tmp_path, fingerprint={"model": "other"})


@pytest.mark.parametrize("if_exists", ["resume", "overwrite"])
@pytest.mark.parametrize("name", ["mine.parquet", ".hidden", "part-0.parquet"])
def test_foreign_files_in_data_are_refused(tmp_path, if_exists, name):
    finish_job(tmp_path)
    (tmp_path / "data" / name).write_bytes(b"mine")
    with pytest.raises(OutputError, match=f"not specrun's \\({name}\\)"):
        open_ledger(tmp_path, if_exists=if_exists)
    assert (tmp_path / "data" / "part-00000-000000.parquet").exists()
    assert not (tmp_path / ".specrun" / "lock").exists()


def test_a_foreign_parquet_file_under_our_name_is_refused(tmp_path):
    open_ledger(tmp_path).close()
    pa.parquet.write_table(pa.table({"a": [1]}), tmp_path / "data" / "part-00000-000000.parquet")
    with pytest.raises(OutputError, match="not a part that specrun wrote"):
        open_ledger(tmp_path)


def test_an_output_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(OutputError, match="cannot be written: ") as caught:
            open_ledger(out)
        assert caught.value.exit_code == 73


def test_an_output_without_permission(tmp_path, monkeypatch):
    # A superuser may write anywhere, so the answer of the file system is made up.
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "data")
    with pytest.raises(OutputError, match="Permission denied"):
        open_ledger(tmp_path)


def test_a_full_disk_is_found_before_anything_is_done(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left"):
        open_ledger(tmp_path)
    assert not (tmp_path / "manifest.json").exists()


def test_a_full_disk_later_is_a_storage_error(tmp_path, monkeypatch):
    ledger = open_ledger(tmp_path)
    before = (tmp_path / "manifest.json").read_bytes()

    def full(source, target):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(StorageError, match="Input/output error; check the disk") as caught:
            ledger.complete(0)
    assert caught.value.exit_code == 74
    assert not (tmp_path / "_SUCCESS").exists()
    assert (tmp_path / "manifest.json").read_bytes() == before
    ledger.close()
