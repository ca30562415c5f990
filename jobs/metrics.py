"""What a job did: totals of the job and one row a step, as Parquet and as readable JSON.

Raw counters are stored and rates derived from them. Definitions as vLLM's: the acceptance rate is accepted / drafted
tokens, the mean acceptance length 1 + accepted tokens / drafts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from .counts import RowCounts
from .errors import StorageError
from .folder import OutputFolder, storage_errors
from .schema import JOB_SCHEMA, STEP_SCHEMA

STEPS_PER_PART = 5000
SECONDS_PER_PART = 60.0


@dataclass(slots=True)
class JobMetrics:
    """Totals of a job over all its attempts. Rates are None while there is nothing to divide by."""

    job: str = ""
    state: str = "running"
    exit_code: int | None = None
    attempt: int = 1
    started_at: datetime | None = None
    """Of the first attempt, UTC."""
    finished_at: datetime | None = None
    model: str = ""
    revision: str | None = None
    device: str = ""
    dtype: str = ""
    method: str = ""
    policy: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    """Library -> version."""

    rows: RowCounts = field(default_factory=RowCounts)
    """Rows in data/ and spill, as the OutputWriter counts them: all attempts, whatever was lost with a crash."""

    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    num_generation_tokens: int = 0
    """Tokens that the engine committed, in attempts that ended with a report; an attempt that was killed left none,
    though its finished rows count in rows.num_output_tokens."""
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_steps: int = 0
    num_preemptions: int = 0
    total_s: float = 0.0
    """From the start of the command to its end."""
    load_s: float = 0.0
    busy_s: float = 0.0
    """In engine steps."""
    spec_on_s: float = 0.0
    spec_off_s: float = 0.0
    input_wait_s: float = 0.0
    peak_rss_bytes: int = 0

    @property
    def failed_fraction(self) -> float | None:
        return _ratio(self.rows.num_failed, self.rows.num_rows)

    @property
    def acceptance_rate(self) -> float | None:
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens committed by a verification that carried drafts."""
        accepted = _ratio(self.num_accepted_tokens, self.num_drafts)
        return None if accepted is None else 1 + accepted

    @property
    def spec_on_fraction(self) -> float | None:
        """Share of decoding time in steps that verified drafts."""
        return _ratio(self.spec_on_s, self.spec_on_s + self.spec_off_s)

    @property
    def output_tokens_per_s(self) -> float | None:
        """Generated tokens per second of engine steps."""
        return _ratio(self.num_generation_tokens, self.busy_s)

    @property
    def rows_per_s(self) -> float | None:
        """Rows per second of the whole command, loading included."""
        return _ratio(self.rows.num_rows, self.total_s)

    def add_stats(self, stats: Mapping[str, Any]) -> None:
        """Adds the engine's totals: every entry with the name of a counter here, other entries are ignored."""
        for name in _COUNTERS & stats.keys():
            setattr(self, name, getattr(self, name) + stats[name])
        self.num_accepted_tokens_per_pos = _add_positions(
            self.num_accepted_tokens_per_pos, stats.get("num_accepted_tokens_per_pos", [])
        )

    def merge(self, previous: Mapping[str, Any] | None) -> JobMetrics:
        """The job's totals: these, of the current attempt, and those of read_report(), of the attempts before.

        Rows are left alone: the OutputWriter knows those of all attempts.
        """
        if previous is None:
            return self
        merged = replace(self)
        merged.add_stats({**previous, "num_accepted_tokens_per_pos": previous.get("num_accepted_tokens_per_pos") or []})
        if began := previous.get("started_at"):
            merged.started_at = datetime.fromisoformat(began)
        merged.peak_rss_bytes = max(self.peak_rss_bytes, previous.get("peak_rss_bytes", 0))
        return merged

    def to_row(self) -> dict[str, Any]:
        """Counters and rates by the names of JOB_SCHEMA, histograms as dicts."""
        row = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "rows"}
        row.update(asdict(self.rows), num_rows=self.rows.num_rows)
        row.update({name: getattr(self, name) for name in _RATES})
        return {name: row[name] for name in JOB_SCHEMA.names}


_COUNTERS = frozenset(
    f.name
    for f in fields(JobMetrics)
    if f.name.endswith("_s") or (f.name.startswith("num_") and f.name != "num_accepted_tokens_per_pos")
)
_RATES = [name for name in JOB_SCHEMA.names if isinstance(getattr(JobMetrics, name, None), property)]


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _add_positions(one: list[int], other: list[int]) -> list[int]:
    length = max(len(one), len(other))
    return [sum(counts[i] for counts in (one, other) if i < len(counts)) for i in range(length)]


def write_job_metrics(folder: OutputFolder, metrics: JobMetrics) -> None:
    """Writes metrics/job.parquet: one row."""
    row = metrics.to_row()
    for name in ("versions", "error_codes", "finish_reasons"):
        row[name] = [{"name": key, "value": value} for key, value in sorted(row[name].items())]
    _write_table(folder, pa.Table.from_pylist([row], schema=JOB_SCHEMA), folder.job_parquet)


def write_report(folder: OutputFolder, metrics: JobMetrics) -> None:
    """Writes report.json: the same as job.parquet, and where the files are."""
    files = {"data": str(folder.data), "job_metrics": str(folder.job_parquet), "step_metrics": str(folder.steps)}
    report = {**metrics.to_row(), "files": files}
    folder.write(folder.report, orjson.dumps(report, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def read_report(folder: OutputFolder) -> dict[str, Any] | None:
    """report.json as it stands; None where there is none."""
    try:
        report: dict[str, Any] = orjson.loads(folder.report.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise StorageError(f"{folder.report} cannot be read ({error}); remove it and submit again") from error
    return report


class StepWriter:
    """Collects step records and writes them as files of metrics/steps, each whole before it has its name.

    append() takes the engine's StepRecord or a mapping with the same keys.
    """

    def __init__(self, folder: OutputFolder, attempt: int) -> None:
        self._folder = folder
        self._attempt = attempt
        self._rows: list[tuple[Any, ...]] = []
        self._num_parts = 0
        self._began_s = time.monotonic()
        names = [name for name in STEP_SCHEMA.names if name != "attempt"]
        self._from_record = attrgetter(*names)
        self._from_mapping = itemgetter(*names)

    def append(self, record: object) -> None:
        """Takes one step; writes a file when enough steps or seconds have gathered. StorageError when it cannot."""
        row = self._from_mapping(record) if isinstance(record, Mapping) else self._from_record(record)
        self._rows.append(row)
        if len(self._rows) >= STEPS_PER_PART or time.monotonic() - self._began_s >= SECONDS_PER_PART:
            self.flush()

    def flush(self) -> None:
        """Writes what has gathered."""
        if self._rows:
            columns = [(self._attempt,) * len(self._rows), *zip(*self._rows, strict=True)]
            arrays = [pa.array(c, f.type) for c, f in zip(columns, STEP_SCHEMA, strict=True)]
            name = f"part-00000-{self._attempt:04d}-{self._num_parts:06d}.parquet"
            _write_table(self._folder, pa.Table.from_arrays(arrays, schema=STEP_SCHEMA), self._folder.steps / name)
            self._num_parts += 1
            self._rows = []
        self._began_s = time.monotonic()


def _write_table(folder: OutputFolder, table: pa.Table, final: Path) -> None:
    tmp = folder.tmp / f"metrics-{final.name}"
    with storage_errors(final):
        pq.write_table(table, tmp, compression="zstd", compression_level=3)
    folder.publish(tmp, final)
