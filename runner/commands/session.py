"""One call of the command, and what it prints."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import click

if TYPE_CHECKING:
    from ...jobs.spec import JobSpec
    from ..build import Builder


class Showable(Protocol):
    """What a command came to."""

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        ...

    def text(self) -> str:
        """For people."""
        ...


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

    def print_json(self, content: Any) -> None:
        """The one JSON object."""
        print_json(content)
        self.is_json = False

    def print_failure(self, code: int, text: str) -> None:
        """The JSON object, where it is owed and nothing else can come of the call."""
        if self.is_json:
            self.print_json({"state": "failed", "exit_code": code, "error": text})

    def show(self, result: Showable, is_json: bool) -> None:
        """Before it is saved: a file that cannot be written must not cost the numbers."""
        if is_json:
            self.print_json(result.to_json())
        else:
            click.echo(result.text())


def print_json(content: Any) -> None:
    """A JSON value on stdout."""
    click.echo(json.dumps(content, indent=2, ensure_ascii=False, default=str))


def complain(text: str) -> None:
    """Lines on stderr."""
    for line in text.splitlines():
        click.echo(f"specrun: {line}", err=True)
