"""The history of the runs that you started: runs are added to it, and it names the cluster of a run's job.

A home folder may be shared by several clusters, on which one job id means different jobs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import CommandError, RefusedError, StorageError
from hpctrain.cli.answers import warn
from hpctrain.records.history.past_runs import PastRun, append_past_run, history_file, read_past_runs
from hpctrain.runs.locate import run_name
from hpctrain.slurm.commands import Slurm


def add_to_history(
    verb: Literal["submit", "resubmit", "train"], folder: Path, job_id: str | None, slurm: Slurm | None = None
) -> None:
    """Record that a run was started, so that its name and its job's id find it from any folder.

    If the history cannot be written, the command only warns.

    Args:
        slurm: asked for the name of the cluster; None for local processes.
    """
    path = history_file(os.environ)
    if path is None:
        return
    folder = folder.resolve()
    past = PastRun(
        time_s=SystemClock().wall(),
        verb=verb,
        name=run_name(folder.name),
        folder=str(folder),
        job_id=job_id,
        cluster=_cluster(slurm) if slurm is not None else None,
    )
    try:
        append_past_run(path, past)
    except StorageError as error:
        warn([f"this run is not in the history: {error}"])


def on_other_clusters(folders: Sequence[Path], slurm: Slurm) -> dict[Path, str]:
    """Return the runs whose newest job is on another cluster than this machine, each with the cluster's name.

    Slurm is asked for the name of this cluster only where the history names a cluster for one of these runs.
    """
    asked = {folder.resolve(): folder for folder in folders}
    newest = {Path(past.folder): past.cluster for past in read_past_runs(os.environ)}
    named = {folder: cluster for folder, cluster in newest.items() if folder in asked and cluster is not None}
    if not named:
        return {}
    here = _cluster(slurm)
    return {} if here is None else {asked[folder]: cluster for folder, cluster in named.items() if cluster != here}


def check_cluster(folder: Path, slurm: Slurm, verb: str) -> None:
    """Check that the run's job is on this machine's cluster.

    Raises:
        RefusedError: the job is on another cluster.
    """
    elsewhere = on_other_clusters([folder], slurm).get(folder)
    if elsewhere is not None:
        raise RefusedError(
            f"{folder.name}: its job is on cluster {elsewhere}; use `hpctrain {verb} {folder.name}` there"
        )


def _cluster(slurm: Slurm) -> str | None:
    try:
        return slurm.config()["cluster"]
    except CommandError:
        return None
