"""The user's history of started runs (`history.jsonl`): commands add runs to it, and learn from it the cluster of a
run's job.

The cluster matters because several clusters may share a home folder, and one job id means different jobs on them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import CommandError, RefusedError, StorageError
from hpctrain.records.history.past_runs import PastRun, append_past_run, history_file, read_past_runs
from hpctrain.runs.locate import run_name
from hpctrain.slurm.commands import Slurm


def add_to_history(
    verb: Literal["submit", "resubmit", "train"], folder: Path, job_id: str | None, slurm: Slurm | None = None
) -> list[str]:
    """Record in the history that a run was started, so that commands find the run by name or job id from any folder.
    Return a warning, as lines, if the history cannot be written; else [].

    Args:
        verb: command that started the run.
        folder: run folder.
        job_id: the run's job; None for `train`, which starts no job.
        slurm: asked for the name of the cluster; None for a run of local processes.
    """
    path = history_file(os.environ)
    if path is None:
        return []
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
        return [f"this run is not in the history: {error}"]
    return []


def on_other_clusters(folders: Sequence[Path], slurm: Slurm) -> dict[Path, str]:
    """Return the runs whose newest job is on another cluster than this machine: the name of that cluster, by run
    folder.

    Slurm is asked for the name of this machine's cluster only if the history names a cluster for one of the runs. If
    Slurm does not answer, the result is {}.

    Args:
        folders: run folders.
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

    Args:
        verb: command that the error recommends on the other cluster.

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
