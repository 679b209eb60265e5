"""The status of runs from their files and, where they were submitted, from Slurm: one question for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import CommandError, HpctrainError
from hpctrain.base.process import SystemRunner
from hpctrain.launch.cancel import is_cancelled
from hpctrain.records.locate import open_jobs
from hpctrain.records.run import read_run
from hpctrain.report.queued import with_controller_away, with_job
from hpctrain.report.status import Status, read_status
from hpctrain.slurm.commands import Slurm
from hpctrain.slurm.job import JobInfo


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
    asked = {index: jobs for index, status in enumerate(found) if (jobs := _open_jobs(folders[index], status))}
    slurm = Slurm(SystemRunner())
    if not asked or not slurm.available():
        return found
    try:
        known = slurm.jobs([job for jobs in asked.values() for job in jobs])
    except CommandError as error:
        known, away = {}, str(error)
    else:
        away = ""
    for index, jobs in asked.items():
        status = found[index]
        assert isinstance(status, Status), "an error has no job"
        found[index] = (
            with_controller_away(status, away)
            if away
            else with_job(status, _telling(jobs, known), is_cancelled(folders[index]))
        )
    return found


def _from_files(folder: Path) -> Status | HpctrainError:
    try:
        return read_status(folder, SystemClock().wall())
    except HpctrainError as error:
        return error


def _open_jobs(folder: Path, status: Status | HpctrainError) -> list[str]:
    """The jobs that Slurm may know more of; a run that is done needs nobody's word."""
    if isinstance(status, HpctrainError) or status.state == "done":
        return []
    return open_jobs(folder) if read_run(folder / "run.yaml").cluster.kind == "slurm" else []


def _telling(jobs: Sequence[str], known: Mapping[str, JobInfo]) -> JobInfo | None:
    """The job that says how the run is: the first that has not ended, as the next one takes over; else the newest."""
    live = (known[job] for job in jobs if job in known and not known[job].state.is_ended)
    return next(live, known.get(jobs[0]))
