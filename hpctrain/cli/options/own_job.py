"""`submit --own-job` and `resubmit --own-job`: the last command of a batch script, which becomes the run's job."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import NoReturn

import click

from hpctrain.base.process import SystemRunner
from hpctrain.cli.answers import warn
from hpctrain.cli.run_history import add_to_history
from hpctrain.jobs.dependencies import refresh_dependent_runs
from hpctrain.launch.slurm_job.existing_job import adopt_job, current_batch_job_id, is_requeued_job
from hpctrain.records.run.run import Run, run_of
from hpctrain.runs.folder import check_trusted
from hpctrain.runs.locate import job_id, run_of_job, scan_runs, untrusted_folders_text
from hpctrain.slurm.commands import Slurm

own_job_option = click.option(
    "--own-job", is_flag=True, help="In a batch script: this job is the run's own, and goes back to the queue with it."
)


def begin_own_job() -> str:
    """Return the id of this batch job, and ignore SIGTERM from now on: the job script handles the notice of a
    preemption.

    If this process ended by that notice, within the grace time, Slurm would count the job as over.

    Raises:
        InputError: this process is in no batch job.
    """
    job = current_batch_job_id(os.environ)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return job


def earlier_run(job: str) -> Path | None:
    """Return the folder of the run that this job had before it was requeued; None at the job's first start."""
    if not is_requeued_job(os.environ):
        return None
    folder = run_of_job(job, os.environ, Path.cwd())
    others = scan_runs(os.environ, Path.cwd()).untrusted if folder is None else []
    if others:
        warn([f"job {job} came back and no run folder had it; {untrusted_folders_text(others)}"])
    return folder


def become_job(folder: Path, job: str, run: Run | None = None) -> NoReturn:
    """Replace this process by the run's job script, which from then on owns the run folder."""
    folder = folder.resolve()
    check_trusted(folder)
    is_new = job_id(folder) != job
    argv = adopt_job(folder, run or run_of(folder), job)
    if is_new:
        slurm = Slurm(SystemRunner())
        add_to_history("submit", folder, job, slurm)
        warn(refresh_dependent_runs(folder, slurm, os.environ))
    warn([f"job {job}, run folder {folder}"])
    SystemRunner().replace_process(argv, os.environ)
