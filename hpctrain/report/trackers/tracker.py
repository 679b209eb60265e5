"""The methods that every tracker has, and the description of the run that it gets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.records.history.rank_log import RankRow
from hpctrain.records.history.run_log import MetricRow


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker sees it."""

    name: str
    """Name of the run folder, by which the tracker finds the run again."""
    title: str
    """`name` of the run file, which several runs may share."""
    settings: Mapping[str, object]
    """Settings of the run file that are set, or have a default; keys with dots, as in `model.layers`."""
    output: Path
    """Folder for the tracker's files."""


class Tracker(ABC):
    """A tool that keeps experiments. A method that fails ends the tracking of the run, and never the run itself.
    Besides the errors below, the methods raise those of the tool's package."""

    @abstractmethod
    def open(self, run: TrackedRun) -> None:
        """Begin to write a run, or continue one of which a part was written before.

        Raises:
            ImportError: the tool's package is not installed.
            OSError: `run.output` cannot be written.
        """

    @abstractmethod
    def log(self, rows: Sequence[MetricRow], ranks: Sequence[RankRow]) -> None:
        """Write new rows, such that they last if this process is killed afterwards.

        Args:
            rows: rows of metrics.jsonl, in the order of time. After a fault, steps come again.
            ranks: the newest row of each rank in metrics-ranks.jsonl; empty if there is none.

        Raises:
            OSError: they cannot be written.
        """

    @abstractmethod
    def close(self, is_done: bool | None) -> None:
        """Finish writing.

        Args:
            is_done: whether the run has done all its steps; False: it failed or was cancelled; None: it goes on.

        Raises:
            OSError: the end cannot be written.
        """
