"""What a job did: totals of the job and one row a step, as Parquet and as readable JSON.

Raw counters are stored and rates derived from them. Definitions as vLLM's: the acceptance rate is accepted / drafted
tokens, the mean acceptance length 1 + accepted tokens / drafts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from operator import attrgetter, itemgetter
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from .counts import RowCounts
from .errors import StorageError
from .folder import DATA, ERRORS, JOB_PARQUET, REPORT, STEPS, WorkFolder
from .schema import JOB_SCHEMA, STEP_SCHEMA
from .shard import Shard
from .store import Store, storage_errors

STEPS_PER_PART = 5000
SECONDS_PER_PART = 60.0


@dataclass(slots=True)
class JobMetrics:
    """Totals of a job over all its attempts. Rates are None while there is nothing to divide by."""

    job: str = ""
    state: str = "running"
    exit_code: int | None = None
    attempt: int = 1
    shards: int = 1
    started_at: datetime | None = None
    """Of the first attempt, UTC."""
    finished_at: datetime | None = None
    model: str = ""
    revision: str | None = None
    content_hash: str | None = None
    """Of the model's files."""
    device: str = ""
    dtype: str = ""
    method: str = ""
    """How drafts were made: speculation.method, or what auto chose."""
    method_reason: str | None = None
    """Why auto chose it; None where the job named it."""
    draft_model: str | None = None
    draft_revision: str | None = None
    draft_content_hash: str | None = None
    drafter_facts: dict[str, float] = field(default_factory=dict)
    """What the drafter says about itself at the end of the last attempt, or of the last shard; what is named num_* is
    summed over them."""
    policy: str = ""
    policy_facts: dict[str, float] = field(default_factory=dict)
    """What the policy says about itself, as drafter_facts; seconds, named *_s, are summed, too."""
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
    """From the start of the command to its end, attempts and shards added up."""
    load_s: float = 0.0
    busy_s: float = 0.0
    """In engine steps."""
    spec_on_s: float = 0.0
    spec_off_s: float = 0.0
    input_wait_s: float = 0.0
    forecast_s: float | None = None
    """busy_s of the whole job as it was foreseen early on; None where the job was too short for a forecast. Shards are
    added up, one without a forecast with what it took."""
    forecast_never_s: float | None = None
    """The same, had nothing been drafted and no drafter been loaded."""
    forecast_at_step: int | None = None
    """Step of the last attempt at which that was foreseen."""
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

    @classmethod
    def of_shards(cls, reports: Sequence[Mapping[str, Any]], rows: RowCounts) -> JobMetrics:
        """The job's totals from read_report() of each shard; `rows` as the shards' parts count them."""
        metrics = cls(rows=rows, shards=len(reports))
        for report in filter(None, reports):
            metrics.add_stats({**report, "num_accepted_tokens_per_pos": report["num_accepted_tokens_per_pos"] or []})
            for name in _SAME_IN_ALL:
                setattr(metrics, name, report.get(name))
            for name in _FACTS:
                setattr(metrics, name, _merge_facts(getattr(metrics, name), report.get(name) or {}))
            for name in _FORECASTS:
                setattr(metrics, name, (getattr(metrics, name) or 0) + (report.get(name) or report["busy_s"]))
            steps = (metrics.forecast_at_step or 0, report.get("forecast_at_step") or 0)
            metrics.forecast_at_step = max(steps) or None
            times = {name: datetime.fromisoformat(report[name]) for name in ("started_at", "finished_at")}
            metrics.started_at = min(metrics.started_at or times["started_at"], times["started_at"])
            metrics.finished_at = max(metrics.finished_at or times["finished_at"], times["finished_at"])
            metrics.attempt = max(metrics.attempt, report["attempt"])
            metrics.peak_rss_bytes = max(metrics.peak_rss_bytes, report["peak_rss_bytes"])
        if metrics.forecast_at_step is None:
            metrics.forecast_s = metrics.forecast_never_s = None
        return metrics

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
        for name in _FACTS:
            setattr(merged, name, _merge_facts(previous.get(name) or {}, getattr(self, name)))
        for name in _FORECASTS:
            value = getattr(self, name)
            # A later attempt knows what the earlier ones took.
            setattr(merged, name, previous.get(name) if value is None else value + previous.get("busy_s", 0.0))
        if merged.forecast_at_step is None:
            merged.forecast_at_step = previous.get("forecast_at_step")
        return merged

    def to_row(self) -> dict[str, Any]:
        """Counters and rates by the names of JOB_SCHEMA, histograms as dicts."""
        row = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "rows"}
        row.update(asdict(self.rows), num_rows=self.rows.num_rows)
        row.update({name: getattr(self, name) for name in _RATES})
        return {name: row[name] for name in JOB_SCHEMA.names}


_FACTS = ("drafter_facts", "policy_facts")
_FORECASTS = ("forecast_s", "forecast_never_s")
_COUNTERS = frozenset(
    f.name
    for f in fields(JobMetrics)
    if (f.name.endswith("_s") and f.name not in _FORECASTS)
    or (f.name.startswith("num_") and f.name != "num_accepted_tokens_per_pos")
)
_SAME_IN_ALL = (
    *("job", "model", "revision", "content_hash", "device", "dtype", "method", "method_reason"),
    *("draft_model", "draft_revision", "draft_content_hash", "policy", "versions"),
)
"""Of these a job has what its last shard has."""
_RATES = [name for name in JOB_SCHEMA.names if isinstance(getattr(JobMetrics, name, None), property)]


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _add_positions(one: list[int], other: list[int]) -> list[int]:
    length = max(len(one), len(other))
    return [sum(counts[i] for counts in (one, other) if i < len(counts)) for i in range(length)]


def _merge_facts(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Those of the later attempt or shard, counts and seconds added up; one that loaded no engine has none."""
    sums = [name for name in before if name.startswith("num_") or name.endswith("_s")]
    return {**(after or before), **{name: before[name] + after.get(name, 0) for name in sums}}


def write_job_metrics(folder: WorkFolder, metrics: JobMetrics) -> None:
    """Writes metrics/job.parquet: one row."""
    row = metrics.to_row()
    for name in ("versions", "error_codes", "finish_reasons", *_FACTS):
        row[name] = [{"name": key, "value": value} for key, value in sorted(row[name].items())]
    _write_table(folder, pa.Table.from_pylist([row], schema=JOB_SCHEMA), JOB_PARQUET)


def write_report(
    folder: WorkFolder, name: str, metrics: JobMetrics, errors: str = ERRORS, results: str | None = None
) -> dict[str, Any]:
    """Writes a report: the same as job.parquet, and where the files are. Gives what read_report() will.

    errors: name of the file with the failed rows, where there are any; results: that of the other rows, if written.
    """
    names = {"data": DATA, "job_metrics": JOB_PARQUET, "step_metrics": STEPS}
    if metrics.rows.num_failed:
        names["errors"] = errors
    if results is not None and metrics.rows.num_ok:
        names["results"] = results
    files = {key: folder.store.path(name) for key, name in names.items()}
    content = orjson.dumps({**metrics.to_row(), "files": files}, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    folder.write(name, content)
    report: dict[str, Any] = orjson.loads(content)
    return report


def read_report(store: Store, name: str = REPORT) -> dict[str, Any] | None:
    """A report as it stands; None where there is none."""
    try:
        report: dict[str, Any] | None = orjson.loads(store.read(name) or b"null")
    except ValueError as error:
        raise StorageError(f"{store.path(name)} cannot be read ({error}); remove it and submit again") from error
    return report


class StepWriter:
    """Collects step records and writes them as files of metrics/steps, each whole before it has its name.

    append() takes the engine's StepRecord or a mapping with the same keys.
    """

    def __init__(self, folder: WorkFolder, shard: Shard, attempt: int) -> None:
        self._folder = folder
        self._shard = shard
        self._attempt = attempt
        self._rows: list[tuple[Any, ...]] = []
        self._num_parts = 0
        self._began_s = time.monotonic()
        names = [name for name in STEP_SCHEMA.names if name not in ("shard", "attempt")]
        self._from_record = attrgetter(*names)
        self._from_mapping = itemgetter(*names)

    def append(self, record: object) -> bool:
        """Takes one step; writes a file when enough steps or seconds have gathered, and says so.

        StorageError when it cannot.
        """
        row = self._from_mapping(record) if isinstance(record, Mapping) else self._from_record(record)
        self._rows.append(row)
        is_due = len(self._rows) >= STEPS_PER_PART or time.monotonic() - self._began_s >= SECONDS_PER_PART
        if is_due:
            self.flush()
        return is_due

    def flush(self) -> None:
        """Writes what has gathered."""
        if self._rows:
            constants = [(value,) * len(self._rows) for value in (self._shard.index, self._attempt)]
            columns = [*constants, *zip(*self._rows, strict=True)]
            arrays = [pa.array(c, f.type) for c, f in zip(columns, STEP_SCHEMA, strict=True)]
            name = f"{STEPS}/part-{self._shard.index:05d}-{self._attempt:04d}-{self._num_parts:06d}.parquet"
            _write_table(self._folder, pa.Table.from_arrays(arrays, schema=STEP_SCHEMA), name)
            self._num_parts += 1
            self._rows = []
        self._began_s = time.monotonic()


def _write_table(folder: WorkFolder, table: pa.Table, name: str) -> None:
    tmp = folder.tmp / f"metrics-{name.rpartition('/')[2]}"
    with storage_errors(tmp):
        pq.write_table(table, tmp, compression="zstd", compression_level=3)
    folder.publish(tmp, name)
