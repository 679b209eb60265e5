"""What happens after an attempt: the run stops, hpctrain queues it again, or Slurm goes on with it. The verdict is
made, reported, then carried out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hpctrain.base.clock import Clock
from hpctrain.base.errors import CommandError
from hpctrain.jobs.attempt_outcome import (
    AttemptOutcome,
    is_out_of_time,
    is_preempted,
    with_no_progress_check,
    with_slurm_state,
)
from hpctrain.jobs.stop_cause import StopCause, stop_cause, stop_reason_text
from hpctrain.records.history.attempt import (
    COUNTED_AGAINST_RETRIES,
    ExitClass,
    attempts_without_checkpoint,
    failures_since_checkpoint,
)
from hpctrain.records.run.run import NotifyState
from hpctrain.slurm.commands import ControllerUnreachableError, Slurm
from hpctrain.slurm.job import JobInfo, JobState

CONTROLLER_WAIT_S = 60.0
"""Seconds for which an unreachable controller is asked again; the save notice leaves time for it."""
RETRY_S = 2.0


@dataclass(frozen=True)
class AttemptHistory:
    """What the run's records say when an attempt ends."""

    retries: int
    """recovery.retries."""
    progressed: bool = False
    """Whether the attempt left a newer checkpoint than the one that it began with."""
    failures_since_checkpoint: int = 0
    """Failures since the last new checkpoint, without this attempt's."""
    attempts_without_checkpoint: int = 0
    """Attempts in a row, without this one, that left no new checkpoint."""
    successor: str | None = None
    """A job that is queued behind this one."""
    notice_s: int = 120
    """cluster.save_notice_s: a signal within this many seconds of the time limit counts as the save notice."""


def read_attempt_history(
    lines: Sequence[dict[str, Any]], checkpoint_before: str | None, checkpoint_after: str | None, retries: int,
    successor: str | None = None, notice_s: int = 120, bad: Sequence[str] = (),
) -> AttemptHistory:  # fmt: skip
    """Return the history of an attempt.

    Args:
        lines: lines of the earlier attempts that belong to the same submission by a person.
        checkpoint_before: the checkpoint that the attempt began with.
        checkpoint_after: the newest checkpoint now.
        bad: nodes that the attempt's probe confirmed to be bad.
    """
    progressed = checkpoint_after is not None and checkpoint_after != checkpoint_before
    before = [] if progressed else lines
    return AttemptHistory(
        retries,
        progressed,
        failures_since_checkpoint(before, bad),
        attempts_without_checkpoint(before),
        successor,
        notice_s,
    )


@dataclass(frozen=True)
class JobVerdict:
    """What happens after the job step."""

    act: Literal["stop", "again", "wait"]
    """`stop`: no further job. `again`: this process queues the next job. `wait`: Slurm requeues the job, or starts the
    successor."""
    reason: str
    exit_class: ExitClass
    failed: bool = False
    """Whether the run stops here although it is not done. Nobody else would report it."""
    cancelled: bool = False
    """Whether a person cancelled the run."""
    cause: StopCause | None = None
    """Why the attempt was asked to stop; None if it was not asked, or if the cause is unknown."""


def decide_after_attempt(
    outcome: AttemptOutcome, job: JobInfo | None, history: AttemptHistory, now: float = 0.0, cancelled: bool = False
) -> JobVerdict:
    """Return what happens after an attempt.

    For Slurm, a job that ends within its grace time is over (seen with 22.05: FAILED and not requeued, although
    PreemptMode is REQUEUE). With PreemptMode=CANCEL, or at the time limit, Slurm never requeues it. So hpctrain has to
    queue it again.

    Args:
        job: Slurm's description; None if Slurm does not know the job.
        now: seconds since 1970; tells the save notice from another signal.
        cancelled: whether a person cancelled the run.
    """
    preempted = job is not None and is_preempted(job)
    outcome = with_slurm_state(outcome, job)
    cause = stop_cause(outcome, job, now, history.notice_s)
    reason = stop_reason_text(outcome, cause)
    stopped_by_hand = cancelled or (job is not None and job.state is JobState.CANCELLED and not preempted)
    if outcome.exit_class != "done" and not stopped_by_hand:
        outcome = with_no_progress_check(outcome, history.progressed, preempted, history.attempts_without_checkpoint)
    kind = outcome.exit_class
    if kind == "done":
        return JobVerdict("stop", outcome.reason or "all steps are done", kind)
    if stopped_by_hand:
        return JobVerdict("stop", "cancelled", kind, cancelled=True)
    if outcome.not_retryable:
        return JobVerdict("stop", reason, kind, failed=True)
    if kind in COUNTED_AGAINST_RETRIES and history.failures_since_checkpoint + 1 > history.retries:
        return JobVerdict("stop", _retries_exhausted_text(reason, history), kind, failed=True, cause=cause)
    if job is None:
        return JobVerdict("stop", f"{reason}; Slurm does not know its job", kind, failed=True)
    ours = preempted or is_out_of_time(job) or job.state is JobState.RUNNING
    if job.state.is_waiting or not ours:
        # After a node failure or a manual requeue, the job is already queued while its script still ends.
        return JobVerdict("wait", f"Slurm took the job ({job.state.value}); {_what_happens_next(job, history)}", kind)
    return JobVerdict("again", f"{reason}{', and' if cause else ';'} back to the queue", kind, cause=cause)


def notification_state(verdict: JobVerdict) -> NotifyState:
    """Return the state that notifications report for the end of an attempt."""
    if verdict.exit_class == "done":
        return "done"
    if verdict.cancelled:
        return "cancelled"
    return "failed" if verdict.act == "stop" else "requeued"


def decide_and_requeue(
    outcome: AttemptOutcome,
    job_id: str,
    history: AttemptHistory,
    slurm: Slurm,
    clock: Clock,
    cancelled: Callable[[], bool],
    on_verdict: Callable[[JobVerdict], None],
    again: Callable[[], None],
) -> JobVerdict:
    """Return the verdict on an attempt, and queue the run again where the verdict says so.

    An unreachable controller is asked again for a minute: nobody else would queue a job that ends in the meantime.

    Args:
        on_verdict: called with the verdict before the job is queued again, as a requeue ends this process.
        again: queues the next job, or requeues this one; raises CommandError.
    """
    if outcome.exit_class == "done":
        return decide_after_attempt(outcome, None, history)
    deadline = clock.now() + CONTROLLER_WAIT_S
    asked: JobVerdict | None = None
    while True:
        try:
            job = slurm.job(job_id)
            if asked is not None and job is not None and job.state.is_waiting:
                return asked  # the controller took the last call before it stopped answering
            verdict = decide_after_attempt(outcome, job, history, clock.wall(), cancelled())
            if verdict.act == "again":
                on_verdict(verdict)
                asked = verdict
                again()
            return verdict
        except ControllerUnreachableError as error:
            if clock.now() >= deadline:
                return _decide_without_slurm(outcome, history, error)
            clock.sleep(RETRY_S)
        except CommandError as error:
            return _decide_without_slurm(outcome, history, error)


def _what_happens_next(job: JobInfo, history: AttemptHistory) -> str:
    if history.successor is not None and not job.state.is_waiting:
        return f"job {history.successor} goes on"
    return "it decides whether it comes back"


def _retries_exhausted_text(reason: str, history: AttemptHistory) -> str:
    count = history.failures_since_checkpoint + 1
    failures = "1 failure" if count == 1 else f"{count} failures in a row"
    return f"{reason}; {failures} without a new checkpoint (recovery.retries is {history.retries})"


def _decide_without_slurm(outcome: AttemptOutcome, history: AttemptHistory, error: CommandError) -> JobVerdict:
    """Return the verdict when Slurm cannot be asked. A successor that is already queued starts by itself."""
    decided = with_no_progress_check(outcome, history.progressed, False, history.attempts_without_checkpoint)
    kind, reason = decided.exit_class, stop_reason_text(outcome, stop_cause(outcome, None, 0.0, history.notice_s))
    over = outcome.not_retryable or (
        kind in COUNTED_AGAINST_RETRIES and history.failures_since_checkpoint + 1 > history.retries
    )
    if history.successor is not None and not over:
        return JobVerdict("wait", f"{reason}; job {history.successor} goes on", kind)
    return JobVerdict("stop", f"{reason}; the run could not be queued again ({error})", kind, failed=True)
