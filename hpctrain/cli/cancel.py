"""`hpctrain cancel RUN`: stop a run for good, with a checkpoint where there is time for one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import click

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import InputError
from hpctrain.base.process import SystemRunner
from hpctrain.launch.allocation import is_in_allocation, stop_in_allocation
from hpctrain.launch.cancel import cancel_job
from hpctrain.launch.folder import lock_holder
from hpctrain.records.locate import find_run, job_id
from hpctrain.records.run import read_run
from hpctrain.slurm.commands import Slurm


@click.command()
@click.argument("run")
def command(run: str) -> None:
    """Stop a run for good: its agents save a checkpoint and leave, then its job is cancelled.

    RUN is a run folder, a run's name or a job's id. `hpctrain resubmit` goes on with it later.
    """
    folder = find_run(run, os.environ, Path.cwd())
    if read_run(folder / "run.yaml").cluster.kind == "slurm":
        job = job_id(folder)
        if job is None:
            raise InputError(f"{folder.name}: it was never submitted, so there is no job to cancel")
        if is_in_allocation(folder):
            click.echo(stop_in_allocation(folder, SystemClock()))
            return
        click.echo(cancel_job(folder, job, Slurm(SystemRunner()), SystemClock()))
        return
    holder = lock_holder(folder)
    if holder is None:
        raise InputError(f"{folder.name}: no process holds it, so there is nothing to cancel")
    if not holder.is_here:
        raise InputError(f"{folder.name}: {holder} holds it; run `hpctrain cancel {folder.name}` on that machine")
    os.kill(holder.pid, signal.SIGTERM)
    click.echo(f"asked process {holder.pid} to save and stop; `hpctrain status {folder.name}` shows when it has")
