"""Job files for the tests of JobSpec."""

import textwrap
from pathlib import Path

import pytest

from specrun.jobs.errors import ConfigError
from specrun.jobs.spec import JobSpec

BASE = """
version: 1
model: {path: some/model}
input: {path: in.parquet}
output: {path: out}
"""


def load(folder: Path, text: str = BASE, overrides=(), now=None) -> JobSpec:
    file = folder / "job.yaml"
    file.write_text(textwrap.dedent(text), encoding="utf-8")
    return JobSpec.load(file, overrides, now)


def problems(folder: Path, text: str = BASE, overrides=()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, overrides)
    return str(caught.value).replace(f"{folder}/", "").splitlines()


def reload(folder: Path, spec: JobSpec) -> JobSpec:
    (folder / "resolved.yaml").write_text(spec.resolved_yaml(), encoding="utf-8")
    return JobSpec.load(folder / "resolved.yaml")
