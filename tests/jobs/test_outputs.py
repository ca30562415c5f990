"""Rows to parts: order, types, commit, and what is refused."""

import io
import os
import tracemalloc

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import specrun
from specrun.jobs import parts, spill
from specrun.jobs.errors import StorageError
from specrun.jobs.schema import OutputRow, output_schema
from tests.jobs.output_jobs import PASSTHROUGH, assert_whole, batch, close, expect, names, open_writer, row, run


def test_rows_in_any_order_come_out_in_input_order(tmp_path):
    writer = open_writer(tmp_path, 35)
    assert sorted(run(writer)) == list(range(35))
    close(writer)
    assert names(tmp_path) == [f"part-00000-00000{i}.parquet" for i in range(4)]
    assert_whole(tmp_path, 35)
    assert not any((tmp_path / ".specrun" / "shard-00000" / "spill").iterdir())
    assert not any((tmp_path / ".specrun" / "shard-00000" / "tmp").iterdir())


def test_a_part_is_committed_by_the_call_that_completes_it(tmp_path):
    writer = open_writer(tmp_path, 20)
    expect(writer)
    writer.write([row(i) for i in range(1, 20)])
    assert names(tmp_path) == ["part-00000-000001.parquet"]
    assert list(writer._ledger.parts) == [1]
    writer.write([row(0)])
    assert sorted(writer._ledger.parts) == [0, 1]
    close(writer)


def test_footer_says_what_the_part_is(tmp_path):
    writer = open_writer(tmp_path, 15)
    run(writer)
    close(writer)
    metadata = pq.read_schema(tmp_path / "data" / "part-00000-000001.parquet").metadata
    assert metadata[b"specrun.job"] == b"nightly"
    assert metadata[b"specrun.model"] == b"tiny"
    assert metadata[b"specrun.version"] == specrun.__version__.encode()
    assert (metadata[b"specrun.row_start"], metadata[b"specrun.row_end"]) == (b"10", b"15")
    assert metadata[b"specrun.fingerprint"].decode() == writer._ledger.index.fingerprint_hash
    assert len(metadata[b"specrun.fingerprint"]) == 64
    assert metadata[b"specrun.attempt"] == b"1"
    counts = {"num_ok": 5, "num_failed": 0, "num_prompt_tokens": 15, "num_output_tokens": 10}
    assert orjson.loads(metadata[b"specrun.counts"]) == {**counts, "error_codes": {}, "finish_reasons": {"stop": 5}}


def test_all_columns_survive(tmp_path):
    writer = open_writer(tmp_path, 3, token_ids=True, logprobs=True)
    writer.expect(0, *batch(0, 3))
    good = row(0, stop_reason="\n", token_ids=[5, 70000], logprobs=[-0.5, 0.0])
    empty = row(1, text="", token_ids=[], logprobs=[])
    failed = OutputRow(2, "id-2", finish_reason="error", error_code="null_prompt", error_message="no prompt")
    writer.write([failed, empty, good])
    writer.finish()
    close(writer)
    table = pq.read_table(tmp_path / "data")
    assert table.schema.remove_metadata() == output_schema(PASSTHROUGH, token_ids=True, logprobs=True)
    first, second, third = table.to_pylist()
    assert first == {
        **{"row_index": 0, "id": "id-0", "lang": None, "n": 0, "text": good.text, "finish_reason": "stop"},
        **{"stop_reason": "\n", "prompt_tokens": 3, "output_tokens": 2, "token_ids": [5, 70000]},
        **{"logprobs": [-0.5, 0.0], "error_code": None, "error_message": None},
    }
    assert (second["text"], second["token_ids"]) == ("", [])
    assert (third["text"], third["token_ids"], third["error_code"]) == (None, None, "null_prompt")


def test_columns_that_are_not_asked_for_are_not_written(tmp_path):
    writer = open_writer(tmp_path, 1)
    writer.expect(0, *batch(0, 1))
    writer.write([row(0, token_ids=[1], logprobs=[-1.0])])
    writer.finish()
    close(writer)
    assert "token_ids" not in pq.read_schema(tmp_path / "data" / "part-00000-000000.parquet").names


def test_broken_text_and_odd_passthrough_types(tmp_path):
    schema = pa.schema([("kind", pa.dictionary(pa.int32(), pa.string())), ("deep", pa.list_(pa.struct([("a", "f4")])))])
    writer = open_writer(tmp_path, 4, passthrough=schema)
    for start in (0, 2):
        kinds = pa.array([f"k{start}", None]).dictionary_encode()
        deep = pa.array([[{"a": 1.5}], None], schema.field("deep").type)
        writer.expect(start, ["lone \ud800", None], pa.record_batch([kinds, deep], schema=schema))
    writer.write([row(i, text="bad \udcff end") for i in range(4)])
    writer.finish()
    close(writer)
    rows = pq.read_table(tmp_path / "data").to_pylist()
    assert [r["kind"] for r in rows] == ["k0", None, "k2", None]
    assert rows[0]["deep"] == [{"a": 1.5}]
    assert rows[0]["text"] == "bad ? end"
    assert [r["id"] for r in rows] == ["lone ?", None] * 2


def test_no_passthrough_columns(tmp_path):
    writer = open_writer(tmp_path, 3, passthrough=pa.schema([]))
    empty = pa.RecordBatch.from_struct_array(pa.array([{}] * 3, pa.struct([])))
    writer.expect(0, ["a", None, "c"], empty)
    writer.write([row(i) for i in range(3)])
    writer.finish()
    close(writer)
    assert pq.read_table(tmp_path / "data").column("id").to_pylist() == ["a", None, "c"]


def test_no_rows_give_one_part_with_all_columns(tmp_path):
    writer = open_writer(tmp_path, 0)
    writer.finish()
    close(writer)
    table = pq.read_table(tmp_path / "data" / "part-00000-000000.parquet")
    assert table.num_rows == 0
    assert table.schema.remove_metadata() == output_schema(PASSTHROUGH, token_ids=False, logprobs=False)
    again = open_writer(tmp_path, 0)
    again.finish()
    close(again)
    assert names(tmp_path) == ["part-00000-000000.parquet"]


def test_row_groups_are_bounded_in_rows_and_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "ROW_GROUP_ROWS", 8)
    monkeypatch.setattr(spill, "ROW_GROUP_ROWS", 8)
    writer = open_writer(tmp_path, 20, rows_per_part=20)
    monkeypatch.setattr(spill, "_TABLE_BYTES", 200)
    run(writer)
    close(writer)
    footer = pq.read_metadata(tmp_path / "data" / "part-00000-000000.parquet")
    sizes = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
    assert sum(sizes) == 20
    assert max(sizes) < 8
    assert_whole(tmp_path, 20)


def test_finish_raises_when_a_row_is_missing(tmp_path):
    writer = open_writer(tmp_path, 25)
    expect(writer)
    writer.write([row(i) for i in range(25) if i not in (3, 24)])
    with pytest.raises(RuntimeError, match=r"part-00000-000000.parquet is not whole.* 1 without result \(3\)"):
        writer.finish()
    with pytest.raises(RuntimeError, match="1 of 3 parts are committed"):
        writer._ledger.complete()
    writer.write([row(3), row(24)])
    writer.finish()
    writer._ledger.complete()
    close(writer)


def test_rows_that_were_never_read_are_missing(tmp_path):
    writer = open_writer(tmp_path, 40)
    expect(writer, 0, 25)
    writer.write([row(i) for i in range(25)])
    with pytest.raises(RuntimeError, match=r"part-00000-000002.parquet is not whole: 5 rows read, 5 done, 5 without"):
        writer.finish()
    expect(writer, 25, 30)
    writer.write([row(i) for i in range(25, 30)])
    with pytest.raises(RuntimeError, match="3 of 4 parts are committed"):
        writer._ledger.complete()
    close(writer)


@pytest.mark.parametrize(("start", "stop"), [(30, 31), (25, 31), (30, 30 + 10)])
def test_rows_behind_the_last_one_are_an_error(tmp_path, start, stop):
    writer = open_writer(tmp_path, 30)
    expect(writer, 0, min(start, 30))
    with pytest.raises(ValueError, match=rf"rows {start} to {stop - 1} are not all in the shard's 0 to 29"):
        writer.expect(start, *batch(start, stop))
    expect(writer, min(start, 30), 30)
    writer.write([row(i) for i in range(30)])
    writer.finish()
    close(writer)
    assert_whole(tmp_path, 30)


@pytest.mark.parametrize("rows", [[5, 5], [4], [11]])
def test_a_row_cannot_be_written_twice_or_unread(tmp_path, rows):
    writer = open_writer(tmp_path, 10)
    writer.expect(0, *batch(0, 10))
    writer.write([row(4)])
    with pytest.raises(ValueError, match="row of"):
        writer.write([row(i) for i in rows])
    assert writer.counts.num_rows == 1
    writer.write([row(i) for i in range(10) if i != 4])
    with pytest.raises(ValueError, match="after its commit"):
        writer.write([row(4)])
    writer.finish()
    close(writer)


def test_batches_must_follow_one_another(tmp_path):
    writer = open_writer(tmp_path)
    writer.expect(0, *batch(0, 4))
    with pytest.raises(ValueError, match="expected row 4 next, got 5"):
        writer.expect(5, *batch(5, 8))
    close(writer)


def test_a_full_disk_tears_no_line(tmp_path, monkeypatch):
    class FullDisk(io.FileIO):
        """Takes half of what it is given."""

        def write(self, content):
            return super().write(content[: len(content) // 2])

    def open_full(path, mode, buffering=-1):
        return FullDisk(path, mode) if path.suffix == ".jsonl" else open(path, mode, buffering)

    writer = open_writer(tmp_path, 10)
    expect(writer)
    writer.write([row(0)])
    with monkeypatch.context() as patch:
        patch.setattr(spill, "open", open_full, raising=False)
        with pytest.raises(StorageError, match=r"part-000000.jsonl: No space left on device; free some space"):
            writer.write([row(1), row(2)])
    assert not writer.is_done(1)
    writer.write([row(i) for i in range(1, 10)])
    writer.finish()
    close(writer)
    assert_whole(tmp_path, 10)


def test_a_stalled_part_keeps_no_rows_in_memory(tmp_path):
    writer = open_writer(tmp_path, 1000, rows_per_part=1000)
    tracemalloc.start()
    expect(writer, batch_rows=100)
    for start in range(0, 1000, 50):
        writer.write([row(i, text=f"{i}" * 2000) for i in range(start, start + 50) if i])
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 100_000
    writer.write([row(0)])
    assert names(tmp_path) == ["part-00000-000000.parquet"]
    close(writer)


def test_a_part_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    calls: list[str] = []

    def listen(name, real):
        def heard(target, *args):
            calls.append(name)
            return real(target, *args)

        monkeypatch.setattr(os, name, heard)

    writer = open_writer(tmp_path, 10)
    expect(writer)
    for name in ("fsync", "replace"):
        listen(name, getattr(os, name))
    writer.write([row(i) for i in range(10)])
    assert calls == ["fsync", "replace", "fsync"]
    close(writer)
