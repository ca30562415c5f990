"""`specrun validate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from ..exit_codes import BAD_INPUT
from .options import as_json, job_file, overrides
from .session import Session, complain


@click.command()
@job_file
@overrides
@as_json
@click.pass_obj
def validate(session: Session, job_file: Path, overrides: Sequence[str], is_json: bool) -> int:
    """Check a job and its data without loading the weights."""
    from ...jobs.spec import JobSpec
    from ..build import ModelBuilder
    from ..validate import validate_job

    spec = session.spec = JobSpec.load(job_file, overrides)
    validation = validate_job(spec, session.builder or ModelBuilder(job_file.parent))
    session.show(validation, is_json)
    if not validation.is_ok:
        allowed = f"errors.max_failed_fraction allows {validation.max_failed_fraction:.2%}"
        complain(f"{validation.num_failed:,} of {validation.num_rows:,} rows would fail; {allowed}")
    return 0 if validation.is_ok else BAD_INPUT
