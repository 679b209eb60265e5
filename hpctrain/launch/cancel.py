"""Stops a run for good, whether a Slurm job or processes of this machine train it."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hpctrain.base.clock import Clock
from hpctrain.base.errors import HpctrainError, InputError
from hpctrain.base.process import Runner
from hpctrain.jobs.successors import cancel_job
from hpctrain.launch.slurm_job.job_script import is_in_allocation, stop_in_allocation
from hpctrain.records.run.run import run_of
from hpctrain.runs.folder import check_trusted, lock_holder, resume_text
from hpctrain.runs.locate import job_id
from hpctrain.runs.started_runs import check_cluster
from hpctrain.slurm.commands import Slurm


def cancel_run(folder: Path, at_once: bool, runner: Runner, clock: Clock) -> str:
    """Stop the run in `folder`: its agents save a checkpoint and stop, then its job is cancelled. A local run is only
    asked to stop; this function does not wait for its end. Return a sentence that says what was done.

    Args:
        at_once: do not wait for a checkpoint to be saved; steps since the last one may be lost.

    Raises:
        InputError: there is nothing to stop, the run's local processes are on another machine, run.yaml has errors, or
            the folder is untrusted.
        RefusedError: the run's job is on another cluster.
        CommandError: Slurm did not cancel the job.
        StorageError: the run folder cannot be written.
    """
    folder = folder.resolve()
    check_trusted(folder)
    if run_of(folder).cluster.kind == "slurm":
        return _cancel_job(folder, at_once, Slurm(runner), clock)
    return _stop_processes(folder, at_once)


AT_ONCE = 16
"""Most runs of a sweep that are stopped at the same time; each may take a minute to save a checkpoint."""


def cancel_runs(
    folders: Sequence[Path], at_once: bool, runner: Runner, clock: Clock
) -> list[tuple[Path, str | HpctrainError]]:
    """Stop all runs of a sweep, each as `cancel_run` does; return for each run a sentence that says what was done, or
    the error that prevented it.

    Runs that wait are stopped before those that train. Otherwise, in an array with a limit, a waiting run would start
    in place of each run that ends.

    Raises:
        CommandError: Slurm does not say which runs wait; none was stopped.
        UntrustedError: a run folder or its list of job ids is untrusted; none was stopped.
    """
    waiting = _waiting(folders, Slurm(runner))

    def stop(folder: Path) -> str | HpctrainError:
        try:
            return cancel_run(folder, at_once, runner, clock)
        except HpctrainError as error:
            return error

    done = {folder: stop(folder) for folder in folders if folder in waiting}
    training = [folder for folder in folders if folder not in waiting]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        done |= dict(zip(training, pool.map(stop, training), strict=True))
    return [(folder, done[folder]) for folder in folders]


def _waiting(folders: Sequence[Path], slurm: Slurm) -> set[Path]:
    """Return those of the run folders whose newest job waits in the queue."""
    jobs = {folder: job for folder in folders if (job := job_id(folder)) is not None}
    known = slurm.jobs(list(jobs.values()))
    return {folder for folder, job in jobs.items() if job in known and known[job].is_waiting}


def _cancel_job(folder: Path, at_once: bool, slurm: Slurm, clock: Clock) -> str:
    job = job_id(folder)
    if job is None:
        raise InputError(f"{folder.name}: it was never submitted, so there is no job to cancel")
    if is_in_allocation(folder):
        if at_once:
            raise InputError(
                f"{folder.name}: it runs in an allocation that is not its own; leave out --now, or press Ctrl-C twice "
                "where it was started"
            )
        return stop_in_allocation(folder, clock)
    check_cluster(folder, slurm, "cancel")
    return cancel_job(folder, job, slurm, clock, at_once)


def _stop_processes(folder: Path, at_once: bool) -> str:
    holder = lock_holder(folder)
    if holder is None:
        raise InputError(f"{folder.name}: no process holds it, so there is nothing to cancel; {resume_text(folder)}")
    if not holder.is_here:
        raise InputError(f"{folder.name}: {holder} holds it; run `hpctrain cancel {folder.name}` on that machine")
    os.kill(holder.pid, signal.SIGTERM)
    if not at_once:
        return f"asked process {holder.pid} to save and stop; `hpctrain status {folder.name}` shows when it has"
    # SIGTERM asks for a save, SIGINT then ends it. Two signals of one kind could arrive as one.
    os.kill(holder.pid, signal.SIGINT)
    return f"told process {holder.pid} to end at once; {resume_text(folder)}"
