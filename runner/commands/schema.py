"""`specrun schema`."""

from __future__ import annotations

import click

from .session import print_json


@click.command()
def schema() -> int:
    """Print the JSON Schema of job.yaml."""
    from ...jobs.spec import json_schema

    print_json(json_schema())
    return 0
