"""What changed in a run since the last look, for `hpctrain watch` without a terminal: plain lines, and JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hpctrain.records.history.run_log import Event, MetricRow
from hpctrain.report.event_text import describe_event
from hpctrain.report.status import AT_WORK, RunStatus
from hpctrain.report.summaries import losses_by_set
from hpctrain.report.terminal import progress_line, queue_lines
from hpctrain.report.watch.run_view import clock_time

EVENTS = 8
"""Number of newest events that are shown at first."""
PROGRESS_EVERY_S = 10.0
"""Fewest seconds between two progress lines of `PlainView`, by the times of the metrics."""

_NUMBER = re.compile(r"\d[\d.]*( (us|ms|s|min|h)\b)?")


class PlainView:
    """The view of `hpctrain watch` if stdout is no terminal: plain lines about what is new."""

    def __init__(self) -> None:
        self._first = True
        self._state = ("", "")
        self._shown_end: str | None = None
        self._progress_s = float("-inf")

    def lines(self, status: RunStatus, new: Sequence[Event | MetricRow], now: float) -> list[str]:
        """Return the lines to print after a poll of the run.

        Args:
            new: events and metrics since the last poll; at the first poll all past ones, of which only the last
                `EVENTS` events are shown.
            now: wall clock, seconds since 1970.
        """
        items = [item for item in new if isinstance(item, Event)][-EVENTS:] if self._first else new
        self._first = False
        lines = [line for item in items for line in self._item(item, status.steps)]
        if status.last_end is not None and status.last_end != self._shown_end:
            self._shown_end = status.last_end
            lines.append(status.last_end)
        state = _without_numbers(status)
        if state != self._state:
            self._state = state
            lines += [f"{status.state}: {status.reason}", *queue_lines(status, now)]
        return lines

    def _item(self, item: Event | MetricRow, steps: int) -> list[str]:
        moment = clock_time(item.time_s)
        if isinstance(item, Event):
            return [f"{moment}  {describe_event(item)}"]
        if item.step < steps and not losses_by_set(item) and item.time_s - self._progress_s < PROGRESS_EVERY_S:
            return []
        self._progress_s = item.time_s
        return [f"{moment}  {progress_line(item, steps)}"]


class JsonView:
    """The view of `hpctrain watch --json`: JSON values about what is new."""

    def __init__(self) -> None:
        self._first = True
        self._status: tuple[str, str] | None = None

    def values(self, status: RunStatus, new: Sequence[Event | MetricRow]) -> list[dict[str, Any]]:
        """Return what to print after a poll of the run, each as an object with one key: `event`, `metrics` or `status`.

        Args:
            new: events and metrics since the last poll; at the first poll all past ones, of which only the last
                `EVENTS` events are shown.
        """
        items = [item for item in new if isinstance(item, Event)][-EVENTS:] if self._first else new
        self._first = False
        values = [{"event" if isinstance(item, Event) else "metrics": item.to_json()} for item in items]
        state = _without_numbers(status)
        if state != self._status:
            self._status = state
            values.append({"status": status.to_json()})
        return values


def _without_numbers(status: RunStatus) -> tuple[str, str]:
    """Return (state, reason) of a run as `watch` compares them: the reason has no numbers, because the time to the
    start always changes. The reason is empty while a run is active, because its events say what changes."""
    return status.state, "" if status.state in AT_WORK else " ".join(_NUMBER.sub(" ", status.reason).split())
