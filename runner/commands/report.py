"""`specrun report`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from .options import as_json
from .session import Session


@click.command()
@click.argument("out", metavar="OUT")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also draw batch size, draft length, acceptance and tokens/s over time: .svg, .pdf or .png.",
)
@as_json
@click.pass_obj
def report(session: Session, out: str, plot: Path | None, is_json: bool) -> int:
    """Show what a job did: OUT is its output.path."""
    from ..report import full_lines, load_report, print_lines

    content = load_report(out)
    if plot is not None:
        from ..plot import plot_job

        plot_job(out, content, plot)
    if is_json:
        session.print_json(content)
    else:
        print_lines([*full_lines(content), *([("plot", str(plot))] * (plot is not None))], sys.stdout)
    return 0
