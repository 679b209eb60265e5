"""Statuses of runs that have ended, remembered in ended_runs.json: their files are read again only after a change."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from hpctrain.base.owned_files import OwnedFolder
from hpctrain.records.history.ended_runs import EndedRun, ended_runs_file, read_ended_runs, write_ended_runs
from hpctrain.records.history.ledger import ATTEMPTS_FILE, SUCCESSORS_FILE
from hpctrain.records.history.node_log import NODE_LOG
from hpctrain.report.status import QUIET_S, RunStatus, lock_held
from hpctrain.runs.locate import JOB_FILE

FILES = (
    "run.yaml", "events.jsonl", "metrics.jsonl", NODE_LOG, ATTEMPTS_FILE, JOB_FILE, SUCCESSORS_FILE, "topology.json",
)  # fmt: skip
"""Files of a run folder from which the status of an ended run follows."""


class EndedRunStatuses:
    """The statuses in ended_runs.json. An entry counts only while the run's files are unchanged: the time at which a
    file was changed (ctime) cannot be set back by anybody but root, and changes with its owner and mode, too."""

    def __init__(self, environ: Mapping[str, str], now: float) -> None:
        """Read the file.

        Args:
            environ: environment variables, which tell where the file lies.
            now: wall clock, seconds since 1970.
        """
        self._path = ended_runs_file(environ)
        self._runs = read_ended_runs(self._path)
        self._now = now
        self._is_changed = False

    def get(self, folder: Path, files: str) -> tuple[RunStatus, list[str]] | None:
        """Return (status by the files alone, jobs about which Slurm may know more) of a run that has ended; None if it
        is not known, or if a process holds the run folder.

        Args:
            files: the present state of the run's files, as `state_of_files` returns it.

        Raises:
            UntrustedError: another user owns the lock file, or can write to it.
        """
        entry = self._runs.get(str(folder))
        if entry is None or entry.files != files or lock_held(folder):
            return None
        if entry.status.keys() != {field.name for field in fields(RunStatus)}:  # of another version of hpctrain
            return None
        try:
            status = _statuses().validate_python(entry.status)
        except ValidationError:
            return None
        age = status.last_sign_s
        aged = status if age is None else replace(status, last_sign_s=max(0.0, age + self._now - entry.read_s))
        return aged, entry.jobs

    def add(self, folder: Path, files: str, status: RunStatus, jobs: list[str]) -> None:
        """Remember a run if it has ended by its files: it is done, or its files are old and no process holds it.

        Args:
            files: the state of the run's files before they were read.
            status: the status by the files alone.
            jobs: jobs about which Slurm may know more.
        """
        is_quiet = status.last_sign_s is not None and status.last_sign_s > QUIET_S
        if (status.state != "done" and not is_quiet) or lock_held(folder):
            return
        # Whether the disk has room is asked anew by those who need to know.
        values = asdict(replace(status, warning=None))
        self._runs[str(folder)] = EndedRun(files=files, read_s=self._now, status=values, jobs=jobs)
        self._is_changed = True

    def write(self) -> None:
        """Write ended_runs.json if a run was added. Runs whose folders are gone are left out."""
        if self._is_changed:
            write_ended_runs(self._path, {name: run for name, run in self._runs.items() if os.path.lexists(name)})


@cache
def _statuses() -> TypeAdapter[RunStatus]:
    return TypeAdapter(RunStatus)


def state_of_files(folder: Path) -> str:
    """Return size, inode and time of change of those of `FILES` that exist in a run folder, as text.

    Raises:
        UntrustedError: the folder belongs to another user, or others can write to it.
        OSError: the folder does not exist, or cannot be read.
    """
    states = []
    with OwnedFolder(folder) as opened:
        for name in FILES:
            try:
                status = os.stat(name, dir_fd=opened.descriptor, follow_symlinks=False)
            except FileNotFoundError:
                continue
            states.append(f"{name} {status.st_size} {status.st_ino} {status.st_ctime_ns}")
    return "; ".join(states)
