"""What old runs and checkpoints take: a list of what could go and why, then, on a person's word, its removal."""

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
"""A run whose files changed this recently counts as alive, whatever lock and queue say: a node may see neither."""
DAY_S = 86400.0
LEFTOVER_PATTERNS = ("skipped-step-*", ".step-*.tmp", ".removed-*")
"""In `checkpoints`: what could not be used, and what killed writers left behind."""
NOT_ACTIVITY = ("report.html", "run.lock")
"""Files that somebody who only looks at a run, or prunes it, writes."""

Jobs = Mapping[str, JobInfo] | CommandError
"""What Slurm says of the runs' jobs, or why it does not."""


@dataclass(frozen=True)
class Removal:
    """Something that could go."""

    kind: Literal["run", "checkpoint", "leftover"]
    path: Path
    run: Path
    """The run folder that it is, or lies in."""
    size_bytes: int
    why: str


def jobs_of(folders: Sequence[Path], slurm: Slurm) -> Jobs:
    """The newest jobs of the runs that were submitted, and those behind them: one question for all of them."""
    try:
        return slurm.jobs([job for folder in folders for job in _slurm_jobs(folder)])
    except CommandError as error:
        return error


def why_in_use(folder: Path, jobs: Jobs, now: float) -> str | None:
    """Why the run lives or may do so; None when it surely does not."""
    if is_locked(folder):
        return "a process holds it"
    for job in _slurm_jobs(folder):
        if isinstance(jobs, CommandError):
            return f"cannot tell whether its job {job} has ended: {jobs}"
        if job in jobs and not jobs[job].state.is_ended:
            return f"its job {job} is {jobs[job].state.value}"
    age = now - last_activity(folder)
    return f"its files changed {format_seconds(max(0.0, age))} ago" if age < RECENT_ACTIVITY_S else None


def removable(folder: Path, now: float, older_than_s: float | None, keep: int) -> list[Removal]:
    """What could go of a run that does not live: all of it, or its spare checkpoints.

    Args:
        older_than_s: a run without a sign of life for so long goes as a whole; None: no run does.
        keep: number of verified checkpoints that stay, at least 1.
    """
    age = now - last_activity(folder)
    if older_than_s is not None and age >= older_than_s:
        return [Removal("run", folder, folder, size_of(folder), f"no sign of life for {age / DAY_S:.0f} d")]
    checkpoints = folder / "checkpoints"
    found = [
        Removal("checkpoint", path, folder, size_of(path), why)
        for path, why in superfluous_checkpoints(listed(checkpoints), keep)
    ]
    rest = sorted(path for pattern in LEFTOVER_PATTERNS for path in checkpoints.glob(pattern) if path.is_dir())
    return found + [Removal("leftover", path, folder, size_of(path), "no checkpoint that can be used") for path in rest]


def superfluous_checkpoints(
    checkpoints: Sequence[Path], keep: int, check: Callable[[Path], object] = verify
) -> list[tuple[Path, str]]:
    """Checkpoints that a run can do without, and why.

    The `keep` newest that verify stay, and so does whatever is newer than the first of them: `latest` may name it, and
    what is wrong with it may be mended. Where none verifies, all stay.

    Args:
        checkpoints: oldest first.
        check: raises CheckpointError for one that cannot be used.
    """
    kept: list[Path] = []
    found = []
    if len(checkpoints) <= keep:
        return []
    for path in reversed(checkpoints):
        if len(kept) == keep:
            found.append((path, f"{kept[0].name} is newer and verified"))
            continue
        try:
            check(path)
            kept.append(path)
        except CheckpointError as error:
            if kept:
                found.append((path, f"it cannot be used: {error}"))
    return found[::-1]


def remove_all(removals: Sequence[Removal], jobs: Callable[[Path], Jobs], now: Callable[[], float]) -> list[str]:
    """Remove what was listed, with each run's lock in hand; what was left after all comes back, as lines.

    Args:
        jobs: asks Slurm once more: a person may have resubmitted a run since the list was made.

    Raises:
        StorageError: something cannot be removed; what comes before it is gone.
    """
    left = []
    for run in dict.fromkeys(item.run for item in removals):
        words = why_in_use(run, jobs(run), now())
        if words is not None:
            left.append(f"{run}: {words}")
            continue
        for item in removals:
            if item.run == run:
                _remove(item)
    return left


def last_activity(folder: Path) -> float:
    """When a file of the run changed last, seconds since 1970."""
    times = [path.lstat().st_mtime for path in _files(folder) if path.name not in NOT_ACTIVITY]
    return max(times, default=folder.stat().st_mtime)


def size_of(path: Path) -> int:
    """Bytes that its files hold; what links point to stays where it is."""
    return sum({(stat.st_dev, stat.st_ino): stat.st_size for stat in map(Path.lstat, _files(path))}.values())


def _files(folder: Path) -> list[Path]:
    found = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    return [path for path in found if path.is_symlink() or path.exists()]


def _slurm_jobs(folder: Path) -> list[str]:
    jobs = open_jobs(folder)
    with contextlib.suppress(HpctrainError):
        return jobs if jobs and run_of(folder).cluster.kind == "slurm" else []
    return jobs  # an unreadable run file: Slurm is asked rather than not


def _remove(item: Removal) -> None:
    lock = lock_run_folder(item.run)
    try:
        if item.kind == "run":
            _empty(item.path)
        else:
            remove(item.path)
    except OSError as error:
        raise StorageError(
            f"{item.path}: cannot be removed: {error.strerror or error}; is it another user's?"
        ) from error
    finally:
        lock.release()
    if item.kind == "run":
        # Only now: on NFS a folder in which a removed file is still open is not empty.
        with contextlib.suppress(OSError):
            (item.path / LOCK_FILE).unlink(missing_ok=True)
            item.path.rmdir()
    if item.path.exists():
        raise StorageError(f"{item.path}: cannot be removed as a whole; is it another user's?")


def _empty(run: Path) -> None:
    """All of a run but its lock; the run file goes last, so that what was left on the way is still found as a run.

    What is emptied is the folder that was opened, in which the run file lies: whoever can write to the folder above may
    put another one in its place meanwhile.
    """
    with OwnedFolder(run) as folder:
        os.close(folder.open(RUN_FILE))
        for name in folder.names():
            if name in (RUN_FILE, LOCK_FILE):
                continue
            status = os.stat(name, dir_fd=folder.descriptor, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                # rmtree takes a dir_fd from Python 3.11 on only.
                shutil.rmtree(f"/proc/self/fd/{folder.descriptor}/{name}")
            else:
                os.unlink(name, dir_fd=folder.descriptor)
        os.unlink(RUN_FILE, dir_fd=folder.descriptor)
