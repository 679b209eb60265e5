"""What the device-hours of a run were spent on: useful steps, faults, waits, warm-up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpctrain.records.history.ledger import FAILED_CLASSES
from hpctrain.records.history.run_log import Event, MetricRow, last_row_of_each_step
from hpctrain.records.run.run import Run
from hpctrain.report.cost import AttemptSpan, attempt_spans, gpus_of_nodes
from hpctrain.report.summaries import FAULTS

Spent = Literal["useful", "faults", "waiting", "warm_up"]
SPENT: Mapping[Spent, str] = {
    "useful": "useful steps",
    "faults": "lost to faults",
    "waiting": "waiting",
    "warm_up": "warm-up",
}
"""What device-hours are spent on, in the order of the bar, with its name on a page."""


@dataclass(frozen=True)
class DeviceHours:
    """What all device-hours of a run were spent on.

    useful: steps that led to the final model, from their beginnings to their ends. faults: steps that were done again,
    and the time from the last step before a fault to the first one after it, or to the end of an attempt that failed.
    warm_up: from the start of an attempt to its first step (probe, plan, start of the workers, data). waiting: all
    other time, such as validation, checkpoints that steps wait for, and the end of an attempt. Device-hours count all
    devices of an attempt's nodes, also those that a plan leaves idle.
    """

    hours: dict[Spent, float]
    """Device-hours by what they were spent on."""
    unit: Literal["GPU-hours", "node-hours"]
    """node-hours if the run has no GPUs, or their number is not known."""

    @property
    def total(self) -> float:
        """All device-hours."""
        return sum(self.hours.values())

    def share(self, spent: Spent) -> float:
        """Return the share of the device-hours that were spent on something."""
        return self.hours[spent] / self.total if self.total else 0.0


def read_device_hours(
    folder: Path, run: Run, attempts: Sequence[Mapping[str, Any]], rows: Sequence[MetricRow], events: Sequence[Event],
    now: float | None,
) -> DeviceHours | None:  # fmt: skip
    """Return what a run's device-hours were spent on; None if no attempt took time on a node.

    Args:
        folder: run folder, whose topology.json may be read.
        attempts: lines of attempts.jsonl.
        rows: all rows of metrics.jsonl.
        events: all events of the run.
        now: up to when the newest attempt counts, if it is in progress; None: no attempt is in progress.

    Raises:
        UntrustedError: topology.json belongs to somebody else, or others can write to it.
    """
    signs = [*(event.time_s for event in events), *(row.time_s for row in rows)]
    spans = attempt_spans(attempts, signs, now)
    if not any(span.hours * len(span.nodes) for span in spans):
        return None
    gpus = gpus_of_nodes(folder, run)
    counted = {id(row) for row in last_row_of_each_step(list(rows))}
    faults = sorted(event.time_s for event in events if event.kind in FAULTS)
    hours: dict[Spent, float] = dict.fromkeys(SPENT, 0.0)
    ordered = sorted(rows, key=lambda row: row.time_s)
    for span in spans:
        devices = len(span.nodes) if gpus is None else sum(map(gpus, span.nodes))
        within = [row for row in ordered if span.start_s <= row.time_s <= span.end_s]
        for spent, seconds in _seconds(span, within, counted, faults).items():
            hours[spent] += devices * seconds / 3600.0
    return DeviceHours(hours, "node-hours" if gpus is None else "GPU-hours")


def _seconds(
    span: AttemptSpan, rows: Sequence[MetricRow], counted: set[int], faults: Sequence[float]
) -> dict[Spent, float]:
    """Return what the seconds of an attempt were spent on.

    Args:
        rows: the rows of the attempt, in the order of time.
        counted: identities of the rows that led to the final model.
        faults: times of all faults, ascending.
    """
    seconds: dict[Spent, float] = dict.fromkeys(SPENT, 0.0)
    at = span.start_s
    for number, row in enumerate(rows):
        begin = max(at, row.time_s - row.step_time_s)
        again = number > 0 and row.generation != rows[number - 1].generation
        gap: Spent = "warm_up" if number == 0 else "waiting"
        if again and any(at <= fault <= row.time_s for fault in faults):
            gap = "faults"
        seconds[gap] += begin - at
        seconds["useful" if id(row) in counted else "faults"] += row.time_s - begin
        at = row.time_s
    failed = span.exit_class in FAILED_CLASSES or any(at <= fault <= span.end_s for fault in faults)
    rest: Spent = "faults" if failed else "waiting" if rows else "warm_up"
    seconds[rest] += max(0.0, span.end_s - at)
    return seconds
