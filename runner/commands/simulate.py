"""`specrun simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from .options import as_json, overrides, with_limit
from .session import Session, complain


@click.command()
@click.argument("what", metavar="JOB.YAML|OUT")
@click.option("--policies", default="goodput,batch_threshold,acceptance_gate", show_default=True, metavar="P,P,...")
@click.option("--rows", type=click.IntRange(1), help="JOB.YAML: only the first rows (input.limit).")
@click.option("--output-tokens", type=click.IntRange(1), help="JOB.YAML: length of every output; default: max_tokens.")
@click.option("--acceptance", metavar="P,P,...", help="JOB.YAML: chance of draft 1, 2, ... to be right; default: 0.7.")
@click.option("--gpu", help="JOB.YAML: steps cost what this one's roofline says; default: H100.")
@click.option("--profile", type=click.Path(path_type=Path), help="JOB.YAML: steps cost what this profile says.")
@click.option("--save", type=click.Path(path_type=Path), help="All numbers as JSON.")
@overrides
@as_json
@click.pass_obj
def simulate(
    session: Session,
    what: str,
    policies: str,
    rows: int | None,
    output_tokens: int | None,
    acceptance: str | None,
    gpu: str | None,
    profile: Path | None,
    save: Path | None,
    overrides: Sequence[str],
    is_json: bool,
) -> int:
    """What would other policies do? OUT: to the job that ran there, whose rows are replayed without the model; it needs
    output.token_ids: true. JOB.YAML: to one that has not run, with an assumed acceptance and cost.

    POLICIES as in bench; never, every fixed draft length, the job's own policy and an oracle are there in any case.
    """
    from ..build import ModelBuilder
    from ..simulate import all_contenders, find_job, simulate_recorded
    from ..what_if import Assumptions, simulate_job

    spec, folder = find_job(what, with_limit(overrides, rows))
    session.spec = spec
    builder = session.builder or ModelBuilder(folder or Path.cwd(), complain)
    contenders = all_contenders(policies, spec, folder or Path.cwd())
    assumptions = Assumptions.parse(output_tokens, acceptance, gpu, profile)
    if folder is not None:
        simulation = simulate_job(spec, contenders, builder, assumptions, complain)
    elif rows is not None or assumptions != Assumptions():
        raise click.UsageError(f"{what} has run, so nothing is assumed; give --rows and such with a job file only")
    else:
        simulation = simulate_recorded(spec, contenders, builder, complain, complain)
    session.show(simulation, is_json)
    if save is not None:
        simulation.write(save)
    return 0
