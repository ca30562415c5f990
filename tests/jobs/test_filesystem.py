"""Where a location lies, which errors are worth another try, and what they are said to mean."""

import errno

import pytest

from specrun.jobs import filesystem
from specrun.jobs.errors import ConfigError
from specrun.jobs.filesystem import explain, open_filesystem, retrying, transient, used_object_store
from specrun.jobs.store import open_store

SLOW = OSError("AWS Error SLOW_DOWN during PutObject operation: slow")


def test_pauses_grow_and_differ(monkeypatch):
    pauses: list[float] = []
    tries = []

    def work():
        tries.append(1)
        raise SLOW

    with pytest.raises(OSError, match="SLOW_DOWN"):
        retrying(work, pauses.append)
    assert len(tries) == filesystem.MAX_TRIES and len(pauses) == filesystem.MAX_TRIES - 1
    for i, pause in enumerate(pauses):
        assert 0.5 <= pause / (filesystem.FIRST_PAUSE_S * 2**i) <= 1
    first = pauses[:]
    with pytest.raises(OSError, match="SLOW_DOWN"):
        retrying(work, pauses.append)
    assert pauses[len(first) :] != first


def test_what_is_not_transient_is_not_tried_again():
    tries = []

    def work():
        tries.append(1)
        raise OSError("AWS Error ACCESS_DENIED during PutObject operation: no")

    with pytest.raises(OSError, match="ACCESS_DENIED"):
        retrying(work, lambda pause_s: pytest.fail())
    assert len(tries) == 1


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (SLOW, True),
        (OSError("AWS Error NETWORK_CONNECTION during HeadObject operation: curlCode: 7"), True),
        (OSError("AWS Error INTERNAL_FAILURE during PutObject operation"), True),
        (OSError("AWS Error SERVICE_UNAVAILABLE during PutObject operation"), True),
        (OSError("AWS Error UNKNOWN (HTTP status 503) during HeadObject operation"), True),
        (OSError("AWS Error UNKNOWN (HTTP status 400) during HeadObject operation"), False),
        (OSError("AWS Error NO_SUCH_BUCKET during PutObject operation"), False),
        (OSError(errno.EIO, "SLOW_DOWN"), False),
        (FileNotFoundError(errno.ENOENT, "no"), False),
    ],
)
def test_what_is_transient(error, expected):
    assert transient(error) is expected


@pytest.mark.parametrize(
    ("location", "problem"),
    [
        ("s3://", r"write s3://BUCKET/PATH"),
        ("s3:///key", r"write s3://BUCKET/PATH"),
        ("s3://bucket/a//b", "single slashes"),
        ("s3://bucket/a?colour=red", "unknown option colour; there are region, scheme, endpoint_override"),
        ("gs://bucket/a?colour=red", "colour"),
        ("s3://bucket/a?scheme=ftp", "ftp"),
        ("s3://bucket/part-?.parquet", "a \\? cannot stand in a path"),
    ],
)
def test_a_broken_uri(location, problem):
    with pytest.raises(ConfigError, match=problem):
        open_store(location)


def test_a_hash_is_part_of_a_name(bucket, tmp_path):
    store = open_store(f"{bucket.url}/run#1/100%25")
    store.write("a", b"content", tmp_path)
    assert bucket.names() == ["run#1/100%25/a"]


def test_options_of_the_uri_win(bucket, monkeypatch, tmp_path):
    address = bucket.server.url.removeprefix("http://")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    store = open_store(f"{bucket.url}/out?endpoint_override={address}&scheme=http&region=us-east-1")
    store.write("a", b"content", tmp_path)
    assert bucket.names() == ["out/a"]


def test_filesystems_are_shared(bucket):
    first, path = open_filesystem(f"{bucket.url}/in/*.parquet")
    assert path == f"{bucket.name}/in/*.parquet"
    assert open_filesystem(f"{bucket.url}/other")[0] is first
    assert used_object_store()


def test_google_storage_opens_without_credentials():
    store = open_store("gs://bucket/out")
    assert store.path("data/a") == "gs://bucket/out/data/a"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("AWS Error NO_SUCH_BUCKET during PutObject", "there is no bucket b"),
        ("AWS Error UNKNOWN (HTTP status 403) during HeadObject", "access to bucket b is denied"),
        ("ExpiredToken Message: The provided token has expired", "access to bucket b is denied"),
        ("something new", "something new"),
    ],
)
def test_explanations(text, expected):
    reason, mend = explain(OSError(text), "s3://b/out/data")
    assert reason == expected and mend
