"""A run's status from its files and, where it was submitted, from Slurm."""

from __future__ import annotations

from pathlib import Path

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import CommandError
from hpctrain.base.process import SystemRunner
from hpctrain.launch.cancel import is_cancelled
from hpctrain.records.locate import job_id
from hpctrain.records.run import read_run
from hpctrain.report.queued import with_controller_away, with_job
from hpctrain.report.status import Status, read_status
from hpctrain.slurm.commands import Slurm


def status_of(folder: Path) -> Status:
    """The status of the run in `folder`; a controller that is away is said, and the files speak alone."""
    status = read_status(folder, SystemClock().wall())
    job = job_id(folder)
    slurm = Slurm(SystemRunner())
    if job is None or read_run(folder / "run.yaml").cluster.kind != "slurm" or not slurm.available():
        return status
    try:
        return with_job(status, slurm.job(job), is_cancelled(folder))
    except CommandError as error:
        return with_controller_away(status, str(error))
