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
    from ..jobs.spec import JobSpec
    from .bench_report import BenchReport
    from .build import Builder
    from .run import JobResult

BAD_INPUT = 65
INTERRUPTED = 130


@dataclass(slots=True)
class Session:
    """One call of the command."""

    builder: Builder | None = None
    """Builds tokenizer and engine; None: the real ones."""
    is_json: bool = False
    """Stdout still owes one JSON object, which it gets whatever happens."""
    exit_code: int = 0
    """Of the work that is done, also where nobody reads what it printed."""
    spec: JobSpec | None = None
    """The job at work, whose secrets are not to be shown."""

    def hide(self, text: str) -> str:
        """`text` for people."""
        return text if self.spec is None else self.spec.hide(text)


job_file = click.argument("job_file", metavar="JOB.YAML", type=click.Path(path_type=Path))
overrides = click.option("--set", "overrides", multiple=True, metavar="A.B=C", help="Override a key; may be repeated.")


shard = click.option("--shard", metavar="I/N", help="Only the I-th (from 0) of N contiguous ranges of rows.")


def _with_shard(overrides: Sequence[str], shard: str | None) -> list[str]:
    return [*overrides, *([f"run.shard={json.dumps(shard)}"] if shard is not None else [])]  # as text, "" too


as_json = click.option(
    "--json",
    "is_json",
    is_flag=True,
    help="Print one JSON object on stdout.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="specrun")
def cli() -> None:
    """Offline batch runs of large language models: Parquet in, Parquet out, speculation decided at every step."""


@cli.command()
@job_file
@shard
@overrides
@as_json
@click.pass_obj
def submit(session: Session, job_file: Path, shard: str | None, overrides: Sequence[str], is_json: bool) -> int:
    """Run a job, or what is left of it."""
    from ..jobs.spec import JobSpec
    from .build import ModelBuilder
    from .progress import show_progress
    from .run import run_job

    spec = session.spec = JobSpec.load(job_file, _with_shard(overrides, shard))
    result = run_job(
        spec,
        builder=session.builder or ModelBuilder(job_file.parent, _complain),
        progress=lambda status: show_progress(status, sys.stderr),
        warn=_complain,
    )
    return _end_with_result(result, session, is_json, "the job was done before; nothing was run")


@cli.command()
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
    from .build import ModelBuilder
    from .progress import show_progress
    from .retry import retry_job, stored_job

    spec = session.spec = stored_job(out, _with_shard(overrides, shard))
    result = retry_job(
        spec,
        codes,
        builder=session.builder or ModelBuilder(Path.cwd(), _complain),
        progress=lambda status: show_progress(status, sys.stderr),
        warn=_complain,
    )
    return _end_with_result(result, session, is_json, "no such rows have failed; nothing was run")


@cli.command()
@click.argument("out", metavar="OUT")
@as_json
@click.pass_obj
def finalize(session: Session, out: str, is_json: bool) -> int:
    """Declare a sharded job done once all its shards are; OUT is its output.path. The last shard does it by itself."""
    from ..jobs.folder import OutputFolder
    from .build import ModelBuilder
    from .finalize import finalize_job
    from .pipeline import Ending
    from .retry import stored_job
    from .run import JobResult

    def token_bytes() -> Sequence[bytes]:
        spec = session.spec = stored_job(out)
        return (session.builder or ModelBuilder()).tokenizer(spec).token_bytes()

    with OutputFolder(out).finalizing() as folder:
        verdict = finalize_job(folder, token_bytes)
    return _end_with_result(JobResult(verdict.exit_code, Ending.DONE, verdict.report), session, is_json)


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

    spec = session.spec = JobSpec.load(job_file, overrides)
    validation = validate_job(spec, session.builder or ModelBuilder(job_file.parent))
    if is_json:
        _print_json(validation.to_json())
    else:
        click.echo(validation.text())
    if not validation.is_ok:
        allowed = f"errors.max_failed_fraction allows {validation.max_failed_fraction:.2%}"
        _complain(f"{validation.num_failed:,} of {validation.num_rows:,} rows would fail; {allowed}")
    return 0 if validation.is_ok else BAD_INPUT


@cli.command()
@click.argument("out", metavar="OUT")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also draw batch size, draft length, acceptance and tokens/s over time: .svg, .pdf or .png.",
)
@as_json
def report(out: str, plot: Path | None, is_json: bool) -> int:
    """Show what a job did: OUT is its output.path."""
    from .report import full_lines, load_report, print_lines

    content = load_report(out)
    if plot is not None:
        from .plot import plot_job

        plot_job(out, content, plot)
    if is_json:
        _print_json(content)
    else:
        print_lines([*full_lines(content), *([("plot", str(plot))] * (plot is not None))], sys.stdout)
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

    POLICIES: never, always:K (K draft tokens), goodput, batch_threshold:K (off above K rows), acceptance_gate,
    module:Class, none (no drafter at all), job (the policy as the job has it). METHOD/POLICY, as in suffix/always:3,
    has drafts by another speculation.method than the job's.
    """
    from ..jobs.spec import JobSpec
    from .bench import run_bench
    from .build import ModelBuilder
    from .contender import parse_batches, parse_contenders

    limits = {"input.limit": rows, "sampling.max_tokens": max_tokens}
    set_limits = [f"{key}={value}" for key, value in limits.items() if value is not None]
    spec = session.spec = JobSpec.load(job_file, [*overrides, *set_limits])
    contenders = parse_contenders(policies, spec, job_file.parent)
    sizes = parse_batches(batches)
    report = run_bench(spec, contenders, sizes, repeats, ModelBuilder(job_file.parent, _complain), _complain)
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
    from .build import ModelBuilder
    from .simulate import all_contenders, find_job, simulate_recorded
    from .what_if import Assumptions, simulate_job

    limit = [f"input.limit={rows}"] if rows is not None else []
    spec, folder = find_job(what, [*overrides, *limit])
    session.spec = spec
    builder = session.builder or ModelBuilder(folder or Path.cwd(), _complain)
    contenders = all_contenders(policies, spec, folder or Path.cwd())
    assumptions = Assumptions.parse(output_tokens, acceptance, gpu, profile)
    if folder is not None:
        simulation = simulate_job(spec, contenders, builder, assumptions, _complain)
    elif rows is not None or assumptions != Assumptions():
        raise click.UsageError(f"{what} has run, so nothing is assumed; give --rows and such with a job file only")
    else:
        simulation = simulate_recorded(spec, contenders, builder, _complain, _complain)
    if is_json:
        _print_json(simulation.to_json())
        session.is_json = False
    else:
        click.echo(simulation.text())
    if save is not None:
        simulation.write(save)
    return 0


@cli.command()
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
    from ..jobs.spec import JobSpec
    from .build import ModelBuilder
    from .calibrate import parse_lengths, run_calibration
    from .contender import parse_batches
    from .profile import check_place

    limit = [f"input.limit={rows}"] if rows is not None else []
    spec = session.spec = JobSpec.load(job_file, [*overrides, *limit])
    sizes = None if batches is None else parse_batches(batches)
    drafts = None if lengths is None else parse_lengths(lengths)
    check_place(save)
    calibration = run_calibration(spec, sizes, drafts, steps, ModelBuilder(job_file.parent, _complain), _complain)
    if is_json:
        _print_json(calibration.to_json())
        session.is_json = False
    else:
        click.echo(calibration.text())
    calibration.write(save)
    if not is_json:
        click.echo(f"\nprofile: {save}")
    return 0


@cli.command()
def schema() -> int:
    """Print the JSON Schema of job.yaml."""
    from ..jobs.spec import json_schema

    _print_json(json_schema())
    return 0


def _end_with_result(result: JobResult, session: Session, is_json: bool, was_done: str = "") -> int:
    """Keep the exit code first: it stands also where nobody reads what is printed."""
    session.exit_code = result.exit_code
    _print_result(result, is_json, was_done)
    return result.exit_code


def _print_result(result: JobResult, is_json: bool, was_done: str) -> None:
    from .report import print_lines, summary_lines

    report = result.report
    if is_json:
        _print_json({**report, "state": result.state, "exit_code": result.exit_code, "was_done": result.was_done})
    elif report:
        print_lines(summary_lines(report), sys.stdout)
    if result.was_done:
        click.echo(f"specrun: {was_done}", err=True)
    elif result.waits_for is not None:
        _complain(f"this shard is done; the last one finalizes the job ({result.waits_for})")
    elif result.exit_code == TRY_AGAIN:
        rows = f"{report['num_rows']:,} rows are done; " if report else ""
        _complain(f"stopped early: {result.stop_reason}; {rows}run the same command again to go on")
    elif result.exit_code == TOO_MANY_FAILED:
        failed = f"{report['num_failed']:,} of {report['num_rows']:,} rows failed"
        why = "too many in a row (errors.abort_after_consecutive)"
        if result.state == "done":
            why = "more than errors.max_failed_fraction allows"
        _complain(f"{failed}, {why}; {report['files'].get('errors', 'the report')} says why each did")


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
    given = list(sys.argv[1:] if args is None else args)
    # Asked here and not of click, which may fail before it comes to this option.
    session = Session(builder, is_json="--json" in given)
    try:
        # Not cli.main(), which ends the process with 1 where a pipe is broken.
        with cli.make_context("specrun", given, obj=session) as context:
            result = cli.invoke(context)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as exc:  # of --help and --version
        return exc.exit_code
    except BrokenPipeError:  # whoever read the output, as `head` does, has enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  the interpreter flushes it at exit
        return session.exit_code
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
    text = session.hide(str(error))
    if code == INTERNAL:
        where = "the traceback is above" if _is_debug() else "set SPECRUN_DEBUG=1 for the traceback"
        text = f"internal error: {type(error).__name__}: {' '.join(text.split())}; {where}"
    if _is_debug():
        click.echo(session.hide("".join(traceback.format_exception(error))), err=True, nl=False)
    if session.is_json:
        _print_failure(code, text)
    _complain(text)
    return code


def _is_debug() -> bool:
    return os.environ.get("SPECRUN_DEBUG", "") not in ("", "0")


def main() -> None:
    """The console script."""
    code = run_command()
    filesystem = sys.modules.get(f"{__package__.rpartition('.')[0]}.jobs.filesystem")  # costs too much to import here
    if filesystem is not None and filesystem.used_object_store():
        # An object store's threads may hold up the interpreter's end for longer than anyone waits.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
