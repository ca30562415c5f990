"""Cases t54 and t55: the dry run, and what goes to stdout and what to stderr."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from specrun.runner.cli import run_command
from specrun.runner.progress import show_progress
from specrun.runner.status import JobStatus
from tests.contract.program import specrun
from tests.runner.conftest import Job

Capture = pytest.CaptureFixture[str]


def thousand_rows(job: Job) -> list[int]:
    """Prompts of 1 to 100 words, 20 of them null, 10 too long, 5 ids twice; returns the lengths of those that fit."""
    lengths = [1 + i % 100 for i in range(970)]
    random.Random(0).shuffle(lengths)
    rows: list[dict[str, Any]] = [{"doc": f"d{i}", "prompt": "w " * length} for i, length in enumerate(lengths)]
    rows += [{"doc": f"n{i}", "prompt": None} for i in range(20)]
    rows += [{"doc": f"l{i}", "prompt": "w " * 300} for i in range(10)]
    for i in range(5):
        rows[500 + i]["doc"] = rows[i]["doc"]
    job.jsonl(rows).set(errors__max_failed_fraction=0.05)
    job.config["input"]["columns"] = {"id": "doc", "prompt": "prompt"}
    return lengths


def test_t54_validate_tells_what_the_job_would_do(job: Job, capsys: Capture) -> None:
    lengths = thousand_rows(job)
    builder = job.stub(max_model_len=200)
    assert run_command(["validate", "--json", str(job.file)], builder) == 0
    found = json.loads(capsys.readouterr().out)
    assert builder.num_loads == 0 and not job.out.exists()
    assert (found["ok"], found["num_rows"], found["num_ok"], found["num_failed"]) == (True, 1000, 970, 30)
    assert found["error_codes"] == {"null_prompt": 20, "prompt_too_long": 10}
    assert found["num_duplicate_ids"] == 5
    assert found["num_prompt_tokens"] == sum(lengths) and found["max_output_tokens"] == 970 * 16
    counted = sorted([*lengths, *[300] * 10])
    assert found["prompt_tokens"]["p50"] == counted[len(counted) // 2 - 1]
    assert found["prompt_tokens"]["p95"] == counted[round(len(counted) * 0.95) - 1]
    assert found["prompt_tokens"]["max"] == 300
    assert found["first_prompt"].split() == ["w"] * lengths[0]
    assert found["files"] == [str(job.folder / "in.jsonl")]
    assert yaml.safe_load(found["resolved"])["sampling"]["top_p"] == 1.0


def test_t54_validate_for_people(job: Job, capsys: Capture) -> None:
    thousand_rows(job)
    assert run_command(["validate", str(job.file)], job.stub(max_model_len=200)) == 0
    out = capsys.readouterr().out
    for text in ("first prompt", "p50", "p95", "max 300", "null_prompt", "prompt_too_long", "max_tokens: 16"):
        assert text in out


@pytest.mark.parametrize(("fraction", "code"), [(0.03, 0), (0.029, 65)])
def test_t54_validate_judges_as_the_job_would(job: Job, capsys: Capture, fraction: float, code: int) -> None:
    thousand_rows(job)
    job.set(errors__max_failed_fraction=fraction)
    assert run_command(["validate", str(job.file)], job.stub(max_model_len=200)) == code
    err = capsys.readouterr().err
    assert ("30 of 1,000 rows would fail" in err) == (code != 0)
    # And the job itself agrees.
    assert (job.run(max_model_len=200).exit_code == 0) == (code == 0)
    assert job.report()["error_codes"] == {"null_prompt": 20, "prompt_too_long": 10}


@pytest.mark.parametrize("change", [{"input__columns": {"prompt": "nope"}}, {"sampling__top_p": 7}])
def test_t54_validate_and_a_wrong_job(job: Job, capsys: Capture, change: dict[str, Any]) -> None:
    job.prompts(1).set(**change)
    assert run_command(["validate", "--json", str(job.file)], job.stub()) == 78
    out, err = capsys.readouterr()
    assert json.loads(out)["exit_code"] == 78 and err.startswith("specrun: ")


def test_t54_validate_loads_no_weights(model_job: Job, tiny_model: Path) -> None:
    """With the real tokenizer, and weights that are not there."""
    model = model_job.folder / "model"
    model.mkdir()
    for file in tiny_model.iterdir():
        if file.suffix != ".safetensors":
            (model / file.name).write_bytes(file.read_bytes())
    (model / "model.safetensors").write_bytes(b"no weights")
    model_job.set(model__path=str(model)).jsonl([{"prompt": "a" * 10}, {"prompt": "a" * 300}])
    assert run_command(["validate", str(model_job.file)]) == 0
    assert run_command(["submit", str(model_job.file)]) == 69


def test_t55_stdout_has_one_json_object(model_job: Job) -> None:
    """The real program: stdout is for the result, stderr for the rest, whatever libraries want to say."""
    result = specrun("submit", model_job.jsonl([{"prompt": "a"}, {"prompt": None}]).file, "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["num_rows"], found["num_failed"], found["state"]) == (2, 1, "done")
    assert all(line == "loading the model" or " rows · " in line for line in result.stderr.splitlines())
    assert "\r" not in result.stderr and "\x1b" not in result.stdout + result.stderr
    report = specrun("report", model_job.out, "--json")
    assert {key: json.loads(report.stdout)[key] for key in ("num_rows", "state")} == {"num_rows": 2, "state": "done"}


@pytest.mark.parametrize("fault", ["usage", "config", "input", "output", "internal"])
def test_t55_json_on_every_error(job: Job, capsys: Capture, fault: str) -> None:
    job.prompts(3)
    if fault == "config":
        job.set(sampling__top_p=9)
    elif fault == "input":
        (job.folder / "in.jsonl").write_bytes(b"PAR1")
    elif fault == "output":
        job.set(output__path=str(job.folder / "in.jsonl" / "out"))
    args = ["submit", str(job.file), "--json", *(["--nope"] if fault == "usage" else [])]
    code = run_command(args, job.stub(raise_on="word") if fault == "internal" else job.stub())
    assert code == {"usage": 64, "config": 78, "input": 65, "output": 73, "internal": 70}[fault]
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["exit_code"] == code and found["error"]
    assert err.strip()


class Lines:
    """A log file: no terminal."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


def test_t55_progress_in_a_log_is_whole_lines(job: Job) -> None:
    job.prompts(100)
    log: Any = Lines()

    def progress(status: JobStatus) -> Any:
        return show_progress(status, log, interval_s=0.01)

    from specrun.runner.run import run_job

    assert run_job(job.spec, builder=job.stub(sleep_s=0.15, max_num_seqs=10), progress=progress).exit_code == 0
    lines = log.text.splitlines(keepends=True)
    assert len(lines) > 3 and all(line.endswith("\n") for line in lines)
    assert "\r" not in log.text and "\x1b" not in log.text
    assert any("/100 rows" in line and "ETA" in line for line in lines)


def test_t55_progress_is_not_chatty(job: Job, capsys: Capture) -> None:
    began = time.monotonic()
    assert run_command(["submit", str(job.prompts(100).file)], job.stub()) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) <= (time.monotonic() - began) / 5
