"""Decides how a run goes on when an attempt ends or a job begins. All functions are pure: they take the state and
return a verdict with its reason.

This module neither reads files nor asks Slurm. `node.attempt` reads the state, records the verdict and carries it out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hpctrain.jobs.attempt_outcome import (
    AttemptOutcome,
    StopCause,
    is_out_of_time,
    is_preempted,
    stop_cause,
    stop_reason_text,
    with_slurm_state,
)
from hpctrain.records.history.ledger import COUNTED_AGAINST_RETRIES, ExitClass, retries_spent_text
from hpctrain.records.run.run import NotifyState
from hpctrain.slurm.job import JobInfo

MAX_ATTEMPTS_WITHOUT_CHECKPOINT = 2
"""Attempts in a row that may end by infrastructure failures without a new checkpoint; the next one gets the exit class
no_progress."""


@dataclass(frozen=True)
class AttemptState:
    """Everything that the verdict on an ended attempt depends on."""

    run: str
    """Name of the run folder."""
    outcome: AttemptOutcome
    """How the attempt ended, by its exit code, its events and srun's errors."""
    retries: int
    """`recovery.retries` of the run file."""
    notice_s: int
    """`cluster.save_notice_s`: a signal within this many seconds of the time limit counts as the save notice."""
    progressed: bool = False
    """Whether the attempt left a newer checkpoint than the one that it began with."""
    failures: int = 0
    """Failures of the run since its last new checkpoint, without this attempt's."""
    attempts_without_checkpoint: int = 0
    """Attempts in a row, without this one, that left no new checkpoint."""
    successor: str | None = None
    """Id of the job that is queued behind the attempt's job; None without one."""
    in_allocation: bool = False
    """Whether the attempt ran in a person's allocation, which hpctrain does not queue again."""
    job: JobInfo | None = None
    """Slurm's description of the job; None if Slurm does not know it."""
    slurm_error: str | None = None
    """Why Slurm did not answer or did not queue the run again; None without such an error."""
    now: float = 0.0
    """When the attempt ended, seconds since 1970; it distinguishes the save notice from another signal."""
    cancelled: bool = False
    """Whether a person cancelled the run."""

    @property
    def preempted(self) -> bool:
        """Whether the job was preempted, or is about to be."""
        return self.job is not None and is_preempted(self.job)


@dataclass(frozen=True)
class JobVerdict:
    """The verdict on how a run goes on after an attempt, or when a job begins, with its reason."""

    act: Literal["stop", "again", "wait"]
    """What follows. `stop`: no further job. `again`: this process queues the next job. `wait`: Slurm requeues the job,
    or starts the successor."""
    reason: str
    exit_class: ExitClass
    """Exit class of the attempt that ended, or of the job that stops at its beginning."""
    failed: bool = False
    """Whether the run stops although it is not done; the process with the verdict then writes the event `failed`."""
    cancelled: bool = False
    """Whether a person cancelled the run, or has to continue it because hpctrain does not queue it again."""
    cause: StopCause | None = None
    """Why the attempt was asked to stop; None if it was not asked, or if the cause is unknown."""
    refused: bool = False
    """Whether the job stops because all checkpoints are lost; its exit code is then that of a refusal."""

    @property
    def notify_state(self) -> NotifyState:
        """The state that a notification about this verdict reports."""
        if self.exit_class == "done":
            return "done"
        if self.cancelled:
            return "cancelled"
        return "failed" if self.act == "stop" else "requeued"


@dataclass(frozen=True)
class AttemptEnd:
    """Exit class, reason and cause of an attempt's end."""

    exit_class: ExitClass
    reason: str
    cause: StopCause | None
    """What stopped the attempt; None if nothing asked it to stop, or if the cause is unknown."""


def decide_after_attempt(state: AttemptState) -> JobVerdict:
    """Return the verdict on how the run goes on after an attempt.

    hpctrain queues a preempted run again by itself: Slurm does not requeue a job that ends within its grace time (seen
    with 22.05: FAILED, although PreemptMode is REQUEUE), nor with PreemptMode=CANCEL. Slurm does not requeue a job at
    its time limit either.
    """
    end, outcome = classify(state), with_slurm_state(state.outcome, state.job)
    if outcome.exit_class == "done":
        return JobVerdict("stop", outcome.reason or "all steps are done", "done")
    if state.in_allocation:
        return _in_allocation(state.outcome)
    if state.slurm_error is None and _stopped_by_hand(state):
        return JobVerdict("stop", "cancelled", outcome.exit_class, cancelled=True)
    counted = end.exit_class in COUNTED_AGAINST_RETRIES
    spent = retries_spent_text(state.failures + 1, state.retries) if counted else None
    if state.slurm_error is not None:
        if state.successor is not None and not outcome.not_retryable and spent is None:
            return JobVerdict("wait", f"{end.reason}; job {state.successor} goes on", end.exit_class)
        return _failed(state, end, f"{end.reason}; the run could not be queued again ({state.slurm_error})")
    if outcome.not_retryable:
        return _failed(state, end, end.reason)
    if spent is not None:
        return _failed(state, end, f"{end.reason}; {spent}")
    if state.job is None:
        return _failed(state, end, f"{end.reason}; Slurm does not know its job")
    requeued_by_us = state.preempted or is_out_of_time(state.job) or state.job.state == "RUNNING"
    if state.job.is_waiting or not requeued_by_us:
        # After a node failure or a manual requeue, the job is already queued while its script still ends.
        what_follows = f"Slurm took the job ({state.job.state}) and decides whether it comes back"
        if state.job.is_waiting:
            what_follows = "Slurm has put the job back into the queue"
        elif state.successor is not None:
            what_follows = f"Slurm took the job ({state.job.state}); job {state.successor} goes on"
        return JobVerdict("wait", f"{end.reason}; {what_follows}", end.exit_class)
    reason = f"{end.reason}{', and' if end.cause else ';'} back to the queue"
    return JobVerdict("again", reason, end.exit_class, cause=end.cause)


def classify(state: AttemptState) -> AttemptEnd:
    """Return exit class, reason and cause of an attempt's end, from its outcome, Slurm's description of the job and the
    attempts before.

    An attempt without a new checkpoint gets the class no_progress if another attempt would probably have none either. A
    resumable attempt that was not preempted gets this class at once, because its time limit is too short for one
    checkpoint. An attempt with an infrastructure failure gets this class if at least MAX_ATTEMPTS_WITHOUT_CHECKPOINT
    attempts right before it left no new checkpoint either.
    """
    outcome = with_slurm_state(state.outcome, state.job)
    cause = stop_cause(outcome, state.job, state.now, state.notice_s)
    patience = {"resumable": 0, "infrastructure": MAX_ATTEMPTS_WITHOUT_CHECKPOINT}.get(outcome.exit_class, math.inf)
    loops = not (state.progressed or state.preempted) and state.attempts_without_checkpoint >= patience
    return AttemptEnd("no_progress" if loops else outcome.exit_class, stop_reason_text(outcome, cause), cause)


@dataclass(frozen=True)
class RunState:
    """Everything that the verdict on a job that begins depends on."""

    run: str
    """Name of the run folder."""
    retries: int
    """`recovery.retries` of the run file."""
    finished: bool = False
    """Whether the run is done."""
    cancelled: bool = False
    """Whether a person cancelled the run."""
    cancelled_job: str | None = None
    """Id of the run's newest job, if a person cancelled that job and the beginning job is its successor; else None."""
    failures: int = 0
    """Failures of the run since its last new checkpoint."""
    last_reason: str = ""
    """Why the last attempt ended."""
    lost_checkpoints: str | None = None
    """Error message if the run has saved checkpoints and none can be used now; else None."""


def decide_before_start(state: RunState) -> JobVerdict | None:
    """Return the verdict `stop` for a job that begins although its run must not go on; None if the run goes on."""
    resubmit = f"`hpctrain resubmit {state.run}` goes on with it"
    if state.finished:
        return JobVerdict("stop", f"{state.run}: the run is finished", "done")
    if state.cancelled:
        return JobVerdict("stop", f"{state.run}: the run was cancelled; {resubmit}", "resumable")
    if state.cancelled_job is not None:
        words = f"{state.run}: its job {state.cancelled_job} was cancelled; {resubmit}"
        return JobVerdict("stop", words, "resumable")
    if (spent := retries_spent_text(state.failures, state.retries)) is not None:
        return JobVerdict("stop", f"{state.last_reason}; {spent}; {resubmit}", "fatal", failed=True)
    if state.lost_checkpoints is not None:
        return JobVerdict("stop", f"{state.run}: {state.lost_checkpoints}", "fatal", failed=True, refused=True)
    return None


def _stopped_by_hand(state: AttemptState) -> bool:
    ended_by_scancel = state.job is not None and state.job.state == "CANCELLED" and not state.preempted
    return state.cancelled or ended_by_scancel


def _failed(state: AttemptState, end: AttemptEnd, reason: str) -> JobVerdict:
    words = f"{reason}; go on with `hpctrain resubmit {state.run}`"
    return JobVerdict("stop", words, end.exit_class, failed=True, cause=end.cause)


def _in_allocation(outcome: AttemptOutcome) -> JobVerdict:
    """Return the verdict on an attempt that ended in a person's allocation.

    If the run could go on, the field `cancelled` of the verdict is set: hpctrain does not queue the run again, so a
    person has to continue it.
    """
    reason = stop_reason_text(outcome, None)
    if outcome.exit_class not in ("resumable", "infrastructure"):
        return JobVerdict("stop", reason, outcome.exit_class)
    words = f"{'stopped on request, saved' if outcome.saved else reason}; `hpctrain resubmit` goes on with it"
    return JobVerdict("stop", words, outcome.exit_class, failed=True, cancelled=True)
