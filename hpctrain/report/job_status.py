"""Combine a run's status with its job's state: the run's files show the training, Slurm's queue shows the job."""

from __future__ import annotations

from dataclasses import replace

from hpctrain.report.status import RunStatus, State
from hpctrain.slurm.job import JobInfo, needs_action, pending_job_text

HORIZON_S = 300 * 86400.0
"""Seconds from now beyond which an estimated start is ignored. Behind a job without a time limit, Slurm assumes that
the job ends in a year."""


def with_job(status: RunStatus, job: JobInfo | None, now: float, cancelled: bool = False) -> RunStatus:
    """Return the status combined with the job's state.

    Args:
        job: the job's information; None if Slurm has forgotten the job, as it does some minutes after the end, and
            accounting has no record either.
        now: wall clock, seconds since 1970.
        cancelled: whether a person cancelled the run; then the job's end counts as no failure.
    """
    if status.state == "done":
        return status
    if cancelled and (job is None or job.state.is_waiting or job.state.is_ended):
        return replace(status, state="cancelled", reason="cancelled; `hpctrain resubmit` goes on with it")
    if job is None:
        return _forgotten(status)
    status = replace(status, job_state=job.state.value)
    word = job.state.value
    if job.state.is_waiting:
        state: State = "requeued" if job.restarts or status.step or status.attempt else "queued"
        return replace(
            status,
            state=state,
            reason=f"job {job.job_id}: {pending_job_text(job, now)}",
            expected_start_s=_expected_start(job, now),
            needs_action=needs_action(job) or None,
        )
    if not job.state.is_ended:
        if status.state in ("queued", "unknown", "requeued"):
            return replace(status, state="starting", reason=f"job {job.job_id} is {word.lower()}")
        if status.state == "failed":
            # The agents gave up, but the end of the job decides whether the run continues.
            reason = f"{status.reason}; its job {job.job_id} is {word.lower()} still"
            return replace(status, state="recovering", reason=reason)
        return status
    if word == "CANCELLED":
        return replace(status, state="cancelled", reason=f"job {job.job_id} was cancelled")
    if status.state == "failed":
        return status
    return replace(status, state="failed", reason=f"job {job.job_id} ended: {word}, exit code {job.exit_code}")


def _expected_start(job: JobInfo, now: float) -> float | None:
    if job.start_s is None or not now < job.start_s < now + HORIZON_S:
        return None
    return job.start_s


def with_remark(status: RunStatus, remark: str) -> RunStatus:
    """Return the status by the run's files, with `remark` as the reason why the job's state is missing from it."""
    return replace(status, reason=f"{status.reason}; {remark}")


def _forgotten(status: RunStatus) -> RunStatus:
    if status.state in ("running", "starting", "recovering", "queued", "requeued", "unknown"):
        return replace(status, state="failed", reason=f"Slurm knows the job no more; last: {status.reason}")
    return status
