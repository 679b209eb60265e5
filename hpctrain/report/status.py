"""Decides the status of a run from its files, and from whether a process holds the lock of its folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hpctrain.base.owned_files import open_owned
from hpctrain.base.system.disk_space import free_bytes
from hpctrain.base.units import format_bytes, format_seconds
from hpctrain.records.format.input_file import read_jsonl
from hpctrain.records.history.ledger import ATTEMPTS_FILE, last_end_text
from hpctrain.records.history.run_log import Event, MetricRow, last_row_of_each_step, read_events, read_metrics
from hpctrain.records.run.run import Run, run_of
from hpctrain.report.cost import run_cost
from hpctrain.report.energy import read_energy
from hpctrain.report.event_text import describe_event
from hpctrain.report.rank_times import read_last_rank_rows, slow_rank_text
from hpctrain.report.summaries import (
    FAULTS,
    HELD_OUT,
    losses_by_set,
    lost_steps,
    recoveries,
    restored_step,
    steady_step_time,
)

State = Literal["queued", "starting", "running", "recovering", "requeued", "done", "failed", "cancelled", "unknown"]

LOCK_FILE = "run.lock"
QUIET_S = 60.0
"""Seconds for which a Slurm run counts as alive after the newest line in its files, even if no process is seen to hold
its lock: locks of other nodes may not be visible from this node."""

AT_WORK = ("starting", "running", "recovering")
"""States of a run whose newest attempt is in progress."""
_PAUSED = ("preempted", "time_limit")


@dataclass(frozen=True)
class RunStatus:
    """The status of a run. A value that is not known is None, and absent in the JSON form."""

    state: State
    reason: str
    """One sentence that says why the run has this state."""
    name: str
    """Name of the run."""
    attempt: int
    """Number of the newest attempt; 0 before the first event."""
    generation: int
    """Number of the newest generation; 0 before the first."""
    step: int
    """Number of steps done."""
    steps: int
    """Number of steps of the run file."""
    nodes: list[str]
    """Names of the nodes of the newest generation."""
    recoveries: int
    """Number of recoveries after which training continued."""
    lost_steps: int
    """Number of steps that were made again after a fault."""
    loss: float | None = None
    """Training loss of the last step, in nats."""
    valid_loss: float | None = None
    """Newest mean loss on the validation data without a name, in nats per target."""
    valid_sets: dict[str, dict[str, float]] | None = None
    """Name of each named validation set of the run file -> {"loss": its newest mean loss in nats per target,
    "perplexity": its perplexity}.
    """
    source_samples: dict[str, int] | None = None
    """Number of samples read so far from each training folder, by folder; None if the folders have no weights."""
    tokens_per_s: float | None = None
    """Tokens per second of the whole job in the last step."""
    mfu: float | None = None
    """Model FLOPs utilization of the last step, as in metrics.jsonl."""
    slow_rank: str | None = None
    """Which rank computes longer than its peers, if one does."""
    eta_s: float | None = None
    """Seconds to the last step at the present speed; None unless the run trains."""
    weights_sha256: str | None = None
    """Hash of the final weights, if the run is done and has `deterministic: true`."""
    last_sign_s: float | None = None
    """Age in seconds of the newest line in the run's files."""
    warning: str | None = None
    """A problem that does not stop the run, such as a full disk, or another torch than in the first attempt."""
    job_state: str | None = None
    """Slurm's state of the run's newest job, if Slurm was asked and knows it."""
    expected_start_s: float | None = None
    """Time at which Slurm expects a waiting job to start, in seconds since 1970. Slurm revises it all the time."""
    needs_action: bool | None = None
    """True if the job waits until a person does what `reason` says."""
    hours: float | None = None
    """Hours of all attempts, summed; pauses between them do not count. None in views that do not compute it."""
    node_hours: float | None = None
    """Hours of each attempt times its nodes, summed; None in views that do not compute it."""
    gpu_hours: float | None = None
    """Hours of each attempt times its GPUs, summed; None without GPUs, or if their number is not known."""
    energy: dict[str, float] | None = None
    """What energy the run has used: the fields of `report.energy.RunEnergy` that are known; None if no node could read
    any, and in views that do not compute it."""
    last_end: str | None = None
    """How the newest ended attempt ended, by its line in attempts.jsonl; None without one, or if the run is done."""

    @property
    def further_words(self) -> list[str]:
        """[`last_end`] if it says more than `reason`, else [].

        Only attempts.jsonl holds what Slurm said about the end of an attempt.
        """
        is_known = self.last_end is None or self.last_end.partition("): ")[2] in self.reason
        return [] if is_known or self.last_end is None else [self.last_end]

    @property
    def valid_losses(self) -> dict[str, float]:
        """The newest validation losses in nats, by display name: 'valid' for the validation data without a name,
        'valid NAME' for the validation set NAME."""
        held_out = {} if self.valid_loss is None else {HELD_OUT: self.valid_loss}
        return held_out | {f"{HELD_OUT} {name}": losses["loss"] for name, losses in (self.valid_sets or {}).items()}

    def to_json(self) -> dict[str, Any]:
        """Return the status as JSON values; unknown values are absent."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def read_status(folder: Path, now: float) -> RunStatus:
    """Return the status of the run in `folder`, without asking Slurm.

    Args:
        now: wall clock, seconds since 1970.

    Raises:
        FileError: run.yaml is missing, or a file of the run is damaged.
        UntrustedError: another user owns the run folder or a file in it, or can write to it.
    """
    run = run_of(folder)
    held = lock_held(folder)
    # Check the lock before the files: if the run ends in between, its files already say how it ended.
    events = read_events(folder / "events.jsonl")
    metrics = read_metrics(folder / "metrics.jsonl")
    slow_rank = slow_rank_text(read_last_rank_rows(folder))
    attempts = read_jsonl(folder / ATTEMPTS_FILE)
    status = decide_status(run, events, metrics, now, held, attempts, _free_bytes(folder), slow_rank)
    signs = [*(event.time_s for event in events), *(row.time_s for row in metrics)]
    cost = run_cost(folder, run, attempts, signs, now if status.state in AT_WORK else None)
    energy = read_energy(folder, run, metrics)
    return replace(
        status,
        hours=cost.hours,
        node_hours=cost.node_hours,
        gpu_hours=cost.gpu_hours,
        energy=None if energy is None else energy.to_json(),
    )


def _free_bytes(folder: Path) -> int | None:
    try:
        return free_bytes(folder)
    except OSError:
        return None


def lock_held(folder: Path) -> bool:
    """Return whether a process holds the run folder's lock; False without a lock file. A process that supervises the
    run holds the lock all the time.

    Raises:
        UntrustedError: another user owns the folder or its lock file, or can write to it.
    """
    try:
        descriptor = open_owned(folder / LOCK_FILE)
    except OSError:
        return False
    try:
        # A shared lock is refused while the supervisor holds the exclusive one, and lets two people ask at once.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def decide_status(
    run: Run, events: Sequence[Event], metrics: Sequence[MetricRow], now: float, lock_held: bool,
    attempts: Sequence[Mapping[str, Any]] = (), free: int | None = None, slow_rank: str | None = None,
) -> RunStatus:  # fmt: skip
    """Return the status of a run from what its files say, without asking Slurm.

    Args:
        events: events of the run, the oldest first.
        metrics: rows of metrics.jsonl, the oldest first.
        now: wall clock, seconds since 1970.
        lock_held: whether a process holds the run folder's lock.
        attempts: lines of attempts.jsonl.
        free: free bytes on the run folder's file system; None if unknown.
        slow_rank: which rank computes longer than its peers; None if none does.
    """
    rows = last_row_of_each_step(list(metrics))
    # Take the last row and not the highest step: after a fault the run continues from an earlier step.
    row = metrics[-1] if metrics else None
    times = [event.time_s for event in events[-1:]] + [item.time_s for item in metrics[-1:]]
    age = max(0.0, now - max(times)) if times else None
    state, reason = _decide(run, _this_attempt(events), list(metrics), lock_held, age)
    pace = steady_step_time(rows[-50:])
    start, finished = _newest(events, "generation_started"), _newest(events, "finished") if state == "done" else None
    validated = next((item for item in reversed(rows) if losses_by_set(item)), None)
    return RunStatus(
        state=state,
        reason=reason,
        name=run.name,
        attempt=events[-1].attempt if events else 0,
        generation=max([0] + [event.generation for event in events] + [item.generation for item in metrics]),
        step=_step(events, row),
        steps=run.steps,
        nodes=list(start.data.get("members", [])) if start else [],
        recoveries=sum(recovery.done for recovery in recoveries(events)),
        lost_steps=lost_steps(metrics),
        loss=row.loss if row else None,
        valid_loss=validated.valid_loss if validated else None,
        valid_sets=_sets(validated),
        source_samples=row.source_samples if row else None,
        tokens_per_s=row.tokens_per_s if row else None,
        mfu=row.mfu if row else None,
        slow_rank=slow_rank if state == "running" else None,
        eta_s=pace * (run.steps - row.step) if pace and row and state == "running" else None,
        weights_sha256=finished.data.get("weights_sha256") if finished else None,
        last_sign_s=age,
        last_end=last_end_text(attempts) if state != "done" else None,
        warning=None if state in ("done", "cancelled") else _warning(events, free),
    )


def _sets(row: MetricRow | None) -> dict[str, dict[str, float]] | None:
    if row is None or row.valid_sets is None:
        return None
    return {name: losses.model_dump(exclude_none=True) for name, losses in row.valid_sets.items()}


def _step(events: Sequence[Event], row: MetricRow | None) -> int:
    """Return the number of steps that are done and need not be repeated.

    Args:
        row: newest row of metrics; None without steps.
    """
    start = _newest(events, "generation_started")
    if start is not None and (row is None or row.generation < start.generation):
        return restored_step(start)
    return row.step if row else 0


def _this_attempt(events: Sequence[Event]) -> list[Event]:
    """Return the events of the newest attempt; all events if they record no start of an attempt."""
    starts = [index for index, event in enumerate(events) if event.kind == "attempt_started"]
    return list(events[starts[-1] :]) if starts else list(events)


def _newest(events: Sequence[Event], *kinds: str) -> Event | None:
    return next((event for event in reversed(events) if event.kind in kinds), None)


def _decide(
    run: Run, events: list[Event], metrics: list[MetricRow], held: bool, age: float | None
) -> tuple[State, str]:
    ended = _end(events)
    if ended is not None and ended.kind == "finished":
        if ended.data.get("step", run.steps) >= run.steps:
            return "done", describe_event(ended)
        return _decide_extended(run, held)
    if ended is not None:
        return ("cancelled" if ended.data.get("cancelled") else "failed"), ended.reason
    paused = _newest(events, *_PAUSED)
    if held:
        return _decide_alive(events, metrics)
    if paused is not None:
        if run.cluster.kind == "slurm":
            return "requeued", describe_event(paused)
        return "cancelled", f"{paused.reason.rstrip('.')}; `hpctrain train --resume` goes on with it"
    if not events and not metrics:
        return _decide_untouched(run)
    if run.cluster.kind == "slurm" and age is not None and age < QUIET_S:
        return _decide_alive(events, metrics)
    if run.cluster.kind == "slurm":
        return "unknown", "no process seen from here holds the run folder"
    crash = _newest(events, "agent_crashed")
    return "failed", crash.reason if crash else "the run's process is gone and did not say why"


def _end(events: list[Event]) -> Event | None:
    """Return the event that ended the attempt; None if it has not ended.

    An agent that lost contact also writes `failed` while the others continue; such an event counts only if no later
    generation began.

    Args:
        events: events of the attempt.
    """
    finished = _newest(events, "finished")
    if finished is not None:
        return finished
    last = max((event.generation for event in events if event.kind == "generation_started"), default=-1)
    for index in reversed(range(len(events))):
        event = events[index]
        if event.kind == "failed" and (event.generation >= last or _written_at_the_end(events, index)):
            return event
    return None


def _written_at_the_end(events: list[Event], index: int) -> bool:
    """Return whether the `failed` event at `index` is the job script's and ends the attempt.

    The job script's event has no generation, and no generation starts after it.
    """
    later = events[index + 1 :]
    return events[index].generation < 0 and not any(event.kind == "generation_started" for event in later)


def _decide_extended(run: Run, held: bool) -> tuple[State, str]:
    """Return (state, reason) of a finished run that was given more steps and has not yet continued.

    Args:
        held: whether a process holds the run folder's lock.
    """
    reason = f"it finished, and was then given more steps: {run.steps}"
    if held:
        return "starting", reason
    return ("requeued", reason) if run.cluster.kind == "slurm" else ("cancelled", reason)


def _decide_untouched(run: Run) -> tuple[State, str]:
    if run.cluster.kind == "slurm":
        return "queued", "nothing was written yet; the job has not started"
    return "unknown", "nothing was written and no process holds the run folder"


def _decide_alive(events: list[Event], metrics: list[MetricRow]) -> tuple[State, str]:
    starts = [event for event in events if event.kind == "generation_started"]
    row = metrics[-1] if metrics else None
    last = _newest(events, *FAULTS, "recovered")
    if last is not None and last.kind != "recovered":  # no training since the last fault
        newest = _newest(events, *FAULTS, "generation_started", "replanned")
        return "recovering", describe_event(newest or events[-1])
    if starts and row is not None and row.generation >= starts[-1].generation:
        return "running", f"step {row.step} done in {format_seconds(row.step_time_s)}"
    if len(starts) > 1:
        return "recovering", describe_event(starts[-1])
    return "starting", describe_event(events[-1]) if events else "the run's process is there, nothing was written yet"


def _warning(events: Sequence[Event], free: int | None) -> str | None:
    """Return the warnings about the disk and about software that changed since the first attempt; None without a
    warning.
    """
    changed = _newest(_this_attempt(events), "environment_changed")
    texts = [disk_warning(events, free), describe_event(changed) if changed else None]
    return "; ".join(filter(None, texts)) or None


_TRIES = ("checkpoint_saved", "checkpoint_skipped", "waiting_for_room")


def disk_warning(events: Sequence[Event], free_bytes: float | None) -> str | None:
    """Return a warning about checkpoints that could not be written, or that will not fit on the disk; None if there is
    no problem.

    Args:
        free_bytes: free bytes on the run folder's file system; None if unknown.
    """
    tries = [event for event in events if event.kind in _TRIES and "step" in event.data]
    saved = next((event for event in reversed(tries) if event.kind == "checkpoint_saved"), None)
    words = []
    if tries and tries[-1] is not saved:
        since = (
            f"the newest checkpoint is that of step {saved.data['step']}" if saved else "no checkpoint was saved yet"
        )
        words.append(f"{tries[-1].reason.rstrip('.')}; {since}")
    needed = saved.data.get("size_bytes") if saved is not None else None
    if needed and free_bytes is not None and free_bytes < needed:
        words.append(
            f"{format_bytes(free_bytes)} are free where the run folder lies, and the next checkpoint takes "
            f"{format_bytes(needed)}: free some space"
        )
    return "; ".join(words) or None
