"""What a command says: lines for a person, which with --json go to stderr, and JSON for a program."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click


def say(lines: Iterable[str], err: bool = False) -> None:
    """Print lines for a person.

    Args:
        err: on stderr, as stdout holds JSON.
    """
    for line in lines:
        click.echo(line, err=err)


def warn(lines: Iterable[str]) -> None:
    """Print lines on stderr, each after the program's name."""
    say((f"hpctrain: {line}" for line in lines), err=True)


def submission(folder: Path, job_id: str) -> dict[str, str]:
    """Return what a submission answers in its JSON form."""
    return {"name": folder.name, "folder": str(folder), "job_id": job_id}
