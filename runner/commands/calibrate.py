"""`specrun calibrate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from .options import as_json, job_file, overrides, with_limit
from .session import Session, complain


@click.command()
@job_file
@click.option("--save", type=click.Path(path_type=Path), required=True, metavar="PROFILE.JSON", help="The profile.")
@click.option("--batch", "batches", metavar="N,N,...", help="Batch sizes; default: powers of 2 up to the job's.")
@click.option("--draft-tokens", "lengths", metavar="K,K,...", help="Draft lengths; default: up to the job's.")
@click.option("--steps", type=click.IntRange(1), default=24, show_default=True, help="Steps of each size and length.")
@click.option("--rows", type=click.IntRange(1), help="Only the first rows (input.limit).")
@overrides
@as_json
@click.pass_obj
def calibrate(
    session: Session,
    job_file: Path,
    save: Path,
    batches: str | None,
    lengths: str | None,
    steps: int,
    rows: int | None,
    overrides: Sequence[str],
    is_json: bool,
) -> int:
    """Measure what steps cost on a job's own rows and save it as a profile for the policy goodput.

    It is good for this machine, model, drafter, dtype and versions only; a job that names it as
    speculation.policy.profile checks that. Nothing is written to the job's output.
    """
    from ...jobs.spec import JobSpec
    from ..build import ModelBuilder
    from ..calibrate import parse_lengths, run_calibration
    from ..contender import parse_batches
    from ..profile import check_place

    spec = session.spec = JobSpec.load(job_file, with_limit(overrides, rows))
    sizes = None if batches is None else parse_batches(batches)
    drafts = None if lengths is None else parse_lengths(lengths)
    check_place(save)
    calibration = run_calibration(spec, sizes, drafts, steps, ModelBuilder(job_file.parent, complain), complain)
    session.show(calibration, is_json)
    calibration.write(save)
    if not is_json:
        click.echo(f"\nprofile: {save}")
    return 0
