"""What happens after an attempt: the run is over, its job comes back, or Slurm sees to it. Decided, told, then done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hpctrain.base.clock import Clock
from hpctrain.base.errors import CommandError
from hpctrain.jobs.exit_codes import Ending, is_out_of_time, is_preempted, with_progress, with_slurms_word
from hpctrain.jobs.stop_cause import StopCause, reason_words, stop_cause
from hpctrain.records.history.attempt import SPENDING, ExitClass, idle_attempts, spent
from hpctrain.records.run.run import NotifyState
from hpctrain.slurm.commands import ControllerAwayError, Slurm
from hpctrain.slurm.job import JobInfo, JobState

PATIENCE_S = 60.0
"""How long a controller that is away is asked again; the notice before the time limit leaves room for it."""
RETRY_S = 2.0


@dataclass(frozen=True)
class Account:
    """What the ledger says when an attempt ends."""

    retries: int
    """recovery.retries."""
    progressed: bool = False
    """The attempt left a newer checkpoint than it found."""
    spent: int = 0
    """Failures since the last new checkpoint, this attempt's left out."""
    idle: int = 0
    """Attempts in a row that left no new checkpoint, this one left out."""
    successor: str | None = None
    """A job that is queued behind this one."""
    notice_s: int = 120
    """cluster.save_notice_s: so long before the time limit a notice is that of the time limit."""


def read_account(
    lines: Sequence[dict[str, Any]], found: str | None, newest: str | None, retries: int,
    successor: str | None = None, notice_s: int = 120, bad: Sequence[str] = (),
) -> Account:  # fmt: skip
    """The account of an attempt.

    Args:
        lines: those of the attempts before it that belong to the same submission by a person.
        found: the checkpoint that it began with.
        newest: the newest one now.
        bad: nodes that the attempt's probe confirmed to be bad.
    """
    progressed = newest is not None and newest != found
    before = [] if progressed else lines
    return Account(retries, progressed, spent(before, bad), idle_attempts(before), successor, notice_s)


@dataclass(frozen=True)
class Verdict:
    """What happens after the step."""

    act: Literal["stop", "again", "wait"]
    """stop: no further job. again: this process has to see to the next one. wait: Slurm brings the job back, or starts
    the one that is queued behind it."""
    reason: str
    exit_class: ExitClass
    failed: bool = False
    """The run stops here although it is not done; nobody else would say so."""
    cancelled: bool = False
    """A person wanted it to stop."""
    cause: StopCause | None = None
    """Why the attempt was asked to stop; None: it was not, or it is not known."""


def decide_end(
    ending: Ending, job: JobInfo | None, account: Account, now: float = 0.0, cancelled: bool = False
) -> Verdict:
    """What happens after an attempt.

    A job that ends within its grace time is over for Slurm (seen with 22.05: FAILED, not requeued, although
    PreemptMode is REQUEUE), and with PreemptMode=CANCEL or at its time limit Slurm never brings it back: somebody has
    to ask.

    Args:
        job: Slurm's description; None when it does not know the job.
        now: seconds since 1970, to tell the notice of the time limit from another one.
        cancelled: whether a person cancelled the run.
    """
    preempted = job is not None and is_preempted(job)
    ending = with_slurms_word(ending, job)
    cause = stop_cause(ending, job, now, account.notice_s)
    reason = reason_words(ending, cause)
    stopped_by_hand = cancelled or (job is not None and job.state is JobState.CANCELLED and not preempted)
    if ending.exit_class != "done" and not stopped_by_hand:
        ending = with_progress(ending, account.progressed, preempted, account.idle)
    kind = ending.exit_class
    if kind == "done":
        return Verdict("stop", ending.reason or "all steps are done", kind)
    if stopped_by_hand:
        return Verdict("stop", "cancelled", kind, cancelled=True)
    if ending.hopeless:
        return Verdict("stop", reason, kind, failed=True)
    if kind in SPENDING and account.spent + 1 > account.retries:
        return Verdict("stop", _budget_words(reason, account), kind, failed=True, cause=cause)
    if job is None:
        return Verdict("stop", f"{reason}; Slurm does not know its job", kind, failed=True)
    ours = preempted or is_out_of_time(job) or job.state is JobState.RUNNING
    if job.state.is_waiting or not ours:
        # After a node failure or a requeue by hand the job is in the queue already while its script still ends.
        return Verdict("wait", f"Slurm took the job ({job.state.value}); {_who_goes_on(job, account)}", kind)
    return Verdict("again", f"{reason}{', and' if cause else ';'} back to the queue", kind, cause=cause)


def told_state(verdict: Verdict) -> NotifyState:
    """What the end of an attempt is called towards the outside."""
    if verdict.exit_class == "done":
        return "done"
    if verdict.cancelled:
        return "cancelled"
    return "failed" if verdict.act == "stop" else "requeued"


def settle_job(
    ending: Ending,
    job_id: str,
    account: Account,
    slurm: Slurm,
    clock: Clock,
    cancelled: Callable[[], bool],
    told: Callable[[Verdict], None],
    again: Callable[[], None],
) -> Verdict:
    """Decide, and see to it that the run goes on. A controller that is away is asked again for a minute: a job that
    ends meanwhile without a word is not brought back by anybody.

    Args:
        told: called with the verdict before the job goes on, as a requeue ends this process.
        again: queues the next job, or puts this one back into the queue; raises CommandError.
    """
    if ending.exit_class == "done":
        return decide_end(ending, None, account)
    deadline = clock.now() + PATIENCE_S
    asked: Verdict | None = None
    while True:
        try:
            job = slurm.job(job_id)
            if asked is not None and job is not None and job.state.is_waiting:
                return asked  # the controller had taken the last call before it fell silent
            verdict = decide_end(ending, job, account, clock.wall(), cancelled())
            if verdict.act == "again":
                told(verdict)
                asked = verdict
                again()
            return verdict
        except ControllerAwayError as error:
            if clock.now() >= deadline:
                return _without_slurm(ending, account, error)
            clock.sleep(RETRY_S)
        except CommandError as error:
            return _without_slurm(ending, account, error)


def _who_goes_on(job: JobInfo, account: Account) -> str:
    if account.successor is not None and not job.state.is_waiting:
        return f"job {account.successor} goes on"
    return "it decides whether it comes back"


def _budget_words(reason: str, account: Account) -> str:
    count = account.spent + 1
    failures = "1 failure" if count == 1 else f"{count} failures in a row"
    return f"{reason}; {failures} without a new checkpoint (recovery.retries is {account.retries})"


def _without_slurm(ending: Ending, account: Account, error: CommandError) -> Verdict:
    """The verdict where Slurm cannot be asked: what is queued already goes on by itself."""
    decided = with_progress(ending, account.progressed, False, account.idle)
    kind, reason = decided.exit_class, reason_words(ending, stop_cause(ending, None, 0.0, account.notice_s))
    over = ending.hopeless or (kind in SPENDING and account.spent + 1 > account.retries)
    if account.successor is not None and not over:
        return Verdict("wait", f"{reason}; job {account.successor} goes on", kind)
    return Verdict("stop", f"{reason}; the run could not be queued again ({error})", kind, failed=True)
