"""What commands print: lines for a person, and JSON for a program. With --json, the lines go to stderr."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

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


def submission(folder: Path, job_id: str) -> dict[str, str]:
    """Return the JSON object that `hpctrain submit` and `hpctrain resubmit` print with --json for a run and its job."""
    return {"name": folder.name, "folder": str(folder), "job_id": job_id}
