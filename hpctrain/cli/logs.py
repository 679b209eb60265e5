"""`hpctrain logs RUN`: what the processes of a run printed."""

from __future__ import annotations

import os
from pathlib import Path

import click

from hpctrain.base.errors import InputError
from hpctrain.records.locate import find_run


@click.command()
@click.argument("run")
@click.option("--node", help="Only the logs of this node.")
@click.option("--attempt", type=int, help="Only this attempt; default: all.")
@click.option(
    "-n", "--lines", type=click.IntRange(min=1), default=20, show_default=True, help="Last lines of each file."
)
def command(run: str, node: str | None, attempt: int | None, lines: int) -> None:
    """Print the end of each log file of a run: the job's script, its agents and its workers.

    RUN is a run folder, a run's name or a job's id.
    """
    folder = find_run(run, os.environ, Path.cwd())
    files = [path for path in sorted((folder / "logs").rglob("*.log")) if _wanted(path, folder, node, attempt)]
    if not files:
        raise InputError(f"{folder.name}: no log of that kind in {folder / 'logs'}")
    for path in files:
        click.secho(f"==> {path.relative_to(folder)}", bold=True)
        for line in path.read_text(errors="replace").splitlines()[-lines:]:
            click.echo(line)


def _wanted(path: Path, folder: Path, node: str | None, attempt: int | None) -> bool:
    parts = path.relative_to(folder / "logs").parts
    if attempt is not None and parts[0] != str(attempt):
        return False
    return node is None or node in path.name.split(".")
