"""Starts a run inside an allocation (salloc) or a batch job that a person already has: the run's job script is executed
there instead of being submitted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from hpctrain.base.atomic import write_text
from hpctrain.base.clock import Clock, utc_text
from hpctrain.base.errors import InputError
from hpctrain.base.process import Runner
from hpctrain.jobs.newest_job import CANCELLED_FILE
from hpctrain.launch.slurm_job.job_script import direct_command, render_job
from hpctrain.launch.stop_signals import stop_signals
from hpctrain.records.run.run import Run
from hpctrain.runs.folder import RunFolder
from hpctrain.runs.locate import JOB_FILE, job_id, record_job

ALLOCATION = "allocation"
"""File in a run folder that exists while the run uses a person's allocation. With it, `hpctrain cancel` ends the run
and not the allocation."""
STOP_WAIT_S = 90.0
"""Seconds for which `hpctrain cancel` waits until a run in an allocation has saved and stopped."""
POLL_S = 0.5


def run_in_allocation(folder: RunFolder, run: Run, job_id: str, runner: Runner, say: Callable[[str], None]) -> int:
    """Run the run's job script in this process's allocation and wait for its end; return its exit code if that is 0, 2
    or 4, else 1.

    The first Ctrl-C asks the script to save and stop, the second one ends it. This process forwards the signals,
    because the script and srun run in another session, which the terminal's signals do not reach.

    Args:
        job_id: id of the allocation's job.
        say: called at each signal, with a line that says what the signal does.

    Raises:
        StorageError: the run folder cannot be written.
        CommandError: bash cannot be started.
    """
    script = folder.path / "job.sh"
    write_text(script, render_job(run, folder.path, direct_command(run, folder.path), submitted=False), mode=0o755)
    marks = [folder.path / name for name in (JOB_FILE, ALLOCATION)]
    try:
        for mark in marks:
            write_text(mark, f"{job_id}\n")
        process = runner.start(["bash", str(script)])

        def stop(text: str) -> None:
            say(text)
            process.terminate()

        with stop_signals(
            lambda: stop("saving a checkpoint and leaving; once more ends it at once"),
            lambda: stop("ending the run at once"),
        ):
            code = process.wait()
    finally:
        # The run has ended, so the allocation's job says nothing about it any more.
        for mark in marks:
            mark.unlink(missing_ok=True)
    return code if code in (0, 2, 4) else 1


def is_in_allocation(folder: Path) -> bool:
    """Whether the run in `folder` now uses a person's allocation (salloc)."""
    return (folder / ALLOCATION).exists()


def stop_in_allocation(folder: Path, clock: Clock) -> str:
    """Ask a run in a person's allocation to save and stop; return a sentence that says whether it has stopped. The
    allocation stays.

    Raises:
        StorageError: the run folder cannot be written.
    """
    # The script watches for this file. A signal would also reach other steps of the allocation.
    write_text(folder / CANCELLED_FILE, utc_text(clock.wall()) + "\n")
    deadline = clock.now() + STOP_WAIT_S
    while is_in_allocation(folder):
        if clock.now() > deadline:
            return f"asked the run to save and leave; it has not within {STOP_WAIT_S:g} s: see `hpctrain logs`"
        clock.sleep(POLL_S)
    return "the run has left its allocation, which goes on"


def current_batch_job_id(environ: Mapping[str, str]) -> str:
    """Return the id of the batch job whose script this process belongs to.

    Raises:
        InputError: this process is in no batch job.
    """
    job = environ.get("SLURM_JOB_ID")
    if not job:
        raise InputError(
            "--own-job: only inside a batch job, as in slurm/train.sbatch; from a login node leave it out, and "
            "hpctrain queues the job itself"
        )
    return job


def is_requeued_job(environ: Mapping[str, str]) -> bool:
    """Whether this process's job was requeued before, for example after a preemption or the loss of a node."""
    return environ.get("SLURM_RESTART_COUNT", "0") != "0"


def adopt_job(folder: Path, run: Run, job: str) -> list[str]:
    """Record the batch job with id `job` as the newest job of the run in `folder`; write the run's job script, and
    return the argv with which this process becomes the script.

    Raises:
        InputError: cluster.setup cannot go into the script.
        StorageError: the run folder cannot be written.
    """
    script = folder / "job.sh"
    write_text(script, render_job(run, folder, direct_command(run, folder), by_hand=True), mode=0o755)
    if job_id(folder) != job:
        (folder / CANCELLED_FILE).unlink(missing_ok=True)
        record_job(folder, job)
    return ["bash", str(script)]


def check_is_slurm(run: Run) -> None:
    """Check that the run has `cluster.kind: slurm`. With `local` it would start processes on the first node of its job
    only.

    Raises:
        InputError: the run has `cluster.kind: local`.
    """
    if run.cluster.kind != "slurm":
        raise InputError("cluster.kind: found local; a job of its own needs slurm: add --set cluster.kind=slurm")
