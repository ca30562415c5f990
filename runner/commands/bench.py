"""`specrun bench`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from ..exit_codes import INTERNAL
from .options import as_json, job_file, overrides, with_limit
from .session import Session, complain


@click.command()
@job_file
@click.option("--policies", default="never,always:3,job", show_default=True, metavar="P,P,...")
@click.option(
    "--batch", "batches", default="1,4,16,64", show_default=True, metavar="N,N,...", help="engine.max_num_seqs."
)
@click.option("--rows", type=click.IntRange(1), help="Only the first rows (input.limit).")
@click.option("--max-tokens", type=click.IntRange(1), help="Output tokens of a row (sampling.max_tokens).")
@click.option(
    "--repeats", type=click.IntRange(1), default=4, show_default=True, help="Even numbers are order-balanced."
)
@click.option(
    "--save", type=click.Path(path_type=Path), help="All numbers as JSON; default: output.path + .bench.json."
)
@overrides
@as_json
@click.pass_obj
def bench(
    session: Session,
    job_file: Path,
    policies: str,
    batches: str,
    rows: int | None,
    max_tokens: int | None,
    repeats: int,
    save: Path | None,
    overrides: Sequence[str],
    is_json: bool,
) -> int:
    """Compare policies on a job's own rows; nothing is written to its output.

    POLICIES: never, always:K (K draft tokens), goodput, batch_threshold:K (off above K rows), acceptance_gate,
    module:Class, none (no drafter at all), job (the policy as the job has it). METHOD/POLICY, as in suffix/always:3,
    has drafts by another speculation.method than the job's.
    """
    from ...jobs.spec import JobSpec
    from ..bench import run_bench
    from ..build import ModelBuilder
    from ..contender import parse_batches, parse_contenders

    limit = [f"sampling.max_tokens={max_tokens}"] if max_tokens is not None else []
    spec = session.spec = JobSpec.load(job_file, [*with_limit(overrides, rows), *limit])
    contenders = parse_contenders(policies, spec, job_file.parent)
    sizes = parse_batches(batches)
    report = run_bench(spec, contenders, sizes, repeats, ModelBuilder(job_file.parent, complain), complain)
    save = save or Path(f"{spec.output.path.rstrip('/')}.bench.json").expanduser()
    session.show(report, is_json)
    report.write(save)
    if not is_json:
        click.echo(f"\nall numbers: {save}")
    if (difference := report.comparison.difference()) is not None:
        complain(f"{difference}, though the outputs must be identical; please report this as a bug")
        return INTERNAL
    return 0
