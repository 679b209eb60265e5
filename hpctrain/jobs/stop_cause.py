"""Finds out why an attempt was asked to stop: a preemption, the time limit, or a signal from elsewhere. Pure
functions."""

from __future__ import annotations

from typing import Literal

from hpctrain.jobs.attempt_outcome import AttemptOutcome, is_out_of_time, is_preempted
from hpctrain.jobs.partition_checks import SIGNAL_EARLY_S
from hpctrain.slurm.job import JobInfo, JobState

StopCause = Literal["preempted", "time_limit", "signal"]
"""Why an attempt was asked to stop. `signal`: Slurm had no reason to send it, so a person or another program did."""
SILENT = "ended without a word: node lost, killed, or time limit"


def stop_cause(outcome: AttemptOutcome, job: JobInfo | None, now: float, notice_s: int) -> StopCause | None:
    """Return why the attempt was asked to stop; None if it was not asked, or if the cause is unknown.

    Args:
        job: Slurm's description; None if Slurm does not know the job or was not asked.
        now: when the attempt ended, seconds since 1970.
        notice_s: cluster.save_notice_s.
    """
    if job is None:
        return None
    if is_preempted(job):
        return "preempted"
    if outcome.exit_class != "resumable":
        return None
    if is_out_of_time(job):
        return "time_limit"
    if job.state is not JobState.RUNNING:
        return None  # Slurm is ending the job and sent the signal itself: a requeue, a lost node
    # The save notice is SIGUSR2 (`sbatch --signal`). Slurm sends no SIGTERM before the limit itself.
    due = job.end_s is not None and now >= job.end_s - notice_s - SIGNAL_EARLY_S
    if due and outcome.asked_by != "SIGTERM":
        return "time_limit"
    return "signal" if outcome.asked_by is not None else None


def stop_reason_text(outcome: AttemptOutcome, cause: StopCause | None) -> str:
    """Return why the attempt ended, in words that name what asked it to stop."""
    saved = ", saved" if outcome.saved else ", without a newer checkpoint"
    if cause == "preempted":
        return f"preempted{saved}"
    if cause == "time_limit":
        return (
            f"stopped before the time limit{saved}" if outcome.saved or outcome.asked_by else "ended at the time limit"
        )
    if cause == "signal":
        sender = "sent by neither a preemption nor the time limit (scancel --signal, kill)"
        return f"stopped by {outcome.asked_by}, {sender}{saved}"
    if outcome.reason:
        return outcome.reason
    if outcome.code is None:
        return SILENT
    if outcome.exit_class == "resumable":
        return "stopped on request"  # on a node other than rank 0's, nobody reports whether it saved
    return f"the step ended with exit code {outcome.code}"
