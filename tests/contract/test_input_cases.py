"""Cases t01 to t12: shapes, types and faults of input data, as whole jobs."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specrun.jobs.errors import ConfigError
from specrun.runner.cli import run_command
from tests.contract.input_tables import codes, folder_of, prompts, texts
from tests.runner.conftest import Job

RESULTS = ["text", "finish_reason", "stop_reason", "prompt_tokens", "output_tokens", "error_code", "error_message"]


def test_t01_a_null_prompt_fails_its_row_alone(job: Job) -> None:
    job.parquet(pa.table({"doc": [1, 2, 3], "prompt": pa.array(["a", None, "c"], pa.string())}))
    job.config["input"]["columns"] = {"id": "doc", "prompt": "prompt"}
    assert job.set(errors__max_failed_fraction=0.5).run().exit_code == 0
    assert texts(job) == ["a", None, "c"] and codes(job) == [None, "null_prompt", None]
    assert [row["id"] for row in job.rows()] == ["1", "2", "3"]
    assert job.report()["num_failed"] == 1 and job.report()["error_codes"] == {"null_prompt": 1}


def test_t01_a_null_may_stand_in_every_column(job: Job) -> None:
    columns = {
        "doc": pa.array(["x", None, "z"], pa.string()),
        "prompt": pa.array([None, "b", "c"], pa.string()),
        "max_tokens": pa.array([1, None, None], pa.int32()),
        "stop": pa.array([None, ["c"], [None]], pa.list_(pa.string())),
        "note": pa.nulls(3),
    }
    job.parquet(pa.table(columns)).set(errors__max_failed_fraction=1.0)
    job.config["input"]["columns"] = {"id": "doc", "prompt": "prompt"}
    assert job.run().exit_code == 0
    assert codes(job) == ["null_prompt", None, "invalid_params"]  # a list of stop strings holds strings
    assert [row["id"] for row in job.rows()] == ["x", None, "z"]
    assert [row["note"] for row in job.rows()] == [None] * 3


def test_t01_nothing_but_nulls(job: Job) -> None:
    job.parquet(pa.table({"prompt": pa.nulls(3)})).set(errors__max_failed_fraction=1.0)
    assert job.run().exit_code == 0
    assert codes(job) == ["null_prompt"] * 3 and texts(job) == [None] * 3


def test_t01_a_template_prints_no_null(job: Job) -> None:
    job.parquet(pa.table({"a": ["x", None], "b": [1, 2]})).set(errors__max_failed_fraction=1.0)
    job.config["prompt"] = {"template": "say {{ a }} {{ b }}"}
    assert job.run().exit_code == 0
    assert texts(job) == ["say x 1", None] and codes(job) == [None, "template_error"]


def test_t02_an_empty_prompt_never_reaches_the_engine(job: Job) -> None:
    job.parquet(prompts("", "   ", "x")).set(errors__max_failed_fraction=1.0)
    assert job.run().exit_code == 0
    # The stub's tokenizer has no BOS: blanks have no tokens either.
    assert codes(job) == ["empty_prompt", "empty_prompt", None]
    steps = pq.read_table(job.out / "metrics" / "steps")
    assert sum(steps.column("num_prefill_tokens").to_pylist()) == 1


def test_t04_a_wrong_column_name(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.parquet(pa.table({"prompt": ["a"], "num": [1]}))
    job.config["input"]["columns"] = {"prompt": "promt"}
    for command in ("validate", "submit"):
        assert run_command([command, str(job.file)], job.stub()) == 78
        err = capsys.readouterr().err
        assert "promt" in err and "found prompt, num" in err and "did you mean prompt?" in err
        assert "in.parquet" in err


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1]),
        pa.array([1.5]),
        pa.array([True]),
        pa.array([["a"]]),
        pa.array([{"a": "b"}]),
        pa.array([0], pa.timestamp("s")),
        pa.array([1]).dictionary_encode(),
        pa.array([b"abc"], pa.binary(3)),
    ],
    ids=lambda column: str(column.type),
)
def test_t05_a_prompt_that_is_no_text_is_refused(job: Job, column: pa.Array) -> None:
    job.parquet(pa.table({"prompt": column}))
    stored = pq.read_schema(job.folder / "in.parquet").field("prompt").type
    with pytest.raises(ConfigError) as raised:
        job.run()
    assert f"'prompt' of {job.folder / 'in.parquet'} is {stored}" in str(raised.value)
    assert job.builder.num_loads == 0 and not (job.out / "data").exists()


@pytest.mark.parametrize("kind", ["binary", "large_binary", "binary_view", "dictionary"])
def test_t05_bytes_that_are_not_utf8(job: Job, kind: str) -> None:
    column = pa.array([b"a", b"\xff", b"ab \xe2\x82", b"c", b"\xc3\xa9"])
    job.parquet(pa.table({"prompt": column.dictionary_encode() if kind == "dictionary" else column.cast(kind)}))
    assert job.set(errors__max_failed_fraction=1.0).run().exit_code == 0
    assert texts(job) == ["a", None, None, "c", "é"]
    assert codes(job) == [None, "encoding_error", "encoding_error", None, None]
    assert "'prompt' is not UTF-8 at byte 3" in job.rows()[2]["error_message"]


def text_columns() -> dict[str, pa.Array]:
    plain = pa.array(["a b", None, "é \U0001f600", "a b", ""])
    columns = {str(kind): plain.cast(kind) for kind in (pa.string(), pa.large_string(), pa.string_view())}
    columns["dictionary"] = plain.dictionary_encode()
    columns["dictionary large"] = plain.cast(pa.large_string()).dictionary_encode()
    columns["dictionary int8"] = plain.dictionary_encode().cast(pa.dictionary(pa.int8(), pa.string()))
    columns["binary"] = plain.cast(pa.binary())
    columns["large binary"] = plain.cast(pa.large_binary())
    columns["binary view"] = plain.cast(pa.binary_view())
    return columns


@pytest.mark.parametrize("role", ["prompt", "id", "template"])
@pytest.mark.parametrize("kind", text_columns())
def test_t06_all_text_types_give_the_same(job: Job, kind: str, role: str) -> None:
    column = text_columns()[kind]
    job.set(errors__max_failed_fraction=1.0)
    if role == "prompt":
        job.parquet(pa.table({"prompt": column}))
        want = ["a b", None, "é \U0001f600", "a b", None]
    elif role == "id":
        job.parquet(pa.table({"doc": column, "prompt": ["x"] * 5}))
        job.config["input"]["columns"] = {"id": "doc", "prompt": "prompt"}
        want = ["a b", None, "é \U0001f600", "a b", ""]
    else:
        job.parquet(pa.table({"word": column}))
        job.config["prompt"] = {"template": "say {{ word or 'nothing' }}"}
        want = ["say a b", "say nothing", "say é \U0001f600", "say a b", "say nothing"]
    assert job.run().exit_code == 0
    assert [row["id" if role == "id" else "text"] for row in job.rows()] == want


def no_rows(job: Job, shape: str) -> Job:
    table = pa.table({"prompt": pa.array([], pa.string()), "num": pa.array([], pa.int8())})
    if shape == "one row group":
        return job.parquet(table)
    if shape == "two files":
        return folder_of(job, {"a.parquet": table, "b.parquet": table})
    with pq.ParquetWriter(job.folder / "in.parquet", table.schema):
        pass
    job.config["input"]["path"] = str(job.folder / "in.parquet")
    return job


@pytest.mark.parametrize("shape", ["one row group", "no row group", "two files"])
def test_t08_no_rows(job: Job, tmp_path_factory: pytest.TempPathFactory, shape: str) -> None:
    result = no_rows(job, shape).run()
    assert (result.exit_code, job.is_success, job.builder.num_loads) == (0, True, 0)
    report = job.report()
    assert report["num_rows"] == report["num_failed"] == 0 and report["failed_fraction"] is None
    other = Job(tmp_path_factory.mktemp("full")).parquet(pa.table({"prompt": ["a"], "num": pa.array([1], pa.int8())}))
    other.run()
    parts = [[pq.read_table(part) for part in sorted((out / "data").iterdir())] for out in (job.out, other.out)]
    assert len(parts[0]) == 1 and parts[0][0].num_rows == 0
    assert parts[0][0].schema.remove_metadata() == parts[1][0].schema.remove_metadata()
    assert job.run().was_done


def test_t08_empty_files_and_row_groups_between_full_ones(job: Job) -> None:
    files: dict[str, pa.Table | bytes] = {"1.parquet": prompts(), "2.parquet": prompts("a"), "3.parquet": prompts()}
    folder_of(job, files)
    with pq.ParquetWriter(job.folder / "in" / "4.parquet", prompts().schema) as writer:
        for table in (prompts(), prompts("b", "c"), prompts(), prompts("d")):
            writer.write_table(table)
    assert job.run().exit_code == 0
    assert texts(job) == ["a", "b", "c", "d"]


def whole_file(job: Job) -> bytes:
    pq.write_table(prompts("a", "b"), job.folder / "whole")
    return (job.folder / "whole").read_bytes()


@pytest.mark.parametrize("fault", ["zero bytes", "truncated", "jsonl inside", "torn footer", "only the magic"])
def test_t09_a_broken_file_is_found_before_anything_runs(
    job: Job, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    whole = whole_file(job)
    size = int.from_bytes(whole[-8:-4], "little")
    broken = {
        "zero bytes": b"",
        "truncated": whole[:-10],
        "jsonl inside": b'{"prompt": "a"}\n' * 10,
        "torn footer": whole[: -8 - size] + b"\xff" * size + whole[-8:],
        "only the magic": b"PAR1",
    }[fault]
    folder_of(job, {"1.parquet": prompts("a"), "2.parquet": broken})
    for command in ("validate", "submit"):
        builder = job.stub()
        assert run_command([command, str(job.file)], builder) == 65
        err = capsys.readouterr().err
        assert str(job.folder / "in" / "2.parquet") in err and err.count("\n") == 1, err
        assert builder.num_loads == 0
    assert not list((job.out / "data").glob("*"))


@pytest.mark.parametrize("content", ["", "\n", "\n  \r\n\t\n", "\ufeff", "\ufeff\n"])
def test_t10_jsonl_without_a_record(job: Job, content: str) -> None:
    (job.folder / "in.jsonl").write_bytes(content.encode())
    result = job.run()
    assert (result.exit_code, job.is_success, job.builder.num_loads) == (0, True, 0)
    assert job.report()["num_rows"] == 0
    (part,) = (job.out / "data").iterdir()
    assert pq.read_table(part).column_names == ["row_index", "id", *RESULTS]


def test_t12_our_own_output_as_input(job: Job, tmp_path_factory: pytest.TempPathFactory) -> None:
    job.prompts(3).run()
    again = Job(tmp_path_factory.mktemp("again"))
    again.config["input"] = {"path": str(job.out / "data"), "columns": {"prompt": "text"}}
    with pytest.raises(ConfigError, match=r"column 'row_index', 'id', .*has a name that the output uses itself"):
        again.run()
    again.config["output"]["keep_columns"] = "none"
    again.config["input"]["columns"]["id"] = "row_index"
    assert again.run().exit_code == 0
    assert [(row["id"], row["text"]) for row in again.rows()] == [(str(i), f"word {i}") for i in range(3)]


@pytest.mark.parametrize("name", ["row_index", "id", *RESULTS, "token_ids", "logprobs"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_t12_each_name_of_ours(job: Job, name: str, kind: str) -> None:
    if kind == "jsonl":
        job.jsonl([{"prompt": "a", name: "mine"}])
    else:
        job.parquet(pa.table({"prompt": ["a"], name: ["mine"]}))
    if name == "logprobs":  # that is a sampling parameter of the row
        assert job.run().exit_code == 2
        assert codes(job) == ["invalid_params"]
        return
    with pytest.raises(ConfigError, match=f"column '{name}' has a name that the output uses itself"):
        job.run()
