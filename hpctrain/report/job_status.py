"""A run's status together with what Slurm says of its job: the files know the training, the queue knows the job."""

from __future__ import annotations

from dataclasses import replace

from hpctrain.report.status import RunStatus, State
from hpctrain.slurm.job import JobInfo, needs_action, pending_job_text

HORIZON_S = 300 * 86400.0
"""An estimate beyond this tells nothing: behind a job without a time limit, Slurm counts on its end in a year."""


def with_job(status: RunStatus, job: JobInfo | None, now: float, cancelled: bool = False) -> RunStatus:
    """The status as the job's state completes it.

    Args:
        job: what Slurm says; None when it has forgotten the job, as it does some minutes after the end, and accounting
            does not remember it either.
        now: wall clock, seconds since 1970.
        cancelled: whether somebody cancelled the run: then its end, however it looks to Slurm, is no failure.
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
            # Its agents gave up; whether the run goes on is decided when its job ends.
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


def with_controller_unreachable(status: RunStatus, why: str) -> RunStatus:
    """The status from the run's files alone, and that the controller does not answer."""
    return replace(status, reason=f"{status.reason}; the Slurm controller does not answer ({why})")


def with_slurm_unknown(status: RunStatus, why: str) -> RunStatus:
    """The status from the run's files alone, and why Slurm could not be asked for its job."""
    return replace(status, reason=f"{status.reason}; Slurm was not asked: {why}")


def with_job_elsewhere(status: RunStatus, job_id: str, cluster: str) -> RunStatus:
    """The status from the run's files alone, and where its job is."""
    return replace(status, reason=f"{status.reason}; its job {job_id} is on cluster {cluster}")


def _forgotten(status: RunStatus) -> RunStatus:
    if status.state in ("running", "starting", "recovering", "queued", "requeued", "unknown"):
        return replace(status, state="failed", reason=f"Slurm knows the job no more; last: {status.reason}")
    return status
