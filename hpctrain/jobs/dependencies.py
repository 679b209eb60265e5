"""Runs and jobs that a run waits for: from what a person calls them to the ids of jobs that live."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpctrain.base.atomic import append_line
from hpctrain.base.errors import CommandError, HpctrainError, InputError, RefusedError
from hpctrain.base.owned_files import read_owned
from hpctrain.records.run.run import Run, run_of
from hpctrain.runs.folder import RunFolder
from hpctrain.runs.locate import find_run, is_trusted_run, job_id, open_jobs
from hpctrain.slurm.commands import Slurm

DEPENDENT_RUNS_FILE = "followers"
"""File in a run folder with the folders of the runs that wait for it, one a line."""


def dependency_option(jobs: Sequence[str], end: Literal["ok", "any"]) -> str | None:
    """What sbatch calls the wait for all of these jobs; None for none."""
    return f"after{end}:{':'.join(jobs)}" if jobs else None


@dataclass(frozen=True)
class JobDependencies:
    """What a run waits for."""

    folders: list[Path]
    """Of the runs among it, whether they live or not."""
    names: list[str]
    """Folders and job ids: `cluster.after` with nothing left to look up."""
    jobs: list[str]
    """Ids of the jobs that have not ended."""
    lines: list[str]
    """What was found, for the person."""


def find_dependencies(run: Run, slurm: Slurm, environ: Mapping[str, str], cwd: Path) -> JobDependencies:
    """Look up what `cluster.after` names.

    Raises:
        InputError: there is no such run or job.
        RefusedError: one of them ended with an error, and only a good end counts.
        CommandError: the controller does not answer.
    """
    before = JobDependencies([], [], [], [])
    must_be_ok = run.cluster.after_end == "ok"
    for name in run.cluster.after:
        folder = _folder_of(name, environ, cwd)
        if folder is None:
            live, line = _job_dependency(name, must_be_ok, slurm)
        else:
            live, line = _run_dependency(folder, must_be_ok, slurm)
            before.folders.append(folder)
        before.names.append(name if folder is None else str(folder))
        before.lines.append(line)
        before.jobs.extend(job for job in live if job not in before.jobs)
    return before


def without_dependencies(run: Run) -> Run:
    """The run as one that waits for nothing."""
    return run.model_copy(update={"cluster": run.cluster.model_copy(update={"after": []})})


def _folder_of(name: str, environ: Mapping[str, str], cwd: Path) -> Path | None:
    """The run's folder; None for the id of a job that is no run's, one that prepares the data say."""
    try:
        return find_run(name, environ, cwd).resolve()
    except InputError as error:
        if name.isdigit():
            return None
        raise InputError(f"cluster.after: {error}") from None


def _run_dependency(folder: Path, must_be_ok: bool, slurm: Slurm) -> tuple[list[str], str]:
    """The job that it is, or goes on as; for the run's further ones there is `refresh_dependent_runs`.

    Where any end counts, its successors too: should Slurm end the job, nobody moves a follower before it could start.
    A successor that is not needed is cancelled, which would never be a good end.
    """
    attempts = RunFolder(folder).attempts()
    # The job that finished the run is over, whatever it still does to Slurm.
    finishing = {line.get("job_id") for line in attempts if line.get("code") == 0}
    known = {own: slurm.job(own) for own in open_jobs(folder) if own not in finishing}
    live = [own for own, job in known.items() if job is not None and not job.state.is_ended]
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
    if not job.state.is_ended:
        return [name], f"it starts after job {name}"
    if must_be_ok and job.exit_code != 0:
        raise RefusedError(f"cluster.after: job {name} has ended as {job.state.value}; set cluster.after_end to any")
    return [], f"job {name} has ended already: nothing to wait for"


def record_dependent_run(before: JobDependencies, folder: Path) -> None:
    """Write into the folders of the runs before it that this run waits for them.

    Raises:
        StorageError: one of them cannot be written.
    """
    for other in before.folders:
        append_line(other / DEPENDENT_RUNS_FILE, str(folder))


def refresh_dependent_runs(folder: Path, slurm: Slurm, environ: Mapping[str, str]) -> list[str]:
    """After a new job of this run: jobs of other runs that wait for an earlier one wait for this one from now on.

    A job's id is all that Slurm knows of a run: without this they would start, or never start, by how that job ended.
    """
    return [
        line for dependent_run in _dependent_runs(folder) for line in refresh_dependency(dependent_run, slurm, environ)
    ]


def refresh_dependency(
    dependent_run: Path, slurm: Slurm, environ: Mapping[str, str], known_jobs: list[str] | None = None
) -> list[str]:
    """Let a run that has not begun wait for what the runs before it are by now; what was done, as lines.

    Args:
        known_jobs: ids of the jobs that it waits for, where they are known: nothing is done if they are right still.
    """
    try:
        job = job_id(dependent_run) if is_trusted_run(dependent_run) else None
        if job is None or RunFolder(dependent_run).attempts():
            return []
    except InputError as error:
        return [f"{dependent_run.name} is left as it is: {error}"]
    try:
        # Not by the reason why it waits: a held job's is another, and for a moment after a change there is none.
        info = slurm.job(job)
        if info is None or not info.state.is_waiting:
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
