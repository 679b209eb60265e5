"""Starts the runs of a sweep as the tasks of one job array. All runs are checked before anything is written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.base.atomic import storage_errors
from hpctrain.base.clock import Clock
from hpctrain.base.errors import CommandError, HpctrainError, InputError, RefusedError
from hpctrain.base.process import Runner
from hpctrain.jobs.bad_nodes import record_excluded_nodes
from hpctrain.jobs.dependencies import record_dependent_run, refresh_dependency
from hpctrain.jobs.successors import nodes_to_exclude_if_known, queue_successors
from hpctrain.jobs.wall_time import total_text
from hpctrain.launch.preflight.prepare import PreparedRun, RunInputs, make_folder, prepare, runs_folder
from hpctrain.launch.preflight.provenance import submitted_software
from hpctrain.launch.preflight.queue_checks import JobForecast, forecast_job
from hpctrain.launch.queueing import Say, check_for_queue, prepare_submission
from hpctrain.launch.slurm_job.array_script import TASK_LOGS, render_array
from hpctrain.launch.slurm_job.queue import CheckedRun, estimate_start
from hpctrain.launch.submission import submit_array
from hpctrain.launch.sweep_settings import NamedSettings, Settings, run_names, settings_text, sweep_overrides
from hpctrain.records.history.sweep import SWEEP_FILE, Sweep, SweptRun
from hpctrain.records.run.run import Run
from hpctrain.runs.code_copy import omitted_secrets_text
from hpctrain.runs.folder import RunFolder, new_folder, remove_on_error
from hpctrain.runs.started_runs import add_to_history
from hpctrain.slurm.commands import Slurm


@dataclass(frozen=True)
class CheckedSweep:
    """A sweep that passed the checks and may be queued."""

    name: str
    """Name of the sweep."""
    named: list[NamedSettings]
    """Name and settings of each run, in the order of their tasks."""
    prepared: list[PreparedRun]
    """The runs as they are to be recorded, in the order of their tasks."""
    checked: CheckedRun
    """Results of the checks of the first run. They hold for all runs, because all ask Slurm for the same resources."""
    limit: int | None
    """Most runs that train at the same time; None: no limit."""

    @property
    def jobs(self) -> list[Run]:
        """The runs of the sweep, in the order of their tasks. All have the `cluster` keys from which the array's one
        request is made."""
        return [item.run.model_copy(update={"cluster": self.checked.asked.cluster}) for item in self.prepared]

    def script_to_be(self) -> str:
        """Return the script of the job array with `<time>` in place of the times in the names of folders that do not
        exist yet.

        Raises:
            RefusedError, InputError: as of `render_array`.
        """
        base = runs_folder().resolve()
        folders = [base / f"{item.name}-<time>" for item in self.named]
        return render_array(self.name, self.jobs, folders, base / f"{self.name}-<time>", self.limit)


@dataclass(frozen=True)
class StartedSweep:
    """A sweep whose job array was submitted."""

    folder: Path
    """Folder of the sweep."""
    job_id: str
    """Id of the job array."""
    runs: list[tuple[Path, str]]
    """Run folder and job id of each run."""


def check_sweep(
    given: RunInputs, points: Sequence[Settings], limit: int | None, slurm: Slurm, runner: Runner, clock: Clock,
    say: Say,
) -> CheckedSweep:  # fmt: skip
    """Check every run of a sweep, and the job array as a whole; nothing is written.

    Args:
        given: the inputs that all runs share.
        points: what each run sets.
        limit: most runs that train at the same time; None: no limit.

    Raises:
        HpctrainError: a run cannot be started; the message names the run.
        InputError: `cluster.kind` is local.
        RefusedError: the cluster does not take such an array, or the runs need different jobs.
    """
    run = first_run(given, points)
    if run.cluster.kind != "slurm":
        raise InputError("--sweep: only for jobs that are queued: cluster.kind slurm; found local")
    if limit is not None and not run.recovery.successors:
        given = _as_same_job(given)
    names = run_names(run.name, points)
    named = [NamedSettings(name, settings) for name, settings in zip(names, points, strict=True)]
    _check_array_size(len(named), slurm)
    prepared = []
    for number, item in enumerate(named):
        inputs = replace(given, overrides=(*given.overrides, *item.overrides))
        with _names_run(item, number, len(named)):
            if number:
                prepared.append(prepare(inputs, runner, queued=True))
            else:
                prepared.append(prepare_submission(inputs, False, slurm, runner, say))
    say([f"{len(named)} runs as tasks of one job array; what follows is for {named[0].name}"])
    with _names_run(named[0], 0, len(named)):
        prepared[0], checked = check_for_queue(prepared[0], slurm, clock, say)
    prepared = [replace(item, run=item.run.model_copy(update={"cluster": checked.run.cluster})) for item in prepared]
    sweep = CheckedSweep(run.name, named, prepared, checked, limit)
    # Rendering checks that all runs need the same job.
    script = sweep.script_to_be()
    estimate_start(sweep.jobs[0], script, slurm, clock.wall())
    if limit is not None and sweep.jobs[0].recovery.requeue == "new_job":
        words = "does not count a run that continues as another job (recovery.requeue: new_job)"
        say([f"--array-limit {limit} {words}; with same_job and no successors it does"])
    _forecast(sweep, say)
    return sweep


def first_run(given: RunInputs, points: Sequence[Settings]) -> Run:
    """Return the first run of a sweep, before its name is set.

    Raises:
        InputError: the run file or a setting is wrong; the message names the run.
    """
    try:
        return replace(given, overrides=(*given.overrides, *sweep_overrides(points[0]))).run()
    except InputError as error:
        raise InputError(f"--sweep: run 1 of {len(points)} ({settings_text(points[0])}): {error}") from None


def _as_same_job(given: RunInputs) -> RunInputs:
    """Return the inputs with `recovery.requeue: same_job`, unless the run file has the key: a run that continues as a
    new job is no task of the array any more, and would not count in its limit."""
    recovery = {"requeue": "same_job", **given.defaults.get("recovery", {})}
    return replace(given, defaults={**given.defaults, "recovery": recovery})


def _forecast(sweep: CheckedSweep, say: Say) -> None:
    """Check that each run fits into its nodes as last measured. Say for each run after the first what the check found,
    without lines that hold for an earlier run, too. Then say what all runs together are billed, if that is known.
    """
    checked, known, shown = sweep.checked, dict[str, JobForecast](), set[str]()
    for number, ready in enumerate(sweep.prepared):
        if (content := _planned(ready.run)) in known:
            continue
        with _names_run(sweep.named[number], number, len(sweep.named)):
            known[content] = forecast_job(
                ready, runs_folder(), checked.nodes, checked.part, checked.limit, checked.price
            )
        # What holds for the first run was said when it was checked for the queue.
        lines = [line for line in known[content].lines if line not in shown]
        shown.update(lines)
        say([f"{sweep.named[number].name}: {line}" for line in lines if number])
    all_runs = [known[_planned(ready.run)] for ready in sweep.prepared]
    parts = [(item.time, item.billed) for item in all_runs if item.time is not None and item.billed is not None]
    say([total_text(parts)] if len(parts) == len(all_runs) else [])


def _check_array_size(count: int, slurm: Slurm) -> None:
    try:
        most = slurm.config()["max_array_size"]
    except CommandError:
        return  # sbatch will tell
    if count > most:
        raise RefusedError(
            f"--sweep: found {count} runs; this cluster allows {most} tasks in a job array (MaxArraySize): submit "
            "several sweeps"
        )


def _planned(run: Run) -> str:
    """Return what a plan depends on, as text: the run without its name, seed and optimizer, which is always AdamW."""
    return run.model_copy(update={"name": "run", "seed": 0, "optimizer": type(run.optimizer)()}).model_dump_json()


@contextlib.contextmanager
def _names_run(item: NamedSettings, number: int, count: int) -> Iterator[None]:
    """Put the name and the settings of a run before the message of an error about it.

    Args:
        number: index of the run in the sweep, from 0.
        count: number of runs of the sweep.
    """
    try:
        yield
    except HpctrainError as error:
        kind = RefusedError if isinstance(error, RefusedError) else InputError
        if not isinstance(error, kind):
            raise
        settings = " ".join(item.overrides[:-1])
        raise kind(f"--sweep: {item.name} (run {number + 1} of {count}: {settings}): {error}") from None


def queue_sweep(sweep: CheckedSweep, slurm: Slurm, runner: Runner, clock: Clock, say: Say) -> StartedSweep:
    """Make the folders of a sweep and of its runs, and submit the job array.

    Raises:
        CommandError: sbatch refused the array; nothing is left of the folders.
        StorageError: a folder cannot be written; no folder of the sweep or its runs is left, and the array is
            cancelled.
        KeptFolderError: the submission failed, and Slurm may have the array nevertheless; the folders are left.
        InputError: `code` of the run file cannot be copied.
    """
    base, jobs = runs_folder(), sweep.jobs
    with contextlib.ExitStack() as cleanup:
        place = new_folder(base, sweep.name, clock.wall(), TASK_LOGS)
        cleanup.enter_context(remove_on_error(RunFolder(place)))
        folders: list[RunFolder] = []
        software = submitted_software(runner, os.environ, queued=True)
        for item in sweep.prepared:
            folders.append(make_folder(item, base, runner, clock, software))
            cleanup.enter_context(remove_on_error(folders[-1]))
        say(dict.fromkeys(line for folder in folders for line in omitted_secrets_text(folder.path)))
        _write_sweep(place, sweep, folders)
        for folder in folders:
            record_dependent_run(sweep.checked.before, folder.path)
        exclude = _excluded(folders, sweep, slurm, clock, say)
        text = render_array(sweep.name, jobs, [folder.path for folder in folders], place, sweep.limit)
        tasks = submit_array(place, text, list(zip(folders, jobs, strict=True)), exclude, slurm)
    for folder, job, task in zip(folders, jobs, tasks, strict=True):
        say(add_to_history("submit", folder.path, task, slurm))
        say(queue_successors(folder.path, job, slurm, clock.wall()))
        if sweep.checked.before.folders:
            say(refresh_dependency(folder.path, slurm, os.environ, sweep.checked.before.jobs))
    return StartedSweep(
        place, tasks[0].partition("_")[0], list(zip((folder.path for folder in folders), tasks, strict=True))
    )


def _write_sweep(place: Path, sweep: CheckedSweep, folders: Sequence[RunFolder]) -> None:
    runs = [
        SweptRun(name=item.name, folder=folder.path.name, settings=item.settings)
        for item, folder in zip(sweep.named, folders, strict=True)
    ]
    Sweep(name=sweep.name, array_limit=sweep.limit, runs=runs).write(place / SWEEP_FILE)
    with storage_errors(place):
        for task, folder in enumerate(folders):
            (place / TASK_LOGS / str(task)).symlink_to(Path("..", "..", folder.path.name, "logs"))


def _excluded(folders: Sequence[RunFolder], sweep: CheckedSweep, slurm: Slurm, clock: Clock, say: Say) -> list[str]:
    """Record in each run folder the nodes that the verdict of the user's topology excludes. Return those of these nodes
    that the array is to exclude: only as many as leave it enough nodes, and none if the controller does not answer."""
    now, job = clock.wall(), sweep.checked.asked
    for folder, item in zip(folders, sweep.prepared, strict=True):
        record_excluded_nodes(folder.path, item.topology, now, item.run.recovery.exclude_hours)
    if sweep.prepared[0].topology is None:
        return []
    exclude = nodes_to_exclude_if_known(folders[0].path, job, slurm, now)
    say([f"the topology excludes {', '.join(exclude)}: the jobs do without"] if exclude else [])
    return exclude
