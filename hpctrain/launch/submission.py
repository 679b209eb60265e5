"""Handing a job to submitit: its executor submits our script, and each of its tasks becomes a node process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedJobError
from submitit.slurm.slurm import SlurmExecutor

from hpctrain.base.atomic import storage_errors, write_text
from hpctrain.base.errors import CommandError, InputError, StorageError
from hpctrain.base.module_argv import program
from hpctrain.base.process import Runner
from hpctrain.jobs.job_nodes import exclude_options
from hpctrain.launch.container_command import python_command, task_command
from hpctrain.launch.job_script import render_job
from hpctrain.records.run.run import Run
from hpctrain.runs.folder import RunFolder
from hpctrain.runs.locate import record_job
from hpctrain.slurm.commands import client_environment

SUPERVISOR_LOG = "logs/supervisor.log"
"""File in a run folder with what the process that watches a local run in the background says."""


def become(words: list[str]) -> None:
    """What submitit's task runs: the process turns into a module of its own Python; in an image that is the image's.

    exec resets signal handlers, so submitit's own are gone: it ignores SIGTERM and lets rank 0 alone requeue.

    Args:
        words: the module's name and its arguments.
    """
    argv = [*program(words[0]), *words[1:]]
    os.execve(argv[0], argv, dict(os.environ))


def node_command(folder: Path) -> list[str]:
    """The module that runs as each node's task, with its words; which node it is comes from Slurm's environment."""
    return ["hpctrain.node", "run", "--folder", str(folder)]


class ScriptExecutor(SlurmExecutor):
    """submitit's Slurm executor with the text of the script and options of sbatch given."""

    def __init__(self, folder: Path, text: str, options: Sequence[str]) -> None:
        super().__init__(folder)
        self._text = text
        self._options = options

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._text

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        # Above the script's own lines, as for the jobs after it: a node that is forgiven must not stay in the script.
        return ["sbatch", *self._options, str(submission_file_path)]


def preview(run: Run, folder: Path) -> str:
    """job.sh as it would be submitted."""
    return render_job(run, folder, _task_command(run, folder))


def submit_job(folder: RunFolder, run: Run, exclude: Sequence[str] = ()) -> str:
    """Submit the run's job; its id comes back. job.sh in the run folder is exactly what was submitted.

    Args:
        exclude: nodes that it does without.

    Raises:
        InputError: there is no Slurm on the path.
        CommandError: sbatch refused; its own words are kept.
        StorageError: the run folder cannot be written.
    """
    text = preview(run, folder.path)
    write_text(folder.path / "job.sh", text, mode=0o755)
    try:
        executor = ScriptExecutor(folder.path / "submitit", text, exclude_options(run, exclude))
    except RuntimeError:
        raise InputError(
            "no Slurm on the path (srun was not found); log in to the cluster, or use `hpctrain train --local N`"
        ) from None
    with _in_clean_environment():
        try:
            job: submitit.Job[Any] = executor.submit(become, node_command(folder.path))
        except FailedJobError as error:
            raise CommandError(f"sbatch refused the job: {_last_line(str(error))}") from None
        return _recorded(folder, job)


def submit_local(folder: RunFolder, count: int, runner: Runner) -> str:
    """Start a supervisor with `count` virtual nodes in the background; its process id comes back as the job's id.

    It leads a session of its own, so the end of this terminal is not its end. What it says goes to a file: with this
    process's output open, whoever reads that, `$(hpctrain submit …)` say, would wait for the end of the run.

    Raises:
        CommandError: it cannot be started.
        StorageError: the run folder cannot be written.
    """
    words = ["train", "--resume", str(folder.path), "--local", str(count)]
    log = folder.path / SUPERVISOR_LOG
    with storage_errors(log):
        process = runner.start([*program("hpctrain"), *words], log=log)
    try:
        record_job(folder.path, str(process.pid))
    except StorageError:
        process.kill()
        raise
    return str(process.pid)


def _recorded(folder: RunFolder, job: submitit.Job[Any]) -> str:
    """The job's id, written into the run folder; a job that cannot be found again is ended."""
    try:
        record_job(folder.path, str(job.job_id))
    except StorageError:
        job.cancel(check=False)
        raise
    return str(job.job_id)


def direct_command(run: Run, folder: Path) -> str:
    """What each node's task runs where no submitit job stands behind it."""
    module, *words = node_command(folder)
    return task_command(run, folder, [*python_command(run, module), *words])


def _task_command(run: Run, folder: Path) -> str:
    task = python_command(run, "submitit.core._submit", flags=["-u"])
    return task_command(run, folder, [*task, str(folder / "submitit")])


@contextlib.contextmanager
def _in_clean_environment() -> Iterator[None]:
    """submitit starts sbatch with this process's environment, so it is this one that has to be clean."""
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
