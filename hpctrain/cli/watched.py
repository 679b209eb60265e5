"""The status of runs from their files and, where they were submitted, from Slurm: one question for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import CommandError, HpctrainError
from hpctrain.base.process import SystemRunner
from hpctrain.launch.cancel import is_cancelled
from hpctrain.records.locate import job_id
from hpctrain.records.run import read_run
from hpctrain.report.queued import with_controller_away, with_job
from hpctrain.report.status import Status, read_status
from hpctrain.slurm.commands import Slurm


def status_of(folder: Path) -> Status:
    """The status of the run in `folder`; a controller that is away is said, and the files speak alone.

    Raises:
        FileError: run.yaml is missing, or a file of the run is damaged.
    """
    status = statuses_of([folder])[0]
    if isinstance(status, HpctrainError):
        raise status
    return status


def statuses_of(folders: Sequence[Path]) -> list[Status | HpctrainError]:
    """The status of each run, or why it has none."""
    found = [_from_files(folder) for folder in folders]
    asked = {index: job for index, status in enumerate(found) if (job := _open_job(folders[index], status))}
    slurm = Slurm(SystemRunner())
    if not asked or not slurm.available():
        return found
    try:
        jobs = slurm.jobs(list(asked.values()))
    except CommandError as error:
        jobs, away = {}, str(error)
    else:
        away = ""
    for index, job in asked.items():
        status = found[index]
        assert isinstance(status, Status), "an error has no job"
        found[index] = (
            with_controller_away(status, away)
            if away
            else with_job(status, jobs.get(job), is_cancelled(folders[index]))
        )
    return found


def _from_files(folder: Path) -> Status | HpctrainError:
    try:
        return read_status(folder, SystemClock().wall())
    except HpctrainError as error:
        return error


def _open_job(folder: Path, status: Status | HpctrainError) -> str | None:
    """The job that Slurm may know more of; a run that is done needs nobody's word."""
    if isinstance(status, HpctrainError) or status.state == "done":
        return None
    return job_id(folder) if read_run(folder / "run.yaml").cluster.kind == "slurm" else None
