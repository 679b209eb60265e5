"""Finds a run's folder: by path, or by a name or job id in ./runs, in $HPCTRAIN_RUNS and among all runs that you have
started."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.atomic import write_text
from hpctrain.base.errors import InputError, UntrustedError
from hpctrain.base.owned_files import OwnedFolder, read_owned
from hpctrain.records.history.ledger import queued_behind, read_successors
from hpctrain.records.history.past_runs import read_past_runs
from hpctrain.records.history.sweep import SWEEP_FILE

RUNS_VARIABLE = "HPCTRAIN_RUNS"
"""Environment variable that names the folder in which run folders are made; unset: ./runs."""
JOB_FILE = "job_id"
"""File in a run folder with the ids of the run's jobs, one a line, the newest last. Waiting successors are not in it
yet."""

_FOLDER_NAME = re.compile(r"^(?P<name>.+?)-(?P<date>\d{8})[T-]?(?P<time>\d{6})Z?-[0-9a-f]{4}$")
_SHOWN = 5


def find_run(name: str, environ: Mapping[str, str], cwd: Path) -> Path:
    """Return the folder of a run; the arguments are those of `find_run_or_sweep`.

    Raises:
        UntrustedError: the folder is another user's, or others can write to it. If `name` is not a path, folders that
            only this user can write to are looked for first, and the error is raised only if none of them fits.
        InputError: there is no such run, and the message lists the nearest names; or the name is that of a sweep.
    """
    folder = find_run_or_sweep(name, environ, cwd)
    if is_trusted_run(folder):
        return folder
    raise InputError(f"{name}: a sweep, and not a run; `hpctrain status {name}` shows its runs: name one of them")


def find_run_or_sweep(name: str, environ: Mapping[str, str], cwd: Path) -> Path:
    """Return the folder of a run or of a sweep.

    Args:
        name: path or name of a folder, the name of a run or a sweep (of several folders the newest is returned), or the
            id of one of its jobs, earlier ones included. A sweep's job is the whole job array.
        environ: HPCTRAIN_RUNS names a second place to search; the history of started runs names further folders.
        cwd: folder that relative paths and `runs` start from.

    Raises:
        UntrustedError: the folder is another user's, or others can write to it. If `name` is not a path, folders that
            only this user can write to are looked for first, and the error is raised only if none of them fits.
        InputError: there is no such run or sweep; the message lists the nearest names.
    """
    path = cwd / Path(name).expanduser()
    if is_trusted_run(path) or is_trusted_run(path, SWEEP_FILE):
        return path
    if path.is_dir():
        # A run may have the name of a folder that is none, such as that of the model from which it started.
        unknown = f"{name}: not a run folder, it has no run.yaml; give a folder that `hpctrain train` made"
    elif path.exists():
        raise InputError(f"{name}: found a file, expected a run folder or a run's name")
    else:
        unknown = f"{name}: no such folder; give a run folder, or a run's name without '/'" * ("/" in name)
    if "/" in name:
        raise InputError(unknown)
    places = _places(environ, cwd)
    for place in places:
        newest = _newest(name, [*runs_in(place).trusted, *sweeps_in(place)])
        if newest is not None:
            return newest
    past = past_folders(environ)
    there = split_by_owner(past)
    sweeps = [sweep for place in sorted({folder.parent for folder in past}) for sweep in sweeps_in(place)]
    named = [
        folder
        for folder in (*there.trusted, *sweeps)
        if name in (*_names(folder), *_all_ids(folder), *past.get(folder, ()))
    ]
    if named:
        return max(named, key=_age_key)
    # Of an untrusted folder, only the name is read.
    others = [*scan_runs(environ, cwd).untrusted, *there.untrusted]
    for other in others:
        if name in _names(Path(other.path)):
            raise other
    gone = [folder for folder, jobs in past.items() if name in (*_names(folder), *jobs)]
    if gone:
        raise InputError(f"{name}: its run folder {gone[-1]} is gone; `hpctrain list` shows the runs that are left")
    if unknown:
        raise InputError(unknown)
    raise InputError(
        _unknown_run_text(name, places, there.trusted) + (f"; {untrusted_folders_text(others)}" if others else "")
    )


def past_folders(environ: Mapping[str, str]) -> dict[Path, set[str]]:
    """Return {run folder: ids of its jobs} for each run that this user has started; some of the folders may no longer
    exist."""
    jobs: dict[Path, set[str]] = {}
    for past in read_past_runs(environ):
        jobs.setdefault(Path(past.folder), set()).update([past.job_id] if past.job_id else [])
    return jobs


def job_of_process(environ: Mapping[str, str]) -> str | None:
    """Return the id of the Slurm job in which a process with these environment variables runs, as squeue shows it:
    '123', or '123_4' for a task of a job array. None outside of a job.

    A task of an array has another SLURM_JOB_ID, which is unknown until it starts; that of an array's last task is the
    id of the whole array.
    """
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID") or None


def job_id(folder: Path) -> str | None:
    """Return the id of the newest job that was submitted for the run; None for a run that was not submitted.

    Raises:
        UntrustedError: the folder or its list of job ids belongs to somebody else, or others can write to it.
    """
    return next(reversed(_job_ids(folder)), None)


def open_jobs(folder: Path) -> list[str]:
    """Return the ids of the run's newest job and of its successors, in the order in which they would run; [] if the run
    has no job. Jobs that have ended are included.

    Raises:
        FileError: successors.jsonl is damaged.
        UntrustedError: the folder or a list of jobs in it belongs to somebody else, or others can write to it.
    """
    newest = job_id(folder)
    return [] if newest is None else [newest, *queued_behind(newest, read_successors(folder))]


def run_of_job(job: str, environ: Mapping[str, str], cwd: Path) -> Path | None:
    """Return the newest run folder in ./runs and $HPCTRAIN_RUNS whose run has or had the job with id `job`; None if
    there is none."""
    return next((path for path in reversed(scan_runs(environ, cwd).trusted) if job in _all_ids(path)), None)


def record_job(folder: Path, job: str) -> None:
    """Add the id of a job that was submitted for the run to the run's list of job ids.

    Raises:
        StorageError: the run folder cannot be written.
        UntrustedError: the folder or its list of job ids belongs to somebody else, or others can write to it.
    """
    write_text(folder / JOB_FILE, "".join(f"{known}\n" for known in [*_job_ids(folder), job]))


def _job_ids(folder: Path) -> list[str]:
    try:
        return read_owned(folder / JOB_FILE).decode(errors="replace").split()
    except OSError:
        return []


def _all_ids(folder: Path) -> list[str]:
    """Return the ids of the run's jobs and successors, as far as the files that list them can be read and are
    trusted."""
    ids: list[str] = []
    with contextlib.suppress(InputError):
        ids += _job_ids(folder)
        ids += [item.job_id for item in read_successors(folder)]
    return ids


def scan_runs(environ: Mapping[str, str], cwd: Path) -> ScannedFolders:
    """Return the run folders in ./runs and in $HPCTRAIN_RUNS: the trusted ones, oldest first by the time in the
    folder's name, and for each untrusted one the reason why it is not trusted.
    """
    scanned = [runs_in(place) for place in _places(environ, cwd)]
    trusted = {path.resolve() for places in scanned for path in places.trusted}
    return ScannedFolders(sorted_by_age(trusted), [other for places in scanned for other in places.untrusted])


def names_with_prefix(prefix: str, environ: Mapping[str, str], cwd: Path, most: int, sweeps: bool = False) -> list[str]:
    """Return names of runs and of their folders that begin with `prefix`, the newest run first. Only trusted run
    folders count.

    Args:
        most: number of folders that are looked into, the newest ones by the time in their names.
        sweeps: whether names of sweeps and of their folders count too, before those of runs.
    """
    folders = set(past_folders(environ))
    for place in _places(environ, cwd):
        with contextlib.suppress(OSError):
            folders.update(place.iterdir())
    matching = [path for path in folders if any(name.startswith(prefix) for name in _names(path))]
    matching = sorted(matching, key=_time_in_name, reverse=True)[:most]
    newest = [*(_trusted_sweeps(matching) if sweeps else ()), *split_by_owner(matching).trusted]
    names = dict.fromkeys([run_name(path.name) for path in newest] + [path.name for path in newest])
    return [name for name in names if name.startswith(prefix)]


def sorted_by_age(folders: Iterable[Path]) -> list[Path]:
    """Return run folders, existing or not, oldest first: by the time in their names, then by the time of change
    of `run.yaml`."""
    return sorted(folders, key=_age_key)


def run_name(folder: str) -> str:
    """Return the run's name from the name of its folder: 'gpt-20260102T030405Z-00ff' -> 'gpt'. A name of another form
    is returned as it is."""
    match = _FOLDER_NAME.match(folder)
    return match["name"] if match else folder


def _places(environ: Mapping[str, str], cwd: Path) -> list[Path]:
    places = [cwd / "runs"]
    if environ.get(RUNS_VARIABLE):
        named = cwd / Path(environ[RUNS_VARIABLE]).expanduser()
        places += [named] if named.resolve() != places[0].resolve() else []
    return places


@dataclass(frozen=True)
class ScannedFolders:
    """The trusted run folders, and for each untrusted run folder the error that says why it is not trusted."""

    trusted: list[Path]
    """Run folders that belong to this user, and to which nobody else can write."""
    untrusted: list[UntrustedError]
    """One error for each untrusted run folder. It says that the folder is another user's, or that others can write to
    the folder."""


def is_trusted_run(path: Path, file: str = "run.yaml") -> bool:
    """Return whether `path` is a run folder of this user, or with SWEEP_FILE the folder of a sweep; False if nothing is
    there, or the folder has no `file`.

    Args:
        file: name of the file by which the folder is recognised: run.yaml or SWEEP_FILE.

    Raises:
        UntrustedError: the folder or its `file` is another user's, or others can write to it.
    """
    try:
        with OwnedFolder(path) as folder:
            os.close(folder.open(file))
    except (OSError, ValueError):  # the text may not be a valid path
        return False
    return True


def split_by_owner(folders: Iterable[Path]) -> ScannedFolders:
    """Return those of `folders` that are run folders, divided into trusted and untrusted ones; other folders are left
    out."""
    result = ScannedFolders([], [])
    for folder in folders:
        try:
            if is_trusted_run(folder):
                result.trusted.append(folder)
        except UntrustedError as error:
            if _FOLDER_NAME.match(folder.name) or os.path.lexists(folder / "run.yaml"):
                result.untrusted.append(error)
    return result


def runs_in(place: Path) -> ScannedFolders:
    """Return the run folders directly in the folder `place`, divided into trusted and untrusted ones; `place` itself
    may belong to anybody."""
    try:
        return split_by_owner(sorted(path for path in place.iterdir() if path.is_dir()))
    except OSError:
        return ScannedFolders([], [])


def sweeps_in(place: Path) -> list[Path]:
    """Return the folders of this user's sweeps directly in the folder `place`, oldest first."""
    try:
        return sorted_by_age(_trusted_sweeps(path for path in place.iterdir() if path.is_dir()))
    except OSError:
        return []


def _trusted_sweeps(folders: Iterable[Path]) -> list[Path]:
    """Return those of `folders` that are folders of this user's sweeps."""
    sweeps = []
    for path in folders:
        with contextlib.suppress(UntrustedError):
            sweeps += [path] if is_trusted_run(path, SWEEP_FILE) else []
    return sweeps


def untrusted_folders_text(others: Sequence[UntrustedError]) -> str:
    """Return a sentence that says how many run folders were left out as untrusted, and why; '' for no folders."""
    if not others:
        return ""
    counted = Counter(other.reason for other in others)
    why = ", ".join(f"{count} × {reason}" for reason, count in sorted(counted.items()))
    return f"{len(others)} run folder{'s' * (len(others) > 1)} left out, as untrusted: {why}"


def _newest(name: str, runs: list[Path]) -> Path | None:
    for path in runs:
        if path.name == name:
            return path
    matching = [path for path in runs if name in (run_name(path.name), *_all_ids(path))]
    return max(matching, key=_age_key, default=None)


def _age_key(path: Path) -> tuple[str, float]:
    """Return a key that is larger for newer folders: the UTC time in the name, then the run file's time of change."""
    stamp = _time_in_name(path)
    try:
        return stamp, (path / "run.yaml").stat().st_mtime
    except OSError:  # removed in the meantime
        return stamp, 0.0


def _time_in_name(path: Path) -> str:
    match = _FOLDER_NAME.match(path.name)
    return match["date"] + match["time"] if match else ""


def _unknown_run_text(name: str, places: list[Path], past: list[Path]) -> str:
    looked = " and ".join(str(place) for place in places)
    folders = [*(path for place in places for path in (*sweeps_in(place), *runs_in(place).trusted)), *past]
    if not folders:
        return f"{name}: no such run; there is none in {looked} (set {RUNS_VARIABLE} to look in another folder too)"
    known = dict.fromkeys(known for path in folders for known in _names(path))
    near = difflib.get_close_matches(name, known, n=_SHOWN, cutoff=0.5)
    if near:
        return f"{name}: no such run in {looked}; nearest: {', '.join(near)}"
    shown = list(dict.fromkeys(run_name(path.name) for path in folders))
    more = ", …" if len(shown) > _SHOWN else ""
    return f"{name}: no such run in {looked}; there are: {', '.join(shown[:_SHOWN])}{more}"


def _names(path: Path) -> tuple[str, str]:
    return run_name(path.name), path.name
