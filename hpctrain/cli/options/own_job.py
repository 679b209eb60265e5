"""`submit --own-job` and `resubmit --own-job`: the last word of a batch script, which becomes the run's job."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import NoReturn

import click

from hpctrain.base.process import SystemRunner
from hpctrain.cli.options.remembered import remember_run
from hpctrain.jobs.dependencies import move_followers
from hpctrain.launch.own_job import is_restarted, own_job_id, take_job
from hpctrain.records.run.run import Run, run_of
from hpctrain.runs.locate import describe_others, job_id, run_of_job, runs_here
from hpctrain.runs.trust import check_trusted
from hpctrain.slurm.commands import Slurm

option = click.option(
    "--own-job", is_flag=True, help="In a batch script: this job is the run's own, and goes back to the queue with it."
)


def begin_own_job() -> str:
    """Id of this job; from here on the notice of a preemption waits for the job's script.

    A job that ends within its grace time is over for Slurm, so this process must not end by that notice.

    Raises:
        InputError: this is no batch job.
    """
    job = own_job_id(os.environ)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return job


def earlier_run(job: str) -> Path | None:
    """The run that this job had before it went back to the queue; None at its first start."""
    if not is_restarted(os.environ):
        return None
    folder = run_of_job(job, os.environ, Path.cwd())
    others = runs_here(os.environ, Path.cwd()).others if folder is None else []
    if others:
        click.echo(f"hpctrain: job {job} came back and no run folder had it; {describe_others(others)}", err=True)
    return folder


def become_job(folder: Path, job: str, run: Run | None = None) -> NoReturn:
    """This process turns into the run's job script; the folder, locks and attempts are that script's from here on."""
    folder = folder.resolve()
    check_trusted(folder)
    is_new = job_id(folder) != job
    argv = take_job(folder, run or run_of(folder), job)
    if is_new:
        slurm = Slurm(SystemRunner())
        remember_run("submit", folder, job, slurm)
        for line in move_followers(folder, slurm, os.environ):
            click.echo(f"hpctrain: {line}", err=True)
    click.echo(f"hpctrain: job {job}, run folder {folder}", err=True)
    SystemRunner().become(argv, os.environ)
