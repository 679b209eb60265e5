"""Finds out how an attempt ended and what asked it to stop, from its exit code, its events, srun's errors and Slurm's
description of its job. All functions are pure, except that `with_srun_error` reads the file with srun's stderr."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from hpctrain.base.errors import EXIT_NO_PROGRESS, EXIT_REFUSED, EXIT_RESUMABLE, EXIT_USAGE, UntrustedError
from hpctrain.base.owned_files import open_owned
from hpctrain.jobs.partition_checks import SIGNAL_EARLY_S
from hpctrain.records.history.fault import Fault, fault_named
from hpctrain.records.history.ledger import ExitClass
from hpctrain.records.history.run_log import Event, nodes_at_start, nodes_excluded_by_probe
from hpctrain.slurm.job import JobInfo, JobState

KILLED_BEFORE_HANDLERS = (128 + 15, 128 + 12)
"""Exit codes of srun after a task got SIGTERM or SIGUSR2 before it had installed its signal handlers."""
NOT_RETRYABLE_CODES = (EXIT_USAGE, EXIT_REFUSED)
"""Exit codes of errors that the next attempt would have too: an invalid input, a plan that cannot be made."""
WORKER_FAILURE_EVENTS = ("worker_died", "worker_hung")
"""Kinds of events that are written when a worker failed by itself, and not when it only lost its peers."""


@dataclass(frozen=True)
class AttemptOutcome:
    """How an attempt ended."""

    code: int | None
    """Exit code for the job script: 0 if the run is finished, whatever single tasks returned, else srun's. None if it
    is unknown."""
    exit_class: ExitClass
    """Kind of the attempt's end, by this attempt alone; `policy.classify` also looks at the attempts before."""
    saved: bool = False
    """Whether the attempt was asked to stop and saved a checkpoint before it ended."""
    asked_by: str | None = None
    """What asked the attempt to stop, such as SIGTERM or SIGUSR2; None if nothing did, or if it is unknown."""
    reason: str | None = None
    """The reason that the agents or srun gave for the end; None if they gave none."""
    not_retryable: bool = False
    """Whether another attempt would end in the same way."""
    crashed: bool = False
    """Whether `reason` is only the error with which an agent crashed."""


def read_outcome(code: int | None, events: Sequence[Event], finished: bool) -> AttemptOutcome:
    """Return how the attempt ended, from its exit code and its events.

    The events take precedence over the code, because the code is the highest exit code of all tasks, also of the task
    on a node that was cut off.

    Args:
        code: highest exit code of the attempt's sruns; None for an attempt whose script was killed.
        events: events of the attempt.
        finished: whether an agent reported that the run is finished.
    """
    done = next((event for event in reversed(events) if event.kind == "finished"), None)
    if code == 0 or finished or done is not None:
        return AttemptOutcome(0, "done", reason=done.reason if done else "all steps are done")
    last = next((event for event in reversed(events) if event.kind in ("preempted", "failed")), None)
    reason = _reason_with_crash(last, events)
    ended = AttemptOutcome(code, "fatal", reason=reason, crashed=last is None and reason is not None)
    failures = [event for event in events if event.kind == "failed" and "exit_code" in event.data]
    error_codes = {event.data["exit_code"] for event in failures if not _due_to_lost_nodes(event, events)}
    if any(_fault(event).names_a_node for event in failures):
        return replace(ended, exit_class="infrastructure")
    if error_codes == {EXIT_NO_PROGRESS}:
        # Where no worker failed by itself, each of them lost its peers: the network failed.
        by_worker = any(event.kind in WORKER_FAILURE_EVENTS for event in events)
        return replace(ended, exit_class="no_progress" if by_worker else "infrastructure")
    if error_codes:
        return replace(ended, not_retryable=not error_codes.isdisjoint(NOT_RETRYABLE_CODES))
    if last is not None and last.kind == "preempted":
        saved, asked_by = _saved_after(last, code, events), last.data.get("asked_by")
        return replace(ended, exit_class="resumable", saved=saved, asked_by=asked_by)
    if failures or code is None:
        return replace(ended, exit_class="infrastructure")
    if code in KILLED_BEFORE_HANDLERS:
        return replace(ended, exit_class="resumable", asked_by=signal.Signals(code - 128).name)
    if code == EXIT_RESUMABLE:
        return replace(ended, exit_class="resumable")
    return replace(ended, not_retryable=code in NOT_RETRYABLE_CODES)


def _reason_with_crash(last: Event | None, events: Sequence[Event]) -> str | None:
    """Return the reason that the agents gave for the attempt's end; None if they gave none.

    If an agent crashed, its error is put before the reason that too few nodes remained; without an event `last`, the
    error is the reason.

    Args:
        last: the attempt's last event of kind preempted or failed; None without one.
        events: events of the attempt.
    """
    crash = next((event.reason for event in events if event.kind == "agent_crashed"), None)
    if last is None or crash is None:
        return crash if last is None else last.reason
    if last.kind != "failed" or last.data.get("exit_code") != EXIT_RESUMABLE or crash in last.reason:
        return last.reason
    return f"{crash}; then {last.reason}"


def _due_to_lost_nodes(event: Event, events: Sequence[Event]) -> bool:
    """Return whether the agent that wrote a failed event gave up because of its nodes: too few remained, no plan fits
    on the remaining ones, the probe refused them, or nodes or the network had a fault.

    Args:
        events: events of the attempt.
    """
    if event.data["exit_code"] == EXIT_RESUMABLE or event.data.get("by_probe") or _fault(event).is_infrastructure:
        return True
    if any(known.kind == "checkpoints_lost" for known in events):
        return False  # other nodes would not find the checkpoints either
    # A node that the verdict excludes is alive, but no plan can use it: it counts as lost.
    alive = set(event.data.get("left", []))
    usable = alive - nodes_excluded_by_probe(events)
    return event.data["exit_code"] in NOT_RETRYABLE_CODES and bool(alive) and usable < set(nodes_at_start(events))


def _saved_after(asked: Event, code: int | None, events: Sequence[Event]) -> bool:
    """Return whether the workers saved a checkpoint after the request to stop, the event `asked`. Workers that exit
    with EXIT_RESUMABLE have saved one, unless the request came before the training began.

    Args:
        code: exit code of srun.
    """
    later = events[events.index(asked) + 1 :]
    return (code == EXIT_RESUMABLE and asked.generation >= 0) or any(
        event.kind == "checkpoint_saved" for event in later
    )


def _fault(event: Event) -> Fault:
    return fault_named(event.data.get("fault"))


_CLASS_BY_JOB_STATE: dict[JobState, ExitClass] = {
    "CANCELLED": "resumable",
    "NODE_FAIL": "infrastructure",
    "BOOT_FAIL": "infrastructure",
    "OUT_OF_MEMORY": "fatal",
    "FAILED": "fatal",
}


def with_slurm_state(outcome: AttemptOutcome, job: JobInfo | None) -> AttemptOutcome:
    """Return the outcome, corrected by Slurm's description of the job, because only Slurm knows of a preemption or a
    lost batch node. An outcome with a reason from the agents, other than a crash, is corrected only for a
    preemption.

    Args:
        job: Slurm's description; None if Slurm does not know the job.
    """
    if job is None or outcome.exit_class == "done":
        return outcome
    if is_preempted(job):
        return replace(outcome, exit_class="resumable", not_retryable=False)
    if outcome.reason is not None and not outcome.crashed:
        return outcome
    crash = f"{outcome.reason}; " if outcome.reason else ""
    if is_out_of_time(job):
        reason = f"{crash}Slurm ended the job: TIMEOUT"
        return replace(outcome, exit_class="resumable", reason=reason, not_retryable=False)
    kind = _CLASS_BY_JOB_STATE.get(job.state)
    if kind is None or (outcome.code is not None and job.state not in ("NODE_FAIL", "BOOT_FAIL")):
        return outcome
    reason = f"{crash}Slurm ended the job: {job.state}"
    return replace(outcome, exit_class=kind, reason=reason, not_retryable=False)


def is_preempted(job: JobInfo) -> bool:
    """Return whether the job was preempted, or is about to be."""
    return job.preempt_s is not None or job.state == "PREEMPTED"


def is_out_of_time(job: JobInfo) -> bool:
    """Return whether the job reached its time limit. Until its script has ended, Slurm 22.05 gives it the state
    COMPLETING."""
    return job.state == "TIMEOUT" or (job.state == "COMPLETING" and job.reason == "TimeLimit")


StopCause = Literal["preempted", "time_limit", "signal"]
"""Why an attempt was asked to stop. `signal`: it got a signal for which Slurm had no reason, so a person or another
program sent it."""
SILENT = "ended without a word: node lost, killed, or time limit"
"""Reason of an attempt about whose end nothing is known."""


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
    if job.state != "RUNNING":
        return None  # Slurm is ending the job and sent the signal itself: a requeue, a lost node
    # The save notice is SIGUSR2 (`sbatch --signal`). Slurm sends no SIGTERM before the limit itself.
    due = job.end_s is not None and now >= job.end_s - notice_s - SIGNAL_EARLY_S
    if due and outcome.asked_by != "SIGTERM":
        return "time_limit"
    return "signal" if outcome.asked_by is not None else None


def stop_reason_text(outcome: AttemptOutcome, cause: StopCause | None) -> str:
    """Return why the attempt ended, as text that also names what asked the attempt to stop, if that is known.

    Args:
        cause: result of `stop_cause`.
    """
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


SRUN_LOG_NAME = "srun.txt"
"""File in a run's folder logs/<attempt> with the stderr of all sruns; the job's log has the same lines."""
SRUN_LOG_BYTES_MAX = 2**18
"""Bytes of srun.txt that are read. The start of the file is enough: the first error is the cause, and after it srun
only names each task that it ends."""


def srun_log(folder: Path, attempt: int) -> Path:
    """Return the path of the file with srun's stderr for an attempt of the run in `folder`."""
    return folder / "logs" / str(attempt) / SRUN_LOG_NAME


def with_srun_error(outcome: AttemptOutcome, folder: Path, attempt: int) -> AttemptOutcome:
    """Return the outcome as an infrastructure failure with srun's message, if srun could not start a job step; else as
    it is.

    An outcome that is done, or has a reason from the agents, is also returned as it is.

    Args:
        folder: the run folder.
    """
    if outcome.exit_class == "done" or (outcome.reason is not None and not outcome.crashed):
        return outcome
    try:
        with os.fdopen(open_owned(srun_log(folder, attempt)), "rb") as file:
            reason = step_failure_text(file.read(SRUN_LOG_BYTES_MAX).decode(errors="replace"))
    except (OSError, UntrustedError):
        return outcome
    if reason is None:
        return outcome
    return replace(outcome, exit_class="infrastructure", reason=reason, not_retryable=False)


_ERROR = re.compile(r"^srun: error: (?:\w+: )?(?P<words>.+)$", re.MULTILINE)
_NOT_STARTED = re.compile(
    r"task launch for .* failed|application launch failed|unable to create step|task \d+ launch failed", re.IGNORECASE
)
_NODE_LOST = re.compile(r"node failure on|(?:aborting, .*\b|cannot communicate with )node \d+", re.IGNORECASE)
"""Matches srun's errors about a lost node, such as 'Aborting, io error and missing step on node 0' and 'Node failure on
gpu3' (seen in 22.05 and 24.11). The job script then tries to start the node's step again; that Slurm refuses this is no
cause of the attempt's end."""


def step_failure_text(text: str) -> str | None:
    """Return as a sentence the first error for which srun did not start a job step at the attempt's beginning; None if
    srun reports no such error.

    Args:
        text: srun's stderr.
    """
    for line in _ERROR.finditer(text):
        words = line["words"].strip()
        if _NODE_LOST.match(words):
            return None
        if _NOT_STARTED.search(words):
            return f"Slurm could not start the step (srun: {words})"
    return None
