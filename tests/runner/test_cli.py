"""The command: exit codes, what goes to stdout and what to stderr."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from specrun.runner.bench_report import BenchReport
from specrun.runner.cli import run_command
from specrun.runner.exit_codes import exit_code_of

ROOT = Path(__file__).parent.parent.parent
STUB = f"""
import runpy, sys
from specrun.runner.cli import run_command
builder = runpy.run_path({str(ROOT / "tests/runner/conftest.py")!r}, run_name="stub")["StubBuilder"]
sys.exit(run_command(sys.argv[2:], builder(eval(sys.argv[1]))))
"""


def python(*args):
    command = [sys.executable, *args]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT / ".src")}


def start_stub(job, *args, **options):
    """A submit, or the command that `args` name, in a process of its own; options are StubBuilder's."""
    command = [sys.executable, "-c", STUB, repr(options), *(args or ("submit", str(job.file)))]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_until(true, process):
    deadline = time.monotonic() + 60
    while not true():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for_rows(job, process):
    """Until the spill holds results."""

    def has_rows():
        with suppress(FileNotFoundError):  # committed meanwhile
            return any(path.stat().st_size for path in job.out.glob(".specrun/shard-*/spill/*.jsonl"))

    wait_until(has_rows, process)


def test_help_is_light_and_quick():
    heavy = "torch", "transformers", "pyarrow", "pydantic", "numpy", "rich", "prometheus_client"
    code = f"""
import sys
from specrun.runner.cli import run_command
assert run_command(["--help"]) == run_command(["submit", "--help"]) == 0
sys.exit(str([name for name in {heavy!r} if name in sys.modules]) if set({heavy!r}) & set(sys.modules) else 0)
"""
    started = time.perf_counter()
    result = python("-c", code)
    assert result.returncode == 0, result.stderr
    assert "submit" in result.stdout
    assert time.perf_counter() - started < 5  # 0.1 s on a machine that does nothing else


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["submit"], 64, "Missing argument"),
        (["submti"], 64, "No such command"),
        (["submit", "no-such.yaml"], 78, "no-such.yaml: cannot read the job file"),
        (["report", "no-such-folder"], 66, "has no report.json"),
    ],
)
def test_usage_and_missing_files(args, code, text):
    result = python("-m", "specrun.runner", *args)
    assert result.returncode == code
    assert text in result.stderr and not result.stdout


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"sampling__max_tokns": 3}, 78, "did you mean max_tokens?"),
        ({"input__path": "no-such.parquet"}, 66, "no-such.parquet"),
        ({"input__columns": {"prompt": "promt"}}, 78, "found prompt"),
        ({"model__path": "./no-such-model"}, 69, "does not exist"),
        ({"speculation__policy": "nver"}, 78, "did you mean"),
        ({"output__path": "/proc/no"}, 73, "cannot be written"),
    ],
)
def test_configuration_errors(job, capsys, monkeypatch, change, code, text):
    monkeypatch.chdir(job.folder)
    if "model__path" not in change:
        (job.folder / "config.json").write_text('{"model_type": "llama"}')
        (job.folder / "model.safetensors").write_text("")
        job.set(model__path=str(job.folder))
    job.prompts(2).set(**change)
    assert run_command(["submit", str(job.file)]) == code
    out, err = capsys.readouterr()
    assert text in err and err.startswith("specrun: ") and not out


def test_a_broken_parquet_file(job, capsys):
    job.config["input"]["path"] = str(job.folder / "in.parquet")
    (job.folder / "in.parquet").write_bytes(b"PAR1 no")
    assert run_command(["submit", str(job.file)], job.stub()) == 65
    assert "in.parquet" in capsys.readouterr().err


def test_json_is_one_object_on_stdout(job, capsys):
    job.prompts(20)
    assert run_command(["submit", "--json", str(job.file)], job.stub()) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["num_ok"] == 20 and json.loads(out)["exit_code"] == 0
    assert err == ""
    assert run_command(["submit", str(job.file), "--json", "--set", "sampling.max_tokens=9"], job.stub()) == 78
    out, err = capsys.readouterr()
    assert json.loads(out) == {"state": "failed", "exit_code": 78, "error": err.removeprefix("specrun: ").rstrip()}


@pytest.mark.parametrize("args", [["submit", "--json"], ["bench", "job.yaml", "--json", "--batch", "0"]])
def test_a_usage_error_is_told_in_json_too(job, capsys, monkeypatch, args):
    monkeypatch.chdir(job.prompts(1).file.parent)
    assert run_command(args) == 64
    out, err = capsys.readouterr()
    assert json.loads(out)["exit_code"] == 64 and json.loads(out)["error"] in err


class Numbers(BenchReport):
    def __init__(self):
        pass

    def text(self):
        return "the table"

    def to_json(self):
        return {"runs": 3}


def test_bench_numbers_that_cannot_be_saved_are_shown(job, capsys, monkeypatch):
    monkeypatch.setattr("specrun.runner.bench.run_bench", lambda *args: Numbers())
    args = ["bench", str(job.prompts(1).file), "--save", str(job.folder), "--policies", "never"]
    assert run_command(args) == 73
    assert "the table" in capsys.readouterr().out
    assert run_command([*args, "--json"]) == 73
    out, err = capsys.readouterr()
    assert json.loads(out) == {"runs": 3} and "--save" in err


def test_submit_report_and_a_second_submit(job, capsys):
    job.prompts(20)
    assert run_command(["submit", str(job.file)], job.stub(num_draft_tokens=1)) == 0
    out, _ = capsys.readouterr()
    table = dict(line.split(None, 1) for line in out.splitlines())
    assert table["rows"] == "20" and table["failed"] == "0" and table["data"] == str(job.out / "data")
    assert run_command(["report", str(job.out)]) == 0
    assert "100.0% of draft tokens, 2.00 tokens a verification" in capsys.readouterr().out
    assert run_command(["report", str(job.out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_rows"] == 20
    assert run_command(["submit", str(job.file)], job.stub()) == 0
    assert "nothing was run" in capsys.readouterr().err


def test_a_report_of_a_job_that_was_killed(job, capsys):
    job.prompts(3).run()
    (job.out / "report.json").unlink()
    assert run_command(["report", str(job.out)]) == 0
    assert "1 of 1 shards done" in capsys.readouterr().out
    (job.out / ".specrun" / "shard-00000" / "report.json").unlink()
    assert run_command(["report", str(job.out)]) == 66
    assert "still runs, or was killed" in capsys.readouterr().err


@pytest.mark.parametrize("args", [["report", "OUT"], ["report", "OUT", "--json"], ["schema"], ["submit", "JOB"]])
def test_a_reader_that_has_enough(job, args):
    """As `| head -1` does, at the latest moment and at the earliest."""
    job.prompts(3).run()
    names = {"OUT": str(job.out), "JOB": str(job.file)}
    command = [sys.executable, "-c", STUB, "{}", *(names.get(arg, arg) for arg in args)]
    for is_read in (True, False):
        pipe = subprocess.PIPE
        with subprocess.Popen(command, env=environment(), stdout=pipe, stderr=pipe, text=True) as process:
            assert process.stdout and process.stderr
            assert not is_read or process.stdout.readline()
            process.stdout.close()
            err = process.stderr.read()
        assert process.returncode == 0, err
        assert not [line for line in err.splitlines() if "nothing was run" not in line]


@pytest.mark.parametrize("names", [["stdout"], ["stderr"], ["stdout", "stderr"]])
def test_the_exit_code_of_a_job_stays_where_nobody_reads_what_it_says(job, names):
    job.jsonl([{"prompt": None}])
    with start_stub(job) as process:
        for name in names:
            getattr(process, name).close()
        process.wait(timeout=60)
    assert process.returncode == 2
    assert not job.is_success and job.report()["exit_code"] == 2


def test_too_many_failed_rows(job, capsys):
    job.jsonl([{"prompt": "ok"}, {"prompt": None}])
    assert run_command(["submit", str(job.file)], job.stub()) == 2
    assert "1 of 2 rows failed, more than errors.max_failed_fraction allows" in capsys.readouterr().err


def test_an_internal_error_is_one_line(job, capsys, monkeypatch):
    job.jsonl([{"prompt": "CRASH"}])
    monkeypatch.delenv("SPECRUN_DEBUG", raising=False)
    assert run_command(["submit", str(job.file)], job.stub(raise_on="CRASH")) == 70
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "internal error: RuntimeError" in err and "SPECRUN_DEBUG=1" in err
    monkeypatch.setenv("SPECRUN_DEBUG", "1")
    assert run_command(["submit", str(job.file)], job.stub(raise_on="CRASH")) == 70
    assert "Traceback" in capsys.readouterr().err


def test_validate(job, capsys):
    job.jsonl(
        [
            {"prompt": "one two", "doc": "a"},
            {"prompt": "w " * 5000, "doc": "a"},
            {"prompt": None, "doc": "b"},
            {"prompt": "one two three", "doc": "c"},
        ]
    )
    job.config["input"]["columns"] = {"id": "doc", "prompt": "prompt"}
    assert run_command(["validate", str(job.file)], job.stub()) == 65
    out, err = capsys.readouterr()
    assert "first prompt, as the model sees it:\none two\n" in out
    assert "p50 3, p95 5,000, max 5,000" in out and "duplicate ids   1" in out
    assert "row 1: the prompt has 5000 tokens" in out and "max_tokens: 16" in out
    assert "2 of 4 rows would fail" in err
    job.set(errors__max_failed_fraction=0.5)
    builder = job.stub()
    assert run_command(["validate", "--json", str(job.file)], builder) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["error_codes"] == {"null_prompt": 1, "prompt_too_long": 1} and builder.num_loads == 0
    assert not job.out.exists()


@pytest.mark.parametrize("where", ["/proc/no/such", "in.jsonl", "in.jsonl/out"])
def test_validate_and_report_of_a_folder_that_cannot_be(job, capsys, where):
    job.prompts(1).set(output__path=str(job.folder / where))
    assert run_command(["validate", str(job.file)], job.stub()) == 73
    assert "cannot be written" in capsys.readouterr().err
    assert run_command(["report", job.config["output"]["path"]]) == 66
    assert "has no report.json" in capsys.readouterr().err


def test_validate_minds_an_output_that_must_not_exist(job, capsys):
    job.prompts(1).set(output__if_exists="error")
    assert run_command(["validate", str(job.file)], job.stub()) == 0
    assert not job.out.exists()
    (job.out / "data").mkdir(parents=True)
    assert run_command(["validate", str(job.file)], job.stub()) == 73


def test_schema(capsys):
    assert run_command(["schema"]) == 0
    assert "sampling" in json.loads(capsys.readouterr().out)["properties"]


def test_errors_have_the_exit_codes_of_the_manual():
    from specrun.engine.errors import EngineError, ModelError
    from specrun.jobs import errors

    named = [errors.InputError, errors.InputMissing, errors.OutputError, errors.StorageError, errors.TemporaryError]
    assert [exit_code_of(error("")) for error in named] == [65, 66, 73, 74, 75]
    assert [exit_code_of(error("")) for error in (errors.ConfigError, ModelError, EngineError, KeyError)] == [
        78,
        69,
        69,
        70,
    ]
