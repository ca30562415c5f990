"""Failed rows run again: only those, merged once, the old part in place until the new one is whole."""

import orjson
import pytest

from specrun.jobs.errors import ConfigError, StorageError, TemporaryError
from specrun.jobs.finished import FinishedJob
from specrun.jobs.folder import OutputFolder
from specrun.jobs.parts import Part
from specrun.jobs.retry import Retry
from tests.jobs.output_jobs import (
    assert_whole,
    close,
    declare_done,
    expect,
    failed_row,
    finish_job,
    is_finished,
    manifest_of,
    names,
    open_ledger,
    open_writer,
    read_rows,
    row,
    run,
    run_shard,
    shard_folder,
    spill_file,
)

FAILED = {3: "timeout", 7: "engine_error", 8: "null_prompt", 25: "engine_error"}


def outcome(index):
    return failed_row(index, FAILED[index]) if index in FAILED else row(index)


def again(index):
    return row(index, text=f"again {index}")


def rows_of(out):
    return {r["row_index"]: r for r in read_rows(out)}


def retry_file(out, shard=0):
    return shard_folder(out, shard) / "retry.json"


def bytes_of(out):
    return {name: (out / "data" / name).read_bytes() for name in names(out)}


@pytest.mark.parametrize(
    ("codes", "chosen"),
    [
        ([], [3, 7, 8, 25]),
        (["engine_error"], [7, 25]),
        (["timeout", "null_prompt"], [3, 8]),
        (["prompt_too_long"], []),
    ],
)
def test_only_the_chosen_rows_run_again(tmp_path, codes, chosen):
    finish_job(tmp_path, make_row=outcome)
    before, files = rows_of(tmp_path), bytes_of(tmp_path)
    assert sorted(finish_job(tmp_path, make_row=again, retry_codes=codes)) == chosen
    after = rows_of(tmp_path)
    assert {i: r for i, r in after.items() if i not in chosen} == {i: r for i, r in before.items() if i not in chosen}
    assert_whole(tmp_path, 30, lambda i: f"again {i}" if i in chosen else before[i]["text"])
    changed = {f"part-00000-00000{i // 10}.parquet" for i in chosen}
    assert {name for name, content in bytes_of(tmp_path).items() if content != files[name]} == changed
    assert not retry_file(tmp_path).exists()
    assert not any((shard_folder(tmp_path) / "spill").iterdir())
    manifest = manifest_of(tmp_path)
    assert (manifest["state"], manifest["attempt"]) == ("done", 2)
    assert [part["attempt"] for part in manifest["parts"]] == [1 + (name in changed) for name in names(tmp_path)]
    counts = FinishedJob.gather(OutputFolder(str(tmp_path))).counts
    assert (counts.num_rows, counts.num_failed) == (30, 4 - len(chosen))
    left = [code for i, code in FAILED.items() if i not in chosen]
    assert counts.error_codes == {code: left.count(code) for code in left}


def test_every_column_of_the_other_rows_stays(tmp_path):
    """All that a row can hold goes through the spill once more: bits of floats, nulls, empty lists, odd text."""
    values: dict[int, dict[str, object]] = {
        1: {"logprobs": [-0.1, -1e-38, -0.0], "token_ids": [0, 2**31 - 1], "stop_reason": "\x00\u2028"},
        2: {"logprobs": [], "token_ids": [], "text": ""},
        4: {"text": "bad \udcff end", "finish_reason": "length"},
    }

    def make(index):
        return failed_row(index) if index == 3 else row(index, **values.get(index, {}))

    kwargs = {"token_ids": True, "logprobs": True}
    finish_job(tmp_path, 10, make_row=make, **kwargs)
    before = rows_of(tmp_path)
    assert finish_job(tmp_path, 10, make_row=again, retry_codes=[], **kwargs) == [3]
    after = rows_of(tmp_path)
    assert after.pop(3)["text"] == "again 3"
    del before[3]
    assert after == before
    assert str(after[1]["logprobs"]) == str(before[1]["logprobs"])


def test_rows_that_fail_again_stay_failed_and_can_be_tried_once_more(tmp_path):
    finish_job(tmp_path, make_row=outcome)
    ran = finish_job(tmp_path, make_row=lambda i: failed_row(i, "timeout") if i == 7 else again(i), retry_codes=[])
    assert sorted(ran) == [3, 7, 8, 25]
    assert {i: r["error_code"] for i, r in rows_of(tmp_path).items() if r["error_code"]} == {7: "timeout"}
    assert finish_job(tmp_path, make_row=again, retry_codes=[]) == [7]
    assert finish_job(tmp_path, make_row=again, retry_codes=[]) == []
    assert [part["attempt"] for part in manifest_of(tmp_path)["parts"]] == [3, 1, 2]


def test_a_retry_without_the_manifest_still_runs(tmp_path):
    finish_job(tmp_path, make_row=outcome)
    (shard_folder(tmp_path) / "manifest.json").unlink()
    assert sorted(finish_job(tmp_path, make_row=again, retry_codes=[])) == [3, 7, 8, 25]


def test_the_old_part_stands_until_the_new_one_is_whole(tmp_path):
    finish_job(tmp_path, make_row=outcome)
    before = bytes_of(tmp_path)
    writer = open_writer(tmp_path, retry_codes=[])
    assert sorted(writer._ledger.reopened) == [0, 2]
    assert (writer.counts.num_rows, writer.counts.num_failed) == (30, 4)
    assert sum(writer.is_done(row) for row in range(30)) == 26  # a part is opened when its rows are asked for
    assert (writer.counts.num_rows, writer.counts.num_failed) == (26, 0)
    assert not (tmp_path / "_SUCCESS").exists()
    assert [part["name"] for part in manifest_of(tmp_path)["parts"]] == names(tmp_path)
    expect(writer)
    assert bytes_of(tmp_path) == before
    writer.write([again(3), again(7)])
    assert bytes_of(tmp_path) == before
    writer.write([again(8)])
    after = bytes_of(tmp_path)
    assert [name for name in after if after[name] != before[name]] == ["part-00000-000000.parquet"]
    assert sorted(writer._ledger.reopened) == [2]
    with pytest.raises(RuntimeError, match="2 of 3 parts are committed"):
        writer._ledger.complete()
    close(writer)
    with pytest.raises(TemporaryError, match="0 of 1 shards are done, missing 0"):
        FinishedJob.gather(OutputFolder(str(tmp_path)))


def test_a_submit_goes_on_with_a_retry(tmp_path):
    """Also with rows of it that stand in the spill; those do not run twice."""
    finish_job(tmp_path, make_row=outcome)
    writer = open_writer(tmp_path, retry_codes=["engine_error", "timeout"])
    expect(writer)
    writer.write([again(3)])
    close(writer)
    assert not is_finished(tmp_path)
    writer = open_writer(tmp_path)
    assert writer._ledger.retry == Retry(2, [0, 2], ["engine_error", "timeout"])
    assert sorted(run(writer, make_row=again)) == [7, 25]
    writer._ledger.complete()
    close(writer)
    assert rows_of(tmp_path)[8]["error_code"] == "null_prompt"
    assert [rows_of(tmp_path)[i]["text"] for i in (3, 7, 25)] == ["again 3", "again 7", "again 25"]


def test_parts_that_are_through_are_not_done_again(tmp_path):
    finish_job(tmp_path, make_row=outcome)
    writer = open_writer(tmp_path, retry_codes=[])
    expect(writer)
    writer.write([failed_row(i, "timeout") for i in (3, 7, 8)])
    close(writer)
    writer = open_writer(tmp_path, retry_codes=[])
    assert sorted(writer._ledger.reopened) == [2]
    assert run(writer, make_row=again) == [25]
    close(writer)
    assert [rows_of(tmp_path)[i]["error_code"] for i in (3, 7, 8)] == ["timeout"] * 3


def test_spill_of_committed_parts_does_not_pass_for_rows_run_again(tmp_path):
    """A crash between commit and the removal of the spill leaves the failed rows there."""
    finish_job(tmp_path, make_row=outcome)
    leftover = b'[3,null,"error",null,0,0,"timeout","row 3 failed"]\n'
    spill_file(tmp_path, 0).write_bytes(leftover)
    assert sorted(finish_job(tmp_path, make_row=again, retry_codes=[])) == [3, 7, 8, 25]
    assert rows_of(tmp_path)[3]["text"] == "again 3"


def test_an_unfinished_job_is_not_retried(tmp_path):
    writer = open_writer(tmp_path)
    expect(writer)
    writer.write([outcome(i) for i in range(20)])
    close(writer)
    with pytest.raises(TemporaryError, match=r"is not finished \(2 of 3 parts are there\); submit the job again first"):
        open_ledger(tmp_path, retry_codes=[])
    assert not retry_file(tmp_path).exists()
    assert sorted(finish_job(tmp_path, make_row=outcome)) == list(range(20, 30))


def test_a_retry_of_another_configuration_is_refused(tmp_path):
    finish_job(tmp_path, make_row=outcome)
    with pytest.raises(ConfigError, match="holds results of another configuration"):
        open_ledger(tmp_path, fingerprint={"other": 1}, retry_codes=[])
    assert (tmp_path / "_SUCCESS").exists()
    assert not retry_file(tmp_path).exists()


@pytest.mark.parametrize("if_exists", ["error", "overwrite", "skip"])
def test_what_a_job_says_about_an_old_output_is_not_asked(tmp_path, if_exists):
    finish_job(tmp_path, make_row=outcome)
    assert sorted(finish_job(tmp_path, make_row=again, retry_codes=[], if_exists=if_exists)) == [3, 7, 8, 25]
    assert len(read_rows(tmp_path)) == 30


def test_a_retry_without_failed_rows_changes_nothing(tmp_path):
    finish_job(tmp_path)
    before = bytes_of(tmp_path)
    assert finish_job(tmp_path, make_row=again, retry_codes=[]) == []
    assert bytes_of(tmp_path) == before


def test_shards_are_retried_one_by_one(tmp_path):
    for index in range(2):
        run_shard(tmp_path, 30, 10, f"{index}/2", make_row=outcome)
    declare_done(tmp_path)
    assert run_shard(tmp_path, 30, 10, "1/2", make_row=again, retry_codes=["engine_error"]) == [25]
    assert not (tmp_path / "_SUCCESS").exists()
    assert manifest_of(tmp_path, 0)["attempt"] == 1
    declare_done(tmp_path)
    assert {i for i, r in rows_of(tmp_path).items() if r["error_code"]} == {3, 7, 8}
    assert len(read_rows(tmp_path)) == 30


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"attempt": 1}'])
def test_a_damaged_record_of_a_retry_is_an_error(tmp_path, content):
    finish_job(tmp_path, make_row=outcome)
    retry_file(tmp_path).write_bytes(content)
    (tmp_path / "_SUCCESS").unlink()
    with pytest.raises(StorageError, match=r"retry.json is damaged .*; remove it and run `specrun retry` again"):
        open_ledger(tmp_path)
    assert len(names(tmp_path)) == 3


def test_what_is_written_down(tmp_path):
    finish_job(tmp_path, make_row=outcome)
    ledger = open_ledger(tmp_path, retry_codes={"timeout", "engine_error"})
    ledger.close()
    content = orjson.loads(retry_file(tmp_path).read_bytes())
    assert content == {"attempt": 2, "sequences": [0, 2], "codes": ["engine_error", "timeout"]}
    retry = Retry(**content)
    assert [retry.chooses(code) for code in ("timeout", "engine_error", "null_prompt", None)] == [
        True,
        True,
        False,
        False,
    ]
    assert [Retry(2, [], []).chooses(code) for code in ("anything", None)] == [True, False]
    part = Part.read(ledger.output.store, "part-00000-000000.parquet", 1)
    assert part is not None
    assert retry.reopens(part)
    assert not Retry(1, [0], []).reopens(part)
    assert not Retry(2, [1], []).reopens(part)


def test_a_stalled_retry_keeps_the_rows_of_its_parts_on_disk(tmp_path, monkeypatch):
    """Rows are taken over in pieces of the part, not as one."""
    finish_job(tmp_path, 3000, 3000, make_row=lambda i: failed_row(i) if i == 5 else row(i))
    sizes = []
    real = Part.batches

    def counted(self, store, columns=None):
        for batch in real(self, store, columns):
            sizes.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(Part, "batches", counted)
    writer = open_writer(tmp_path, 3000, 3000, retry_codes=[])
    assert not sizes and not writer.is_done(5)
    close(writer)
    assert sum(sizes) == 3000
    assert max(sizes) <= 512


def test_a_retry_of_other_rows_waits_for_the_one_that_was_begun(tmp_path):
    """It would pass over what was asked for and say that it is done."""
    finish_job(tmp_path, make_row=outcome)
    close(open_writer(tmp_path, retry_codes=["timeout", "engine_error"]))
    for codes in ([], ["timeout"]):
        with pytest.raises(ConfigError, match="holds a retry of engine_error, timeout that was begun and not ended"):
            open_ledger(tmp_path, retry_codes=codes)
    assert sorted(finish_job(tmp_path, make_row=again, retry_codes=["timeout", "engine_error"])) == [3, 7, 25]
    assert finish_job(tmp_path, make_row=again, retry_codes=[]) == [8]
