"""Writes a run's metrics into trackers, once or while the run goes on. Nothing here is part of the training: a tracker
that fails, hangs or is killed costs the run nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from hpctrain.base.clock import Clock
from hpctrain.base.errors import FileError
from hpctrain.base.owned_files import owner_only
from hpctrain.base.requirements import pip_install
from hpctrain.jobs.run_status import WatchedRun
from hpctrain.records.history.run_log import MetricRow
from hpctrain.records.history.tracked import Tracked
from hpctrain.records.run.tracking import TrackerName
from hpctrain.report.comparison import flat_values
from hpctrain.report.rank_times import read_last_rank_rows
from hpctrain.report.trackers.choose import TRACKERS
from hpctrain.report.trackers.tracker import TrackedRun, Tracker
from hpctrain.runs.locate import run_name

FOLDER = "tracking"
"""Folder in a run folder with the trackers' files, unless the run file names another one."""


def track(
    folder: Path,
    names: Sequence[TrackerName],
    output: Path,
    clock: Clock,
    fail: Callable[[TrackerName, str], None],
    pause: Callable[[], bool] | None = None,
) -> None:
    """Write the metrics of a run that its trackers do not have yet, and with `pause` go on while the run does.

    A tracker that fails is left out from then on.

    Args:
        folder: the run folder.
        output: folder in which each tracker has a folder of its name.
        fail: called for each tracker that fails, with its name and the reason in one sentence.
        pause: waits until the run's files are to be read again; returns whether to end after that, although the run
            goes on. None: write what is there now, and end.

    Raises:
        FileError: run.yaml is missing or wrong.
        UntrustedError: a file of the run belongs to another user, or others can write to it.
    """
    watched = WatchedRun(folder, clock, all_rows=True)
    status = watched.look()
    trackings = [_Tracking(folder, name, output / name) for name in dict.fromkeys(names)]
    settings = flat_values(watched.live.run.to_json())
    trackings = [each for each in trackings if each.attempt(partial(each.open, settings), fail)]
    ends_now = pause is None
    while True:
        rows = [row for row in watched.new if isinstance(row, MetricRow)]
        trackings = [each for each in trackings if each.attempt(partial(each.log, rows), fail)]
        if ends_now or not trackings or watched.is_over(status):
            break
        assert pause is not None, "without it, the first turn is the last"
        ends_now = pause()
        status = watched.look()
    ends = {"done": True, "failed": False, "cancelled": False}
    for each in trackings:
        each.attempt(partial(each.tracker.close, ends.get(status.state)), fail)


class _Tracking:
    """One tracker of a run, and how far it has come."""

    def __init__(self, folder: Path, name: TrackerName, output: Path) -> None:
        self.tracker: Tracker = TRACKERS[name][0]()
        self._name = name
        self._folder = folder
        self._output = output
        self._position = folder / FOLDER / f"{name}.json"
        self._until_s = float("-inf")

    def open(self, settings: Mapping[str, object]) -> None:
        """Begin to track the run, or continue behind the last of its rows that an earlier call wrote to the tracker.

        Args:
            settings: those of the run file, as in `TrackedRun`.
        """
        try:
            before = Tracked.read(self._position, owned=True)
        except FileError:
            before = None
        if before is not None and before.output == str(self._output):
            self._until_s = before.until_s
        name = self._folder.name
        self.tracker.open(TrackedRun(name, run_name(name), settings, self._output))

    def log(self, rows: Sequence[MetricRow]) -> None:
        """Write the rows that the tracker does not have yet."""
        rows = [row for row in rows if row.time_s > self._until_s]
        if not rows:
            return
        self.tracker.log(rows, read_last_rank_rows(self._folder))
        self._until_s = rows[-1].time_s
        with owner_only():
            self._position.parent.mkdir(exist_ok=True)
            Tracked(output=str(self._output), until_s=self._until_s).write(self._position)

    def attempt(self, act: Callable[[], None], fail: Callable[[TrackerName, str], None]) -> bool:
        """Call `act`; return whether it did not fail."""
        try:
            act()
        except ImportError as error:
            package = TRACKERS[self._name][1]
            reason = f"the package '{package}' cannot be imported ({error}); run `{pip_install(package)}`"
        except OSError as error:
            reason = f"{self._output}: {error.strerror or error}"
        except Exception as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        else:
            return True
        fail(self._name, f"tracker {self._name}: {reason}")
        return False
