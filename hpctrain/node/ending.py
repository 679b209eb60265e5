"""How an attempt ended, and whether its job goes back to the queue: from exit code, events and Slurm's own word."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.agent.decide import RESUMABLE
from hpctrain.base.clock import Clock
from hpctrain.base.errors import CommandError
from hpctrain.launch.folder import RunFolder
from hpctrain.records.event import Event
from hpctrain.records.run import NotifyState
from hpctrain.slurm.commands import ControllerAwayError, Slurm
from hpctrain.slurm.job import JobInfo, JobState
from hpctrain.snapshot.published import listed

CANCELLED = "cancelled"
PATIENCE_S = 60.0
"""How long a controller that is away is asked again; the notice before the time limit leaves room for it."""
RETRY_S = 2.0
KILLED_AT_START = (128 + signal.SIGTERM, 128 + signal.SIGUSR2)
"""What srun gives when a task was told to leave before its handlers stood."""


@dataclass(frozen=True)
class Ending:
    """What an attempt left behind."""

    code: int
    """Exit code of the job: 0 when the run is finished, whatever became of single tasks."""
    resumable: bool
    """Stopped where it can go on, by itself or because somebody asked."""
    saved: bool
    """It was asked to stop, and saved first."""
    reason: str | None
    """The last word of its agents; None when they left without one."""


@dataclass(frozen=True)
class Verdict:
    """What happens to the job after its step."""

    requeue: bool
    reason: str
    failed: bool = False
    """The run stops here although it is not done; nobody else would say so."""


def read_ending(code: int, events: Sequence[Event], finished: bool) -> Ending:
    """How the attempt ended.

    Args:
        code: what srun gave: the highest exit code of all tasks, that of a lost or isolated node's too. So the events
            have the first word.
        events: those of the attempt.
        finished: whether an agent said that the run is over.
    """
    last = next((event for event in reversed(events) if event.kind in ("preempted", "failed")), None)
    done = next((event for event in reversed(events) if event.kind == "finished"), None)
    if code == 0 or finished or done is not None:
        return Ending(0, False, False, done.reason if done else "all steps are done")
    failures = [event.data.get("exit_code") for event in events if event.kind == "failed"]
    fatal = any(found not in (None, RESUMABLE) for found in failures)
    asked = last is not None and last.kind == "preempted"
    resumable = asked or RESUMABLE in failures or code == RESUMABLE or code in KILLED_AT_START
    return Ending(code, resumable and not fatal, asked, last.reason if last else None)


def decide_end(ending: Ending, job: JobInfo | None, cancelled: bool = False, stuck: str | None = None) -> Verdict:
    """Whether the job goes back to the queue.

    A job that ends within its grace time is over for Slurm (seen with 22.05: FAILED, not requeued, although
    PreemptMode is REQUEUE), and with PreemptMode=CANCEL Slurm never brings it back: it has to ask for itself.

    Args:
        job: Slurm's description; None when it does not know the job.
        cancelled: whether a person cancelled the run.
        stuck: why it makes no sense to try once more, if so. A preemption is not the run's fault.
    """
    if ending.code == 0:
        return Verdict(False, "all steps are done")
    preempted = job is not None and job.preempt_s is not None
    if not ending.resumable and not preempted:
        return Verdict(False, ending.reason or f"the step ended with exit code {ending.code}")
    if cancelled or (job is not None and job.state is JobState.CANCELLED):
        return Verdict(False, CANCELLED)
    if job is None:
        return Verdict(False, "stopped at a checkpoint on request")
    if job.state.is_waiting or not (preempted or job.state is JobState.RUNNING):
        # After a node failure or a requeue by hand the job is in the queue already while its script still ends.
        return Verdict(False, f"Slurm took the job ({job.state.value}); it decides whether it comes back")
    if stuck is not None and not preempted:
        return Verdict(False, stuck, failed=True)
    return Verdict(True, _why(ending, preempted))


def told_state(ending: Ending, verdict: Verdict) -> NotifyState:
    """What the end of an attempt is called towards the outside."""
    if ending.code == 0:
        return "done"
    if verdict.reason == CANCELLED:
        return "cancelled"
    # A job that Slurm took back itself is in the queue, or will be.
    return "requeued" if verdict.requeue or (ending.resumable and not verdict.failed) else "failed"


def settle_job(
    ending: Ending,
    job_id: str,
    slurm: Slurm,
    clock: Clock,
    cancelled: Callable[[], bool],
    stuck: str | None,
    told: Callable[[Verdict], None],
) -> Verdict:
    """Decide, and put the job back into the queue. A controller that is away is asked again for a minute: a job that
    ends meanwhile without a word is not requeued by anybody.

    Args:
        told: called with the verdict before the job goes back, as that ends this process.
    """
    if ending.code == 0:
        return decide_end(ending, None)
    deadline = clock.now() + PATIENCE_S
    asked: Verdict | None = None
    while True:
        try:
            job = slurm.job(job_id)
            if asked is not None and job is not None and job.state.is_waiting:
                return asked  # the controller had taken the last call before it fell silent
            verdict = decide_end(ending, job, cancelled(), stuck)
            if verdict.requeue:
                told(verdict)
                asked = verdict
                slurm.requeue(job_id)
            return verdict
        except ControllerAwayError as error:
            if clock.now() >= deadline:
                return _not_requeued(ending, error)
            clock.sleep(RETRY_S)
        except CommandError as error:
            return _not_requeued(ending, error)


def stuck_words(folder: RunFolder, job_id: str, retries: int) -> str | None:
    """Why the job would only loop: too many of its attempts in a row made no new checkpoint; None when it would not.

    Each attempt counts its own failures from none, so a job that dies in every attempt needs a bound of its own.
    """
    newest, count = newest_checkpoint(folder.path), 0
    for line in reversed(folder.attempts()):
        if line.get("job_id") != job_id or "checkpoint" not in line or line["checkpoint"] != newest:
            break
        count += 1
    if count <= retries:
        return None
    return (
        f"{count} attempts in a row ended without a new checkpoint (recovery.retries is {retries}); see "
        f"`hpctrain logs {folder.path.name}`"
    )


def newest_checkpoint(path: Path) -> str | None:
    """Name of the run's newest published checkpoint."""
    found = listed(path / "checkpoints")
    return found[-1].name if found else None


def _why(ending: Ending, preempted: bool) -> str:
    if preempted:
        return f"preempted{', saved,' if ending.saved else ''} and back to the queue"
    if ending.saved:
        return "stopped before the time limit, saved, and back to the queue"
    return f"{ending.reason or 'stopped on request'}; back to the queue"


def _not_requeued(ending: Ending, error: CommandError) -> Verdict:
    if not ending.resumable:
        return Verdict(False, ending.reason or f"the step ended with exit code {ending.code}")
    return Verdict(False, f"the job could not be requeued ({error})", failed=True)
