"""Summaries of a run's events and metrics: recoveries, lost steps, robustness, step time, validation losses. Pure
functions."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hpctrain.records.history.run_log import Event, MetricRow, last_row_of_each_step, perplexity

FAULTS = ("worker_died", "worker_hung", "node_lost")
"""Kinds of events that end a generation."""

ROBUSTNESS_STEPS = 1000


@dataclass(frozen=True)
class FaultRecovery:
    """One recovery of a run, from one fault or from several that came together.

    `restore_step` is the step from which the new generation starts, `step` the first one that it makes, `seconds` the
    time from the detection of the fault to the end of `step`, and `time_s` that end in seconds since 1970.
    """

    faults: tuple[Event, ...]
    """The recorded faults; () if workers were restarted without a recorded fault."""
    generation: int | None = None
    """Number of the generation that replaced the broken one; None if none has started yet."""
    restore_step: int | None = None
    """Step of the checkpoint or state from which the new generation started; None if none has started yet."""
    step: int | None = None
    """First step that the new generation made; None if it has made none yet."""
    reason: str = ""
    """Why the new generation was started."""
    seconds: float | None = None
    """None if not known."""
    time_s: float | None = None
    """None if the new generation has made no step yet."""

    @property
    def done(self) -> bool:
        """Whether the new generation has made its first step."""
        return self.step is not None


def restored_step(start: Event) -> int:
    """Return the step from which a generation continues: that of its checkpoint or of the state in memory; 0 without
    both.

    Args:
        start: the event `generation_started` of the generation.
    """
    step = start.data.get("restore_step")
    if step is not None:
        return int(step)
    number = re.search(r"step-(\d+)$", str(start.data.get("restore") or ""))
    return int(number[1]) if number else 0


def restore_point(events: Sequence[Event]) -> int:
    """Return the step of the newest checkpoint from which the run could start again; 0 without one.

    A checkpoint that turned out to be damaged, or was put aside, does not count: the next generation starts from an
    earlier step.
    """
    step = 0
    for event in events:
        if event.kind == "checkpoint_saved":
            step = int(event.data.get("step") or step)
        elif event.kind == "generation_started" and not event.data.get("memory"):
            step = restored_step(event)
    return step


def recoveries(events: Sequence[Event]) -> list[FaultRecovery]:
    """Return the recoveries of a run, in order; the last one may be incomplete.

    A second fault before training continues belongs to the recovery from the first one.
    """
    known: list[FaultRecovery] = []
    faults: list[Event] = []
    start: Event | None = None
    for event in events:
        if event.kind in FAULTS:
            faults.append(event)
            start = None
        elif event.kind == "generation_started":
            start = event
        elif event.kind == "recovered":
            known.append(_recovery(faults, start, event))
            faults, start = [], None
    if faults:
        known.append(_recovery(faults, start, None))
    return known


def _recovery(faults: Sequence[Event], start: Event | None, end: Event | None) -> FaultRecovery:
    """Return what the report says about one recovery from faults.

    Args:
        faults: its faults.
        start: the event `generation_started` of the new generation; None if none has started.
        end: the event `recovered`, after the new generation's first step; None if there is none yet.
    """
    newest = end or start
    recovery = FaultRecovery(tuple(faults), newest.generation if newest else None)
    if start is not None:
        recovery = replace(recovery, restore_step=restored_step(start), reason=start.reason)
    if end is None:
        return recovery
    seconds = end.data.get("seconds", end.time_s - faults[0].time_s if faults else None)
    return replace(recovery, step=end.data.get("step"), seconds=seconds, time_s=end.time_s)


def lost_steps(rows: Sequence[MetricRow]) -> int:
    """Return the number of steps that were made again, as after a fault: rows beyond one for each step."""
    return len(rows) - len({row.step for row in rows})


def robustness(rows: Sequence[MetricRow]) -> tuple[float, int] | None:
    """Return (score, steps): the robustness score and the number of steps that it is computed from; None with fewer
    than two steps.

    The score is that of the paper (Sun 2026, section 4.1, metric 4): 1 − std(T_step) / mean(T_step) over the last 1,000
    steps, where T_step is the time of a step and std the standard deviation of a population.
    """
    times = [row.step_time_s for row in last_row_of_each_step(list(rows))][-ROBUSTNESS_STEPS:]
    if len(times) < 2:
        return None
    return 1.0 - statistics.pstdev(times) / statistics.fmean(times), len(times)


def steady_step_time(rows: Sequence[MetricRow]) -> float | None:
    """Return the median over the steps of the step time in seconds; None without steps. The first step of each
    generation, which takes longer, counts only if there are no other steps.
    """
    return _median([row.step_time_s for row in _warm(rows)])


def steady_tokens_per_s(rows: Sequence[MetricRow]) -> float | None:
    """Return the median over the steps of the whole job's tokens per second; None without steps. The first step of
    each generation counts only if there are no other steps.
    """
    return _median([row.tokens_per_s for row in _warm(rows)])


def steady_mfu(rows: Sequence[MetricRow]) -> float | None:
    """Return the median over the steps of the model FLOPs utilization as a share, without the first step of each
    generation if there are other steps; None if no such step has a value.
    """
    return _median([row.mfu for row in _warm(rows) if row.mfu is not None])


def _warm(rows: Sequence[MetricRow]) -> list[MetricRow]:
    """Return the rows without the first of each generation, or all rows if no other is left."""
    seen: set[int] = set()
    warm = []
    for row in rows:
        if row.generation in seen:
            warm.append(row)
        seen.add(row.generation)
    return warm or list(rows)


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


HELD_OUT = "valid"


def losses_by_set(row: MetricRow) -> dict[str, float]:
    """Return the validation losses of a step in nats, by display name ('valid', 'valid NAME'); {} if the step had no
    validation."""
    held_out = {} if row.valid_loss is None else {HELD_OUT: row.valid_loss}
    return held_out | {f"{HELD_OUT} {name}": losses.loss for name, losses in (row.valid_sets or {}).items()}


def loss_words(losses: Mapping[str, float]) -> list[str]:
    """Return the losses as texts: ['valid 3.2500 (perplexity 25.79)', 'valid code 4.1000 (perplexity 60.34)']."""
    return [f"{name} {loss:.4f} ({_perplexity(loss)})" for name, loss in losses.items()]


def _perplexity(loss: float) -> str:
    value = perplexity(loss)
    return "perplexity too large to tell" if value is None else f"perplexity {value:.4g}"
