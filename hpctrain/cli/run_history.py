"""The history of the runs that a person started: runs are added, and their job's cluster is looked up.

A home folder may be shared by several clusters, on which the same job id means two jobs.
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
    """Record that a run was started, so that its name and its job's id lead to it from any folder.

    A home folder that is full does not stop the run.

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

    Slurm is asked for its name only where the history names a cluster of one of these runs.
    """
    asked = {folder.resolve(): folder for folder in folders}
    newest = {Path(past.folder): past.cluster for past in read_past_runs(os.environ)}
    named = {folder: cluster for folder, cluster in newest.items() if folder in asked and cluster is not None}
    if not named:
        return {}
    here = _cluster(slurm)
    return {} if here is None else {asked[folder]: cluster for folder, cluster in named.items() if cluster != here}


def check_cluster(folder: Path, slurm: Slurm, verb: str) -> None:
    """Check that the run's job is on this cluster.

    Raises:
        RefusedError: it is on another cluster.
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
