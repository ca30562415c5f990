"""How a command ends that ran a job: the exit code, the report, and a line for what is left to do."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from ..exit_codes import TOO_MANY_FAILED, TRY_AGAIN
from .session import Session, complain

if TYPE_CHECKING:
    from ..run import JobResult


def end_with_result(result: JobResult, session: Session, is_json: bool, was_done: str = "") -> int:
    """Keep the exit code first: it stands also where nobody reads what is printed."""
    session.exit_code = result.exit_code
    _print_result(result, session, is_json, was_done)
    return result.exit_code


def _print_result(result: JobResult, session: Session, is_json: bool, was_done: str) -> None:
    from ..report import print_lines, summary_lines

    report = result.report
    if is_json:
        session.print_json(
            {**report, "state": result.state, "exit_code": result.exit_code, "was_done": result.was_done}
        )
    elif report:
        print_lines(summary_lines(report), sys.stdout)
    if result.was_done:
        click.echo(f"specrun: {was_done}", err=True)
    elif result.waits_for is not None:
        complain(f"this shard is done; the last one finalizes the job ({result.waits_for})")
    elif result.exit_code == TRY_AGAIN:
        rows = f"{report['num_rows']:,} rows are done; " if report else ""
        complain(f"stopped early: {result.stop_reason}; {rows}run the same command again to go on")
    elif result.exit_code == TOO_MANY_FAILED:
        failed = f"{report['num_failed']:,} of {report['num_rows']:,} rows failed"
        why = "too many in a row (errors.abort_after_consecutive)"
        if result.state == "done":
            why = "more than errors.max_failed_fraction allows"
        complain(f"{failed}, {why}; {report['files'].get('errors', 'the report')} says why each did")
