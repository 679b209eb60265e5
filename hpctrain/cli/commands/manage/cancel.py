"""`hpctrain cancel RUN`: stop a run for good, with a checkpoint if there is time for one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import click

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import InputError
from hpctrain.base.owned_files import owner_only
from hpctrain.base.process import SystemRunner
from hpctrain.cli.options.run_and_paths import RUN
from hpctrain.cli.run_history import check_cluster
from hpctrain.jobs.live_job import cancel_job
from hpctrain.launch.slurm_job.existing_job import is_in_allocation, stop_in_allocation
from hpctrain.records.run.run import run_of
from hpctrain.runs.folder import check_trusted, lock_holder, resume_text
from hpctrain.runs.locate import job_id
from hpctrain.slurm.commands import Slurm


@click.command()
@click.argument("folder", metavar="RUN", type=RUN)
@click.option(
    "--now", "at_once", is_flag=True, help="Do not wait for a save: steps since the last checkpoint may be lost."
)
def command(folder: Path, at_once: bool) -> None:
    """Stop a run for good: its agents save a checkpoint and stop, then its job is cancelled.

    RUN is a run folder, a run's name or a job's id. A run that waits in the queue is taken out of the queue. `hpctrain
    resubmit` continues a cancelled run later, from its newest checkpoint.
    """
    click.get_current_context().with_resource(owner_only())
    folder = folder.resolve()
    check_trusted(folder)
    if run_of(folder).cluster.kind == "slurm":
        click.echo(_cancel_job(folder, at_once))
    else:
        click.echo(_stop_processes(folder, at_once))


def _cancel_job(folder: Path, at_once: bool) -> str:
    job = job_id(folder)
    if job is None:
        raise InputError(f"{folder.name}: it was never submitted, so there is no job to cancel")
    if is_in_allocation(folder):
        if at_once:
            raise InputError(
                f"{folder.name}: it runs in an allocation that is not its own; leave out --now, or press Ctrl-C twice "
                "where it was started"
            )
        return stop_in_allocation(folder, SystemClock())
    slurm = Slurm(SystemRunner())
    check_cluster(folder, slurm, "cancel")
    return cancel_job(folder, job, slurm, SystemClock(), at_once)


def _stop_processes(folder: Path, at_once: bool) -> str:
    holder = lock_holder(folder)
    if holder is None:
        raise InputError(f"{folder.name}: no process holds it, so there is nothing to cancel; {resume_text(folder)}")
    if not holder.is_here:
        raise InputError(f"{folder.name}: {holder} holds it; run `hpctrain cancel {folder.name}` on that machine")
    os.kill(holder.pid, signal.SIGTERM)
    if not at_once:
        return f"asked process {holder.pid} to save and stop; `hpctrain status {folder.name}` shows when it has"
    # SIGTERM asks for a save, SIGINT then ends it. Two signals of one kind could arrive as one.
    os.kill(holder.pid, signal.SIGINT)
    return f"told process {holder.pid} to end at once; {resume_text(folder)}"
