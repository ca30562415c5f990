"""`specrun finalize`."""

from __future__ import annotations

from collections.abc import Sequence

import click

from .job_result import end_with_result
from .options import as_json
from .session import Session


@click.command()
@click.argument("out", metavar="OUT")
@as_json
@click.pass_obj
def finalize(session: Session, out: str, is_json: bool) -> int:
    """Declare a sharded job done once all its shards are; OUT is its output.path. The last shard does it by itself."""
    from ...jobs.folder import OutputFolder
    from ..build import ModelBuilder
    from ..finalize import finalize_job
    from ..pipeline import Ending
    from ..retry import stored_job
    from ..run import JobResult

    def token_bytes() -> Sequence[bytes]:
        spec = session.spec = stored_job(out)
        return (session.builder or ModelBuilder()).tokenizer(spec).token_bytes()

    with OutputFolder(out).finalizing() as folder:
        verdict = finalize_job(folder, token_bytes)
    return end_with_result(JobResult(verdict.exit_code, Ending.DONE, verdict.report), session, is_json)
