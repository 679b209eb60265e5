"""What commands print: lines for a person, and JSON for a program. With --json, the lines go to stderr."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click


def say(lines: Iterable[str], err: bool = False) -> None:
    """Print lines for a person.

    Args:
        err: print on stderr. Commands set it with --json, because stdout then holds only JSON.
    """
    for line in lines:
        click.echo(line, err=err)


def warn(lines: Iterable[str]) -> None:
    """Print lines on stderr, each with `hpctrain: ` before it."""
    say((f"hpctrain: {line}" for line in lines), err=True)


JSON_OPTION = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else.")
"""The option --json of a command that prints one JSON object."""
JSON_LINES_OPTION = click.option("--json", "as_json", is_flag=True, help="Print a JSON object a line on stdout.")
"""The option --json of a command that prints JSON objects as they come."""


def print_json(value: Any) -> None:
    """Print a JSON value as one line on stdout, at once."""
    click.echo(json.dumps(value, allow_nan=False))


def submission(folder: Path, job_id: str) -> dict[str, str]:
    """Return the JSON object that `hpctrain submit` and `hpctrain resubmit` print with --json for a run and its job."""
    return {"name": folder.name, "folder": str(folder), "job_id": job_id}
