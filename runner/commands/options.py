"""Arguments and options that several commands have."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

job_file = click.argument("job_file", metavar="JOB.YAML", type=click.Path(path_type=Path))
overrides = click.option("--set", "overrides", multiple=True, metavar="A.B=C", help="Override a key; may be repeated.")
shard = click.option("--shard", metavar="I/N", help="Only the I-th (from 0) of N contiguous ranges of rows.")
as_json = click.option("--json", "is_json", is_flag=True, help="Print one JSON object on stdout.")


def with_shard(overrides: Sequence[str], shard: str | None) -> list[str]:
    """The overrides with the one that --shard stands for."""
    return [*overrides, *([f"run.shard={json.dumps(shard)}"] if shard is not None else [])]  # as text, "" too


def with_limit(overrides: Sequence[str], rows: int | None) -> list[str]:
    """The overrides with the one that --rows stands for."""
    return [*overrides, *([f"input.limit={rows}"] if rows is not None else [])]
