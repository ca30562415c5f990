"""Small inputs, and what became of them."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from tests.runner.conftest import Job


def folder_of(job: Job, files: dict[str, pa.Table | bytes]) -> Job:
    """Input files by name, which may have folders in it."""
    for name, content in files.items():
        path = job.folder / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            pq.write_table(content, path)
    job.config["input"]["path"] = str(job.folder / "in")
    return job


def prompts(*texts: str | None) -> pa.Table:
    return pa.table({"prompt": pa.array(texts, pa.string())})


def codes(job: Job) -> list[str | None]:
    return [row["error_code"] for row in job.rows()]


def texts(job: Job) -> list[str | None]:
    return [row["text"] for row in job.rows()]
