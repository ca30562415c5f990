"""Jobs on the stub engine."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from specrun.engine.errors import ModelError
from specrun.engine.request import Request, RequestOutput
from specrun.engine.testing import StubEngine, WordTokenizer
from specrun.jobs.spec import JobSpec
from specrun.policies.base import SpeculationPolicy
from specrun.runner.build import Builder, ModelBuilder
from specrun.runner.retry import retry_job, stored_job
from specrun.runner.run import JobResult, run_job


class RecordingEngine(StubEngine):
    """Notes which rows it was given."""

    def __init__(self, ran: list[int], groups: set[int], **options: Any) -> None:
        super().__init__(**options)
        self._ran, self._groups = ran, groups

    def run(self, requests: Iterable[Request | None]) -> Iterator[RequestOutput]:
        return super().run(self._noted(requests))

    def _noted(self, requests: Iterable[Request | None]) -> Iterator[Request | None]:
        for request in requests:
            if request is not None:
                self._ran.append(request.request_id)
                self._groups.add(request.group)
            yield request


@dataclass
class StubBuilder(Builder):
    """Builds the stub; `options` are StubEngine's, with words in place of token ids for fail_on and raise_on."""

    options: dict[str, Any] = field(default_factory=dict)
    has_chat_template: bool = False
    num_loads: int = 0
    ran: list[int] = field(default_factory=list)
    """Rows that reached an engine, in that order."""
    groups: set[int] = field(default_factory=set)
    """Theirs."""

    def identity(self, spec: JobSpec) -> dict[str, Any]:
        return {"stub": 1}

    def policy(self, spec: JobSpec) -> SpeculationPolicy:
        return ModelBuilder().policy(spec)

    def max_model_len(self, spec: JobSpec) -> int:
        return int(self.options.get("max_model_len", 4096))

    def tokenizer(self, spec: JobSpec) -> WordTokenizer:
        return WordTokenizer(has_chat_template=self.has_chat_template)

    def engine(self, spec: JobSpec, tokenizer: Any, policy: SpeculationPolicy) -> StubEngine:
        self.num_loads += 1
        options = dict(self.options)
        if "load_error" in options:
            raise ModelError(options["load_error"])
        options.setdefault("request_timeout_s", spec.run.timeout_s)
        for name in ("fail_on", "raise_on", "slow_on"):
            if name in options:
                options[name] = tokenizer.token_id(options[name])
        return RecordingEngine(self.ran, self.groups, **options)


class Job:
    """A job in a folder of its own, run on the stub engine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "out"
        self.config: dict[str, Any] = {
            "version": 1,
            "model": {"path": "stub"},
            "input": {"path": str(folder / "in.jsonl")},
            "output": {"path": str(self.out), "rows_per_part": 100},
            "sampling": {"max_tokens": 16},
            "speculation": {"policy": "never"},
        }

    def jsonl(self, rows: list[Any]) -> "Job":
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (self.folder / "in.jsonl").write_text("".join(line + "\n" for line in lines), "utf-8")
        return self

    def parquet(self, table: pa.Table) -> "Job":
        pq.write_table(table, self.folder / "in.parquet")
        self.config["input"]["path"] = str(self.folder / "in.parquet")
        return self

    def prompts(self, count: int) -> "Job":
        return self.jsonl([{"prompt": f"word {i}"} for i in range(count)])

    def set(self, **values: Any) -> "Job":
        """set(errors__max_failed_fraction=0.5)"""
        for key, value in values.items():
            section, _, name = key.partition("__")
            self.config.setdefault(section, {})[name] = value
        return self

    def stub(self, has_chat_template: bool = False, **options: Any) -> StubBuilder:
        return StubBuilder(options, has_chat_template)

    def run(self, **options: Any) -> JobResult:
        """Run it; options are StubBuilder's."""
        self.builder = self.stub(**options)
        return run_job(self.spec, builder=self.builder)

    def run_shard(self, index: int, count: int, **options: Any) -> JobResult:
        """Run one shard; options are StubBuilder's."""
        self.builder = self.stub(**options)
        return run_job(JobSpec.load(self.file, [f"run.shard={index}/{count}"]), builder=self.builder)

    def preempt(self, num_rows: int, *overrides: str, is_retry: bool = False, **options: Any) -> JobResult:
        """Run it until so many rows have come to the engine; then its time is up and nothing gets any grace."""
        builder = self.builder = self.stub(**options)
        limits = [*overrides, "run.max_runtime_s=1", "run.grace_s=0"]

        def clock() -> float:
            return 2.0 if len(builder.ran) >= num_rows else 0.0

        spec = stored_job(str(self.out), limits) if is_retry else JobSpec.load(self.file, limits)
        return run_job(spec, builder=self.builder, clock=clock, retry_codes=[] if is_retry else None)

    def retry(self, *codes: str, overrides: tuple[str, ...] = (), **options: Any) -> JobResult:
        """Run its failed rows again; options are StubBuilder's."""
        self.builder = self.stub(**options)
        return retry_job(stored_job(str(self.out), overrides), codes, builder=self.builder)

    @property
    def file(self) -> Path:
        path = self.folder / "job.yaml"
        path.write_text(yaml.safe_dump(self.config), "utf-8")
        return path

    @property
    def spec(self) -> JobSpec:
        return JobSpec.load(self.file)

    def rows(self) -> list[dict[str, Any]]:
        """What stands in data/, in order."""
        tables = [pq.read_table(part) for part in sorted((self.out / "data").iterdir())]
        rows: list[dict[str, Any]] = pa.concat_tables(tables).to_pylist() if tables else []
        return rows

    def error_lines(self) -> list[dict[str, Any]]:
        """What stands in errors.jsonl."""
        path = self.out / "errors.jsonl"
        return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []

    @property
    def is_success(self) -> bool:
        return (self.out / "_SUCCESS").exists()

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.out / "report.json").read_bytes())
        return report


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)
