"""What must hold of an output: while a job is killed again and again, and once it is complete."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tests.chaos.chaos_job import ChaosJob
from tests.chaos.remains import PART_NAME, torn_parts, work_files

POLL_S = 0.004


class Violation(AssertionError):
    """A row was lost, doubled or silently wrong, or a file that must be whole is not."""


def parts_of(out: Path) -> dict[str, pa.Table]:
    """The tables in data/ by name, in order."""
    return {path.name: pq.read_table(path).replace_schema_metadata() for path in sorted((out / "data").iterdir())}


def ranges_of(out: Path) -> dict[str, tuple[bytes, bytes]]:
    """The range of rows that each part says it covers."""
    ranges = {}
    for path in sorted((out / "data").iterdir()):
        metadata = pq.read_schema(path).metadata
        ranges[path.name] = (metadata[b"specrun.row_start"], metadata[b"specrun.row_end"])
    return ranges


def demand(holds: bool, message: str) -> None:
    """Raises Violation."""
    if not holds:
        raise Violation(message)


def check_rows(job: ChaosJob, table: pa.Table) -> None:
    """The table is what the job's rows must come to."""
    expected = job.expected
    names = [name for name in table.column_names if name != "error_message"]
    demand(names == expected.column_names, f"columns {names}, expected {expected.column_names}")
    indices = table.column("row_index").to_pylist()
    demand(indices == list(range(len(job.rows))), f"row_index is {indices}, {len(job.rows)} rows expected")
    failed = table.column("error_code").is_valid()
    has_message = table.column("error_message").is_valid()
    demand(failed.equals(has_message), "a row has a code without message, or a message without code")
    for name in names:
        column = table.column(name)
        if name in ("prompt_tokens", "token_ids"):
            column = pc.if_else(failed, pa.scalar(None, column.type), column)
        want = expected.column(name)
        demand(column.type == want.type, f"column {name} is {column.type}, expected {want.type}")
        if column.combine_chunks() != want.combine_chunks():
            pairs = zip(column.to_pylist(), want.to_pylist(), strict=True)
            index, (got, wanted) = next((i, pair) for i, pair in enumerate(pairs) if repr(pair[0]) != repr(pair[1]))
            raise Violation(f"row {index}, column {name}: {got!r}, expected {wanted!r}")


def check_complete(job: ChaosJob, out: Path, undisturbed: Path | None) -> None:
    """The job is done, exact, counted right, and has cleaned up behind itself."""
    parts = parts_of(out)
    check_rows(job, pa.concat_tables(parts.values()))
    if undisturbed is not None:
        check_equal(parts, parts_of(undisturbed))
        demand(ranges_of(out) == ranges_of(undisturbed), "the parts cover other ranges than undisturbed")
    demand((out / "_SUCCESS").is_file(), "_SUCCESS is missing")
    manifest = json.loads((out / "manifest.json").read_bytes())
    demand(manifest["state"] == "done", f"manifest.json: state {manifest['state']}")
    left = [*work_files(out, "spill/*"), *work_files(out, "tmp/*")]
    if len(work_files(out, "shard-*")) > 1:  # a shard may die while it finalises; another then ends the job
        left = [path for path in left if path.parent.name == "spill" or PART_NAME.match(path.name)]
    demand(not left, f"left behind: {', '.join(map(str, left))}")
    check_counts(job, out, pa.concat_tables(parts.values()))


def check_equal(parts: dict[str, pa.Table], undisturbed: dict[str, pa.Table]) -> None:
    """Part for part the same names, schema, rows and values as the undisturbed run."""
    demand(list(parts) == list(undisturbed), f"parts {list(parts)}, undisturbed {list(undisturbed)}")
    for name, table in parts.items():
        demand(table.equals(undisturbed[name]), f"{name} differs from the undisturbed run")


def check_counts(job: ChaosJob, out: Path, table: pa.Table) -> None:
    """report.json, job.parquet and errors.jsonl say what is in data/."""
    counts = {
        "num_rows": len(job.rows),
        "num_ok": len(job.rows) - job.num_failed,
        "num_failed": job.num_failed,
        "num_prompt_tokens": pc.sum(table.column("prompt_tokens")).as_py() or 0,
        "num_output_tokens": pc.sum(table.column("output_tokens")).as_py() or 0,
    }
    histograms = {
        "error_codes": Counter(row.error_code for row in job.rows if row.error_code is not None),
        "finish_reasons": Counter(row.finish_reason for row in job.rows),
    }
    report = json.loads((out / "report.json").read_bytes())
    demand(report["state"] == "done" and report["exit_code"] == 0, "report.json does not say done")
    metrics = pq.read_table(out / "metrics" / "job.parquet").to_pylist()[0]
    for name, value in counts.items():
        demand(report[name] == value, f"report.json: {name} {report[name]}, expected {value}")
        demand(metrics[name] == value, f"job.parquet: {name} {metrics[name]}, expected {value}")
    for name, histogram in histograms.items():
        demand(report[name] == histogram, f"report.json: {name} {report[name]}, expected {histogram}")
    errors = out / "errors.jsonl"
    if errors.exists():
        lines = [json.loads(line)["row_index"] for line in errors.read_bytes().splitlines()]
        failed = [index for index, row in enumerate(job.rows) if row.error_code is not None]
        demand(lines == failed, f"errors.jsonl has rows {lines}, expected {failed}")


def check_clean(out: Path, shard: int) -> None:
    """A run that ended by itself, whatever the reason, leaves no half-written part of its shard anywhere."""
    left = [path for path in torn_parts(out) if path.name.startswith(f"part-{shard:05d}-")]
    demand(not left, f"left behind: {', '.join(map(str, left))}")


class PartReader:
    """Reads every file in data/ again and again, as somebody would who does not know that a job is running."""

    def __init__(self, out: Path, undisturbed: dict[str, pa.Table]) -> None:
        self.num_reads = 0
        self.violation: str | None = None
        self._data = out / "data"
        self._undisturbed = undisturbed
        self._seen: dict[str, bytes] = {}
        self._done = threading.Event()

    @contextmanager
    def reading(self) -> Iterator[PartReader]:
        """Reads while the block runs; Violation at its end when a file was not as it must be."""
        thread = threading.Thread(target=self._read_on, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._done.set()
            thread.join()
        demand(self.violation is None, str(self.violation))

    def _read_on(self) -> None:
        while self.violation is None and not self._done.wait(POLL_S):
            self.read_all()

    def read_all(self) -> None:
        """One look at every file; a file that vanishes between listing and reading is looked at again next time."""
        names = [path.name for path in self._data.iterdir()] if self._data.is_dir() else []
        for name in names:
            try:
                content = (self._data / name).read_bytes()
            except FileNotFoundError:
                continue
            self.num_reads += 1
            if self._seen.get(name) != content:
                self._check(name, content)
                self._seen[name] = content

    def _check(self, name: str, content: bytes) -> None:
        expected = self._undisturbed.get(name)
        if expected is None:
            self.violation = f"data/{name} is no part of this job"
            return
        try:
            table = pq.read_table(pa.BufferReader(content)).replace_schema_metadata()
        except (pa.ArrowException, OSError) as error:
            self.violation = f"data/{name} could not be read while the job ran: {error}"
            return
        if not table.equals(expected):
            self.violation = f"data/{name} held other rows while the job ran than undisturbed"
