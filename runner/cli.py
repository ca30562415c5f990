"""The `specrun` command. The only place that prints, and that turns an error into an exit code.

Everything heavy is imported inside the commands: `specrun --help` answers at once.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import __version__
from .exit_codes import INTERNAL, TOO_MANY_FAILED, TRY_AGAIN, USAGE, exit_code_of

if TYPE_CHECKING:
    from .bench_report import BenchReport
    from .build import Builder
    from .run import JobResult
    from .validate import Validation

BAD_INPUT = 65
INTERRUPTED = 130


@dataclass(slots=True)
class Session:
    """One call of the command."""

    builder: Builder | None = None
    """Builds tokenizer and engine; None: the real ones."""
    is_json: bool = False
    """Stdout still owes one JSON object, which it gets whatever happens."""


job_file = click.argument("job_file", metavar="JOB.YAML", type=click.Path(path_type=Path))
overrides = click.option("--set", "overrides", multiple=True, metavar="A.B=C", help="Override a key; may be repeated.")


def _remember_json(context: click.Context, option: click.Parameter, is_json: bool) -> bool:
    """Before anything else is looked at, so that a wrong option is told in JSON too."""
    context.obj.is_json = is_json
    return is_json


as_json = click.option(
    "--json",
    "is_json",
    is_flag=True,
    is_eager=True,
    callback=_remember_json,
    help="Print one JSON object on stdout.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="specrun")
def cli() -> None:
    """Offline batch runs of large language models: Parquet in, Parquet out, speculation decided at every step."""


@cli.command()
@job_file
@overrides
@as_json
@click.pass_obj
def submit(session: Session, job_file: Path, overrides: Sequence[str], is_json: bool) -> int:
    """Run a job, or what is left of it."""
    from ..jobs.spec import JobSpec
    from .build import ModelBuilder
    from .progress import show_progress
    from .run import run_job

    spec = JobSpec.load(job_file, overrides)
    builder = session.builder or ModelBuilder(job_file.parent)
    result = run_job(spec, builder=builder, progress=lambda status: show_progress(status, sys.stderr))
    _print_result(result, is_json, spec.errors.abort_after_consecutive)
    return result.exit_code


@cli.command()
@job_file
@overrides
@as_json
@click.pass_obj
def validate(session: Session, job_file: Path, overrides: Sequence[str], is_json: bool) -> int:
    """Check a job and its data without loading the weights."""
    from ..jobs.spec import JobSpec
    from .build import ModelBuilder
    from .validate import validate_job

    spec = JobSpec.load(job_file, overrides)
    validation = validate_job(spec, session.builder or ModelBuilder(job_file.parent))
    if is_json:
        _print_json(validation.to_json())
    else:
        _print_validation(validation)
    if not validation.is_ok:
        allowed = f"errors.max_failed_fraction allows {validation.max_failed_fraction:.2%}"
        _complain(f"{validation.num_failed:,} of {validation.num_rows:,} rows would fail; {allowed}")
    return 0 if validation.is_ok else BAD_INPUT


@cli.command()
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@as_json
def report(out: Path, is_json: bool) -> int:
    """Show what a job did: OUT is its output.path."""
    from .report import full_lines, load_report, print_lines

    content = load_report(out)
    if is_json:
        _print_json(content)
    else:
        print_lines(full_lines(content), sys.stdout)
    return 0


@cli.command()
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

    POLICIES: never, always:K (K draft tokens), batch_threshold:K (off above K rows), acceptance_gate, module:Class,
    none (no drafter at all), job (the policy as the job has it).
    """
    from ..jobs.spec import JobSpec
    from .bench import run_bench
    from .build import ModelBuilder
    from .contender import parse_batches, parse_contenders

    limits = {"input.limit": rows, "sampling.max_tokens": max_tokens}
    set_limits = [f"{key}={value}" for key, value in limits.items() if value is not None]
    spec = JobSpec.load(job_file, [*overrides, *set_limits])
    contenders = parse_contenders(policies, spec, job_file.parent)
    sizes = parse_batches(batches)
    report = run_bench(spec, contenders, sizes, repeats, ModelBuilder(job_file.parent), _complain)
    save = save or Path(f"{spec.output.path.rstrip('/')}.bench.json").expanduser()
    _print_bench(report, session)
    report.write(save)
    if not is_json:
        click.echo(f"\nall numbers: {save}")
    if (difference := report.comparison.difference()) is not None:
        _complain(f"{difference}, though the outputs must be identical; please report this as a bug")
        return INTERNAL
    return 0


@cli.command()
def schema() -> int:
    """Print the JSON Schema of job.yaml."""
    from ..jobs.spec import json_schema

    _print_json(json_schema())
    return 0


def _print_result(result: JobResult, is_json: bool, abort_after: int) -> None:
    from .report import print_lines, summary_lines

    report = result.report
    if is_json:
        _print_json({**report, "state": result.state, "exit_code": result.exit_code, "was_done": result.was_done})
    elif report:
        print_lines(summary_lines(report), sys.stdout)
    if result.was_done:
        click.echo("specrun: the job was done before; nothing was run", err=True)
    elif result.exit_code == TRY_AGAIN:
        rows = f"{report['num_rows']:,} rows are done; " if report else ""
        _complain(f"stopped early: {result.stop_reason}; {rows}run the same command again to go on")
    elif result.exit_code == TOO_MANY_FAILED:
        failed = f"{report['num_failed']:,} of {report['num_rows']:,} rows failed"
        why = f"stopped after {abort_after} in a row" if result.state == "aborted" else "more than the job allows"
        _complain(f"{failed}, {why}; error_code and error_message in {report['files']['data']} say why")


def _print_validation(validation: Validation) -> None:
    tokens = validation.prompt_tokens
    click.echo(validation.resolved.rstrip())
    click.echo("\nfirst prompt, as the model sees it:\n" + (validation.first_prompt or "(no row has one)") + "\n")
    click.echo(f"files           {', '.join(validation.files)}")
    click.echo(f"rows            {validation.num_rows:,}")
    click.echo(f"prompt tokens   p50 {tokens['p50']:,}, p95 {tokens['p95']:,}, max {tokens['max']:,}")
    click.echo(f"max_model_len   {validation.max_model_len or 'unknown'}")
    click.echo(f"tokens in all   {validation.num_prompt_tokens:,} in, at most {validation.max_output_tokens:,} out")
    click.echo(f"duplicate ids   {validation.num_duplicate_ids:,}")
    click.echo(f"bad rows        {validation.num_failed:,}")
    for code, count in sorted(validation.error_codes.items()):
        click.echo(f"  {code:<20}{count:>8,}   {validation.first_errors[code]}")


def _print_bench(report: BenchReport, session: Session) -> None:
    """Before it is saved: a file that cannot be written must not cost the numbers."""
    if session.is_json:
        _print_json(report.to_json())
        session.is_json = False
    else:
        click.echo(report.text())


def _print_json(content: Any) -> None:
    click.echo(json.dumps(content, indent=2, ensure_ascii=False, default=str))


def _print_failure(code: int, text: str) -> None:
    _print_json({"state": "failed", "exit_code": code, "error": text})


def _complain(text: str) -> None:
    for line in text.splitlines():
        click.echo(f"specrun: {line}", err=True)


def run_command(args: Sequence[str] | None = None, builder: Builder | None = None) -> int:
    """Run the command and return its exit code; `builder` replaces the real model."""
    session = Session(builder)
    try:
        result = cli.main(args, prog_name="specrun", standalone_mode=False, obj=session)
        return result if isinstance(result, int) else 0
    except click.ClickException as exc:
        if session.is_json:
            _print_failure(USAGE, exc.format_message())
        exc.show()
        return USAGE
    except (click.Abort, KeyboardInterrupt):
        if session.is_json:
            _print_failure(INTERRUPTED, "interrupted")
        return INTERRUPTED
    except Exception as exc:
        return _end_with(exc, session)


def _end_with(error: Exception, session: Session) -> int:
    code = exit_code_of(error)
    text = str(error)
    if code == INTERNAL:
        where = "the traceback is above" if _is_debug() else "set SPECRUN_DEBUG=1 for the traceback"
        text = f"internal error: {type(error).__name__}: {' '.join(text.split())}; {where}"
    if _is_debug():
        traceback.print_exception(error)
    if session.is_json:
        _print_failure(code, text)
    _complain(text)
    return code


def _is_debug() -> bool:
    return os.environ.get("SPECRUN_DEBUG", "") not in ("", "0")


def main() -> None:
    """The console script."""
    sys.exit(run_command())
