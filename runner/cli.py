"""The `specrun` command: the group of its commands, and how an error becomes an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from .. import __version__
from .commands.bench import bench
from .commands.calibrate import calibrate
from .commands.finalize import finalize
from .commands.report import report
from .commands.retry import retry
from .commands.schema import schema
from .commands.session import Session, complain
from .commands.simulate import simulate
from .commands.submit import submit
from .commands.validate import validate
from .exit_codes import INTERNAL, INTERRUPTED, USAGE, exit_code_of

if TYPE_CHECKING:
    from .build import Builder

COMMANDS = (submit, retry, finalize, validate, report, bench, simulate, calibrate, schema)


@click.group(commands=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="specrun")
def cli() -> None:
    """Offline batch runs of large language models: Parquet in, Parquet out, speculation decided at every step."""


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
        session.print_failure(USAGE, exc.format_message())
        exc.show()
        return USAGE
    except (click.Abort, KeyboardInterrupt):
        session.print_failure(INTERRUPTED, "interrupted")
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
    session.print_failure(code, text)
    complain(text)
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
