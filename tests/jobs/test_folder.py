"""The files of a job and its shards: names, work folders, spill that goes to an object store."""

import io
import os
from pathlib import Path

import pytest

from specrun.jobs.errors import InputMissing, OutputError, StorageError
from specrun.jobs.folder import PART_NAME, OutputFolder
from specrun.jobs.parts import part_name
from specrun.jobs.shard import Shard
from specrun.jobs.store import LocalStore
from tests.jobs.output_jobs import finish_job


class Bucket:
    """A folder that behaves like a bucket: a file is copied to its name, and folders are parts of names."""

    def __init__(self, root):
        self.root = root
        self._files = LocalStore(str(root))

    def __getattr__(self, name):
        return getattr(self._files, name)

    def put(self, tmp, name):
        self.write(name, tmp.read_bytes(), tmp.parent)
        tmp.unlink()

    def write(self, name, content, tmp):
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_bytes(content)

    def create(self, folders):
        self.root.mkdir(exist_ok=True)


@pytest.fixture
def remote(tmp_path):
    output = OutputFolder(str(tmp_path / "bucket"))
    output.store = Bucket(tmp_path / "bucket")
    return output


def test_names_of_parts():
    for shard, sequence in ((0, 0), (12, 345), (99999, 1234567)):
        match = PART_NAME.fullmatch(part_name(sequence, shard))
        assert match is not None
        assert (int(match[1]), int(match[2])) == (shard, sequence)
    for name in (
        "part-0-000000.parquet",
        "part-00000-00000.parquet",
        "x-part-00000-000000.parquet",
        "part-00000-000000",
    ):
        assert not PART_NAME.fullmatch(name)


def test_a_shard_has_a_folder_of_its_own(tmp_path):
    output = OutputFolder(f"{tmp_path}/")
    assert output.location == str(tmp_path)
    shard, whole = output.shard(Shard(3, 7)), output.shard(Shard())
    assert shard.lock == ".specrun/shard-00003/lock"
    assert (shard.manifest, shard.retry) == (".specrun/shard-00003/manifest.json", ".specrun/shard-00003/retry.json")
    assert (shard.errors, whole.errors) == (".specrun/shard-00003/errors.jsonl", "errors.jsonl")
    assert shard.tmp == tmp_path / ".specrun" / "shard-00003" / "tmp"
    assert not any(tmp_path.iterdir())
    shard.create()
    shard.create()
    assert shard.tmp.is_dir() and shard.spill.is_dir() and shard.journal == shard.spill.parent / "journal.jsonl"
    shard.close()
    assert shard.tmp.is_dir()


def test_one_file_system(tmp_path, monkeypatch):
    """Otherwise a part would be copied to its name, and readers would see half of it."""
    real = Path.stat

    def stat(path, **kwargs):
        found = real(path, **kwargs)
        if path.name == "data":
            return os.stat_result((*found[:2], found.st_dev + 1, *found[3:]))
        return found

    folder = OutputFolder(str(tmp_path)).shard(Shard())
    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(OutputError, match="must lie on one file system, or parts cannot be renamed"):
        folder.create()


def test_lines(tmp_path):
    folder = OutputFolder(str(tmp_path)).shard(Shard())
    folder.create()
    names = ["errors.jsonl", "output.jsonl"]
    folder.write_lines(names, iter([(0, b"a\n"), (1, b"x\n"), (0, b"b\n")]))
    assert (tmp_path / "errors.jsonl").read_bytes() == b"a\nb\n"
    assert (tmp_path / "output.jsonl").read_bytes() == b"x\n"

    def breaks():
        yield 0, b"c\n"
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="No space left on device; free some space"):
        folder.write_lines(names, breaks())
    assert (tmp_path / "errors.jsonl").read_bytes() == b"a\nb\n"
    folder.write_lines(names, iter([(1, b"y\n")]))
    assert not (tmp_path / "errors.jsonl").exists()
    assert (tmp_path / "output.jsonl").read_bytes() == b"y\n"
    folder.write_lines(names, iter([]))
    assert not (tmp_path / "output.jsonl").exists()
    assert list(folder.tmp.iterdir()) == []


def test_a_folder_to_finalize_in_leaves_nothing(tmp_path):
    finish_job(tmp_path)
    output = OutputFolder(str(tmp_path))
    with output.finalizing() as one, output.finalizing() as other:
        assert one.tmp != other.tmp
        assert one.tmp.is_dir()
        one.write("report.json", b"1")
        other.write("report.json", b"2")
    assert (tmp_path / "report.json").read_bytes() == b"2"
    there = ["index.json", "shard-00000"]
    assert sorted(path.name for path in (tmp_path / ".specrun").iterdir()) == there
    with pytest.raises(KeyboardInterrupt), output.finalizing():
        raise KeyboardInterrupt
    assert sorted(path.name for path in (tmp_path / ".specrun").iterdir()) == there
    with pytest.raises(InputMissing, match="holds no job"), OutputFolder(str(tmp_path / "typo")).finalizing():
        pass
    assert not (tmp_path / "typo").exists()


def test_a_finalize_that_was_killed_is_in_nobodys_way(tmp_path):
    finish_job(tmp_path)
    (tmp_path / ".specrun" / "finalize-0badcafe" / "tmp").mkdir(parents=True)
    finish_job(tmp_path, 12, if_exists="overwrite")


def test_foreign_data(tmp_path):
    output = OutputFolder(str(tmp_path))
    assert output.foreign_data() == []
    finish_job(tmp_path)
    assert output.foreign_data() == []
    (tmp_path / "data" / "sub").mkdir()
    (tmp_path / "data" / "_metadata").write_bytes(b"")
    assert output.foreign_data() == ["_metadata", "sub"]


def test_a_shard_on_an_object_store_works_in_a_temporary_folder(remote):
    folder = remote.shard(Shard(1, 2))
    folder.create()
    work = folder.tmp.parent
    assert folder.spill.is_dir() and folder.journal is None
    assert not folder.tmp.is_relative_to(remote.store.root)
    folder.create()
    assert folder.tmp.parent == work
    folder.write("report.json", b"{}")
    assert remote.store.read("report.json") == b"{}"
    folder.close()
    folder.close()
    assert not work.exists()


def saved(remote):
    return remote.store.list(".specrun/shard-00000/spill")


def attempt(remote):
    folder = remote.shard(Shard())
    folder.create()
    folder.fetch_spill()
    return folder


def test_spill_goes_to_the_object_store_and_comes_back(remote, monkeypatch):
    folder = attempt(remote)
    assert list(folder.spill.iterdir()) == []
    content = {"part-000000.jsonl": b"[0]\n" * 1000, "part-000007.jsonl": b"[70]\n"}
    for name, lines in content.items():
        (folder.spill / name).write_bytes(lines)
    (folder.spill / "part-000007.arrow").write_bytes(b"is read again")
    folder.save_spill()
    assert saved(remote) == {name: len(lines) for name, lines in content.items()}
    assert list(folder.tmp.iterdir()) == []
    puts: list[str] = []
    real = Bucket.put

    def put(self, tmp, name):
        puts.append(name)
        real(self, tmp, name)

    monkeypatch.setattr(Bucket, "put", put)
    folder.save_spill()
    assert puts == []  # what is there already is not sent again
    folder.close()

    folder = attempt(remote)
    assert {path.name: path.read_bytes() for path in folder.spill.iterdir()} == content
    with open(folder.spill / "part-000007.jsonl", "ab") as file:
        file.write(b"[71]\n")
    (folder.spill / "part-000000.jsonl").unlink()  # committed
    folder.save_spill()
    assert puts == [".specrun/shard-00000/spill/part-000007.jsonl"]
    assert saved(remote) == {"part-000007.jsonl": 10}
    folder.close()

    folder = attempt(remote)
    folder.clear_spill()
    assert (saved(remote), list(folder.spill.iterdir())) == ({}, [])
    folder.close()


def test_a_large_spill_comes_back_in_pieces(remote, monkeypatch):
    folder = attempt(remote)
    (folder.spill / "part-000000.jsonl").write_bytes(bytes(3 << 20))
    folder.save_spill()
    folder.close()
    sizes = []

    class Counted(io.FileIO):
        def read(self, size=-1):
            sizes.append(size)
            return super().read(size)

    monkeypatch.setattr(Bucket, "open", lambda self, name: Counted(self.root / name), raising=False)
    folder = attempt(remote)
    assert (folder.spill / "part-000000.jsonl").stat().st_size == 3 << 20
    assert 0 < min(sizes) <= max(sizes) <= 1 << 20
    folder.close()


def test_a_local_spill_stays_where_it_is(tmp_path):
    folder = OutputFolder(str(tmp_path)).shard(Shard())
    folder.create()
    (folder.spill / "part-000000.jsonl").write_bytes(b"[0]\n")
    folder.save_spill()
    folder.fetch_spill()
    assert [path.name for path in folder.spill.iterdir()] == ["part-000000.jsonl"]
    folder.clear_spill()
    assert list(folder.spill.iterdir()) == []
