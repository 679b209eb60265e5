"""Handing a job to submitit: its executor submits our script, and each of its tasks becomes a node process."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedJobError
from submitit.slurm.slurm import SlurmExecutor

from hpctrain.base.atomic import storage_errors, write_text
from hpctrain.base.errors import CommandError, InputError, StorageError
from hpctrain.launch.entering import python_of, task_of
from hpctrain.launch.folder import RunFolder
from hpctrain.launch.job_nodes import exclude_options
from hpctrain.launch.job_script import render_job
from hpctrain.records.locate import record_job
from hpctrain.records.run import Run
from hpctrain.slurm.commands import client_environment

DEVICES = "CUDA_VISIBLE_DEVICES"
A_YEAR_MIN = 366 * 24 * 60
"""Local runs have no time limit; submitit wants one."""


def become(words: list[str], devices: str | None = None, detach: bool = False) -> None:
    """What submitit's task runs: the process turns into its own Python with `words`; in an image that is the image's.

    exec resets signal handlers, so submitit's own are gone: it ignores SIGTERM and lets rank 0 alone requeue.

    Args:
        devices: with `detach`, CUDA_VISIBLE_DEVICES as it was before submitit hid all GPUs; None: it was not set.
        detach: leave the session of the terminal, whose end would end the process.
    """
    env = dict(os.environ)
    if detach:
        os.setsid()
        env = {name: value for name, value in env.items() if not name.startswith("SUBMITIT_")}
        env.pop(DEVICES, None)
        env |= {DEVICES: devices} if devices is not None else {}
    os.execve(sys.executable, [sys.executable, *words], env)


def node_words(folder: Path) -> list[str]:
    """What Python runs as each node's task; which node it is comes from Slurm's environment."""
    return ["-m", "hpctrain.node", "run", "--folder", str(folder)]


class ScriptExecutor(SlurmExecutor):
    """submitit's Slurm executor with the text of the script given."""

    def __init__(self, folder: Path, run: Run, run_folder: Path, exclude: Sequence[str]) -> None:
        super().__init__(folder)
        self._run = run
        self._run_folder = run_folder
        self._exclude = exclude

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return render_job(self._run, self._run_folder, command)

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        # Above the script's own lines, as for the jobs after it: a node that is forgiven must not stay in the script.
        return ["sbatch", *exclude_options(self._run, self._exclude), str(submission_file_path)]


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
        executor = ScriptExecutor(folder.path / "submitit", run, folder.path, exclude)
    except RuntimeError:
        raise InputError(
            "no Slurm on the path (srun was not found); log in to the cluster, or use `hpctrain train --local N`"
        ) from None
    with _in_clean_environment():
        try:
            job: submitit.Job[Any] = executor.submit(become, node_words(folder.path))
        except FailedJobError as error:
            raise CommandError(f"sbatch refused the job: {_last_line(str(error))}") from None
        return _recorded(folder, job)


def submit_local(folder: RunFolder, count: int) -> str:
    """Start a supervisor with `count` virtual nodes in the background; its process id comes back as the job's id."""
    executor = submitit.LocalExecutor(folder.path / "submitit")
    executor.update_parameters(timeout_min=A_YEAR_MIN)
    words = ["-m", "hpctrain", "train", "--resume", str(folder.path), "--local", str(count)]
    # submitit hides all GPUs from local jobs that ask for none. That one variable goes into its pickle: a whole
    # environment there would leave the person's tokens in the run folder.
    with _silent_children(folder.path / "logs" / "supervisor.log"):
        job: submitit.Job[Any] = executor.submit(become, words, os.environ.get(DEVICES), True)
    return _recorded(folder, job)


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
    return task_of(run, folder, [python_of(run), *node_words(folder)])


def _task_command(run: Run, folder: Path) -> str:
    return task_of(run, folder, [python_of(run), "-u", "-m", "submitit.core._submit", str(folder / "submitit")])


@contextlib.contextmanager
def _silent_children(log: Path) -> Iterator[None]:
    """Processes started meanwhile write to `log`: one that kept this process's output open would make whoever reads
    that output, `$(hpctrain submit …)` say, wait for the end of the run."""
    sys.stdout.flush()
    sys.stderr.flush()
    with storage_errors(log), log.open("ab") as file:
        kept = {number: os.dup(number) for number in (1, 2)}
        try:
            for number in kept:
                os.dup2(file.fileno(), number)
            yield
        finally:
            for number, copy in kept.items():
                os.dup2(copy, number)
                os.close(copy)


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
