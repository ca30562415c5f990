"""Answers of earlier jobs: where they are found, which of them count, and what damage costs."""

import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specrun.jobs import answers, earlier_output
from specrun.jobs.answers import spilled_answers
from specrun.jobs.earlier_output import EarlierOutput
from specrun.jobs.errors import ConfigError, InputMissing, StorageError
from specrun.jobs.folder import OutputFolder
from specrun.jobs.saved_index import vocabulary_hash, write_saved_index
from tests.jobs.output_jobs import close, expect, failed_row, open_writer, row, run_shard, shard_folder, spill_file

OURS = vocabulary_hash([b"a", b"b"])
OTHERS = vocabulary_hash([b"ab", b""])


def answer(name):
    """Rows of a job whose texts begin with its name."""
    return lambda i: row(i, text=f"{name}{i}", token_ids=[i, i + 1])


def earlier(out, name="", num_rows=30, written=None, **options):
    """An earlier job's output folder; `written` is when, in seconds."""
    run_shard(out, num_rows, make_row=options.pop("make_row", answer(name)), **options)
    if written is not None:
        touch(out, written)
    return out


def touch(folder, seconds):
    for path in folder.rglob("*.parquet"):
        os.utime(path, (seconds, seconds))


def texts(locations, *args, max_tokens=None, **options):
    batches = EarlierOutput(locations, *args, **options).batches(max_tokens)
    return [text for batch in batches for text in batch.texts]


def ids(locations, *args, **options):
    batches = EarlierOutput(locations, *args, **options).batches()
    return [row.tolist() for batch in batches for row in batch.token_ids or []]


def named(name, *rows):
    return [f"{name}{i}" for i in rows]


def save_index(out, rows, vocabulary=OURS, shard=0):
    """An index as a job leaves it."""
    with OutputFolder(str(out)).finalizing() as folder:
        starts = np.cumsum([0, *map(len, rows[:-1])])
        write_saved_index(folder, shard, np.concatenate(rows).astype(np.int32), starts, vocabulary)


def add_to_footer(part, facts):
    table = pq.read_table(part)
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, **facts}), part)


@pytest.mark.parametrize(
    "location",
    ["out", "out/", "out/data", "out/data/", "o*", "*/data", "out/data/*.parquet", "out/data/part-00000-00000[0-2]*"],
)
def test_where_parts_are_found(tmp_path, location):
    earlier(tmp_path / "out")
    assert texts(f"{tmp_path}/{location}") == named("", *range(30))


def test_a_list_of_parts_and_a_single_part(tmp_path):
    earlier(tmp_path / "out")
    parts = [f"{tmp_path}/out/data/part-00000-00000{i}.parquet" for i in (2, 0)]
    assert texts(parts[0]) == named("", *range(20, 30))
    assert sorted(texts(parts)) == sorted(named("", *range(10), *range(20, 30)))


def test_a_folder_of_a_strange_name_is_taken_as_it_is(tmp_path, monkeypatch):
    earlier(tmp_path / "out [1]?x=1")
    assert texts(f"{tmp_path}/out [1]?x=1") == named("", *range(30))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert texts("~/out [1]?x=1") == named("", *range(30))


def test_rows_come_with_their_index_and_how_they_ended(tmp_path):
    def make_row(i):
        return row(i, text=f"{i}", finish_reason="length" if i == 1 else "stop", stop_reason="\n" if i == 2 else None)

    earlier(tmp_path / "out", num_rows=4, make_row=make_row)
    (batch,) = EarlierOutput(str(tmp_path / "out")).batches()
    assert batch.row_index.tolist() == [0, 1, 2, 3] and batch.row_index.dtype == np.int64
    assert batch.token_ids is None and batch.ended.tolist() == [True, False, False, True]


def test_the_text_comes_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(earlier_output, "BATCH_ROWS", 4)
    earlier(tmp_path / "out")
    sizes = [len(batch.texts) for batch in EarlierOutput(str(tmp_path / "out")).batches()]
    assert sum(sizes) == 30 and max(sizes) == 4


def test_failed_rows_are_left_out(tmp_path):
    earlier(tmp_path / "out", make_row=lambda i: failed_row(i) if i % 3 else row(i, text=f"{i}"))
    assert texts(str(tmp_path / "out")) == named("", *range(0, 30, 3))


def test_the_job_that_wrote_last_comes_last(tmp_path):
    for name, written in (("b", 300), ("a", 100), ("c", 200)):
        earlier(tmp_path / name, name, num_rows=2, written=written)
    assert texts(f"{tmp_path}/*") == ["a0", "a1", "c0", "c1", "b0", "b1"]


def test_of_one_moment_the_names_decide(tmp_path):
    for name in ("day-2", "day-10", "day-1"):
        earlier(tmp_path / name, f"{name}:", num_rows=1, written=100)
    assert texts(f"{tmp_path}/day-*") == ["day-1:0", "day-2:0", "day-10:0"]


def test_only_the_newest_that_fit_are_read(tmp_path):
    for day in range(5):
        earlier(tmp_path / f"day-{day}", f"{day}:", num_rows=10, written=day)
    # A job has 10 rows of 2 tokens.
    assert texts(f"{tmp_path}/day-*", max_tokens=40) == named("3:", *range(10)) + named("4:", *range(10))
    assert len(texts(f"{tmp_path}/day-*", max_tokens=41)) == 30
    touch(tmp_path / "day-0", 9)
    assert texts(f"{tmp_path}/day-*", max_tokens=20) == named("0:", *range(10))


def test_of_a_large_part_the_last_row_groups_are_read(tmp_path):
    earlier(tmp_path / "out", num_rows=40, rows_per_part=40)
    (part,) = (tmp_path / "out" / "data").iterdir()
    pq.write_table(pq.read_table(part), part, row_group_size=10)
    assert texts(str(tmp_path / "out"), max_tokens=80) == named("", *range(40))
    assert texts(str(tmp_path / "out"), max_tokens=40) == named("", *range(20, 40))
    assert texts(str(tmp_path / "out"), max_tokens=41) == named("", *range(10, 40))


def test_a_job_without_rows_gives_none(tmp_path):
    run_shard(tmp_path / "out", 0)
    assert texts(str(tmp_path / "out")) == texts(str(tmp_path / "out"), max_tokens=5) == []


def test_an_unfinished_job_gives_what_it_has_committed(tmp_path):
    writer = open_writer(tmp_path / "out", 30)
    expect(writer)
    writer.write([answer("")(i) for i in range(15)])
    close(writer)
    assert texts(str(tmp_path / "out")) == named("", *range(10))
    assert [t for batch in spilled_answers(OutputFolder(str(tmp_path / "out"))) for t in batch.texts] == named(
        "", *range(10, 15)
    )


def test_spill_that_is_torn_or_holds_failed_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(answers, "BATCH_ROWS", 2)
    for logprobs in (False, True):
        out = tmp_path / f"{logprobs}"
        writer = open_writer(out, 30, rows_per_part=30, token_ids=logprobs, logprobs=logprobs)
        expect(writer)
        values = {"token_ids": [1], "logprobs": [0.0]} if logprobs else {}
        writer.write([failed_row(i) if i == 2 else row(i, text=f"{i}", stop_reason="x", **values) for i in range(8)])
        close(writer)
        file = spill_file(out, 0)
        file.write_bytes(file.read_bytes()[:-4])
        (shard_folder(out) / "spill" / "part-000000.arrow.tmp").write_bytes(b"no lines")
        batches = list(spilled_answers(OutputFolder(str(out))))
        assert [t for batch in batches for t in batch.texts] == named("", 0, 1, 3, 4, 5, 6)
        assert not any(batch.ended.any() for batch in batches)


@pytest.mark.parametrize("damage", ["cut", "empty", "zeros", "foreign", "columns", "utf-8"])
def test_a_damaged_part_is_passed_over(tmp_path, damage):
    earlier(tmp_path / "out")
    part = tmp_path / "out" / "data" / "part-00000-000001.parquet"
    content = part.read_bytes()
    if damage == "cut":
        part.write_bytes(content[:-100])
    elif damage == "empty":
        part.write_bytes(b"")
    elif damage == "zeros":
        part.write_bytes(content[:4] + bytes(200) + content[204:])
    elif damage == "foreign":
        pq.write_table(pa.table({"row_index": [1], "text": ["x"]}), part)
    elif damage == "columns":
        table = pq.read_table(part)
        kept = table.schema.metadata
        pq.write_table(table.drop_columns(["error_code"]).replace_schema_metadata(kept), part)
    else:
        table = pq.read_table(part)
        torn = pa.array([b"\xff\xfe"] * 10, pa.large_binary()).view(pa.large_string())
        pq.write_table(table.set_column(table.schema.get_field_index("text"), "text", torn), part)
        add_to_footer(part, table.schema.metadata)
    warnings: list[str] = []
    found = texts(str(tmp_path / "out"), warn=warnings.append)
    assert found == named("", *range(10), *range(20, 30))
    (warning,) = warnings
    assert warning.startswith("speculation.warm_from: passed over: ") and "part-00000-000001" in warning
    assert "\n" not in warning


def test_of_many_damaged_parts_a_few_are_named(tmp_path):
    earlier(tmp_path / "out", num_rows=100)
    for part in (tmp_path / "out" / "data").iterdir():
        part.write_bytes(b"PAR1")
    warnings: list[str] = []
    assert texts(str(tmp_path / "out"), warn=warnings.append) == []
    assert len(warnings) == 4 and "10 parts" in warnings[-1]


def test_nothing_there_is_a_warning(tmp_path):
    (tmp_path / "empty").mkdir()
    for location in (f"{tmp_path}/2026-11-*", f"{tmp_path}/empty", f"{tmp_path}/out/data/part-1.parquet"):
        warnings: list[str] = []
        assert texts(location, OURS, warn=warnings.append) == []
        assert warnings == [f"speculation.warm_from: nothing behind {location}; the job begins without"]


@pytest.mark.parametrize("location", ["ftp://host/out", "s3://key@bucket/out", "s3://bucket/o?x=1"])
def test_a_broken_location_is_refused(location, monkeypatch):
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with pytest.raises(ConfigError):
        texts(location)


def test_the_jobs_own_folder_is_left_out_of_a_glob(tmp_path, monkeypatch):
    for day in (1, 2):
        earlier(tmp_path / f"day-{day}", f"{day}:", num_rows=1)
    monkeypatch.chdir(tmp_path)
    for own in ("day-2", "./day-2/", str(tmp_path / "day-2")):
        assert texts(f"{tmp_path}/day-*", exclude=own) == ["1:0"]
        assert texts("day-*/data/*", exclude=own) == ["1:0"]


def test_token_ids_count_where_they_are_known_to_be_the_same(tmp_path):
    out = earlier(tmp_path / "out", num_rows=20, token_ids=True)
    assert texts(str(out), OURS) == named("", *range(20))
    assert ids(str(out), same_tokenizer=True) == [[i, i + 1] for i in range(20)]
    assert ids(str(out), OURS) == ids(str(out)) == []


def test_a_part_that_cannot_be_looked_at_leaves_the_others(tmp_path):
    out = earlier(tmp_path / "out", num_rows=20)
    (out / "data" / "part-00000-000002.parquet").symlink_to(tmp_path / "gone")
    warnings: list[str] = []
    assert texts(str(out), OURS, warn=warnings.append) == named("", *range(20))
    assert len(warnings) == 1 and "part-00000-000002" in warnings[0]


def test_indexes_of_shards_share_the_budget(tmp_path):
    """They began with the same answers of the night before; each has some that the others do not."""
    out = earlier(tmp_path / "out", num_rows=3)
    for shard in range(3):
        save_index(out, [[shard] * 10 for _ in range(30)], shard=shard)
    touch(out, 100)
    rows = [row for batch in EarlierOutput(str(out), OURS).batches(30) for row in batch.token_ids or ()]
    assert {int(row[0]) for row in rows} == {0, 1, 2}


def test_rows_without_token_ids_are_left_out(tmp_path):
    def make_row(i):
        return failed_row(i) if i == 1 else row(i, token_ids=None if i == 2 else [i] * i)

    out = earlier(tmp_path / "out", num_rows=5, token_ids=True, make_row=make_row)
    (batch,) = EarlierOutput(str(out), same_tokenizer=True).batches()
    assert batch.token_ids is not None and batch.row_index.tolist() == [0, 3, 4]
    assert [row.tolist() for row in batch.token_ids] == [[], [3] * 3, [4] * 4]
    assert all(row.dtype == np.int32 for row in batch.token_ids) and not batch.ended.any()


def test_a_saved_index_stands_for_the_parts_of_its_shard(tmp_path):
    out = tmp_path / "out"
    for shard in ("0/2", "1/2"):
        earlier(out, num_rows=20, rows_per_part=5, shard=shard)
    save_index(out, [[7, 8], [9]], shard=1)
    assert ids(str(out), OURS) == ids(f"{out}/suffix_index", OURS) == [[7, 8], [9]]
    assert texts(str(out), OURS) == [None, None, *named("", *range(10))]
    warnings: list[str] = []
    assert texts(str(out), OTHERS, warn=warnings.append) == texts(str(out)) == named("", *range(20))
    assert warnings == []


def test_parts_newer_than_the_saved_index_are_read_after_it(tmp_path):
    out = earlier(tmp_path / "out", num_rows=20)
    save_index(out, [[7], [8]])
    touch(out, 100)
    assert texts(str(out), OURS) == [None, None]
    os.utime(out / "data" / "part-00000-000001.parquet", (101, 101))
    assert texts(str(out), OURS) == [None, None, *named("", *range(10, 20))]


def test_a_damaged_index_gives_way_to_the_parts(tmp_path):
    out = earlier(tmp_path / "out")
    save_index(out, [[7]])
    (out / "suffix_index" / "part-00000.parquet").write_bytes(b"PAR1 torn PAR1")
    warnings: list[str] = []
    assert texts(str(out), OURS, warn=warnings.append) == named("", *range(30))
    assert "suffix_index/part-00000.parquet" in warnings[0]


def test_an_index_goes_round(tmp_path):
    out = earlier(tmp_path / "out")
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 50_000, size=rng.integers(1, 40)).tolist() for _ in range(3000)]
    save_index(out, rows)
    save_index(out, rows[1:])  # in place of the other
    assert ids(str(out), OURS) == rows[1:]
    (batch, *_) = EarlierOutput(str(out), OURS).batches()
    assert batch.row_index.tolist() == list(range(512))
    assert os.listdir(out / "suffix_index") == ["part-00000.parquet"]


def test_of_a_large_index_the_newest_rows_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("specrun.jobs.saved_index._GROUP_TOKENS", 10)
    out = earlier(tmp_path / "out")
    save_index(out, [[i, i] for i in range(50)])
    batches = EarlierOutput(str(out), OURS).batches(20)
    assert [row.tolist() for batch in batches for row in batch.token_ids or []] == [[i, i] for i in range(40, 50)]


def test_an_overwritten_job_keeps_no_index(tmp_path):
    out = earlier(tmp_path / "out")
    save_index(out, [[7]])
    (out / "suffix_index" / "notes.txt").write_text("mine")
    OutputFolder(str(out)).clear()
    assert os.listdir(out / "suffix_index") == ["notes.txt"]


def test_in_a_bucket(bucket):
    for day in (1, 2):
        earlier(f"{bucket.url}/out/day-{day}", f"{day}:", num_rows=12)
    save_index(f"{bucket.url}/out/day-2", [[7, 8]])
    both = named("1:", *range(12)) + named("2:", *range(12))
    for location in ("out/day-*", "out/*/data", "out/day-?/data/part-*.parquet", "out/day-*?region=us-east-1"):
        assert sorted(texts(f"{bucket.url}/{location}")) == sorted(both)
    assert texts(f"{bucket.url}/out/day-1/") == named("1:", *range(12))
    assert texts(f"{bucket.url}/out/day-1/data/part-00000-000001.parquet") == ["1:10", "1:11"]
    assert ids(f"{bucket.url}/out/day-2", OURS) == [[7, 8]]
    assert texts(f"{bucket.url}/out/day-*", exclude=f"{bucket.url}/out/day-2/") == named("1:", *range(12))
    bucket.put("out/day-1/data/part-00000-000000.parquet", b"PAR1")
    warnings: list[str] = []
    assert texts(f"{bucket.url}/out/day-1", warn=warnings.append) == ["1:10", "1:11"] and len(warnings) == 1
    assert texts(f"{bucket.url}/other/day-*", OURS, warn=warnings.append) == [] and len(warnings) == 2


def test_a_bucket_that_cannot_be_reached_is_an_error(bucket):
    with pytest.raises(InputMissing, match=r"speculation\.warm_from .*there is no bucket"):
        texts("s3://no-such-bucket-here/out")
    bucket.server.fail("denied")
    with pytest.raises(InputMissing, match=r"speculation\.warm_from .*is denied"):
        texts(f"{bucket.url}/out")
    bucket.server.heal()
    bucket.server.fail("slow")
    with pytest.raises(StorageError, match=r"speculation\.warm_from"):
        texts(f"{bucket.url}/out")


def test_a_part_that_cannot_be_fetched_is_passed_over(bucket):
    earlier(f"{bucket.url}/out")
    bucket.server.fail("denied", "GET", "part-00000-000001")
    warnings: list[str] = []
    assert texts(f"{bucket.url}/out", warn=warnings.append) == named("", *range(10), *range(20, 30))
    assert len(warnings) == 1
