"""Checks whether a job still uses a run folder: two jobs in one folder would overwrite each other's checkpoints."""

from __future__ import annotations

from pathlib import Path

from hpctrain.base.errors import InputError, RefusedError
from hpctrain.records.history.ledger import job_chain, read_successors
from hpctrain.runs.locate import job_id, open_jobs
from hpctrain.slurm.commands import ControllerUnreachableError, Slurm


def check_no_live_job(folder: Path, slurm: Slurm) -> None:
    """Check that the run's newest job has ended and that no successor waits.

    Slurm is asked, as the run's files may come from an agent that was cut off.

    Raises:
        InputError: one of these jobs waits or runs.
        RefusedError: the controller does not answer, so the state is unknown.
    """
    for job in open_jobs(folder):
        live = _live_state(folder, job, slurm)
        if live is not None:
            raise InputError(
                f"{folder.name}: its job {job} is {live}; wait for its end, or use `hpctrain cancel {folder.name}`"
            )


def check_own_folder(folder: Path, own_id: str | None, slurm: Slurm) -> None:
    """Check that this job is the run's newest one, or that the newest has ended and is of the same submission.

    Raises:
        RefusedError: another job uses the folder, or the controller does not answer.
    """
    newest = job_id(folder)
    if newest is None or newest == own_id:
        return
    successors = read_successors(folder)
    if own_id in {item.job_id for item in successors} and newest not in job_chain(own_id, successors):
        raise RefusedError(
            f"{folder}: the run went on as job {newest}; this job ({own_id}) was queued for an earlier one"
        )
    live = _live_state(folder, newest, slurm)
    if live is not None:
        raise RefusedError(
            f"{folder}: the run went on as job {newest}, which is {live}; this job ({own_id or 'started by hand'}) "
            "leaves it alone"
        )


def _live_state(folder: Path, job: str, slurm: Slurm) -> str | None:
    """Return the state of a job that has not ended; None if it has ended or Slurm no longer knows it."""
    try:
        info = slurm.job(job)
    except ControllerUnreachableError as error:
        raise RefusedError(f"{folder.name}: cannot tell whether its job {job} has ended: {error}") from None
    return None if info is None or info.state.is_ended else info.state.value
