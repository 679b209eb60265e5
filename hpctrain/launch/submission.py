"""Submits a run's job through submitit, or starts a local run in the background. submitit submits the run's own job
script, and each of its tasks becomes a node process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import DelayedSubmission, FailedJobError
from submitit.slurm.slurm import SlurmExecutor

from hpctrain.base.atomic import storage_errors, write_text
from hpctrain.base.errors import CommandError, InputError
from hpctrain.base.module_argv import program
from hpctrain.base.process import Runner
from hpctrain.jobs.partition_checks import exclude_options
from hpctrain.launch.container_command import python_command, task_command
from hpctrain.launch.slurm_job.job_script import node_command, render_job
from hpctrain.records.run.run import Run
from hpctrain.runs.folder import KeptFolderError, RunFolder
from hpctrain.runs.locate import record_job
from hpctrain.slurm.commands import Slurm, client_environment, may_be_done

SUPERVISOR_LOG = "logs/supervisor.log"
"""File in a run folder with the output of the process that supervises a local run in the background."""


def become(words: list[str]) -> None:
    """Replace this process, a task of submitit, by the same Python running another module.

    exec resets signal handlers. So submitit's handlers, which ignore SIGTERM and let only rank 0 requeue the job, no
    longer act.

    Args:
        words: the module's name and its arguments.
    """
    argv = [*program(words[0]), *words[1:]]
    os.execve(argv[0], argv, dict(os.environ))


class ScriptExecutor(SlurmExecutor):
    """submitit's Slurm executor, which submits a given text as the script, with given sbatch options."""

    def __init__(self, folder: Path, text: str, options: Sequence[str]) -> None:
        super().__init__(folder)
        self._text = text
        self._options = options

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._text

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        # Options on the command line override those in the script. Excluded nodes go here, because the script is used
        # again for later jobs, when a node may no longer be bad.
        return ["sbatch", *self._options, str(submission_file_path)]


def preview(run: Run, folder: Path) -> str:
    """Return the text of the job script that `submit_job` submits for the run in `folder`.

    Raises:
        InputError: as of `render_job`.
    """
    task = [*python_command(run, "submitit.core._submit", flags=["-u"]), str(folder / "submitit")]
    return render_job(run, folder, task_command(run, folder, task))


def submit_job(folder: RunFolder, run: Run, slurm: Slurm, exclude: Sequence[str] = ()) -> str:
    """Submit the run's job, record its id in the run folder, and return the id. job.sh in the run folder is a copy of
    the submitted script.

    Args:
        exclude: names of nodes that the job excludes, besides those in cluster.exclude.

    Raises:
        InputError: there is no Slurm on the path, or as of `render_job`.
        CommandError: sbatch refused the job; the message quotes sbatch.
        StorageError: the run folder cannot be written; the job is cancelled.
        KeptFolderError: the submission failed, and Slurm may have the job nevertheless.
    """
    text = preview(run, folder.path)
    write_text(folder.path / "job.sh", text, mode=0o755)
    try:
        executor = ScriptExecutor(folder.path / "submitit", text, exclude_options(run, exclude))
    except RuntimeError:
        raise InputError(
            "no Slurm on the path (srun was not found); log in to the cluster, or use `hpctrain train --local N`"
        ) from None
    with _cancel_on_error(folder.path, slurm):
        try:
            with _in_clean_environment():
                job: submitit.Job[Any] = executor.submit(become, node_command(folder.path))
        except FailedJobError as error:
            raise CommandError(f"sbatch refused the job: {_last_line(str(error))}") from None
        record_job(folder.path, str(job.job_id))
        return str(job.job_id)


def submit_array(
    sweep: Path, text: str, runs: Sequence[tuple[RunFolder, Run]], exclude: Sequence[str], slurm: Slurm
) -> list[str]:
    """Submit the runs of a sweep as the tasks of one job array, record the ids of tasks and array in their folders, and
    return the ids of the tasks. job.sh in the sweep's folder is the submitted script; job.sh in each run folder is what
    its task runs, and what is submitted if the run continues as another job.

    Args:
        sweep: folder of the sweep.
        text: text of the array's script.
        runs: the run folders, each with the run that its job is for, in the order of the tasks.
        exclude: names of nodes that the jobs exclude, besides those in cluster.exclude.

    Raises:
        CommandError: sbatch refused the array; the message quotes sbatch.
        StorageError: a folder cannot be written; the array is cancelled.
        KeptFolderError: the submission failed, and Slurm may have the array nevertheless.
        InputError: as of `render_job`.
    """
    for folder, run in runs:
        write_text(folder.path / "job.sh", preview(run, folder.path), mode=0o755)
    script = sweep / "job.sh"
    write_text(script, text, mode=0o755)
    with _cancel_on_error(sweep, slurm):
        array = slurm.submit(script, exclude_options(runs[0][1], exclude))
        tasks = [f"{array}_{number}" for number in range(len(runs))]
        for task, (folder, _) in zip(tasks, runs, strict=True):
            # submitit's tasks wait for this file for a minute.
            words = folder.path / "submitit" / f"{task}_submitted.pkl"
            with storage_errors(words):
                words.parent.mkdir(exist_ok=True)
                DelayedSubmission(become, node_command(folder.path)).dump(words)
            record_job(folder.path, task)
        record_job(sweep, array)
        return tasks


def submit_local(folder: RunFolder, count: int, runner: Runner) -> str:
    """Start a local run of `count` virtual nodes in the background; return the process id of its supervisor, which
    serves as the run's job id.

    The supervisor is a process `hpctrain train --resume` in a session of its own, so that it survives the end of the
    terminal. The supervisor's output goes to a file: if the supervisor held this process's stdout open, a reader such
    as `$(hpctrain submit …)` would wait for the end of the run.

    Raises:
        CommandError: the supervisor cannot be started.
        StorageError: the run folder cannot be written.
    """
    words = ["train", "--resume", str(folder.path), "--local", str(count)]
    log = folder.path / SUPERVISOR_LOG
    with storage_errors(log):
        process = runner.start([*program("hpctrain"), *words], log=log)
    try:
        record_job(folder.path, str(process.pid))
    except BaseException:
        process.kill()
        raise
    return str(process.pid)


@contextlib.contextmanager
def _cancel_on_error(folder: Path, slurm: Slurm) -> Iterator[None]:
    """Cancel the job whose script lies in `folder` if the `with` block, which submits it, fails.

    Slurm is asked for the job, because sbatch may have answered too late, or been interrupted with this process.

    Raises:
        KeptFolderError: the block failed, sbatch did not refuse the job, and none could be cancelled.
    """
    try:
        yield
    except BaseException as error:
        if not may_be_done(error):
            raise
        try:
            jobs = slurm.jobs_of_scripts_in(folder)
            for job in jobs:
                slurm.cancel(job)
        except BaseException:  # also a second Ctrl-C
            jobs = []
        if not jobs:
            raise KeptFolderError(
                f"{str(error) or 'interrupted'}; sbatch may have queued the job all the same, and {folder} is kept for "
                "it: `squeue --me` shows the job, `scancel ID` ends it"
            ) from error
        raise


@contextlib.contextmanager
def _in_clean_environment() -> Iterator[None]:
    """Remove from this process's environment, until the context ends, the variables with which a person or an
    enclosing job changes Slurm's commands (see `client_environment`): submitit passes the environment to sbatch."""
    before = dict(os.environ)
    cleaned = client_environment(before)
    for name in before.keys() - cleaned.keys():
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(before)


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no reason given"
