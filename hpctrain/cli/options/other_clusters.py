"""Runs whose job is on another cluster: with a home folder on several of them, the same job id means two jobs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hpctrain.base.errors import CommandError, RefusedError
from hpctrain.records.history.past_runs import read_past_runs
from hpctrain.slurm.commands import Slurm


def on_other_clusters(folders: Sequence[Path], slurm: Slurm) -> dict[Path, str]:
    """The runs whose newest job is known to be on another cluster than this machine's, with its name.

    Slurm is asked for its name only where the history names a cluster of one of these runs.
    """
    asked = {folder.resolve(): folder for folder in folders}
    newest = {Path(past.folder): past.cluster for past in read_past_runs(os.environ)}
    named = {folder: cluster for folder, cluster in newest.items() if folder in asked and cluster is not None}
    if not named:
        return {}
    try:
        here = slurm.config()["cluster"]
    except CommandError:
        return {}
    return {asked[folder]: cluster for folder, cluster in named.items() if cluster != here}


def check_cluster(folder: Path, slurm: Slurm, verb: str) -> None:
    """The run's job must be one that Slurm here knows.

    Raises:
        RefusedError: it is on another cluster.
    """
    elsewhere = on_other_clusters([folder], slurm).get(folder)
    if elsewhere is not None:
        raise RefusedError(
            f"{folder.name}: its job is on cluster {elsewhere}; use `hpctrain {verb} {folder.name}` there"
        )
