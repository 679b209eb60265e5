"""Finds the nodes that a job may get; only measurements of these nodes are used for its plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hpctrain.jobs.partition_checks import candidate_partitions
from hpctrain.records.format.node_name import expand_node_set
from hpctrain.records.run.run import Run
from hpctrain.slurm.cluster import ClusterState
from hpctrain.slurm.features import has_features
from hpctrain.slurm.limits import members
from hpctrain.slurm.options import parse_sbatch_options

NODE_CHOOSING_OPTIONS = ("nodefile", "prefer")
"""sbatch options that choose among a partition's nodes in ways that hpctrain does not evaluate."""


def nodes_of_allocation(environ: Mapping[str, str]) -> frozenset[str] | None:
    """Return the names of the nodes of this process's allocation; None outside of an allocation."""
    return _names(environ["SLURM_JOB_NODELIST"]) if environ.get("SLURM_JOB_NODELIST") else None


def nodes_of_job(run: Run, state: ClusterState) -> frozenset[str] | None:
    """Return the names of the nodes that the run's job may get; None if unknown."""
    cluster, options = run.cluster, parse_sbatch_options(run.cluster.sbatch)
    if cluster.reservation or cluster.groups or any(name in options for name in NODE_CHOOSING_OPTIONS):
        return None
    if cluster.constraint and has_features(cluster.constraint, ()) is None:
        return None
    partitions = candidate_partitions(cluster.partition, state.partitions)
    allowed = frozenset(node.name for item in partitions for node in members(item, state.nodes, cluster.constraint))
    if "nodelist" in options:
        allowed &= _names(options["nodelist"])
    return allowed - _names(options.get("exclude", ""))


def merged_exclude_list(run: Run, exclude: Collection[str]) -> str:
    """Return the excluded nodes as Slurm's list, with those of the run file: Slurm uses only the last --exclude."""
    return ",".join(sorted({*exclude, *_names(parse_sbatch_options(run.cluster.sbatch).get("exclude", ""))}))


def exclude_options(run: Run, exclude: Collection[str]) -> list[str]:
    """Return sbatch's --exclude option for these nodes; [] without nodes."""
    return [f"--exclude={merged_exclude_list(run, exclude)}"] if exclude else []


def sbatch_option_names(run: Run) -> frozenset[str]:
    """Return the names of the options in the run file's cluster.sbatch."""
    return frozenset(parse_sbatch_options(run.cluster.sbatch))


def _names(folded: str) -> frozenset[str]:
    try:
        return frozenset(expand_node_set(folded))
    except ValueError:
        return frozenset()  # sbatch reports the error
