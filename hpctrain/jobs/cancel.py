"""Cancels a run: asks the agents to save a checkpoint, then ends the job."""

from __future__ import annotations

import math
from pathlib import Path

from hpctrain.base.atomic import write_text
from hpctrain.base.clock import Clock, utc_text
from hpctrain.jobs.successors import cancel_successors, waiting_successors
from hpctrain.runs.folder import resume_text
from hpctrain.slurm.commands import Slurm

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
    ended = job is None or job.state.is_ended
    if ended and not waiting_successors(folder, slurm):
        return f"job {job_id} has ended already; {resume_text(folder)}"
    # The file comes first: a job that begins or ends from now on queues no other.
    write_text(folder / CANCELLED_FILE, utc_text(clock.wall()) + "\n")
    behind = cancel_successors(folder, slurm)
    if job is None or ended:
        return f"jobs {', '.join(behind)} cancelled; they were waiting; {resume_text(folder)}"
    if job.state.value != "RUNNING" or at_once:
        slurm.cancel(job_id)
        was = "waiting" if job.state.is_waiting else job.state.value.lower()
        return f"job {job_id} cancelled; it was {was}; {resume_text(folder)}"
    deadline, asked_s = clock.now() + SAVE_WAIT_S, -math.inf
    while clock.now() < deadline:
        if clock.now() - asked_s >= CANCEL_RETRY_S:
            # The signal is repeated: submitit ignores it in a task that is just starting.
            slurm.signal(job_id, "TERM")
            asked_s = clock.now()
        job = slurm.job(job_id)
        if job is None or job.state.is_ended:
            return f"job {job_id} ended; {resume_text(folder)}"
        clock.sleep(POLL_S)
    slurm.cancel(job_id)
    return (
        f"job {job_id} cancelled; it had not ended {SAVE_WAIT_S:g} s after it was asked to save; {resume_text(folder)}"
    )


def is_cancelled(folder: Path) -> bool:
    """Whether a person cancelled the run."""
    return (folder / CANCELLED_FILE).exists()
