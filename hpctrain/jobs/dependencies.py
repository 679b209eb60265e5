"""Finds the jobs that a run's job has to wait for, from the runs and jobs in `cluster.after`, and changes the
dependencies of a waiting job when a run before it continues as another job."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpctrain.base.atomic import append_line
from hpctrain.base.errors import CommandError, HpctrainError, InputError, RefusedError
from hpctrain.base.owned_files import read_owned
from hpctrain.records.run.run import Run, run_of
from hpctrain.runs.folder import RunFolder
from hpctrain.runs.locate import is_trusted_run, job_id, open_jobs
from hpctrain.runs.sweeps import find_runs
from hpctrain.slurm.commands import Slurm

DEPENDENT_RUNS_FILE = "followers"
"""File in the folder of a run that lists the folders of the runs that wait for that run, one a line."""


def dependency_option(jobs: Sequence[str], end: Literal["ok", "any"]) -> str | None:
    """Return the value of sbatch's --dependency for a job that waits for `jobs`; None without jobs.

    Args:
        end: the end of `jobs` that counts: a successful one (ok) or any.
    """
    return f"after{end}:{':'.join(jobs)}" if jobs else None


@dataclass(frozen=True)
class JobDependencies:
    """The runs and jobs that a run waits for."""

    folders: list[Path]
    """Folders of the runs that the run waits for, ended or not."""
    names: list[str]
    """The items of `cluster.after`, with the path of the folder in place of a run's name, so that no name has to be
    looked up again."""
    jobs: list[str]
    """Ids of the jobs to wait for, which have not ended."""
    lines: list[str]
    """A line for a person about each item of `cluster.after`."""


def find_dependencies(run: Run, slurm: Slurm, environ: Mapping[str, str], cwd: Path) -> JobDependencies:
    """Return the runs and jobs that `cluster.after` of a run names.

    Args:
        environ: its variable HPCTRAIN_RUNS names a folder in which runs are looked up.
        cwd: folder whose subfolder `runs` is searched for runs too.

    Raises:
        InputError: there is no run or job of such a name.
        RefusedError: a run or job ended with an error, and the run waits for a successful end.
        CommandError: the controller does not answer.
    """
    before = JobDependencies([], [], [], [])
    must_be_ok = run.cluster.after_end == "ok"
    for name in run.cluster.after:
        for folder in _folders_of(name, environ, cwd):
            if folder is None:
                live, line = _job_dependency(name, must_be_ok, slurm)
            else:
                live, line = _run_dependency(folder, must_be_ok, slurm)
                before.folders.append(folder)
            before.names.append(name if folder is None else str(folder))
            before.lines.append(line)
            before.jobs.extend(job for job in live if job not in before.jobs)
    return before


def with_dependencies(run: Run, after: list[str]) -> Run:
    """Return the run with `after` as its `cluster.after`: run folders and job ids, or job ids alone."""
    return run.model_copy(update={"cluster": run.cluster.model_copy(update={"after": after})})


def _folders_of(name: str, environ: Mapping[str, str], cwd: Path) -> Sequence[Path | None]:
    """Return the folders of the run, or of all runs of the sweep, that `name`, an item of `cluster.after`, means;
    [None] for the id of a job that belongs to no run, such as a job that prepares data.

    Raises:
        InputError: there is no such run or sweep, or its files cannot be used, and `name` is no job's id.
    """
    try:
        return find_runs(name, environ, cwd).runs
    except InputError as error:
        if re.fullmatch(r"\d+(_\d+)?", name, re.ASCII):
            return [None]
        raise InputError(f"cluster.after: {error}") from None


def _run_dependency(folder: Path, must_be_ok: bool, slurm: Slurm) -> tuple[list[str], str]:
    """Return (ids of the jobs after which the run in `folder` has ended, a line that says what is waited for). No ids
    are returned if none of that run's jobs waits or runs.

    If any end counts, the run's successors are among the jobs: otherwise, if Slurm ended the running job, the waiting
    run would start before its dependency could be changed. If the run has to succeed, successors are left out: a
    successor that is not needed is cancelled, which never counts as success. Jobs that the run gets later are added by
    `refresh_dependent_runs`.

    Args:
        must_be_ok: whether only a successful end of that run counts; else any end does.

    Raises:
        RefusedError: the run must end with success, has no job any more, and did not finish.
    """
    attempts = RunFolder(folder).attempts()
    # The job that finished the run is over, even where Slurm still has it.
    finishing = {line.get("job_id") for line in attempts if line.get("code") == 0}
    infos = {job: slurm.job(job) for job in open_jobs(folder) if job not in finishing}
    live = [job for job, info in infos.items() if info is not None and not info.is_ended]
    if live:
        waited = live[:1] if must_be_ok else live
        return waited, f"it starts after {folder.name} ({_job_list_text(waited)})"
    if must_be_ok and not (attempts and attempts[-1].get("code") == 0):
        raise RefusedError(
            f"cluster.after: {folder.name} has no job any more and did not finish; `hpctrain resubmit {folder.name}` "
            "first, or set cluster.after_end to any"
        )
    return [], f"{folder.name} has ended already: nothing to wait for"


def _job_dependency(name: str, must_be_ok: bool, slurm: Slurm) -> tuple[list[str], str]:
    job = slurm.job(name)
    if job is None:
        raise InputError(f"cluster.after: Slurm knows no job {name} (any more), and no run has had it")
    if not job.is_ended:
        return [name], f"it starts after job {name}"
    if must_be_ok and job.exit_code != 0:
        raise RefusedError(f"cluster.after: job {name} has ended as {job.state}; set cluster.after_end to any")
    return [], f"job {name} has ended already: nothing to wait for"


def record_dependent_run(before: JobDependencies, folder: Path) -> None:
    """Record in the folder of each run in `before` that the run in `folder` waits for that run.

    Raises:
        StorageError: a run folder cannot be written.
    """
    for other in before.folders:
        append_line(other / DEPENDENT_RUNS_FILE, str(folder))


def refresh_dependent_runs(folder: Path, slurm: Slurm, environ: Mapping[str, str]) -> list[str]:
    """Make the jobs of other runs that wait for the run in `folder` wait for this run's current jobs; return what was
    done, as lines.

    Slurm knows only jobs, not runs. Without this call the waiting jobs would depend on the end of an earlier job of
    this run.
    """
    return [
        line for dependent_run in _dependent_runs(folder) for line in refresh_dependency(dependent_run, slurm, environ)
    ]


def refresh_dependency(
    dependent_run: Path, slurm: Slurm, environ: Mapping[str, str], known_jobs: list[str] | None = None
) -> list[str]:
    """Make a run that has not begun wait for the current jobs of the runs that its `cluster.after` names; return what
    was done, as lines, errors included.

    Args:
        dependent_run: folder of the run that waits.
        known_jobs: ids of the jobs that its job waits for now, if known; nothing is done if they are still right.
    """
    try:
        job = job_id(dependent_run) if is_trusted_run(dependent_run) else None
        if job is None or RunFolder(dependent_run).attempts():
            return []
    except InputError as error:
        return [f"{dependent_run.name} is left as it is: {error}"]
    try:
        # Slurm's pending reason does not tell: a held job has another one, and right after a change there is none.
        info = slurm.job(job)
        if info is None or not info.is_waiting:
            return []
        run = run_of(dependent_run)
        jobs = find_dependencies(run, slurm, environ, dependent_run.parent).jobs
        if jobs == known_jobs:
            return []
        slurm.update(job, Dependency=dependency_option(jobs, run.cluster.after_end) or "")
        return [f"{dependent_run.name} (job {job}) waits for {_job_list_text(jobs) if jobs else 'no job any more'}"]
    except CommandError as error:
        return [f"{dependent_run.name} (job {job}) may not start: it waits for an earlier job ({error})"]
    except HpctrainError as error:
        return [f"{dependent_run.name} (job {job}) may not start: {error}"]


def _job_list_text(jobs: list[str]) -> str:
    return f"job{'s' * (len(jobs) > 1)} {', '.join(jobs)}"


def _dependent_runs(folder: Path) -> list[Path]:
    try:
        lines = read_owned(folder / DEPENDENT_RUNS_FILE).decode(errors="replace").splitlines()
    except OSError:
        return []
    return [Path(line) for line in dict.fromkeys(lines) if line]
