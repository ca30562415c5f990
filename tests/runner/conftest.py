"""Jobs on the stub engine."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from specrun.engine.errors import ModelError
from specrun.engine.testing import StubEngine, WordTokenizer
from specrun.jobs.spec import JobSpec
from specrun.policies.base import SpeculationPolicy
from specrun.policies.registry import make_policy
from specrun.runner.run import JobResult, run_job


@dataclass
class StubBuilder:
    """Builds the stub; `options` are StubEngine's, with words in place of token ids for fail_on and raise_on."""

    options: dict[str, Any] = field(default_factory=dict)
    has_chat_template: bool = False
    num_loads: int = 0

    def identity(self, spec: JobSpec) -> dict[str, Any]:
        return {"stub": 1}

    def policy(self, spec: JobSpec) -> SpeculationPolicy:
        return make_policy(spec.speculation.policy.name, **spec.speculation.policy.kwargs)

    def max_model_len(self, spec: JobSpec) -> int:
        return int(self.options.get("max_model_len", 4096))

    def tokenizer(self, spec: JobSpec) -> WordTokenizer:
        return WordTokenizer(has_chat_template=self.has_chat_template)

    def engine(self, spec: JobSpec, tokenizer: Any, policy: SpeculationPolicy) -> StubEngine:
        self.num_loads += 1
        options = dict(self.options)
        if "load_error" in options:
            raise ModelError(options["load_error"])
        for name in ("fail_on", "raise_on"):
            if name in options:
                options[name] = tokenizer.token_id(options[name])
        return StubEngine(**options)


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

    @property
    def is_success(self) -> bool:
        return (self.out / "_SUCCESS").exists()

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.out / "report.json").read_bytes())
        return report


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)
