"""The status of runs from their files and, if they were submitted, from Slurm: asked once, or repeatedly for `hpctrain
watch`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpctrain.base.clock import Clock, SystemClock
from hpctrain.base.errors import CommandError, FileError, HpctrainError
from hpctrain.base.process import SystemRunner
from hpctrain.jobs.ended_runs import EndedRunStatuses, state_of_files
from hpctrain.jobs.successors import is_cancelled
from hpctrain.records.history.run_log import Event, MetricRow
from hpctrain.records.run.run import run_of
from hpctrain.report.live_run import LiveRun, with_job, with_remark
from hpctrain.report.status import RunStatus, State, read_status
from hpctrain.runs.locate import job_id, open_jobs
from hpctrain.runs.started_runs import on_other_clusters
from hpctrain.slurm.commands import NO_COMMANDS, Slurm
from hpctrain.slurm.job import JobInfo
from hpctrain.slurm.watch import JobWatcher

ASK_SLURM_S = 10.0
"""Shortest pause in seconds between two requests to Slurm; it grows to 30 s while nothing changes."""
UNKNOWN_S = 60.0
"""Seconds without a new line in the run's files after which a run without a Slurm job counts as over."""

NO_ANSWER = "the Slurm controller does not answer ({})"
_OVER = ("done", "failed", "cancelled")


def run_status(folder: Path) -> RunStatus:
    """Return the status of the run in `folder`; if the Slurm controller does not answer, the status by the run's files.

    Raises:
        FileError: run.yaml is missing, or a file of the run is damaged.
        UntrustedError: another user owns the run folder or a file in it, or can write to it.
    """
    now = SystemClock().wall()
    status = read_status(folder, now)
    jobs = _open_jobs(folder, status)
    return _with_slurm({folder: (status, jobs)}, Slurm(SystemRunner()), now).get(folder, status) if jobs else status


def run_statuses(folders: Sequence[Path]) -> list[RunStatus | HpctrainError]:
    """Return for each run folder, in order, the status of its run, or the error that prevents one.

    The files of a run that has ended are read once, and then only after a change; its status is kept in
    ended_runs.json, without warnings. Slurm's queue is asked once for all runs. Accounting is asked once for the jobs
    that have left the queue and whose end the files do not state.
    """
    now = SystemClock().wall()
    ended = EndedRunStatuses(os.environ, now)
    statuses: dict[Path, RunStatus | HpctrainError] = {}
    open_runs: dict[Path, tuple[RunStatus, list[str]]] = {}
    for folder in folders:
        try:
            statuses[folder], jobs = status, _ = _status_by_files(folder, ended, now)
            if jobs:
                open_runs[folder] = status, jobs
        except HpctrainError as error:
            statuses[folder] = error
    ended.write()
    statuses |= _with_slurm(open_runs, Slurm(SystemRunner()), now) if open_runs else {}
    return [statuses[folder] for folder in folders]


def _status_by_files(folder: Path, ended: EndedRunStatuses, now: float) -> tuple[RunStatus, list[str]]:
    """Return (status by the files alone, jobs about which Slurm may know more) of a run.

    Raises:
        FileError: run.yaml is missing, or a file of the run is damaged.
        UntrustedError: another user owns the run folder or a file in it, or can write to it.
    """
    try:
        files = state_of_files(folder)
    except OSError:
        files = None  # the error of `read_status` says more
    known = None if files is None else ended.get(folder, files)
    if known is not None:
        return known
    status = read_status(folder, now)
    jobs = _open_jobs(folder, status)
    if files is not None:
        ended.add(folder, files, status, jobs)
    return status, jobs


def _with_slurm(open_runs: dict[Path, tuple[RunStatus, list[str]]], slurm: Slurm, now: float) -> dict[Path, RunStatus]:
    """Return run folder -> status of the run by its files and Slurm; {} on a machine without Slurm's commands.

    Args:
        open_runs: run folder -> (status according to the files alone, jobs about which Slurm may know more).
        now: Unix time in seconds.
    """
    why = slurm.why_unavailable()
    if why is not None:
        # A machine without Slurm may still show a run folder, by its files alone.
        unknown = {} if why.startswith(NO_COMMANDS) else open_runs
        return {folder: with_remark(status, f"Slurm was not asked: {why}") for folder, (status, _) in unknown.items()}
    here, statuses = dict(open_runs), dict[Path, RunStatus]()
    for folder, cluster in on_other_clusters(list(open_runs), slurm).items():
        status, jobs = here.pop(folder)
        statuses[folder] = with_remark(status, f"its job {jobs[0]} is on cluster {cluster}")
    try:
        known = slurm.jobs([job for _, jobs in here.values() for job in jobs])
    except CommandError as error:
        return statuses | {folder: with_remark(run[0], NO_ANSWER.format(error)) for folder, run in here.items()}
    cancelled = {folder for folder in here if is_cancelled(folder)}
    forgotten = [
        jobs[0]
        for folder, (status, jobs) in here.items()
        if not known.keys() & set(jobs) and folder not in cancelled and status.state not in _OVER
    ]
    known = {**slurm.ended_jobs(forgotten), **known}
    return statuses | {
        folder: with_job(status, _telling(jobs, known), now, folder in cancelled)
        for folder, (status, jobs) in here.items()
    }


class WatchedRun:
    """The status of a run that is watched. Each `look` reads the run's files; Slurm is asked every 10 to 30 seconds."""

    def __init__(self, folder: Path, clock: Clock, all_rows: bool = False) -> None:
        """Open the run in `folder`.

        Args:
            all_rows: as of `LiveRun`.

        Raises:
            FileError: run.yaml is missing or wrong.
        """
        self.live = LiveRun(folder, all_rows)
        self.new: list[Event | MetricRow] = []
        """Events and metrics that were written between the last two looks."""
        self._clock = clock
        self._slurm = Slurm(SystemRunner())
        self._unavailable = self._slurm.why_unavailable() if self.live.run.cluster.kind == "slurm" else NO_COMMANDS
        self._asks = self._unavailable is None and not on_other_clusters([folder], self._slurm)
        self._watcher = JobWatcher(self._slurm, delay_min_s=ASK_SLURM_S)
        self._jobs: list[str] = []
        self._remembered: dict[str, JobInfo | None] = {}
        self._trouble: str | None = None
        self._last_state: str | None = None
        self._began = clock.now()

    def look(self) -> RunStatus:
        """Read the new lines of the run's files, ask Slurm if the next request is due, and return the status.

        Raises:
            FileError, UntrustedError: a file of the run is damaged or untrusted.
        """
        self.new = self.live.read()
        status = self.live.status(self._clock.wall())
        self._follow_job()
        if self._unavailable is not None and not self._unavailable.startswith(NO_COMMANDS) and status.state != "done":
            return with_remark(status, f"Slurm was not asked: {self._unavailable}")
        if not self._jobs or not self._asks or status.state == "done":
            return status
        if status.state != self._last_state:
            self._watcher.poll_soon()
            self._last_state = status.state
        self._ask()
        if self._trouble is not None:
            return with_remark(status, NO_ANSWER.format(self._trouble))
        return with_job(status, self._info(), self._clock.wall(), is_cancelled(self.live.folder))

    @property
    def job(self) -> JobInfo | None:
        """What Slurm said last of the job that determines the run's state; None if it was not asked, or knows no such
        job."""
        return self._info() if self._jobs and self._asks and self._trouble is None else None

    def is_over(self, status: RunStatus) -> bool:
        """Return whether the run will do nothing more, given the status of the last look."""
        if status.state == "done":
            return True
        if self._jobs and self._asks:
            info = self._info() if self._trouble is None else None
            return self._trouble is None and status.state in _OVER and (info is None or info.is_ended)
        if status.state in ("unknown", "queued"):
            quiet_s = self._clock.now() - self._began if status.last_sign_s is None else status.last_sign_s
            return quiet_s > UNKNOWN_S
        return status.state in _OVER and not self.live.held

    def _ask(self) -> None:
        """Ask Slurm about the run's jobs if the next request is due. If Slurm does not answer, the status that `look`
        returns has a remark with the error, until Slurm answers again.
        """
        due = self._clock.now() >= self._watcher.next_s
        try:
            self._watcher.poll(self._clock.now())
        except CommandError as error:
            self._trouble = str(error)
        else:
            if due:
                self._trouble = self._watcher.away

    def _follow_job(self) -> None:
        """Add the run's new jobs to the jobs that are watched: the run may continue as another job at any time."""
        jobs = _slurm_jobs(self.live.folder) if self.live.run.cluster.kind == "slurm" else []
        if jobs[:1] != self._jobs[:1]:
            self.live.read_run()
        for job in jobs:
            if job not in self._jobs:
                self._watcher.add(job)
        self._jobs = jobs

    def _info(self) -> JobInfo | None:
        """Return what Slurm's queue or accounting knows about the job that determines the run's state; None if neither
        knows the job. `_telling` chooses this job among the run's newest one and the successors behind it."""
        known = {job: info for job, info in self._watcher.known.items() if not self._watcher.is_forgotten(job)}
        newest, telling = self._jobs[0], _telling(self._jobs, known)
        if telling is not None or not self._watcher.is_forgotten(newest):
            return telling
        if newest not in self._remembered:
            self._remembered[newest] = self._slurm.ended_jobs([newest]).get(newest)
        return self._remembered[newest]


class WatchedSweep:
    """The statuses of the runs of a sweep that is watched. Each `look` reads the new lines of their files; Slurm is
    asked about all of them at once, every 10 seconds. The files of a run that has ended are not read again."""

    def __init__(self, folders: Sequence[Path], clock: Clock) -> None:
        """Open the runs in `folders`.

        Raises:
            FileError: a run.yaml is missing or wrong.
        """
        self.runs = [LiveRun(folder) for folder in folders]
        self.new: list[list[Event | MetricRow]] = [[] for _ in folders]
        """Events and metrics of each run that were written between the last two looks."""
        self._clock = clock
        self._slurm = Slurm(SystemRunner())
        self._asked: dict[Path, tuple[State, RunStatus]] = {}
        self._next_s = clock.now()
        self._ended: dict[Path, RunStatus] = {}

    def look(self) -> list[RunStatus]:
        """Read the new lines of the runs' files, ask Slurm if the next request is due, and return the status of each
        run, in order.

        Raises:
            FileError, UntrustedError: a file of a run is damaged or untrusted.
        """
        now = self._clock.wall()
        by_files: dict[Path, RunStatus] = {}
        for index, live in enumerate(self.runs):
            is_ended = live.folder in self._ended
            self.new[index] = [] if is_ended else live.read()
            by_files[live.folder] = self._ended[live.folder] if is_ended else live.status(now)
        going = {folder: status for folder, status in by_files.items() if folder not in self._ended}
        if self._clock.now() >= self._next_s:
            self._next_s = self._clock.now() + ASK_SLURM_S
            self._ask(going, now)
        return [self._ended.get(folder) or self._status(folder, status) for folder, status in by_files.items()]

    def is_over(self) -> bool:
        """Return whether no run will do anything more, by the last answer of Slurm."""
        return len(self._ended) == len(self.runs)

    def _ask(self, going: Mapping[Path, RunStatus], now: float) -> None:
        open_runs = {folder: (status, _open_jobs(folder, status)) for folder, status in going.items()}
        asked = {folder: run for folder, run in open_runs.items() if run[1]}
        answers = _with_slurm(asked, self._slurm, now) if asked else {}
        for folder, status in going.items():
            combined = answers.get(folder, status)
            self._asked[folder] = status.state, combined
            if combined.state in _OVER and NO_ANSWER.partition("{")[0] not in combined.reason:
                self._ended[folder] = combined

    def _status(self, folder: Path, status: RunStatus) -> RunStatus:
        """Return the status by the files, with what Slurm said last if the files say no other state since then."""
        state, combined = self._asked.get(folder, (status.state, status))
        if state != status.state or combined.state == status.state:
            return status
        parts = {key: getattr(combined, key) for key in ("state", "reason", "job_state", "expected_start_s")}
        return replace(status, **parts, needs_action=combined.needs_action)


def _open_jobs(folder: Path, status: RunStatus) -> list[str]:
    """Return the ids of the jobs about which Slurm may know more than the files; [] for a run that is done or local.

    Raises:
        UntrustedError: other users could have written the list of jobs.
    """
    return _slurm_jobs(folder) if status.state != "done" and run_of(folder).cluster.kind == "slurm" else []


def _slurm_jobs(folder: Path) -> list[str]:
    """Return the ids of the run's newest job and its successors; only the newest if the list of successors is
    damaged."""
    try:
        return open_jobs(folder)
    except FileError:
        newest = job_id(folder)
        return [] if newest is None else [newest]


def _telling(jobs: Sequence[str], known: Mapping[str, JobInfo]) -> JobInfo | None:
    """Return the job that determines the state of the run; None if Slurm does not know it.

    The job is the first of `jobs` that has not ended, or jobs[0] if all have ended.

    Args:
        jobs: ids of the run's newest job and its successors.
        known: what Slurm says, by job id.
    """
    live = (known[job] for job in jobs if job in known and not known[job].is_ended)
    return next(live, known.get(jobs[0]))
