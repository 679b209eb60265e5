"""The run's newest job and its successors: the check that none of them uses the run folder any more, and cancelling
them, which first lets the agents save."""

from __future__ import annotations

import math
from pathlib import Path

from hpctrain.base.atomic import write_text
from hpctrain.base.clock import Clock, utc_text
from hpctrain.base.errors import InputError, RefusedError
from hpctrain.jobs.successors import cancel_successors, waiting_successors
from hpctrain.records.history.ledger import job_chain, read_successors
from hpctrain.runs.folder import resume_text
from hpctrain.runs.locate import job_id, open_jobs
from hpctrain.slurm.commands import ControllerUnreachableError, Slurm

CANCELLED_FILE = "cancelled"
"""File in a run folder that marks the run as cancelled, so that no process queues it again."""
SAVE_WAIT_S = 60.0
"""Seconds that the agents get to save before the job is cancelled."""
CANCEL_RETRY_S = 10.0
POLL_S = 1.0


def cancel_job(folder: Path, job_id: str, slurm: Slurm, clock: Clock, at_once: bool = False) -> str:
    """Cancel the run's job and its successors; return a sentence that says what was done and which checkpoint remains.

    After it returns, none of these jobs starts again. A run whose job has ended, without successors, keeps its state.

    Args:
        at_once: whether to give the agents no time to save.

    Raises:
        CommandError: the controller does not answer.
        StorageError: the run folder cannot be written.
    """
    job = slurm.job(job_id)
    ended = job is None or job.is_ended
    if ended and not waiting_successors(folder, slurm):
        return f"job {job_id} has ended already; {resume_text(folder)}"
    # The file comes first: a job that begins or ends from now on queues no other.
    write_text(folder / CANCELLED_FILE, utc_text(clock.wall()) + "\n")
    behind = cancel_successors(folder, slurm)
    if job is None or ended:
        return f"jobs {', '.join(behind)} cancelled; they were waiting; {resume_text(folder)}"
    if job.state != "RUNNING" or at_once:
        slurm.cancel(job_id)
        was = "waiting" if job.is_waiting else job.state.lower()
        return f"job {job_id} cancelled; it was {was}; {resume_text(folder)}"
    deadline, asked_s = clock.now() + SAVE_WAIT_S, -math.inf
    while clock.now() < deadline:
        if clock.now() - asked_s >= CANCEL_RETRY_S:
            # The signal is repeated: submitit ignores it in a task that is just starting.
            slurm.signal(job_id, "TERM")
            asked_s = clock.now()
        job = slurm.job(job_id)
        if job is None or job.is_ended:
            return f"job {job_id} ended; {resume_text(folder)}"
        clock.sleep(POLL_S)
    slurm.cancel(job_id)
    return (
        f"job {job_id} cancelled; it had not ended {SAVE_WAIT_S:g} s after it was asked to save; {resume_text(folder)}"
    )


def is_cancelled(folder: Path) -> bool:
    """Whether a person cancelled the run."""
    return (folder / CANCELLED_FILE).exists()


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
    return None if info is None or info.is_ended else info.state
