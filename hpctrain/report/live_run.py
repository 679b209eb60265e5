"""A run that is being watched: each read of its files continues where the last one ended."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from hpctrain.base.errors import FileError
from hpctrain.records.format.input_file import read_jsonl
from hpctrain.records.history.event import Event
from hpctrain.records.history.ledger import ATTEMPTS_FILE
from hpctrain.records.history.metric import MetricRow
from hpctrain.records.run.run import Run, run_of
from hpctrain.report.follow_files import FileTail, rows_of
from hpctrain.report.status import RunStatus, decide_status, lock_held

ROWS = 2000
"""Most metrics rows in memory; a view needs only the last ones."""


class LiveRun:
    """The events and metrics in a run's files, updated by `read`."""

    def __init__(self, folder: Path) -> None:
        """Open the run in `folder`.

        Raises:
            FileError: run.yaml is missing or invalid.
        """
        self.folder = folder
        self.run: Run = run_of(folder)
        self.events: list[Event] = []
        self.rows: deque[MetricRow] = deque(maxlen=ROWS)
        self.held = False
        """Whether a process held the folder at the last read."""
        self._tails = FileTail(folder / "events.jsonl"), FileTail(folder / "metrics.jsonl")

    def read(self) -> list[Event | MetricRow]:
        """Return the events and metrics that were written since the last read, in the order of time."""
        # Check the lock before the files: if the run ends in between, its files already say how it ended.
        self.held = lock_held(self.folder)
        events, rows = (tail.values() for tail in self._tails)
        new: list[Event | MetricRow] = [*rows_of(Event, events), *rows_of(MetricRow, rows)]
        self.events += [item for item in new if isinstance(item, Event)]
        self.rows.extend(item for item in new if isinstance(item, MetricRow))
        return sorted(new, key=lambda item: item.time_s)

    def read_run(self) -> None:
        """Read run.yaml again, because a run that was resubmitted may have other settings."""
        try:
            self.run = run_of(self.folder)
        except FileError:
            return  # run.yaml cannot be read: keep the settings of the last read

    def status(self, now: float) -> RunStatus:
        """Return the status by the run's files; repeated steps are counted only among the rows in memory.

        Args:
            now: wall clock, seconds since 1970.
        """
        attempts = read_jsonl(self.folder / ATTEMPTS_FILE)
        return decide_status(self.run, self.events, list(self.rows), now, self.held, attempts)
