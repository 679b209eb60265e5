"""`hpctrain logs RUN`: what the processes of a run printed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import click

from hpctrain.base.errors import InputError
from hpctrain.launch.folder import RunFolder
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
    files = sorted((folder / "logs").rglob("*.log"))
    if attempt is not None:
        files = [path for path in files if _of_attempt(path.relative_to(folder / "logs"), folder, attempt)]
    if node is not None:
        files = [path for path in files if _of_node(path.name, node)]
    if not files:
        raise InputError(f"{folder.name}: no log of that kind in {folder / 'logs'}")
    for path in files:
        click.secho(f"==> {path.relative_to(folder)}", bold=True)
        for line in path.read_text(errors="replace").splitlines()[-lines:]:
            click.echo(line)


def _of_attempt(path: Path, folder: Path, attempt: int) -> bool:
    """Whether a log is of that attempt: in its folder, or of its job, whose attempts share theirs."""
    if len(path.parts) > 1:
        return path.parts[0] == str(attempt)
    jobs = {str(line["job_id"]) for line in RunFolder(folder).attempts() if line["attempt"] == attempt}
    return path.name.partition(".")[0] in jobs


def _of_node(name: str, node: str) -> bool:
    """Whether a log is of that node: NODE.RANK.log of a worker, NODE.agent.log or JOB.NODE.agent.log of an agent."""
    if re.fullmatch(rf"{re.escape(node)}\.\d+\.log", name):
        return True
    # Slurm writes the short name of a host into the name of a file.
    return any(re.fullmatch(rf"(\d+\.)?{re.escape(form)}\.agent\.log", name) for form in (node, node.split(".")[0]))
