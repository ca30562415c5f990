"""Lock, fingerprint, manifest, journal, and what to do with an output that is there already."""

import errno
import os

import orjson
import pytest

from specrun.jobs.errors import ConfigError, OutputError, StorageError
from specrun.jobs.fingerprint import Fingerprint
from specrun.jobs.finished import FinishedJob
from specrun.jobs.folder import OutputFolder
from tests.jobs.output_jobs import (
    FINGERPRINT,
    finish_job,
    is_finished,
    make_ledger,
    manifest_of,
    open_ledger,
    run_shard,
    shard_folder,
    writer_of,
)

OTHER = {"model": {"path": "other"}, "sampling": {"temperature": 0, "seed": 0}}


def test_a_new_job(tmp_path):
    out = tmp_path / "deep" / "out"
    ledger = open_ledger(out, 30, scan={"files": [{"path": "a.jsonl", "size": 3}]})
    assert (ledger.attempt, ledger.is_finished, ledger.parts, ledger.lost) == (1, False, {}, [])
    assert (ledger.retry, ledger.reopened) == (None, {})
    assert sorted(path.name for path in out.iterdir()) == [".specrun", "data", "metrics"]
    index = orjson.loads((out / ".specrun" / "index.json").read_bytes())
    assert index["fingerprint"] == {"model.path": "tiny", "sampling.temperature": 0, "sampling.seed": 0}
    assert index["fingerprint_hash"] == Fingerprint(FINGERPRINT).hash
    assert (index["num_rows"], index["rows_per_part"], index["num_shards"]) == (30, 10, 1)
    assert index["scan"] == {"files": [{"path": "a.jsonl", "size": 3}]}
    manifest = manifest_of(out)
    assert (manifest["state"], manifest["attempt"], manifest["parts"]) == ("running", 1, [])
    assert (manifest["row_start"], manifest["row_stop"]) == (0, 30)
    assert manifest["fingerprint"] == index["fingerprint_hash"]
    ledger.close()
    ledger.close()
    assert not (shard_folder(out) / "lock").exists()


def test_manifest_of_a_finished_job(tmp_path):
    finish_job(tmp_path, 13, max_failed_fraction=0.25, format="openai-batch")
    manifest = manifest_of(tmp_path)
    assert (manifest["version"], manifest["state"], manifest["attempt"]) == (2, "done", 1)
    assert (manifest["max_failed_fraction"], manifest["format"]) == (0.25, "openai-batch")
    size = (tmp_path / "data" / "part-00000-000001.parquet").stat().st_size
    counts = {
        **{"num_ok": 3, "num_failed": 0, "num_prompt_tokens": 9, "num_output_tokens": 6},
        **{"error_codes": {}, "finish_reasons": {"stop": 3}},
    }
    last = {"name": "part-00000-000001.parquet", "row_start": 10, "row_stop": 13, "bytes": size, "attempt": 1}
    assert manifest["parts"][1:] == [{**last, "counts": counts}]
    job = orjson.loads((tmp_path / "manifest.json").read_bytes())
    assert (job["state"], job["num_rows"], job["num_shards"]) == ("done", 13, 1)
    assert job["parts"] == manifest["parts"]
    assert (tmp_path / "_SUCCESS").read_bytes() == b""


@pytest.mark.parametrize("content", [b"", b"{torn", b"[]", b'{"version": 2}', b'{"version": 1, "state": "done"}'])
def test_a_damaged_job_manifest_is_not_finished(tmp_path, content):
    finish_job(tmp_path)
    (tmp_path / "manifest.json").write_bytes(content)
    assert not is_finished(tmp_path)
    assert finish_job(tmp_path) == []
    assert is_finished(tmp_path)


def test_a_job_with_too_many_failed_rows_is_not_finished(tmp_path):
    finish_job(tmp_path)
    output = OutputFolder(str(tmp_path))
    with output.finalizing() as folder:
        folder.write_json("manifest.json", FinishedJob.gather(output).manifest("failed_rows"))
    assert not is_finished(tmp_path)
    assert not is_finished(tmp_path, if_exists="skip")


def test_a_finished_job_whose_part_is_gone_is_not_finished(tmp_path):
    finish_job(tmp_path)
    (tmp_path / "data" / "part-00000-000000.parquet").unlink()
    assert not is_finished(tmp_path)
    ledger = open_ledger(tmp_path)
    assert not ledger.is_finished
    assert ledger.lost == ["part-00000-000000.parquet"]
    assert not (tmp_path / "_SUCCESS").exists()
    ledger.close()
    assert len(finish_job(tmp_path)) == 10
    assert is_finished(tmp_path)


def test_a_torn_journal_line_costs_nothing(tmp_path):
    journal = shard_folder(tmp_path) / "journal.jsonl"
    finish_job(tmp_path, 20)
    (tmp_path / "_SUCCESS").unlink()
    journal.write_bytes(journal.read_bytes() + b'\n{"name":"part-00000-0000')
    ledger = open_ledger(tmp_path, 20)
    assert (sorted(ledger.parts), ledger.lost, ledger.attempt) == ([0, 1], [], 2)
    ledger.close()
    (tmp_path / "data" / "part-00000-000001.parquet").unlink()
    finish_job(tmp_path, 20)
    committed = [orjson.loads(line)["name"] for line in journal.read_bytes().split(b"\n") if line.endswith(b"}")]
    assert committed == ["part-00000-000000.parquet", "part-00000-000001.parquet", "part-00000-000001.parquet"]


def test_equal_values_of_other_types_are_no_change(tmp_path):
    open_ledger(tmp_path, fingerprint={"stop": ("a", "b")}).close()
    open_ledger(tmp_path, fingerprint={"stop": ["a", "b"]}).close()


@pytest.mark.parametrize("name", [".specrun/index.json", ".specrun/shard-00000/manifest.json"])
def test_a_record_of_another_version(tmp_path, name):
    open_ledger(tmp_path).close()
    (tmp_path / name).write_bytes(orjson.dumps({"version": 9}))
    with pytest.raises(ConfigError, match=rf"{name} has version 9, this specrun reads [12]; submit with the specrun"):
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
    assert not (tmp_path / ".specrun" / "index.json").exists()


def test_a_full_disk_later_is_a_storage_error(tmp_path, monkeypatch):
    ledger = open_ledger(tmp_path, 0)
    writer_of(ledger).finish()
    before = (shard_folder(tmp_path) / "manifest.json").read_bytes()

    def full(source, target):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(StorageError, match="Input/output error; check the disk") as caught:
            ledger.complete()
    assert caught.value.exit_code == 74
    assert not (tmp_path / "_SUCCESS").exists()
    assert (shard_folder(tmp_path) / "manifest.json").read_bytes() == before
    ledger.close()


def test_a_done_manifest_is_not_believed_without_its_parts(tmp_path):
    run_shard(tmp_path)
    (tmp_path / "data" / "part-00000-000002.parquet").unlink()
    (shard_folder(tmp_path) / "journal.jsonl").unlink()
    ledger = open_ledger(tmp_path)
    assert (sorted(ledger.parts), ledger.lost) == ([0, 1], [])
    assert manifest_of(tmp_path)["state"] == "running"
    with pytest.raises(RuntimeError, match="2 of 3 parts are committed"):
        ledger.complete()
    ledger.close()


def test_nothing_is_done_before_open(tmp_path):
    make_ledger(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not is_finished(tmp_path / "out")
    assert not (tmp_path / "out").exists()
