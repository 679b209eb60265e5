"""The status of runs from their files and, where they were submitted, from Slurm: once, or again and again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.base.clock import Clock, SystemClock
from hpctrain.base.errors import CommandError, FileError, HpctrainError, UntrustedError
from hpctrain.base.process import SystemRunner
from hpctrain.cli.run_history import on_other_clusters
from hpctrain.jobs.cancel import is_cancelled
from hpctrain.records.history.event import Event
from hpctrain.records.history.metric import MetricRow
from hpctrain.records.run.run import run_of
from hpctrain.report.job_status import with_controller_unreachable, with_job, with_job_elsewhere, with_slurm_unknown
from hpctrain.report.live_run import LiveRun
from hpctrain.report.status import RunStatus, read_status
from hpctrain.runs.locate import job_id, open_jobs
from hpctrain.slurm.commands import NO_COMMANDS, Slurm
from hpctrain.slurm.job import JobInfo
from hpctrain.slurm.watch import JobWatcher

ASK_SLURM_S = 10.0
"""Fewest seconds between two questions to Slurm of a command that watches; 30 while nothing changes."""
UNKNOWN_S = 60.0
"""A run of which there was no sign for so long, without a job that could bring it back, is taken to be over."""

_OVER = ("done", "failed", "cancelled")


def run_status(folder: Path) -> RunStatus:
    """The status of the run in `folder`; a controller that is away is said, and the files speak alone.

    Raises:
        FileError: run.yaml is missing, or a file of the run is damaged.
    """
    status = run_statuses([folder])[0]
    if isinstance(status, HpctrainError):
        raise status
    return status


def run_statuses(folders: Sequence[Path]) -> list[RunStatus | HpctrainError]:
    """The status of each run, or why it has none: one question to the queue for all of them, and one to accounting
    where the queue has forgotten a job whose end its files do not tell."""
    now = SystemClock().wall()
    found = [_from_files(folder, now) for folder in folders]
    asked: dict[int, list[str]] = {}
    for index, status in enumerate(found):
        try:
            jobs = _open_jobs(folders[index], status)
        except UntrustedError as error:
            found[index] = error
        else:
            asked |= {index: jobs} if jobs else {}
    slurm = Slurm(SystemRunner())
    why = slurm.why_unavailable() if asked else NO_COMMANDS
    if why is not None:
        # Where there is no Slurm at all, a run folder is only looked at.
        for index in asked if not why.startswith(NO_COMMANDS) else ():
            found[index] = with_slurm_unknown(_status(found[index]), why)
        return found
    for folder, cluster in on_other_clusters([folders[index] for index in asked], slurm).items():
        index = folders.index(folder)
        found[index] = with_job_elsewhere(_status(found[index]), asked.pop(index)[0], cluster)
    try:
        known = slurm.jobs([job for jobs in asked.values() for job in jobs])
    except CommandError as error:
        for index in asked:
            found[index] = with_controller_unreachable(_status(found[index]), str(error))
        return found
    cancelled = {index for index in asked if is_cancelled(folders[index])}
    forgotten = [
        jobs[0]
        for index, jobs in asked.items()
        if not known.keys() & set(jobs) and index not in cancelled and _status(found[index]).state not in _OVER
    ]
    known = {**slurm.ended_jobs(forgotten), **known}
    for index, jobs in asked.items():
        found[index] = with_job(_status(found[index]), _telling(jobs, known), now, index in cancelled)
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
        self._unavailable = self._slurm.why_unavailable() if self.live.run.cluster.kind == "slurm" else NO_COMMANDS
        self._asks = self._unavailable is None and not on_other_clusters([folder], self._slurm)
        self._watcher = JobWatcher(self._slurm, delay_min_s=ASK_SLURM_S)
        self._jobs: list[str] = []
        self._remembered: dict[str, JobInfo | None] = {}
        self._trouble: str | None = None
        self._said: str | None = None
        self._began = clock.now()

    def look(self) -> RunStatus:
        """The status now."""
        self.new = self.live.read()
        status = self.live.status(self._clock.wall())
        self._follow_job()
        if self._unavailable is not None and not self._unavailable.startswith(NO_COMMANDS) and status.state != "done":
            return with_slurm_unknown(status, self._unavailable)
        if not self._jobs or not self._asks or status.state == "done":
            return status
        if status.state != self._said:
            self._watcher.poll_soon()
            self._said = status.state
        self._ask()
        if self._trouble is not None:
            return with_controller_unreachable(status, self._trouble)
        return with_job(status, self._info(), self._clock.wall(), is_cancelled(self.live.folder))

    def is_over(self, status: RunStatus) -> bool:
        """Whether nothing more will come of the run, given the status of the last look."""
        if status.state == "done":
            return True
        if self._jobs and self._asks:
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
        jobs = _slurm_jobs(self.live.folder) if self.live.run.cluster.kind == "slurm" else []
        if jobs[:1] != self._jobs[:1]:
            self.live.read_run()
        for job in jobs:
            if job not in self._jobs:
                self._watcher.add(job)
        self._jobs = jobs

    def _info(self) -> JobInfo | None:
        """What Slurm says of the run's job, its accounting included; None when it knows nothing of it."""
        known = {job: info for job, info in self._watcher.known.items() if not self._watcher.is_forgotten(job)}
        newest, telling = self._jobs[0], _telling(self._jobs, known)
        if telling is not None or not self._watcher.is_forgotten(newest):
            return telling
        if newest not in self._remembered:
            self._remembered[newest] = self._slurm.ended_jobs([newest]).get(newest)
        return self._remembered[newest]


def _from_files(folder: Path, now: float) -> RunStatus | HpctrainError:
    try:
        return read_status(folder, now)
    except HpctrainError as error:
        return error


def _open_jobs(folder: Path, status: RunStatus | HpctrainError) -> list[str]:
    """The jobs that Slurm may know more of; a run that is done needs nobody's word."""
    if isinstance(status, HpctrainError) or status.state == "done":
        return []
    return _slurm_jobs(folder) if run_of(folder).cluster.kind == "slurm" else []


def _slurm_jobs(folder: Path) -> list[str]:
    """The run's newest job and those behind it; it alone where the list of those is damaged."""
    try:
        return open_jobs(folder)
    except FileError:
        newest = job_id(folder)
        return [] if newest is None else [newest]


def _telling(jobs: Sequence[str], known: Mapping[str, JobInfo]) -> JobInfo | None:
    """The job that says how the run is: the first that has not ended, as the next one takes over; else the newest."""
    live = (known[job] for job in jobs if job in known and not known[job].state.is_ended)
    return next(live, known.get(jobs[0]))


def _status(found: RunStatus | HpctrainError) -> RunStatus:
    assert isinstance(found, RunStatus), "a run that cannot be read has no job that is asked for"
    return found
