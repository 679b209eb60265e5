"""Which nodes a job may get: only what was measured on them says anything about it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hpctrain.jobs.partition_checks import wanted
from hpctrain.records.format.node_set import unfolded
from hpctrain.records.run.run import Run
from hpctrain.slurm.cluster import ClusterState
from hpctrain.slurm.features import has_features
from hpctrain.slurm.limits import members
from hpctrain.slurm.options import options_of

CHOOSING = ("nodefile", "prefer")
"""sbatch options that choose among a partition's nodes by what is not known here."""


def nodes_of_allocation(environ: Mapping[str, str]) -> frozenset[str] | None:
    """Names of the nodes of the allocation that this process is in; None outside of one."""
    return _names(environ["SLURM_JOB_NODELIST"]) if environ.get("SLURM_JOB_NODELIST") else None


def nodes_of_job(run: Run, state: ClusterState) -> frozenset[str] | None:
    """Names of the nodes that the run's job may get; None where that is not known."""
    cluster, options = run.cluster, options_of(run.cluster.sbatch)
    if cluster.reservation or cluster.groups or any(name in options for name in CHOOSING):
        return None
    if cluster.constraint and has_features(cluster.constraint, ()) is None:
        return None
    partitions = wanted(cluster.partition, state.partitions)
    found = frozenset(node.name for item in partitions for node in members(item, state.nodes, cluster.constraint))
    if "nodelist" in options:
        found &= _names(options["nodelist"])
    return found - _names(options.get("exclude", ""))


def excluded_by_hand(run: Run) -> frozenset[str]:
    """Nodes that the run file's own --exclude names."""
    return _names(options_of(run.cluster.sbatch).get("exclude", ""))


def with_own_exclude(run: Run, exclude: Collection[str]) -> str:
    """The nodes as Slurm takes them: the last list alone counts, so that of the run file goes with it."""
    return ",".join(sorted({*exclude, *excluded_by_hand(run)}))


def exclude_options(run: Run, exclude: Collection[str]) -> list[str]:
    """sbatch's option for a job that does without these nodes."""
    return [f"--exclude={with_own_exclude(run, exclude)}"] if exclude else []


def names_of_options(run: Run) -> frozenset[str]:
    """The options in the run file's cluster.sbatch."""
    return frozenset(options_of(run.cluster.sbatch))


def _names(folded: str) -> frozenset[str]:
    try:
        return frozenset(unfolded(folded))
    except ValueError:
        return frozenset()  # sbatch has its own word for it
