"""Prunes old runs and checkpoints: lists what can be removed and why, and removes it once you agree."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
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
"""Names in the folder `checkpoints` of unusable checkpoints, and of files that killed writers left behind."""
NOT_ACTIVITY = ("report.html", "run.lock")
"""Files whose change does not show that a run is alive: reading or pruning a run writes them."""

Jobs = Mapping[str, JobInfo] | CommandError
"""Slurm's description of the runs' jobs, or why it cannot be had."""


@dataclass(frozen=True)
class Removal:
    """A run folder, checkpoint or leftover file that can be removed, and why."""

    kind: Literal["run", "checkpoint", "leftover"]
    path: Path
    run: Path
    """The run folder that the item is, or lies in."""
    size_bytes: int
    why: str


def jobs_of(folders: Sequence[Path], slurm: Slurm) -> Jobs:
    """Return the newest jobs and successors of the runs that were submitted, with a single query for all runs."""
    try:
        return slurm.jobs([job for folder in folders for job in _slurm_jobs(folder)])
    except CommandError as error:
        return error


def why_in_use(folder: Path, jobs: Jobs, now: float) -> str | None:
    """Return why the run is, or may be, alive; None if it surely is not."""
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
    """Return what can be removed of a run that is not alive: all of it, or its spare checkpoints.

    Args:
        older_than_s: a run without activity for so long is removed as a whole; None: no run is.
        keep: number of verified checkpoints that stay, at least 1.
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
    """Return the checkpoints that a run can do without, each with the reason.

    The `keep` newest checkpoints that verify stay. So do newer ones that do not verify: `latest` may name one, and it
    may be repaired. If none verifies, all stay.

    Args:
        checkpoints: oldest first.
        check: raises CheckpointError for one that cannot be used.
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
    """Remove the listed items, holding each run's lock; return the runs that were left alone and why, as lines.

    Args:
        jobs: asks Slurm once more: a person may have resubmitted a run since the list was made.

    Raises:
        StorageError: something cannot be removed; the items before it are removed.
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
    """Return when a file of the run last changed, seconds since 1970."""
    times = [path.lstat().st_mtime for path in _files(folder) if path.name not in NOT_ACTIVITY]
    return max(times, default=folder.stat().st_mtime)


def size_of(path: Path) -> int:
    """Return the bytes of the files in `path`, without what links point to."""
    return sum({(stat.st_dev, stat.st_ino): stat.st_size for stat in map(Path.lstat, _files(path))}.values())


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_symlink() or (path.exists() and not path.is_dir())]


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
    """Remove everything in a run folder except its lock. The run file goes last, so that an interrupted removal leaves
    something that still counts as a run.

    Only the folder that was opened, with the run file in it, is emptied: whoever can write to the parent folder may put
    another one in its place.
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
