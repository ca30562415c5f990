"""The index of a job: written once, the same for all shards and attempts."""

import threading

import orjson
import pytest

from specrun.jobs.errors import ConfigError
from specrun.jobs.fingerprint import Fingerprint
from specrun.jobs.folder import OutputFolder
from specrun.jobs.index import JobIndex
from specrun.jobs.shard import Shard
from tests.jobs.output_jobs import FINGERPRINT, finish_job, open_ledger, run_shard

OTHER = {"model": {"path": "tiny"}, "sampling": {"temperature": 0, "seed": 1}}


def index_file(out):
    return out / ".specrun" / "index.json"


def test_what_is_written_is_read(tmp_path):
    output = OutputFolder(str(tmp_path))
    assert JobIndex.read(output) is None
    scan = {"files": [{"path": "a.jsonl", "size": 3, "offsets": [[0, 0, 1]]}], "kinds": {"x": "int"}}
    index = JobIndex.of(Fingerprint(FINGERPRINT), Shard(1, 4), 77, 10, scan)
    folder = output.shard(Shard(1, 4))
    folder.create()
    index.write(folder)
    assert JobIndex.read(output) == index
    assert (index.num_shards, index.num_rows, index.rows_per_part, index.scan) == (4, 77, 10, scan)
    assert not any(folder.tmp.iterdir())


def test_it_is_written_once(tmp_path):
    run_shard(tmp_path, 30, 10, "0/2")
    before = index_file(tmp_path).read_bytes(), index_file(tmp_path).stat().st_mtime_ns
    run_shard(tmp_path, 30, 10, "1/2", scan={"files": [{"path": "moved.jsonl"}]})
    run_shard(tmp_path, 30, 10, "0/2")
    assert (index_file(tmp_path).read_bytes(), index_file(tmp_path).stat().st_mtime_ns) == before


def test_shards_that_come_at_once_write_the_same(tmp_path):
    gate = threading.Barrier(4)
    found = []

    def begin(i):
        gate.wait()
        ledger = open_ledger(tmp_path, 30, 10, f"{i}/4")
        found.append(ledger.index)
        ledger.close()

    threads = [threading.Thread(target=begin, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(index == found[0] for index in found)


@pytest.mark.parametrize("shard", ["0/1", "0/3", "2/3"])
def test_another_number_of_shards_is_refused(tmp_path, shard):
    open_ledger(tmp_path, 30, 10, "0/2").close()
    before = index_file(tmp_path).read_bytes()
    with pytest.raises(ConfigError, match=rf"was begun with 2 shard\(s\), this run says {shard}; keep the number"):
        open_ledger(tmp_path, 30, 10, shard)
    assert index_file(tmp_path).read_bytes() == before


def test_shards_of_another_configuration_are_refused_though_nothing_is_done(tmp_path):
    """Another shard may be at work under that index at this very moment."""
    open_ledger(tmp_path, 30, 10, "0/2").close()
    for shard in ("0/2", "1/2"):
        with pytest.raises(ConfigError, match=r"sampling.seed: 0 -> 1\. Choose another output.path$"):
            open_ledger(tmp_path, 30, 10, shard, fingerprint=OTHER)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"x"', b"{}", b'{"version": 1}', b"null"])
def test_a_damaged_index_is_written_anew(tmp_path, content):
    finish_job(tmp_path)
    whole = orjson.loads(index_file(tmp_path).read_bytes())
    index_file(tmp_path).write_bytes(content)
    (tmp_path / "_SUCCESS").unlink()
    assert JobIndex.read(OutputFolder(str(tmp_path))) is None
    assert finish_job(tmp_path) == []
    assert orjson.loads(index_file(tmp_path).read_bytes()) == whole


def test_an_index_of_another_specrun_is_refused(tmp_path):
    finish_job(tmp_path)
    index_file(tmp_path).write_bytes(orjson.dumps({"version": 2}))
    with pytest.raises(ConfigError, match=r"index.json has version 2, this specrun reads 1; submit with the specrun"):
        JobIndex.read(OutputFolder(str(tmp_path)))
