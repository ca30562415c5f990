"""`specrun retry`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from .job_result import end_with_result
from .options import as_json, overrides, shard, with_shard
from .session import Session, complain


@click.command()
@click.argument("out", metavar="OUT")
@click.option("--code", "codes", multiple=True, metavar="CODE", help="Only rows with this error_code; may be repeated.")
@shard
@overrides
@as_json
@click.pass_obj
def retry(
    session: Session, out: str, codes: Sequence[str], shard: str | None, overrides: Sequence[str], is_json: bool
) -> int:
    """Run the failed rows of a finished job again; OUT is its output.path. All other rows stay as they are."""
    from ..build import ModelBuilder
    from ..progress import show_progress
    from ..retry import retry_job, stored_job

    spec = session.spec = stored_job(out, with_shard(overrides, shard))
    result = retry_job(
        spec,
        codes,
        builder=session.builder or ModelBuilder(Path.cwd(), complain),
        progress=lambda status: show_progress(status, sys.stderr),
        warn=complain,
    )
    return end_with_result(result, session, is_json, "no such rows have failed; nothing was run")
