"""Finds, before a run is queued, what its partition means for the run: the nodes and GPUs that its job may get, a time
limit that is too short to train, and preemption."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from hpctrain.base.errors import InputError
from hpctrain.records.format.node_name import expand_node_set
from hpctrain.records.run.run import Run
from hpctrain.slurm.cluster import ClusterState, NodeInfo, Partition, gpu_count, has_features
from hpctrain.slurm.limits import default_partition, members
from hpctrain.slurm.options import parse_sbatch_options
from hpctrain.slurm.values import format_time_limit, parse_time_limit

SIGNAL_EARLY_S = 60
"""Seconds by which Slurm may send the save notice too early (sbatch(1), --signal)."""


def check_time_limit(run: Run, partitions: Sequence[Partition] = ()) -> None:
    """Check that the time limit of the run's job leaves time to train before the save notice. Otherwise each job would
    end before its first step, and be queued again.

    Args:
        partitions: the cluster's partitions, whose time limits count if the run file has none. Without partitions only
            the time limit in the run file is checked.

    Raises:
        InputError: the time limit is too short.
    """
    notice, least = run.cluster.save_notice_s, run.cluster.save_notice_s + SIGNAL_EARLY_S
    rule = f"allowed: more than {format_time_limit(least)}, as the notice to save (cluster.save_notice_s {notice})"
    rule += f" may come {SIGNAL_EARLY_S} s early"
    try:
        limits = _time_limits(run, partitions)
    except ValueError as error:
        raise InputError(f"cluster.time: {error}") from None
    for partition, limit in limits:
        if limit is None or limit > least:
            continue
        if partition is None:
            raise InputError(f"cluster.time: found {format_time_limit(limit)}; {rule}; raise it or lower the notice")
        raise InputError(
            f"cluster.time: not given, and partition '{partition.name}' gives {format_time_limit(limit)}; {rule}; "
            "give a time or lower the notice"
        )


def time_limit(run: Run, partitions: Sequence[Partition]) -> int | None:
    """Return the time limit of the run's job in seconds; None: no limit. The limit is the run file's, else the shortest
    of the partitions in which the job may start. A partition counts with its default time, or with its time limit if it
    has no default time.

    Args:
        partitions: the cluster's partitions.

    Raises:
        ValueError: cluster.time is no time.
    """
    return min((limit for _, limit in _time_limits(run, partitions) if limit is not None), default=None)


def _time_limits(run: Run, partitions: Sequence[Partition]) -> list[tuple[Partition | None, int | None]]:
    """Return (partition, time limit in seconds) for each time limit that may apply to the run's job. The partition is
    None if the limit is that of the run file, which then is the only one; a limit of None means no limit."""
    if run.cluster.time is not None:
        return [(None, parse_time_limit(run.cluster.time))]
    candidates = candidate_partitions(run.cluster.partition, partitions)
    return [(item, item.default_time_s or item.time_limit_s) for item in candidates]


def preemption_warnings(run: Run, state: ClusterState) -> list[str]:
    """Return warnings, as lines, about partitions in which a preemption would lose steps or end the run's job; [] if
    there are none."""
    kind, partitions = state.config["preempt_type"], state.partitions
    lines = []
    for partition in candidate_partitions(run.cluster.partition, partitions):
        if not can_be_preempted(kind, partition, partitions):
            continue
        cancels, name = "CANCEL" in partition.preempt_mode, partition.name
        if not cancels and "REQUEUE" not in partition.preempt_mode:
            continue
        end = "cancelled" if cancels else "requeued"
        if partition.grace_s == 0:
            lines.append(
                f"partition '{name}': a preempted job is {end} at once (GraceTime 0), so the steps since the last "
                f"checkpoint are lost: checkpoint.every is {run.checkpoint.every}"
            )
        if cancels:
            lines.append(
                f"partition '{name}': Slurm does not bring a preempted job back (PreemptMode CANCEL); the run asks for "
                "it while it saves, and where that comes too late, `hpctrain resubmit` goes on with it"
            )
    return lines


def can_be_preempted(kind: str, partition: Partition, partitions: Sequence[Partition]) -> bool:
    """Return whether jobs of the partition may be preempted.

    Args:
        kind: PreemptType of the cluster, such as preempt/partition_prio.
        partitions: all partitions of the cluster; with preempt/partition_prio, only jobs of partitions with a higher
            tier preempt.
    """
    above = any(other.priority_tier > partition.priority_tier for other in partitions)
    return not (kind.endswith("/none") or (kind.endswith("partition_prio") and not above))


def with_gpu_request(run: Run, state: ClusterState) -> tuple[Run, list[str]]:
    """Return the run with the number of GPUs that its job requests on each node, and lines for a person about a number
    that the run file leaves out.

    A number that is left out becomes the largest one for which the cluster has enough nodes. The run is unchanged if it
    trains on CPUs, if it names the number or its `cluster.sbatch` requests GPUs, or if Slurm lists no GPUs on enough
    nodes. A job that requests no GPUs gets none, and would train on CPUs without a warning.
    """
    cluster = run.cluster
    # Some sites accept only --gres, which stands among the options of sbatch.
    requested = any(option.startswith(("--gres=gpu", "--gres gpu", "--gpus")) for option in cluster.sbatch)
    if cluster.device == "cpu" or cluster.devices_per_node is not None or requested:
        return run, []
    partitions = candidate_partitions(cluster.partition, state.partitions)
    count = min(
        gpus_per_node_available(partitions, state.nodes, nodes, cluster.gpu_type, constraint)
        for constraint, nodes in node_groups(run)
    )
    if count == 0:
        reason = "no GPUs are asked for: Slurm lists none on so many nodes of the partition"
        return run, [f"cluster.device is cuda, and {reason}"] if cluster.device == "cuda" else []
    asked = cluster.model_copy(update={"devices_per_node": count})
    which = f"of type {cluster.gpu_type}" if cluster.gpu_type else "all of them"
    return run.model_copy(update={"cluster": asked}), [f"{count} GPUs a node are asked for ({which})"]


def node_groups(run: Run) -> tuple[tuple[str | None, int], ...]:
    """Return (constraint or None, number of nodes) for each item of `cluster.groups`; without groups, one pair with
    `cluster.constraint` and the fewest nodes that `cluster.nodes` allows.
    """
    cluster = run.cluster
    if cluster.groups:
        return tuple((group.constraint, group.nodes) for group in cluster.groups)
    return ((cluster.constraint, cluster.node_range[0]),)


def gpus_per_node_available(
    partitions: Sequence[Partition],
    nodes: Sequence[NodeInfo],
    count: int,
    gpu_type: str | None = None,
    constraint: str | None = None,
) -> int:
    """Return the most GPUs per node that a job can request on `count` nodes in each of these partitions; 0 if in one of
    the partitions fewer than `count` nodes have GPUs.

    Args:
        gpu_type: count only GPUs of this type.
        constraint: count only nodes that satisfy this constraint.
    """
    most = []
    for partition in partitions:
        counts = [gpu_count(node.gres, gpu_type) for node in members(partition, nodes, constraint)]
        counts.sort(reverse=True)
        most.append(counts[count - 1] if len(counts) >= count else 0)
    return min(most, default=0)


def candidate_partitions(names: str | None, partitions: Sequence[Partition]) -> list[Partition]:
    """Return the partitions in which a job may start.

    Args:
        names: names that the job requests, separated by commas; None: the default partition.
        partitions: all partitions of the cluster.
    """
    if names is None:
        default = default_partition(partitions)
        return [default] if default else []
    return [partition for partition in partitions if partition.name in names.split(",")]


NODE_CHOOSING_OPTIONS = ("nodefile", "prefer")
"""sbatch options that choose among a partition's nodes in ways that hpctrain does not evaluate."""


def nodes_of_allocation(environ: Mapping[str, str]) -> frozenset[str] | None:
    """Return the names of the nodes of this process's allocation; None outside of an allocation.

    Args:
        environ: variables of this process.
    """
    return _names(environ["SLURM_JOB_NODELIST"]) if environ.get("SLURM_JOB_NODELIST") else None


def nodes_of_job(run: Run, state: ClusterState) -> frozenset[str] | None:
    """Return the names of the nodes that the run's job may get, whatever their state; None if only Slurm can tell, as
    for a reservation."""
    cluster, options = run.cluster, parse_sbatch_options(run.cluster.sbatch)
    if cluster.reservation or cluster.groups or any(name in options for name in NODE_CHOOSING_OPTIONS):
        return None
    if cluster.constraint and has_features(cluster.constraint, ()) is None:
        return None
    partitions = candidate_partitions(cluster.partition, state.partitions)
    allowed = frozenset(node.name for item in partitions for node in members(item, state.nodes, cluster.constraint))
    if cluster.nodelist is not None and len(expand_node_set(cluster.nodelist)) == cluster.node_range[1]:
        allowed &= frozenset(expand_node_set(cluster.nodelist))
    return allowed - frozenset(expand_node_set(cluster.exclude or ""))


def merged_exclude_list(run: Run, exclude: Collection[str]) -> str:
    """Return the nodes in `exclude` and those that the run file excludes, as one list for Slurm, because Slurm uses
    only the last --exclude."""
    return ",".join(sorted({*exclude, *expand_node_set(run.cluster.exclude or "")}))


def exclude_options(run: Run, exclude: Collection[str]) -> list[str]:
    """Return sbatch's option --exclude for the nodes in `exclude` and those that the run file excludes. [] if `exclude`
    is empty: the job script itself excludes the nodes of the run file."""
    return [f"--exclude={merged_exclude_list(run, exclude)}"] if exclude else []


def sbatch_option_names(run: Run) -> frozenset[str]:
    """Return the names of the options in the run file's cluster.sbatch, without dashes."""
    return frozenset(parse_sbatch_options(run.cluster.sbatch))


def _names(folded: str) -> frozenset[str]:
    try:
        return frozenset(expand_node_set(folded))
    except ValueError:
        return frozenset()  # sbatch reports the error
