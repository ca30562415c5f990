"""One part file: what its footer says, and how a damaged one is told from one that cannot be read just now."""

from dataclasses import asdict

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specrun.jobs.counts import RowCounts
from specrun.jobs.errors import OutputError, StorageError
from specrun.jobs.parts import Part, part_name, write_part
from specrun.jobs.store import LocalStore
from tests.jobs.output_jobs import failed_row, finish_job, open_ledger, row

SCHEMA = pa.schema([("row_index", pa.int64()), ("text", pa.large_string())])
COUNTS = RowCounts(2, 1, 9, 6, {"timeout": 1}, {"stop": 2, "error": 1})
PART = Part(3, 12, 100, 103, "f" * 64, 4, COUNTS)


def tables(num_rows=3):
    yield pa.table({"row_index": range(100, 100 + num_rows), "text": ["x"] * num_rows}, schema=SCHEMA)


@pytest.fixture
def written(tmp_path):
    """A part in data/ and the store that it lies in."""
    (tmp_path / "data").mkdir()
    part = write_part(tmp_path / "data" / PART.name, PART, SCHEMA, {"specrun.job": "nightly"}, tables())
    return part, LocalStore(str(tmp_path))


def test_names_sort_as_their_rows():
    assert part_name(7) == "part-00000-000007.parquet"
    assert part_name(1234567, 12) == "part-00012-1234567.parquet"
    names = [part_name(sequence, shard) for shard in (0, 9, 10, 99999) for sequence in (0, 9, 10, 999_999)]
    assert names == sorted(names)


def test_a_part_is_what_its_footer_says(written):
    part, store = written
    assert (part.name, part.path) == ("part-00003-000012.parquet", "data/part-00003-000012.parquet")
    assert (part.num_rows, part.attempt, part.counts) == (3, 4, COUNTS)
    assert Part.read(store, part.name, part.num_bytes) == part
    metadata = pq.read_schema(store.path(part.path)).metadata
    assert {key: metadata[key] for key in metadata if key.startswith(b"specrun.")} == {
        b"specrun.job": b"nightly",
        b"specrun.fingerprint": b"f" * 64,
        b"specrun.attempt": b"4",
        b"specrun.row_start": b"100",
        b"specrun.row_end": b"103",
        b"specrun.counts": orjson.dumps(asdict(COUNTS)),
    }


def test_an_entry_of_a_manifest_is_the_part_again(written):
    part, _ = written
    entry = orjson.loads(orjson.dumps(part.to_json()))
    assert Part.of_json(entry, part.fingerprint) == part
    for broken in ({**entry, "name": "../x.parquet"}, {**entry, "counts": {"x": 1}}, {"name": part.name}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            Part.of_json(broken, "f")


@pytest.mark.parametrize("keep", [0, 3, 8, 11, 100, -1, -4, -9])
def test_a_torn_file_is_no_part(written, keep):
    part, store = written
    path = store.root / part.path
    path.write_bytes(path.read_bytes()[:keep])
    assert Part.read(store, part.name, path.stat().st_size) is None


@pytest.mark.parametrize("size", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\x10\x00\x00\x00"])
def test_a_footer_of_another_length_is_no_part(written, size):
    part, store = written
    path = store.root / part.path
    content = path.read_bytes()
    path.write_bytes(content[:-8] + size + content[-4:])
    assert Part.read(store, part.name, len(content)) is None


@pytest.mark.parametrize(
    "error",
    [
        OSError("When reading information: AWS Error NETWORK_CONNECTION during HeadObject operation: timed out"),
        OSError("AWS Error ACCESS_DENIED during GetObject operation: Access Denied"),
        OSError(5, "Input/output error"),
    ],
    ids=["network", "denied", "disk"],
)
@pytest.mark.parametrize("when", ["open", "size", "read"])
def test_a_part_that_cannot_be_read_is_not_damaged(tmp_path, written, monkeypatch, error, when):
    """Nothing may take a good part away because a store did not answer."""
    part, store = written

    class Unread(pa.PythonFile):  # type: ignore[misc]
        def size(self):
            if when == "size":
                raise error
            return 1000

        def read_at(self, nbytes, offset):
            raise error

    def unopened(self, name):
        if when == "open":
            raise error
        return Unread(open(tmp_path / name, "rb"))

    monkeypatch.setattr(LocalStore, "open", unopened)
    with pytest.raises(StorageError, match=rf"{part.name}: .*; .* and submit again"):
        Part.read(store, part.name, part.num_bytes)


def test_a_job_keeps_a_part_that_it_cannot_read(tmp_path, monkeypatch):
    def unopened(self, name):
        raise OSError("AWS Error SLOW_DOWN during GetObject operation: Please reduce your request rate")

    finish_job(tmp_path)
    (tmp_path / "_SUCCESS").unlink()
    before = {path: path.read_bytes() for path in (tmp_path / "data").iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "open", unopened)
        with pytest.raises(StorageError, match=r"part-00000-000000.parquet"):
            open_ledger(tmp_path)
    assert before == {path: path.read_bytes() for path in (tmp_path / "data").iterdir()}
    assert finish_job(tmp_path) == []


@pytest.mark.parametrize("missing", ["fingerprint", "attempt", "row_start", "row_end", "counts"])
def test_a_file_of_our_name_without_our_footer_is_refused(tmp_path, missing):
    (tmp_path / "data").mkdir()
    own = {f"specrun.{key}": "1" for key in ("fingerprint", "attempt", "row_start", "row_end", "counts")}
    del own[f"specrun.{missing}"]
    table = pa.table({"a": [1]}).replace_schema_metadata(own)
    pq.write_table(table, tmp_path / "data" / PART.name)
    with pytest.raises(OutputError, match="is not a part that specrun wrote; move it away"):
        Part.read(LocalStore(str(tmp_path)), PART.name, 1)


@pytest.mark.parametrize("num_rows", [2, 4])
def test_a_part_with_other_rows_than_it_says_is_not_written(tmp_path, num_rows):
    path = tmp_path / PART.name
    with pytest.raises(OutputError, match=rf"holds {num_rows} rows, its footer says 3"):
        write_part(path, PART, SCHEMA, {}, tables(num_rows))
    assert not path.exists()


def test_an_exception_on_the_way_leaves_no_file(tmp_path):
    """A Parquet writer that is left by an exception would close a valid file of too few rows."""

    def breaks():
        yield from tables(2)
        raise KeyboardInterrupt

    path = tmp_path / PART.name
    with pytest.raises(KeyboardInterrupt):
        write_part(path, PART, SCHEMA, {}, breaks())
    assert not path.exists()


def test_metadata_of_others_cannot_replace_what_the_footer_says(tmp_path):
    part = write_part(tmp_path / PART.name, PART, SCHEMA, {"specrun.attempt": "9", "specrun.row_start": "0"}, tables())
    assert (part.attempt, part.row_start) == (4, 100)


def test_failed_rows_of_a_part(tmp_path):
    finish_job(tmp_path, 30, make_row=lambda i: failed_row(i, f"code{i % 2}") if i in (2, 9, 15) else row(i))
    ledger = open_ledger(tmp_path)
    store = ledger.output.store
    parts = [part for name, size in store.list("data").items() if (part := Part.read(store, name, size))]
    ledger.close()
    found = [list(part.failed_rows(store)) for part in parts]
    assert found == [
        [(2, "id-2", "code0", "row 2 failed"), (9, "id-9", "code1", "row 9 failed")],
        [(15, "id-15", "code1", "row 15 failed")],
        [],
    ]
    assert parts[0].counts.error_codes == {"code0": 1, "code1": 1}
    assert (parts[0].counts.num_ok, parts[0].counts.num_failed) == (8, 2)
