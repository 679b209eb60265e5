"""Adding a run that was started to the person's history; a run is not stopped by a home folder that is full."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import click

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import CommandError, StorageError
from hpctrain.records.history.past_runs import PastRun, append_past_run, history_file
from hpctrain.runs.locate import run_name
from hpctrain.slurm.commands import Slurm


def add_to_history(
    verb: Literal["submit", "resubmit", "train"], folder: Path, job_id: str | None, slurm: Slurm | None = None
) -> None:
    """Write down that a run was started, so that its name and its job's id lead to it from any folder.

    Args:
        slurm: asked for the name of the cluster; None for local processes.
    """
    path = history_file(os.environ)
    if path is None:
        return
    folder = folder.resolve()
    past = PastRun(
        time_s=SystemClock().wall(),
        verb=verb,
        name=run_name(folder.name),
        folder=str(folder),
        job_id=job_id,
        cluster=_cluster(slurm) if slurm is not None else None,
    )
    try:
        append_past_run(path, past)
    except StorageError as error:
        click.echo(f"hpctrain: this run is not in the history: {error}", err=True)


def _cluster(slurm: Slurm) -> str | None:
    try:
        return slurm.config()["cluster"]
    except CommandError:
        return None
