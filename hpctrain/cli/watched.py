"""The status of runs from their files and, where they were submitted, from Slurm: once, or again and again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpctrain.base.clock import Clock, SystemClock
from hpctrain.base.errors import CommandError, HpctrainError
from hpctrain.base.process import SystemRunner
from hpctrain.cli.clusters import on_other_clusters
from hpctrain.launch.cancel import is_cancelled
from hpctrain.records.event import Event
from hpctrain.records.locate import job_id
from hpctrain.records.metric import MetricRow
from hpctrain.records.run import read_run
from hpctrain.report.live_run import LiveRun
from hpctrain.report.queued import with_controller_away, with_job, with_job_elsewhere
from hpctrain.report.status import Status, read_status
from hpctrain.slurm.commands import Slurm
from hpctrain.slurm.job import JobInfo
from hpctrain.slurm.watch import Watcher

ASK_SLURM_S = 10.0
"""Fewest seconds between two questions to Slurm of a command that watches; 30 while nothing changes."""
UNKNOWN_S = 60.0
"""A run of which there was no sign for so long, without a job that could bring it back, is taken to be over."""

_OVER = ("done", "failed", "cancelled")


def status_of(folder: Path) -> Status:
    """The status of the run in `folder`; a controller that is away is said, and the files speak alone.

    Raises:
        FileError: run.yaml is missing, or a file of the run is damaged.
    """
    status = statuses_of([folder])[0]
    if isinstance(status, HpctrainError):
        raise status
    return status


def statuses_of(folders: Sequence[Path]) -> list[Status | HpctrainError]:
    """The status of each run, or why it has none: one question to the queue for all of them, and one to accounting
    where the queue has forgotten a job whose end its files do not tell."""
    now = SystemClock().wall()
    found = [_from_files(folder, now) for folder in folders]
    asked = {index: job for index, status in enumerate(found) if (job := _open_job(folders[index], status))}
    slurm = Slurm(SystemRunner())
    if not asked or not slurm.available():
        return found
    for folder, cluster in on_other_clusters([folders[index] for index in asked], slurm).items():
        index = folders.index(folder)
        found[index] = with_job_elsewhere(_status(found[index]), asked.pop(index), cluster)
    try:
        jobs = slurm.jobs(list(asked.values()))
    except CommandError as error:
        for index in asked:
            found[index] = with_controller_away(_status(found[index]), str(error))
        return found
    cancelled = {index for index in asked if is_cancelled(folders[index])}
    forgotten = [
        job
        for index, job in asked.items()
        if job not in jobs and index not in cancelled and _status(found[index]).state not in _OVER
    ]
    jobs = {**slurm.ended_jobs(forgotten), **jobs}
    for index, job in asked.items():
        found[index] = with_job(_status(found[index]), jobs.get(job), now, index in cancelled)
    return found


class WatchedRun:
    """A run over a longer time. Its files are read at each look, Slurm is asked as rarely as every 10 to 30 seconds."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        """
        Raises:
            FileError: run.yaml is missing or wrong.
        """
        self.live = LiveRun(folder)
        self.new: list[Event | MetricRow] = []
        """What was written between the last two looks."""
        self._clock = clock
        self._slurm = Slurm(SystemRunner())
        self._asks = self.live.run.cluster.kind == "slurm" and self._slurm.available()
        self._asks = self._asks and not on_other_clusters([folder], self._slurm)
        self._watcher = Watcher(self._slurm, delay_min_s=ASK_SLURM_S)
        self._job: str | None = None
        self._remembered: dict[str, JobInfo | None] = {}
        self._trouble: str | None = None
        self._said: str | None = None
        self._began = clock.now()

    def look(self) -> Status:
        """The status now."""
        self.new = self.live.read()
        status = self.live.status(self._clock.wall())
        self._follow_job()
        if self._job is None or not self._asks or status.state == "done":
            return status
        if status.state != self._said:
            self._watcher.hurry()
            self._said = status.state
        self._ask()
        if self._trouble is not None:
            return with_controller_away(status, self._trouble)
        return with_job(status, self._info(), self._clock.wall(), is_cancelled(self.live.folder))

    def is_over(self, status: Status) -> bool:
        """Whether nothing more will come of the run, given the status of the last look."""
        if status.state == "done":
            return True
        if self._job is not None and self._asks:
            info = self._info() if self._trouble is None else None
            return self._trouble is None and status.state in _OVER and (info is None or info.state.is_ended)
        if status.state in ("unknown", "queued"):
            quiet_s = self._clock.now() - self._began if status.last_sign_s is None else status.last_sign_s
            return quiet_s > UNKNOWN_S
        return status.state in _OVER and not self.live.held

    def _ask(self) -> None:
        """Ask Slurm, if it is time; until it answers again, what is wrong stays known."""
        due = self._clock.now() >= self._watcher.next_s
        try:
            self._watcher.poll(self._clock.now())
        except CommandError as error:
            self._trouble = str(error)
        else:
            if due:
                self._trouble = self._watcher.away

    def _follow_job(self) -> None:
        """The run may go on as another job at any time."""
        newest = job_id(self.live.folder)
        if newest != self._job and self.live.run.cluster.kind == "slurm":
            self._job = newest
            self.live.read_run()
            if newest is not None:
                self._watcher.add(newest)

    def _info(self) -> JobInfo | None:
        """What Slurm says of the job, its accounting included; None when it knows nothing of it."""
        assert self._job is not None, "asked only for a job"
        if not self._watcher.is_forgotten(self._job):
            return self._watcher.known.get(self._job)
        if self._job not in self._remembered:
            self._remembered[self._job] = self._slurm.ended_jobs([self._job]).get(self._job)
        return self._remembered[self._job]


def _from_files(folder: Path, now: float) -> Status | HpctrainError:
    try:
        return read_status(folder, now)
    except HpctrainError as error:
        return error


def _open_job(folder: Path, status: Status | HpctrainError) -> str | None:
    """The job that Slurm may know more of; a run that is done needs nobody's word."""
    if isinstance(status, HpctrainError) or status.state == "done":
        return None
    return job_id(folder) if read_run(folder / "run.yaml").cluster.kind == "slurm" else None


def _status(found: Status | HpctrainError) -> Status:
    assert isinstance(found, Status), "a run that cannot be read has no job that is asked for"
    return found
