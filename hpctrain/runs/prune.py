"""Lists old runs and superfluous checkpoints that can be removed, each with the reason, and removes them."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpctrain.base.errors import CheckpointError, CommandError, HpctrainError, StorageError
from hpctrain.base.owned_files import OwnedFolder
from hpctrain.base.units import format_seconds
from hpctrain.checkpoint.published import listed, remove, verify
from hpctrain.records.run.run import RUN_FILE, run_of
from hpctrain.runs.folder import LOCK_FILE, is_locked, lock_run_folder
from hpctrain.runs.locate import open_jobs
from hpctrain.slurm.commands import Slurm
from hpctrain.slurm.job import JobInfo

RECENT_ACTIVITY_S = 15 * 60.0
"""A run whose files changed within this many seconds counts as alive, because this node may see neither its lock nor
its job."""
DAY_S = 86400.0
LEFTOVER_PATTERNS = ("skipped-step-*", ".step-*.tmp", ".removed-*")
"""Names in a run's folder `checkpoints` of unusable checkpoints, and of folders that killed processes left behind."""
NOT_ACTIVITY = ("report.html", "run.lock")
"""Files whose change does not show that a run is alive, because reports and the removal of checkpoints write them."""

Jobs = Mapping[str, JobInfo] | CommandError
"""Slurm's description of the runs' jobs by job id, or the error with which Slurm did not answer."""


@dataclass(frozen=True)
class Removal:
    """A run folder, a checkpoint or a leftover folder that can be removed, and why."""

    kind: Literal["run", "checkpoint", "leftover"]
    path: Path
    """Path of the item."""
    run: Path
    """The run folder: the item itself, or the folder in which the item lies."""
    size_bytes: int
    """Bytes of all files in the item, as `size_of` counts them."""
    why: str
    """Why the item can be removed, as text."""


def jobs_of(folders: Sequence[Path], slurm: Slurm) -> Jobs:
    """Return Slurm's description of the newest job and the successors of each run in `folders`, by job id, or Slurm's
    error. One query asks for all runs. Runs that were not submitted to Slurm have no jobs.

    Raises:
        FileError, UntrustedError: the list of jobs or of successors of a run is damaged, or is not trusted.
    """
    try:
        return slurm.jobs([job for folder in folders for job in _slurm_jobs(folder)])
    except CommandError as error:
        return error


def why_in_use(folder: Path, jobs: Jobs, now: float) -> str | None:
    """Return why the run in `folder` is alive or may be alive; None if it surely is not.

    Args:
        jobs: Slurm's description of the run's jobs, as `jobs_of` returns it.
        now: seconds since 1970.

    Raises:
        FileError, UntrustedError: the list of jobs or of successors of the run is damaged, or the run folder is not
            trusted.
    """
    if is_locked(folder):
        return "a process holds it"
    for job in _slurm_jobs(folder):
        if isinstance(jobs, CommandError):
            return f"cannot tell whether its job {job} has ended: {jobs}"
        if job in jobs and not jobs[job].is_ended:
            return f"its job {job} is {jobs[job].state}"
    age = now - last_activity(folder)
    return f"its files changed {format_seconds(max(0.0, age))} ago" if age < RECENT_ACTIVITY_S else None


def removable(folder: Path, now: float, older_than_s: float | None, keep: int) -> list[Removal]:
    """Return what can be removed of a run that is not alive: its whole folder, or its superfluous checkpoints and the
    leftovers in its folder `checkpoints` (`LEFTOVER_PATTERNS`).

    Args:
        now: seconds since 1970.
        older_than_s: if no file of the run has changed for this many seconds, the whole run can be removed; None: no
            run as a whole.
        keep: number of verified checkpoints that stay, at least 1.

    Raises:
        OSError: the run folder is gone.
    """
    age = now - last_activity(folder)
    if older_than_s is not None and age >= older_than_s:
        return [Removal("run", folder, folder, size_of(folder), f"no sign of life for {age / DAY_S:.0f} d")]
    checkpoints = folder / "checkpoints"
    spare = [
        Removal("checkpoint", path, folder, size_of(path), why)
        for path, why in superfluous_checkpoints(listed(checkpoints), keep)
    ]
    leftovers = sorted(path for pattern in LEFTOVER_PATTERNS for path in checkpoints.glob(pattern) if path.is_dir())
    reason = "no checkpoint that can be used"
    return spare + [Removal("leftover", path, folder, size_of(path), reason) for path in leftovers]


def superfluous_checkpoints(
    checkpoints: Sequence[Path], keep: int, check: Callable[[Path], object] = verify
) -> list[tuple[Path, str]]:
    """Return the checkpoints that a run can do without, oldest first, each with the reason.

    The `keep` newest checkpoints that verify stay. Checkpoints that do not verify stay if they are newer than all
    of these, because a person may repair them. If no checkpoint verifies, or there are at most `keep`, all stay.

    Args:
        checkpoints: the run's checkpoint folders, oldest first.
        check: function that raises CheckpointError for a checkpoint that cannot be used.
    """
    verified: list[Path] = []
    spare = []
    if len(checkpoints) <= keep:
        return []
    for path in reversed(checkpoints):
        if len(verified) == keep:
            spare.append((path, f"{verified[0].name} is newer and verified"))
            continue
        try:
            check(path)
            verified.append(path)
        except CheckpointError as error:
            if verified:
                spare.append((path, f"it cannot be used: {error}"))
    return spare[::-1]


def remove_all(removals: Sequence[Removal], jobs: Callable[[Path], Jobs], now: Callable[[], float]) -> list[str]:
    """Remove the items, each with the lock of its run held, except items of runs that are alive by now; return a line
    for each run that is alive, with the reason.

    Args:
        jobs: function that asks Slurm for the jobs of one run folder, because a person may have resubmitted the run
            since the items were listed.
        now: function that returns the seconds since 1970.

    Raises:
        StorageError: an item cannot be removed; the items before it are removed.
        InputError: a process locked the run in the meantime, or a file of the run is damaged or not trusted.
    """
    skipped = []
    for run in dict.fromkeys(item.run for item in removals):
        words = why_in_use(run, jobs(run), now())
        if words is not None:
            skipped.append(f"{run}: {words}")
            continue
        for item in removals:
            if item.run == run:
                _remove(item)
    return skipped


def last_activity(folder: Path) -> float:
    """Return when a file in the run folder last changed, in seconds since 1970; changes of the files in NOT_ACTIVITY do
    not count. Without any other file, return when the folder itself changed.

    Raises:
        OSError: the folder is gone.
    """
    times = [status.st_mtime for name, status in _files(folder) if name not in NOT_ACTIVITY]
    return max(times) if times else folder.stat().st_mtime


def size_of(path: Path) -> int:
    """Return the bytes of all files in the folder `path`. A file with several hard links counts once, and the target of
    a symbolic link does not count."""
    return sum({(status.st_dev, status.st_ino): status.st_size for _, status in _files(path)}.values())


def _files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (name, status) of each file and symbolic link in the folder `folder` and below. A file that a running
    process removes meanwhile is left out."""
    for where, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(f"{where}/{name}")
                if not stat.S_ISDIR(status.st_mode):
                    yield name, status


def _slurm_jobs(folder: Path) -> list[str]:
    jobs = open_jobs(folder)
    with contextlib.suppress(HpctrainError):
        return jobs if jobs and run_of(folder).cluster.kind == "slurm" else []
    return jobs  # an unreadable run file: ask Slurm to be safe


def _remove(item: Removal) -> None:
    with lock_run_folder(item.run):
        try:
            (_empty if item.kind == "run" else remove)(item.path)
        except OSError as error:
            why = error.strerror or error
            raise StorageError(f"{item.path}: cannot be removed: {why}; is it another user's?") from error
    if item.kind == "run":
        # Not earlier: on NFS, a folder in which a removed file is still open is not empty.
        with contextlib.suppress(OSError):
            (item.path / LOCK_FILE).unlink(missing_ok=True)
            item.path.rmdir()
    if item.path.exists():
        raise StorageError(f"{item.path}: cannot be removed as a whole; is it another user's?")


def _empty(run: Path) -> None:
    """Remove everything in a run folder except its lock file. The run file goes last, so that after an interrupted
    removal the folder still counts as a run folder.

    All names are relative to the open folder: whoever can write to the parent folder could otherwise put another folder
    at this path, which would then be emptied.
    """
    with OwnedFolder(run) as folder:
        os.close(folder.open(RUN_FILE))
        for name in folder.names():
            if name in (RUN_FILE, LOCK_FILE):
                continue
            status = os.stat(name, dir_fd=folder.descriptor, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                # rmtree takes a dir_fd only from Python 3.11 on.
                shutil.rmtree(f"/proc/self/fd/{folder.descriptor}/{name}")
            else:
                os.unlink(name, dir_fd=folder.descriptor)
        os.unlink(RUN_FILE, dir_fd=folder.descriptor)
