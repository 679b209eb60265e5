"""What kind of end an attempt had: from its exit code, its events and what Slurm says of its job. Pure functions."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpctrain.base.errors import EXIT_NO_PROGRESS, EXIT_REFUSED, EXIT_RESUMABLE, EXIT_USAGE
from hpctrain.records.history.attempt import ExitClass
from hpctrain.records.history.event import Event
from hpctrain.records.history.fault import Fault, fault_named
from hpctrain.slurm.job import JobInfo, JobState

KILLED_BEFORE_HANDLERS = (128 + 15, 128 + 12)
"""What srun gives when a task was told to leave (TERM, USR2) before its handlers stood."""
NOT_RETRYABLE_CODES = (EXIT_USAGE, EXIT_REFUSED)
"""Exit codes of what the next attempt would meet again: an invalid input, a plan that cannot be made."""
WORKER_FAILURE_EVENTS = ("worker_died", "worker_hung")
"""Events of a worker that failed by itself; one that lost its peers has none."""
MAX_ATTEMPTS_WITHOUT_CHECKPOINT = 2
"""So many attempts in a row may end for the cluster's sake without a new checkpoint; the next is no_progress."""


@dataclass(frozen=True)
class AttemptOutcome:
    """What an attempt left behind."""

    code: int | None
    """Exit code of the job: 0 when the run is finished, whatever became of single tasks. None: nobody saw it."""
    exit_class: ExitClass
    saved: bool = False
    """It was asked to stop, and saved before it left."""
    asked_by: str | None = None
    """What asked it to stop: SIGTERM, SIGUSR2; None: nothing did, or nobody said what."""
    reason: str | None = None
    """The last word of its agents; None when they left without one."""
    not_retryable: bool = False
    """Another attempt would end in the same way."""
    crashed: bool = False
    """The reason is no more than the error that an agent crashed with."""


def read_outcome(code: int | None, events: Sequence[Event], finished: bool) -> AttemptOutcome:
    """How the attempt ended, by what it said itself.

    Args:
        code: what srun gave: the highest exit code of all tasks, that of a lost or isolated node's too. So the events
            have the first word. None for an attempt whose script was killed.
        events: those of the attempt.
        finished: whether an agent said that the run is over.
    """
    done = next((event for event in reversed(events) if event.kind == "finished"), None)
    if code == 0 or finished or done is not None:
        return AttemptOutcome(0, "done", reason=done.reason if done else "all steps are done")
    last = next((event for event in reversed(events) if event.kind in ("preempted", "failed")), None)
    reason = _reason_with_crash(last, events)
    crashed = last is None and reason is not None
    failures = [event for event in events if event.kind == "failed" and "exit_code" in event.data]
    own = [event.data["exit_code"] for event in failures if not _due_to_lost_nodes(event, events)]
    if any(_fault(event).names_a_node for event in failures):
        return AttemptOutcome(code, "infrastructure", reason=reason)
    if own:
        kind: ExitClass = "fatal"
        if set(own) == {EXIT_NO_PROGRESS}:
            # Where no worker failed by itself, each of them lost its peers: that is the network's fault.
            kind = "no_progress" if any(event.kind in WORKER_FAILURE_EVENTS for event in events) else "infrastructure"
        return AttemptOutcome(
            code, kind, reason=reason, not_retryable=any(found in NOT_RETRYABLE_CODES for found in own)
        )
    if last is not None and last.kind == "preempted":
        asked_by = last.data.get("asked_by")
        return AttemptOutcome(
            code, "resumable", saved=_saved_after(last, code, events), asked_by=asked_by, reason=reason
        )
    if failures or code is None:
        return AttemptOutcome(code, "infrastructure", reason=reason, crashed=crashed)
    if code in KILLED_BEFORE_HANDLERS:
        return AttemptOutcome(
            code, "resumable", asked_by=signal.Signals(code - 128).name, reason=reason, crashed=crashed
        )
    if code == EXIT_RESUMABLE:
        return AttemptOutcome(code, "resumable", reason=reason, crashed=crashed)
    return AttemptOutcome(code, "fatal", reason=reason, not_retryable=code in NOT_RETRYABLE_CODES, crashed=crashed)


def _reason_with_crash(last: Event | None, events: Sequence[Event]) -> str | None:
    """The last word of the agents. Where one that crashed is why too few were left, or nobody was left to say
    anything, its error is the reason."""
    crash = next((event.reason for event in events if event.kind == "agent_crashed"), None)
    if last is None or crash is None:
        return crash if last is None else last.reason
    if last.kind != "failed" or last.data.get("exit_code") != EXIT_RESUMABLE or crash in last.reason:
        return last.reason
    return f"{crash}; then {last.reason}"


def _due_to_lost_nodes(event: Event, events: Sequence[Event]) -> bool:
    """Whether an agent gave up because nodes were gone: too few are left, no plan fits those that are, or the probe
    refused the nodes."""
    if event.data["exit_code"] == EXIT_RESUMABLE or event.data.get("by_probe") or _fault(event).is_infrastructure:
        return True
    if any(known.kind == "checkpoints_lost" for known in events):
        return False  # other nodes would not find them either
    left = set(event.data.get("left", []))
    # A node that the verdict excludes is there, and no plan can use it: it counts as gone.
    return (
        event.data["exit_code"] in NOT_RETRYABLE_CODES
        and bool(left)
        and left - _excluded(events) < set(nodes_of(events))
    )


def _excluded(events: Sequence[Event]) -> set[str]:
    """The nodes that the verdict of the attempt's topology excludes."""
    return {str(node) for event in events if event.kind == "probed" for node in event.data.get("exclude", [])}


def _saved_after(asked: Event, code: int | None, events: Sequence[Event]) -> bool:
    """Whether a checkpoint followed the request to stop. Workers that leave with EXIT_RESUMABLE have saved, unless they
    were asked before the training began."""
    later = events[events.index(asked) + 1 :]
    return (code == EXIT_RESUMABLE and asked.generation >= 0) or any(
        event.kind == "checkpoint_saved" for event in later
    )


def _fault(event: Event) -> Fault:
    return fault_named(event.data.get("fault"))


def nodes_of(events: Sequence[Event]) -> list[str]:
    """The nodes that the attempt began with, as its first agent said."""
    start = next((event for event in events if event.kind == "attempt_started"), None)
    return list(start.data.get("nodes", [])) if start else []


_CLASS_BY_JOB_STATE: dict[JobState, ExitClass] = {
    JobState.CANCELLED: "resumable",
    JobState.NODE_FAIL: "infrastructure",
    JobState.BOOT_FAIL: "infrastructure",
    JobState.OUT_OF_MEMORY: "fatal",
    JobState.FAILED: "fatal",
}


def with_slurm_state(outcome: AttemptOutcome, job: JobInfo | None) -> AttemptOutcome:
    """The outcome, completed by what Slurm did to the job: it alone knows of a preemption or a lost batch node.

    What the agents said for themselves stands: they were there.
    """
    if job is None or outcome.exit_class == "done":
        return outcome
    if is_preempted(job):
        return replace(outcome, exit_class="resumable", not_retryable=False)
    if outcome.reason is not None and not outcome.crashed:
        return outcome
    crash = f"{outcome.reason}; " if outcome.reason else ""
    if is_out_of_time(job):
        return replace(
            outcome, exit_class="resumable", reason=f"{crash}Slurm ended the job: TIMEOUT", not_retryable=False
        )
    kind = _CLASS_BY_JOB_STATE.get(job.state)
    words = f"{crash}Slurm ended the job: {job.state.value}"
    if outcome.code is None and kind is not None:
        return replace(outcome, exit_class=kind, reason=words)
    if job.state in (JobState.NODE_FAIL, JobState.BOOT_FAIL) and kind is not None:
        return replace(outcome, exit_class=kind, reason=words, not_retryable=False)
    return outcome


def is_preempted(job: JobInfo) -> bool:
    """Whether the job had to make room, or is about to."""
    return job.preempt_s is not None or job.state is JobState.PREEMPTED


def is_out_of_time(job: JobInfo) -> bool:
    """Whether the job reached its time limit; while its script still ends, Slurm 22.05 calls it COMPLETING."""
    return job.state is JobState.TIMEOUT or (job.state is JobState.COMPLETING and job.reason == "TimeLimit")


def with_no_progress_check(
    outcome: AttemptOutcome, progressed: bool, preempted: bool, attempts_without_checkpoint: int
) -> AttemptOutcome:
    """The outcome as no_progress, where an attempt that is not to blame got nowhere: it would loop for ever.

    A time limit too short for one checkpoint counts at once; a cluster that fails gets
    MAX_ATTEMPTS_WITHOUT_CHECKPOINT attempts.

    Args:
        progressed: whether it left a newer checkpoint than it found.
        preempted: then it is nobody's fault.
        attempts_without_checkpoint: attempts in a row before it that left no new checkpoint.
    """
    patience = {"resumable": 0, "infrastructure": MAX_ATTEMPTS_WITHOUT_CHECKPOINT}.get(outcome.exit_class)
    if patience is None or progressed or preempted or attempts_without_checkpoint < patience:
        return outcome
    return replace(outcome, exit_class="no_progress")
