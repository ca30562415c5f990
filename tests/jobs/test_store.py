"""Files of an output in a folder and in a bucket: whole or not there, whatever fails on the way."""

import errno
import gc
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specrun.jobs import filesystem
from specrun.jobs.errors import OutputError, StorageError
from specrun.jobs.filesystem import is_remote, open_filesystem
from specrun.jobs.store import LocalStore, open_store

LARGE = 11_000_000
"""Bytes that go up in two requests."""


@pytest.fixture(params=["local", "s3"])
def location(request, tmp_path):
    """An output location that is not there yet."""
    if request.param == "local":
        return str(tmp_path / "jobs" / "out")
    return f"{request.getfixturevalue('bucket').url}/jobs/out"


@pytest.fixture
def tmp(tmp_path):
    folder = tmp_path / "tmp"
    folder.mkdir()
    return folder


def made(location):
    store = open_store(location)
    store.create(["data", ".specrun/shard-00000/spill"])
    return store


def closed(tmp: Path, content: bytes) -> Path:
    path = tmp / "beside"
    path.write_bytes(content)
    return path


def test_what_is_put_is_found_again(location, tmp):
    store = made(location)
    beside = closed(tmp, b"first")
    store.put(beside, "data/b")
    assert not beside.exists()
    store.put(closed(tmp, b""), "data/a")
    store.write("manifest.json", b"{}", tmp)
    assert store.list("data") == {"a": 0, "b": 5}
    assert list(store.list("data")) == ["a", "b"]
    assert "manifest.json" in store.list("") and "data" in store.folders("")
    assert store.read("data/b") == b"first" and store.read("data/a") == b""
    assert store.exists("data/b") and not store.exists("data/c") and not store.exists("data")
    store.put(closed(tmp, b"in its place"), "data/b")
    assert store.read("data/b") == b"in its place"
    assert list(tmp.iterdir()) == []


def test_what_is_not_there(location, tmp):
    store = open_store(location)
    assert store.read("data/a") is None
    assert store.list("data") == {} and store.folders("data") == []
    assert not store.exists("data/a")
    with pytest.raises(FileNotFoundError, match="out/data/a"):
        store.open("data/a")
    store.delete("data/a")
    store.delete_folder("data")


def test_parquet_is_read_at_random_places(location, tmp):
    store = made(location)
    pq.write_table(pa.table({"n": [1, 2, 3], "text": ["a", "b", "c"]}), tmp / "part")
    store.put(tmp / "part", "data/part")
    with store.open("data/part") as file:
        assert pq.ParquetFile(file).read(["n"]).to_pydict() == {"n": [1, 2, 3]}


def test_deleting(location, tmp):
    store = made(location)
    for name in ("data/a", "data/b", ".specrun/shard-00000/spill/x/y", ".specrun/index.json"):
        (Path(location) / name).parent.mkdir(parents=True, exist_ok=True) if not is_remote(location) else None
        store.write(name, b"content", tmp)
    assert store.folders(".specrun") == ["shard-00000"]
    store.delete("data/a")
    assert store.list("data") == {"b": 7}
    store.delete_folder(".specrun/shard-00000/spill")
    assert store.folders(".specrun/shard-00000") == []
    assert store.read(".specrun/index.json") == b"content"


def test_names_as_a_person_would_type_them(bucket, tmp_path):
    store = open_store(f"{bucket.url}/out/?region=us-east-1")
    assert store.path("data/a") == f"{bucket.url}/out/data/a" and store.path("") == f"{bucket.url}/out"
    assert open_store(f"{bucket.url}/out/").location == f"{bucket.url}/out"
    local = open_store(f"{tmp_path}/out/")
    assert isinstance(local, LocalStore) and local.location == str(local.root) == f"{tmp_path}/out"
    assert local.path("data/a") == f"{tmp_path}/out/data/a"


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_store("~/out").path("a") == str(tmp_path / "out" / "a")
    assert open_filesystem("~/in.jsonl")[1] == str(tmp_path / "in.jsonl")


def test_a_check_leaves_nothing_behind(location, tmp_path, request):
    open_store(location).check()
    if is_remote(location):
        assert request.getfixturevalue("bucket").names() == []
    else:
        assert not (tmp_path / "jobs").exists()
    made(location)
    assert open_store(location).list("") == {}


@pytest.mark.parametrize("make", ["check", "create"])
def test_a_local_folder_that_cannot_be_made(make, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    store = open_store(str(tmp_path / "file" / "out"))
    with pytest.raises(OutputError, match=r"file/out cannot be written: Not a directory.*choose another output.path"):
        store.check() if make == "check" else store.create(["data"])


def test_a_local_folder_that_is_read_only(tmp_path, monkeypatch):
    store = made(str(tmp_path / "out"))
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "shard-00000")
    with pytest.raises(OutputError, match=r"Permission denied \(.*/out/.specrun/shard-00000\)"):
        made(store.location)


def test_a_full_disk_is_named(tmp_path, tmp, monkeypatch):
    store = made(str(tmp_path / "out"))

    def full(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StorageError, match="out/data/a: No space left on device; free some space and submit again"):
        store.write("data/a", b"content", tmp)
    assert store.list("data") == {}


@pytest.mark.parametrize("make", ["check", "create"])
@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("missing", "there is no bucket nowhere-at-all; create it or correct its name"),
        ("denied", r"access to bucket \S+ is denied; check the credentials .*AWS_ACCESS_KEY_ID.* rights to list, read"),
        ("no reading", r"access to bucket \S+ is denied"),
        ("no credentials", r"access to bucket \S+ is denied; check the credentials in the environment"),
        (
            "dead",
            r"bucket \S+ cannot be reached \(Failed to connect to .*\); check the network and AWS_ENDPOINT_URL",
        ),
    ],
)
def test_a_bucket_that_cannot_be_written(make, trouble, reason, bucket, monkeypatch):
    location = f"{bucket.url}/out"
    match trouble:
        case "missing":
            location = "s3://nowhere-at-all/out"
        case "denied":
            bucket.server.fail("denied", "PUT|POST")
        case "no reading":
            bucket.server.fail("denied", "GET|HEAD", "/out")
        case "no credentials":
            monkeypatch.delenv("AWS_ACCESS_KEY_ID")
            monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
            bucket.server.needs_credentials = True
        case "dead":
            monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    store = open_store(location)
    with pytest.raises(OutputError, match=f"output.path {location} cannot be written: {reason}"):
        store.check() if make == "check" else store.create(["data"])


def test_a_denied_write_in_the_middle_is_an_error_of_the_storage(bucket, tmp):
    store = made(f"{bucket.url}/out")
    bucket.server.fail("denied", "PUT", "/data/")
    beside = closed(tmp, b"content")
    with pytest.raises(StorageError, match=f"out/data/a: access to bucket {bucket.name} is denied; .* kept"):
        store.put(beside, "data/a")
    assert beside.read_bytes() == b"content"  # for another try
    assert bucket.names() == []


def test_a_large_file_goes_up_in_several_requests(bucket, tmp):
    store = made(f"{bucket.url}/out")
    content = os.urandom(LARGE)
    store.put(closed(tmp, content), "data/a")
    assert sum("partNumber" in target for _, target in bucket.server.requests) == 2
    assert store.read("data/a") == content


@pytest.mark.parametrize("before", [None, b"what was there"])
@pytest.mark.parametrize(
    ("kind", "method", "target"),
    [
        ("denied", "PUT", "partNumber=1"),
        ("drop", "PUT", "partNumber=2"),
        ("slow", "PUT", "partNumber=2"),
        ("denied", "POST", "uploads"),
        ("denied", "POST", "uploadId"),
        ("drop", "POST", "uploadId"),
    ],
)
def test_nothing_torn_is_seen_when_a_large_upload_fails(before, kind, method, target, bucket, tmp, monkeypatch):
    monkeypatch.setattr(filesystem, "MAX_TRIES", 2)
    store = made(f"{bucket.url}/out")
    if before:
        bucket.put("out/data/a", before)
    fault = bucket.server.fail(kind, method, target)
    with pytest.raises(StorageError, match="out/data/a: "):
        store.put(closed(tmp, bytes(LARGE)), "data/a")
    assert fault.hits == (1 if kind == "denied" else filesystem.MAX_TRIES)
    bucket.server.heal()
    gc.collect()  # a stream that is forgotten publishes what has arrived
    assert store.read("data/a") == before
    store.put(closed(tmp, bytes(LARGE)), "data/a")
    assert store.list("data") == {"a": LARGE}


@pytest.mark.parametrize(
    ("kind", "target"),
    [("drop", "partNumber=1"), ("slow", "partNumber=2"), ("slow", "uploads$"), ("drop", r"\?uploadId=[^&]*$")],
)
def test_a_large_upload_survives_a_bad_moment(kind, target, bucket, tmp):
    store = made(f"{bucket.url}/out")
    fault = bucket.server.fail(kind, "PUT|POST", target, times=2)
    content = os.urandom(LARGE)
    store.put(closed(tmp, content), "data/a")
    assert fault.hits == 2 and store.read("data/a") == content


@pytest.mark.parametrize("kind", ["slow", "drop"])
def test_every_call_survives_bad_moments(kind, bucket, tmp):
    store = open_store(f"{bucket.url}/out")
    calls = [
        lambda: store.create(["data"]),
        lambda: store.check(),
        lambda: store.write("data/a", b"content", tmp),
        lambda: store.put(closed(tmp, b"part"), "data/b"),
        lambda: store.read("data/a"),
        lambda: store.open("data/a").read(),
        lambda: store.exists("data/a"),
        lambda: store.list("data"),
        lambda: store.folders(""),
        lambda: store.delete("data/a"),
        lambda: store.delete_folder("data"),
    ]
    for call in calls:
        fault = bucket.server.fail(kind, times=filesystem.MAX_TRIES - 1)
        call()
        assert fault.hits == filesystem.MAX_TRIES - 1
        bucket.server.heal()
    assert bucket.names() == []


def test_a_busy_store_is_given_up_in_the_end(bucket):
    store = open_store(f"{bucket.url}/out")
    fault = bucket.server.fail("slow")
    with pytest.raises(StorageError, match=r"out/data: .*SLOW_DOWN.*; wait a while and submit again, finished"):
        store.list("data")
    assert fault.hits == filesystem.MAX_TRIES
