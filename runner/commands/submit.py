"""`specrun submit`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from .job_result import end_with_result
from .options import as_json, job_file, overrides, shard, with_shard
from .session import Session, complain


@click.command()
@job_file
@shard
@overrides
@as_json
@click.pass_obj
def submit(session: Session, job_file: Path, shard: str | None, overrides: Sequence[str], is_json: bool) -> int:
    """Run a job, or what is left of it."""
    from ...jobs.spec import JobSpec
    from ..build import ModelBuilder
    from ..progress import show_progress
    from ..run import run_job

    spec = session.spec = JobSpec.load(job_file, with_shard(overrides, shard))
    result = run_job(
        spec,
        builder=session.builder or ModelBuilder(job_file.parent, complain),
        progress=lambda status: show_progress(status, sys.stderr),
        warn=complain,
    )
    return end_with_result(result, session, is_json, "the job was done before; nothing was run")
