"""Input from an object store: finding files, reading them, what goes wrong."""

import gzip
import io

import pyarrow.parquet as pq
import pytest

from specrun.jobs import lines
from specrun.jobs.errors import ConfigError, InputError, InputMissing, StorageError
from specrun.jobs.prompts import PromptSource
from tests.jobs.prompt_inputs import job, prompts, read, source

import pyarrow as pa  # isort: skip


def put(bucket, name: str, content: bytes) -> None:
    # By default Arrow packs what has a name that ends in .gz.
    with bucket.fs.open_output_stream(f"{bucket.name}/{name}", compression=None) as stream:
        stream.write(content)


def parquet_bytes(data, **kwargs) -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.table(data), stream, **kwargs)
    return stream.getvalue()


def lines_of(*texts) -> bytes:
    return b"".join(b'{"prompt": "%s"}\n' % text.encode() for text in texts)


def test_natural_order_and_ignored_names(bucket):
    for number in (10, 2, 1):
        put(bucket, f"in/part-{number}.parquet", parquet_bytes({"prompt": [str(number)]}))
    for name in ("_SUCCESS", "_part-0.parquet", ".part-0.parquet", "report.json", "x.parquet.crc"):
        put(bucket, f"in/{name}", b"no data")
    put(bucket, "in/deep/er/e.parquet", parquet_bytes({"prompt": ["deep"]}))
    put(bucket, "in/_tmp/t.parquet", parquet_bytes({"prompt": ["no"]}))
    for path in ("in", "in/", "in/*", "in/part-*.parquet", "in/part-?*.parquet", "*/part-*"):
        found = source(f"{bucket.url}/{path}")
        assert prompts(found) == ["1", "2", "10"], path
    assert [file.path for file in found.files] == [f"{bucket.url}/in/part-{i}.parquet" for i in (1, 2, 10)]
    assert prompts(source(f"{bucket.url}/in/**/*.parquet")) == ["deep", "1", "2", "10"]
    assert prompts(source(f"{bucket.url}/in/**/e*")) == prompts(source(f"{bucket.url}/in/*/*/*")) == ["deep"]
    assert prompts(source(f"{bucket.url}/in/part-[12].parquet")) == ["1", "2"]
    assert prompts(source(f"{bucket.url}/in/part-2.parquet")) == ["2"]


def test_options_in_the_location(bucket, monkeypatch):
    put(bucket, "a.jsonl", lines_of("a"))
    endpoint = bucket.server.url
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    for path in ("", "/", "/*.jsonl", "/?.jsonl", "/a.jsonl"):
        found = source(f"{bucket.url}{path}?region=us-east-1&endpoint_override={endpoint}")
        assert prompts(found) == ["a"] and found.files[0].path == f"{bucket.url}/a.jsonl"


def test_whatever_lies_there(bucket):
    put(bucket, "a.txt", lines_of("a"))
    put(bucket, "b.jsonl", lines_of("b"))
    put(bucket, "c.parquet", parquet_bytes({"prompt": ["c"]}))
    with pytest.raises(ConfigError, match=r"rename it or set input.format"):
        source(f"{bucket.url}/a.txt")
    assert prompts(source(f"{bucket.url}/a.txt", format="jsonl")) == ["a"]
    with pytest.raises(ConfigError, match=r"mixes formats .*set input.format"):
        source(bucket.url)
    assert prompts(source(bucket.url, format="jsonl")) == ["b"]
    for name in ("none.parquet", "none/*.parquet", "none"):
        with pytest.raises(InputMissing, match=r"no such file, and no \*.parquet.* behind it; check the path"):
            source(f"{bucket.url}/{name}")
    put(bucket, "bad/x.parquet", b"no parquet at all")
    with pytest.raises(InputError, match=rf"{bucket.url}/bad/x.parquet: cannot be read: .*; write the file again"):
        source(f"{bucket.url}/bad")


def test_lines_packed_and_plain(bucket, monkeypatch):
    monkeypatch.setattr(lines, "REMOTE_CHUNK_BYTES", 1 << 18)
    texts = [str(i) * 40 for i in range(6000)]
    content = lines_of(*texts)
    put(bucket, "a.jsonl", content)
    put(bucket, "b.jsonl.gz", gzip.compress(content, 1))
    put(bucket, "c.jsonl.zst", pa.compress(content, codec="zstd", asbytes=True))
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst"):
        found = source(f"{bucket.url}/{name}")
        assert prompts(found) == texts
        known = found.scan()
        bucket.server.requests.clear()
        again = PromptSource(job(f"{bucket.url}/{name}"), known)
        assert [row.prompt for batch in again.batches(start=5800) for row in batch.rows] == texts[5800:]
        assert len([1 for method, _ in bucket.server.requests if method == "GET"]) <= 2, "not the whole of a plain file"


def test_identity_is_the_tag_of_the_object(bucket):
    for name, content in (("a.jsonl", lines_of), ("b.parquet", lambda text: parquet_bytes({"prompt": [text]}))):
        put(bucket, name, content("abc"))
        (before,) = source(f"{bucket.url}/{name}").identity()
        assert before["path"] == f"{bucket.url}/{name}" and before["hash"].startswith("etag:")
        put(bucket, name, content("abc"))
        assert source(f"{bucket.url}/{name}").identity() == [before]
        put(bucket, name, content("abd"))
        assert source(f"{bucket.url}/{name}").identity()[0]["hash"] != before["hash"]


def test_a_wide_row_group_comes_in_pieces(bucket):
    data = {"prompt": [f"{i:06}" * 100 for i in range(20_000)], "k": range(20_000)}
    put(bucket, "a.parquet", parquet_bytes(data, row_group_size=20_000))
    rows, table = read(source(f"{bucket.url}/a.parquet"))
    assert [row.prompt for row in rows] == data["prompt"] and table["k"].to_pylist() == list(range(20_000))


def test_missing_bucket(bucket):
    for location in ("s3://no-such-bucket", "s3://no-such-bucket/in/*.parquet", "s3://no-such-bucket/a.jsonl"):
        with pytest.raises(InputMissing, match=r"there is no bucket no-such-bucket; correct its name"):
            source(location)


def test_denied(bucket):
    put(bucket, "in/a.jsonl", lines_of(*"abcdefghijklmnopqrstuvwxyz"))
    bucket.server.fail("denied")
    for location in (f"{bucket.url}/in", f"{bucket.url}/in/a.jsonl", f"{bucket.url}/in/*.jsonl"):
        with pytest.raises(InputMissing, match=rf"access to bucket {bucket.name} is denied; check the credentials"):
            source(location)
    bucket.server.heal()
    bucket.server.fail("denied", "GET", "a.jsonl")
    with pytest.raises(InputMissing, match=r"in/a.jsonl: access to bucket .* is denied; check the credentials"):
        source(f"{bucket.url}/in")


def test_no_credentials(bucket, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    bucket.server.needs_credentials = True
    with pytest.raises(InputMissing, match=r"check the credentials in the environment"):
        source(f"{bucket.url}/a.jsonl")


@pytest.mark.parametrize("kind", ["slow", "drop"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_passing_errors_are_borne(bucket, kind, name):
    texts = [str(i) * 40 for i in range(10_000)]
    content = {
        "a.jsonl": lambda: lines_of(*texts),
        "a.jsonl.gz": lambda: gzip.compress(lines_of(*texts)),
        "a.parquet": lambda: parquet_bytes({"prompt": texts}, row_group_size=1000),
    }
    put(bucket, name, content[name]())
    for _ in range(3):
        bucket.server.fail(kind, times=2, skip=len(bucket.server.faults))
    found = source(f"{bucket.url}/{name}")
    found.identity()
    bucket.server.fail(kind, times=2, skip=2)
    assert prompts(found) == texts


def test_lasting_errors_can_be_run_again(bucket):
    put(bucket, "a.parquet", parquet_bytes({"prompt": ["a"]}))
    put(bucket, "a.jsonl", lines_of("a"))
    found = [source(f"{bucket.url}/a.{suffix}") for suffix in ("parquet", "jsonl")]
    bucket.server.fail("slow")
    with pytest.raises(StorageError, match=r"input.path 's3://.*"):
        source(bucket.url)
    for one in found:
        with pytest.raises(StorageError, match=r"s3://.*/a.* reading failed: .*; run the job again"):
            list(one.batches())


def test_an_object_that_changes_is_noticed(bucket):
    put(bucket, "a.jsonl", lines_of("a"))
    found = source(f"{bucket.url}/a.jsonl")
    put(bucket, "a.jsonl", lines_of("a", "b"))
    with pytest.raises(InputError, match=r"changed while the job reads it"):
        list(found.batches())
    bucket.fs.delete_file(f"{bucket.name}/a.jsonl")
    with pytest.raises(InputMissing, match=r"is gone"):
        list(found.batches())
