"""Turn a batch job that a person submitted into the run's job, which continues the run after each requeue."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hpctrain.base.atomic import write_text
from hpctrain.base.errors import InputError
from hpctrain.jobs.cancel import CANCELLED_FILE
from hpctrain.launch.slurm_job.job_script import direct_command, render_job
from hpctrain.records.run.run import Run
from hpctrain.runs.locate import job_id, record_job


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
    """Whether the job was requeued, for example after a preemption, its time limit, or the loss of a node."""
    return environ.get("SLURM_RESTART_COUNT", "0") != "0"


def adopt_job(folder: Path, run: Run, job: str) -> list[str]:
    """Record `job` as the run's newest job; return the argv of the run's job script, which this process then executes.

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
    """Check that the run is of kind slurm: a local run would only start processes on the job's first node.

    Raises:
        InputError: the run is of kind local.
    """
    if run.cluster.kind != "slurm":
        raise InputError("cluster.kind: found local; a job of its own needs slurm: add --set cluster.kind=slurm")
