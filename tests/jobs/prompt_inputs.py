"""Small inputs for tests, and what a PromptSource makes of them."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from specrun.jobs.prompts import PromptRow, PromptSource
from specrun.jobs.spec import JobSpec


def job(path, columns=None, keep="all", prompt=None, **more) -> JobSpec:
    return JobSpec.model_validate(
        {
            "model": {"path": "m"},
            "input": {"path": str(path), "columns": columns or {}, **more},
            "prompt": prompt or {},
            "output": {"path": "out", "keep_columns": keep},
        }
    )


def source(path, *args, **kwargs) -> PromptSource:
    return PromptSource(job(path, *args, **kwargs))


def read(found: PromptSource) -> tuple[list[PromptRow], pa.Table]:
    rows, tables, at = [], [], None
    for batch in found.batches():
        assert batch.start == (batch.start if at is None else at), "rows are missing"
        at = batch.start + len(batch.rows)
        assert len(batch.rows) == batch.passthrough.num_rows
        assert batch.passthrough.schema == found.passthrough_schema
        rows += batch.rows
        tables.append(batch.passthrough)
    assert [row.row_index for row in rows] == list(range(found.num_rows))
    return rows, pa.Table.from_batches(tables, found.passthrough_schema)


def prompts(found: PromptSource) -> list[str | None]:
    return [row.prompt for row in read(found)[0]]


def codes(found: PromptSource) -> list[str | None]:
    return [row.error_code for row in read(found)[0]]


def write_parquet(path: Path, data, **kwargs) -> Path:
    pq.write_table(data if isinstance(data, pa.Table) else pa.table(data), path, **kwargs)
    return path


def write_lines(path: Path, *lines) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path
