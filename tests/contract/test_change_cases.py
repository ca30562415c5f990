"""Cases t43 to t45: a job that is submitted again, changed or not, on an input that changed or not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specrun.jobs.errors import ConfigError, OutputError
from tests.contract.stub_jobs import assert_whole, num_run, num_spilled, parts, visible_rows
from tests.runner.conftest import Job, StubBuilder


def half_done(job: Job, num_rows: int = 300) -> Job:
    """Its engine has crashed with one part committed and another one half full."""
    rows: list[Any] = [{"prompt": f"word {i}"} for i in range(num_rows)]
    with pytest.raises(RuntimeError, match="holds the token"):
        job.jsonl(rows).set(run__order="input").run(raise_on="150", max_num_seqs=20)
    del job.config["run"]
    assert visible_rows(job) == list(range(100)) and num_spilled(job) > 0
    return job


CHANGES: list[tuple[str, Any]] = [
    ("sampling__temperature", 0.5),
    ("sampling__seed", 1),
    ("sampling__max_tokens", 17),
    ("sampling__stop", ["zz"]),
    ("prompt__system", "be brief"),
    ("prompt__template", "{{ prompt }}!"),
    ("prompt__overflow", "clamp"),
    ("model__dtype", "float32"),
    ("model__max_model_len", 99),
    ("engine__deterministic", True),
    ("output__token_ids", True),
    ("output__keep_columns", "none"),
    ("input__limit", 200),
]


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize(("key", "value"), CHANGES, ids=[key for key, _ in CHANGES])
def test_t43_a_change_that_matters_is_refused(job: Job, key: str, value: Any, is_done: bool) -> None:
    if is_done:
        job.prompts(3).run()
    else:
        half_done(job)
    rows = job.rows()
    job.set(**{key: value})
    with pytest.raises(ConfigError) as raised:
        job.run(has_chat_template=True)
    assert key.replace("__", ".") in str(raised.value) and "output.if_exists: overwrite" in str(raised.value)
    assert job.builder.num_loads == 0 and job.rows() == rows


@pytest.mark.parametrize("what", ["weights", "chat template"])
def test_t43_changed_files_are_refused(job: Job, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template = job.folder / "chat.jinja"
    template.write_text("{{ messages[0].content }}")
    job.set(prompt__chat_template=str(template)).prompts(3).run()
    if what == "weights":
        monkeypatch.setattr(StubBuilder, "identity", lambda self, spec: {"stub": 2})
    else:
        template.write_text("{{ messages[0].content }} ")
    with pytest.raises(ConfigError, match="another configuration"):
        job.run()


def test_t43_overwrite_begins_anew(job: Job) -> None:
    half_done(job).set(sampling__max_tokens=1, output__if_exists="overwrite")
    assert job.run().exit_code == 0
    assert [row["text"] for row in job.rows()] == ["word"] * 300 and num_run(job) == 300


HARMLESS: list[tuple[str, Any]] = [
    ("name", "another name"),
    ("model__path", "the same weights elsewhere"),
    ("errors__max_failed_fraction", 0.5),
    ("errors__abort_after_consecutive", 7),
    ("run__grace_s", 1.0),
    ("run__max_runtime_s", 3600.0),
    ("run__order", "auto"),
    ("engine__max_num_seqs", 3),
    ("engine__max_num_batched_tokens", 4096),
    ("engine__gpu_memory_utilization", 0.5),
    ("speculation__method", "ngram"),
    ("speculation__max_draft_tokens", 2),
    ("metrics__prometheus_port", 0),
    ("output__if_exists", "skip"),
]


@pytest.mark.parametrize(("key", "value"), HARMLESS, ids=[key for key, _ in HARMLESS])
def test_t43_a_change_that_does_not_matter_resumes(job: Job, key: str, value: Any) -> None:
    num_done = half_done(job).report()["num_rows"]
    if key == "name":
        job.config["name"] = value
    else:
        job.set(**{key: value})
    assert job.run().exit_code == 0
    assert num_run(job) == 300 - num_done
    assert_whole(job, 300)


def rewrite(job: Job, kind: str, texts: list[str]) -> None:
    if kind == "jsonl":
        job.jsonl([{"prompt": text} for text in texts])
    else:
        path = job.folder / "in.parquet"
        pq.write_table(pa.table({"prompt": texts}), path, compression="none", write_statistics=False)
        job.config["input"]["path"] = str(path)


TEXTS = [f"word {i}" for i in range(100, 400)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("change", ["append", "remove", "reorder", "edit", "edit and keep size and time"])
def test_t44_another_input_is_refused(job: Job, kind: str, change: str) -> None:
    rewrite(job.set(run__order="input"), kind, TEXTS)  # so that rows are done before the engine fails
    with pytest.raises(RuntimeError):
        job.run(raise_on="250", max_num_seqs=20)
    path = Path(job.config["input"]["path"])
    before = path.stat()
    changed = {
        "append": [*TEXTS, "word 400"],
        "remove": TEXTS[:-1],
        "reorder": [TEXTS[1], TEXTS[0], *TEXTS[2:]],
        "edit": ["another", *TEXTS[1:]],
        "edit and keep size and time": ["wurd 100", *TEXTS[1:]],
    }[change]
    rewrite(job, kind, changed)
    if change.endswith("time"):
        assert path.stat().st_size == before.st_size
        # What was read before is trusted where size and time of a file are as they were; a new inode is no sign.
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    rows = job.rows()
    with pytest.raises(ConfigError, match="another configuration"):
        job.run()
    assert job.builder.num_loads == 0 and job.rows() == rows
    assert job.set(output__if_exists="overwrite").run().exit_code == 0
    assert [row["text"] for row in job.rows()] == changed


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_t44_a_copied_file_is_the_same_input(job: Job, kind: str) -> None:
    rewrite(job, kind, TEXTS)
    with pytest.raises(RuntimeError):
        job.run(raise_on="250", max_num_seqs=20)
    path = Path(job.config["input"]["path"])
    shutil.copy(path, path.with_name("copy"))
    os.replace(path.with_name("copy"), path)
    os.utime(path, (1, 1))
    num_done = job.report()["num_rows"]
    assert job.run().exit_code == 0
    assert num_run(job) == 300 - num_done and [row["text"] for row in job.rows()] == TEXTS


def test_t44_a_file_more_in_the_folder(job: Job) -> None:
    (job.folder / "in").mkdir()
    job.config["input"]["path"] = str(job.folder / "in")
    pq.write_table(pa.table({"prompt": ["a"]}), job.folder / "in" / "b.parquet")
    assert job.run().exit_code == 0
    pq.write_table(pa.table({"prompt": ["0"]}), job.folder / "in" / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet|b\.parquet"):
        job.run()


def test_t45_a_finished_job_is_left_alone(job: Job) -> None:
    job.prompts(250).run()
    files = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in job.out.rglob("*")}
    for if_exists in ("resume", "skip"):
        result = job.set(output__if_exists=if_exists).run()
        assert (result.exit_code, result.was_done, job.builder.num_loads) == (0, True, 0)
        assert result.report["num_ok"] == 250
    assert files == {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in job.out.rglob("*")}
    with pytest.raises(OutputError, match="is not empty"):
        job.set(output__if_exists="error").run()
    assert_whole(job, 250)


def test_t45_a_date_in_the_path_gives_a_new_folder(job: Job) -> None:
    job.prompts(3).set(output__path=str(job.folder / "out-{date}"))
    assert job.run().exit_code == 0
    (made,) = job.folder.glob("out-*")
    assert (made / "_SUCCESS").exists() and "{" not in made.name


def test_t45_a_part_that_is_gone_is_made_again(job: Job) -> None:
    job.prompts(250).run()
    parts(job)[1].unlink()
    assert job.run().exit_code == 0
    assert num_run(job) == 100
    assert_whole(job, 250)
