"""Guard a cluster's login node: a background run is refused there, and a run in the foreground causes a warning."""

from __future__ import annotations

import os
from collections.abc import Mapping

import psutil

from hpctrain.base.errors import InputError
from hpctrain.launch.local import local_environment
from hpctrain.slurm.commands import Slurm

FEW_CORES = 4
"""Number of cores up to which a run is no more than the usual work on a login node, such as compilers."""


def check_not_queued_here(slurm: Slurm, train: str) -> None:
    """Check that this machine has no Slurm, before `hpctrain submit` starts a run of kind local: on a machine with
    Slurm, `submit` should queue a job.

    Args:
        train: the command that trains on this machine, for the message.

    Raises:
        InputError: this machine has Slurm.
    """
    if slurm.available():
        raise InputError(
            "cluster.kind: found local on a machine with Slurm: nothing would be queued, and this machine would train; "
            f"for a job write kind: slurm, or add --set cluster.kind=slurm; to train on this machine: `{train}`"
        )


def login_node_words(count: int, slurm: Slurm, environ: Mapping[str, str]) -> list[str]:
    """Return a warning, as lines, if a run of `count` virtual nodes would take the cores of a login node; else [].

    A login node has Slurm's commands, is not in a job and runs no slurmd.
    """
    threads = local_environment(count, environ)["OMP_NUM_THREADS"]
    cores = min(len(os.sched_getaffinity(0)), count * int(threads) if threads.isdigit() else count)
    if cores <= FEW_CORES or environ.get("SLURM_JOB_ID") or not slurm.available() or _runs_slurmd():
        return []
    return [
        f"this looks like a login node, and the run keeps {cores} of its cores busy, which most sites forbid; train as "
        "a job: `hpctrain submit RUN.YAML --set cluster.kind=slurm`, or take fewer cores: OMP_NUM_THREADS=1"
    ]


def _runs_slurmd() -> bool:
    return any(process.info["name"] == "slurmd" for process in psutil.process_iter(["name"]))
