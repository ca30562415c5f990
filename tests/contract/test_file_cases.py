"""Cases t13 to t15: inputs of several files, as whole jobs."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specrun.jobs.errors import InputError, InputMissing
from tests.contract.input_tables import codes, folder_of, prompts, texts
from tests.runner.conftest import Job


def test_t13_columns_and_types_that_differ_between_files(job: Job) -> None:
    a = pa.table({"prompt": pa.nulls(1), "p": pa.nulls(1)})
    b = pa.table({"prompt": ["x"], "p": ["y"], "q": [7]})
    c = pa.table({"q": [8], "prompt": ["z"], "r": [True]})
    folder_of(job, {"a.parquet": a, "b.parquet": b, "c.parquet": c}).set(errors__max_failed_fraction=1.0)
    assert job.run().exit_code == 0
    rows = job.rows()
    assert codes(job) == ["null_prompt", None, None]
    assert [(r["p"], r["q"], r["r"]) for r in rows] == [(None, None, None), ("y", 7, None), (None, 8, True)]
    schema = pq.read_schema(next((job.out / "data").iterdir()))
    assert [schema.field(name).type for name in "pqr"] == [pa.string(), pa.int64(), pa.bool_()]


@pytest.mark.parametrize(
    "other",
    [pa.array(["x"]), pa.array([1.5]), pa.array([True]), pa.array([[1]]), pa.array([0], pa.timestamp("ms"))],
    ids=lambda column: str(column.type),
)
def test_t13_types_that_exclude_each_other(job: Job, other: pa.Array) -> None:
    a, b = (pa.table({"prompt": ["a"], "q": column}) for column in (pa.array([1]), other))
    folder_of(job, {"a.parquet": a, "b.parquet": b})
    with pytest.raises(InputError) as raised:
        job.run()
    text = str(raised.value)
    stored = pq.read_schema(job.folder / "in" / "b.parquet").field("q").type
    assert "'q' is int64 in" in text and f"and {stored} in" in text
    assert str(job.folder / "in" / "a.parquet") in text and str(job.folder / "in" / "b.parquet") in text
    assert job.builder.num_loads == 0


def test_t13_a_wider_type_of_the_same_kind_holds_both(job: Job) -> None:
    columns = [
        {"i": pa.array([-1], pa.int8()), "f": pa.array([0.5], pa.float32()), "s": ["x"], "l": [[1]]},
        {"i": pa.array([2**62]), "f": pa.array([0.1]), "s": pa.array(["y"], pa.large_string()), "l": pa.nulls(1)},
    ]
    a, b = (pa.table({"prompt": ["p"], **found}) for found in columns)
    assert folder_of(job, {"a.parquet": a, "b.parquet": b}).run().exit_code == 0
    rows = [tuple(row[name] for name in "ifsl") for row in job.rows()]
    assert rows == [(-1, 0.5, "x", [1]), (2**62, 0.1, "y", None)]


def test_t13_two_kinds_of_prompt_text_go_together(job: Job) -> None:
    a = pa.table({"prompt": ["a"]})
    b = pa.table({"prompt": pa.array([b"b"])})
    c = pa.table({"prompt": pa.array(["c"]).dictionary_encode()})
    assert folder_of(job, {"a.parquet": a, "b.parquet": b, "c.parquet": c}).run().exit_code == 0
    assert texts(job) == ["a", "b", "c"]


def test_t13_jsonl_keys_that_differ_between_lines(job: Job) -> None:
    job.jsonl([{"prompt": "a"}, {"q": 1, "prompt": "b"}, {"prompt": "c", "q": None, "r": "x"}])
    assert job.run().exit_code == 0
    assert [(row["q"], row["r"]) for row in job.rows()] == [(None, None), (1, None), (None, "x")]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_t14_files_come_in_natural_order(job: Job, kind: str) -> None:
    names = [f"part-{n}.{kind}" for n in (1, 2, 10, 100)]
    files: dict[str, Any] = {}
    for name in sorted(names):
        files[name] = prompts(f"a {name}", f"b {name}")
        if kind == "jsonl":
            rows = [json.dumps({"prompt": f"{letter} {name}"}) for letter in "ab"]
            files[name] = "\n".join(rows).encode()
    assert folder_of(job, files).run().exit_code == 0
    assert texts(job) == [f"{letter} {name}" for name in names for letter in "ab"]
    assert [row["row_index"] for row in job.rows()] == list(range(8))
    manifest = (job.out / "manifest.json").read_text()
    assert sorted(names, key=manifest.index) == names


def test_t15_what_is_no_data_in_the_input_folder(job: Job) -> None:
    files: dict[str, pa.Table | bytes] = {
        "a.parquet": prompts("a"),
        "_SUCCESS": b"",
        ".a.parquet.crc": b"crc",
        "_b.parquet": prompts("b"),
        ".c.parquet": prompts("c"),
        "report.json": b"{}",
        "manifest.json": b"{}",
        "notes.txt": b"x",
        "a.parquet.tmp": b"x",
        "errors/e.parquet": prompts("e"),
        "_delta_log/f.parquet": prompts("f"),
    }
    assert folder_of(job, files).run().exit_code == 0
    assert texts(job) == ["a"]


def test_t15_only_two_stars_go_into_folders(job: Job) -> None:
    files: dict[str, pa.Table | bytes] = {
        "a.parquet": prompts("a"),
        "x/b.parquet": prompts("b"),
        "x/y/c.parquet": prompts("c"),
        "_temporary/d.parquet": prompts("d"),
        ".hidden/e.parquet": prompts("e"),
    }
    folder_of(job, files)
    job.config["input"]["path"] = str(job.folder / "in" / "**" / "*.parquet")
    assert job.run().exit_code == 0
    assert sorted(text or "" for text in texts(job)) == ["a", "b", "c"]


def test_t15_a_folder_of_nothing_but_other_files(job: Job) -> None:
    folder_of(job, {"report.json": b"{}", "sub/a.parquet": prompts("a")})
    with pytest.raises(InputMissing, match=r"no \*\.parquet, \*\.jsonl"):
        job.run()
