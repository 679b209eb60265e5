"""Which nodes a job may get: only what was measured on them says anything about it."""

from __future__ import annotations

from collections.abc import Mapping

from ClusterShell.NodeSet import NodeSet, NodeSetException

from hpctrain.base.errors import CommandError
from hpctrain.records.run import Run
from hpctrain.slurm.commands import Slurm
from hpctrain.slurm.limits import default_partition

CHOOSING = ("constraint", "nodefile", "prefer")
"""sbatch options that choose among a partition's nodes by what is not known here."""


def nodes_of_job(run: Run, slurm: Slurm, environ: Mapping[str, str]) -> frozenset[str] | None:
    """Names of the nodes that the run's job may get, or has inside an allocation; None where that is not known."""
    if environ.get("SLURM_JOB_NODELIST"):
        return _names(environ["SLURM_JOB_NODELIST"])
    options = _options(run.cluster.sbatch)
    if any(name in options for name in CHOOSING):
        return None
    try:
        partitions = slurm.partitions(nodes=[])
    except CommandError:
        return None
    default = default_partition(partitions)
    wanted = run.cluster.partition.split(",") if run.cluster.partition else [default.name] if default else []
    found = frozenset(node for partition in partitions if partition.name in wanted for node in partition.nodes)
    if "nodelist" in options:
        found &= _names(options["nodelist"])
    return found - _names(options.get("exclude", ""))


def excluded_by_hand(run: Run) -> frozenset[str]:
    """Nodes that the run file's own --exclude names."""
    return _names(_options(run.cluster.sbatch).get("exclude", ""))


def _options(options: list[str]) -> dict[str, str]:
    pairs = [option.removeprefix("--").replace(" ", "=", 1).partition("=") for option in options]
    return {name: value.strip() for name, _, value in pairs}


def _names(folded: str) -> frozenset[str]:
    try:
        return frozenset(str(name) for name in NodeSet(folded))
    except NodeSetException:
        return frozenset()  # sbatch has its own word for it
