"""Checks a job's request against the limits of partitions, and ranks the partitions for a job that names none. All
functions are pure."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.slurm.cluster import NodeInfo, Partition, gpu_count, has_features
from hpctrain.slurm.values import format_time_limit

_CLOSED = {"DRAIN": "takes no jobs at present", "INACTIVE": "starts no jobs at present"}


@dataclass(frozen=True)
class JobRequest:
    """The resources that a job asks for. A field is None where Slurm's default applies."""

    partition: str | None
    """One name, or several separated by commas: the job starts in whichever can start it first."""
    nodes_min: int
    """Fewest nodes on which the job may run."""
    nodes_max: int
    """Most nodes that the job takes."""
    time_s: int | None
    """Time limit in seconds."""
    gpus_per_node: int | None
    account: str | None
    qos: str | None
    gpu_type: str | None = None
    """Type of the GPUs, by Slurm's name."""
    reservation: str | None = None
    """Name of the reservation in which the job runs."""
    kinds: tuple[tuple[str | None, int], ...] = ()
    """(constraint or None, number of nodes) for each group of nodes; (): `nodes_min` nodes without a constraint."""

    @property
    def parts(self) -> tuple[tuple[str | None, int], ...]:
        """(constraint or None, number of nodes) for each group of nodes: `kinds`, or if that is empty, one group of
        `nodes_min` nodes without a constraint."""
        return self.kinds or ((None, self.nodes_min),)


def check_request(request: JobRequest, partitions: Sequence[Partition], nodes: Sequence[NodeInfo]) -> list[str]:
    """Return why the job can never start in any requested partition, a line for each reason with field, value and what
    is allowed; [] if it can start.

    Args:
        partitions: all partitions of the cluster.
        nodes: all nodes of the cluster.
    """
    wanted, unknown = _wanted(request, partitions)
    if unknown:
        return unknown
    problems = [check_partition(request, partition, nodes) for partition in wanted]
    if not all(problems):
        return []  # it can start in at least one of them
    return [line for lines in problems for line in lines]


def default_partition(partitions: Sequence[Partition]) -> Partition | None:
    """Return the partition of jobs that name none; None if the cluster has no default partition."""
    return next((partition for partition in partitions if partition.default), None)


def _wanted(request: JobRequest, partitions: Sequence[Partition]) -> tuple[list[Partition], list[str]]:
    """Return (the requested partitions, or the default one if none is named; an error line for each unknown name, or
    for the missing default)."""
    by_name = {partition.name: partition for partition in partitions}
    if request.partition is None:
        default = default_partition(partitions)
        if default is None:
            return [], [f"cluster.partition: not given, and this cluster has no default; allowed: {', '.join(by_name)}"]
        return [default], []
    names = request.partition.split(",")
    unknown = [_unknown_partition(name, list(by_name)) for name in names if name not in by_name]
    return [by_name[name] for name in names if name in by_name], unknown


def _unknown_partition(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    return f"cluster.partition: found '{name}'; allowed: {', '.join(known)}{hint}"


def check_partition(request: JobRequest, partition: Partition, nodes: Sequence[NodeInfo]) -> list[str]:
    """Return the reasons why the job can never start in this partition, a line each; [] if it can.

    Args:
        nodes: all nodes of the cluster.
    """
    return [
        *_check_state(request, partition),
        *_check_nodes(request, partition),
        *_check_features(request, partition, nodes),
        *_check_gpus(request, partition, nodes),
        *_check_time(request, partition),
        *_check_name("account", request.account, partition, partition.allow_accounts, partition.deny_accounts),
        *_check_name("qos", request.qos, partition, partition.allow_qos, partition.deny_qos),
    ]


def members(partition: Partition, nodes: Sequence[NodeInfo], constraint: str | None = None) -> list[NodeInfo]:
    """Return those of `nodes` that are in the partition and satisfy the constraint. A constraint that only Slurm can
    evaluate excludes no node."""
    names = set(partition.nodes)
    partition_nodes = [node for node in nodes if node.name in names]
    if constraint is None:
        return partition_nodes
    return [node for node in partition_nodes if has_features(constraint, node.features) is not False]


def _check_state(request: JobRequest, partition: Partition) -> list[str]:
    if partition.state == "UP":
        if partition.needs_reservation and request.reservation is None:
            return [f"cluster.reservation: not given, and partition '{partition.name}' takes only jobs that have one"]
        return []
    what = _CLOSED.get(partition.state, "is down")
    return [f"cluster.partition: '{partition.name}' {what}; choose another, or wait until the site opens it"]


def _check_nodes(request: JobRequest, partition: Partition) -> list[str]:
    asked = f"cluster.nodes: found {request.nodes_min}"
    if request.nodes_min > partition.nodes_total:
        return [f"{asked}; allowed: 1 to {partition.nodes_total}, as partition '{partition.name}' has no more"]
    if partition.max_nodes is not None and request.nodes_min > partition.max_nodes:
        return [f"{asked}; allowed: 1 to {partition.max_nodes} for one job of partition '{partition.name}'"]
    return []


def _check_features(request: JobRequest, partition: Partition, nodes: Sequence[NodeInfo]) -> list[str]:
    known = members(partition, nodes)
    lines = []
    for constraint, wanted in request.parts:
        if constraint is None or not known:
            continue
        count = len(members(partition, nodes, constraint))
        if count < min(wanted, partition.nodes_total):
            there = sorted({feature for node in known for feature in node.features})
            lines.append(
                f"cluster.{'groups' if len(request.parts) > 1 else 'constraint'}: found '{constraint}' for {wanted} "
                f"nodes; {count} of the {len(known)} nodes of partition '{partition.name}' have it; features there: "
                f"{', '.join(there) or 'none'}"
            )
    return lines


def _check_gpus(request: JobRequest, partition: Partition, nodes: Sequence[NodeInfo]) -> list[str]:
    wanted = request.gpus_per_node or 0
    counts = [gpu_count(node.gres, request.gpu_type) for node in members(partition, nodes)]
    if not wanted or not counts:
        return []
    if not max(counts) and request.gpu_type is not None:
        return [_no_such_gpus(request.gpu_type, partition)]
    asked = f"cluster.devices_per_node: found {wanted}"
    if wanted > max(counts):
        allowed = f"0 to {max(counts)}" if max(counts) else "0"
        return [f"{asked}; allowed: {allowed}, the most GPUs of a node of partition '{partition.name}'"]
    enough = sum(count >= wanted for count in counts)
    if enough < min(request.nodes_min, partition.nodes_total):
        return [
            f"{asked} on {request.nodes_min} nodes; only {enough} of the {len(counts)} nodes of partition "
            f"'{partition.name}' have as many GPUs: ask for fewer nodes or fewer GPUs"
        ]
    return []


def _no_such_gpus(gpu_type: str, partition: Partition) -> str:
    types = [gres.type for gres in partition.gres if gres.name == "gpu" and gres.type is not None]
    allowed = (
        f"allowed in partition '{partition.name}': {', '.join(types)}"
        if types
        else (f"Slurm tells no types of GPU in partition '{partition.name}': leave it out")
    )
    return f"cluster.gpu_type: found '{gpu_type}'; {allowed}"


def _check_time(request: JobRequest, partition: Partition) -> list[str]:
    limit = partition.time_limit_s
    if limit is None or request.time_s is None or request.time_s <= limit:
        return []
    return [
        f"cluster.time: found {format_time_limit(request.time_s)}; allowed: up to {format_time_limit(limit)} "
        f"in partition '{partition.name}'"
    ]


def _check_name(
    field: str, value: str | None, partition: Partition, allowed: tuple[str, ...] | None, denied: tuple[str, ...]
) -> list[str]:
    if value is None:
        return []  # the person's default applies, which the partition's description does not contain
    if allowed is not None and value not in allowed:
        return [f"cluster.{field}: found '{value}'; allowed in partition '{partition.name}': {', '.join(allowed)}"]
    if value in denied:
        return [f"cluster.{field}: found '{value}'; not allowed in partition '{partition.name}'"]
    return []


@dataclass(frozen=True)
class PartitionFit:
    """How well a partition fits a job that it accepts."""

    partition: Partition
    has_gpus: bool
    """Whether enough of the partition's nodes have the GPUs that the job asks for; if it asks for none, a GPU each."""
    starts_now: bool
    """Whether enough suitable nodes are free, so that the job can start at once."""
    free: int
    """Suitable nodes that are free, no more than the job can use."""
    preemptible: bool
    """Whether jobs of the partition may be preempted."""

    @property
    def words(self) -> str:
        """The partition's GPUs, free nodes, preemption and time limit, as text for a person."""
        limit = format_time_limit(self.partition.time_limit_s)
        free = "enough nodes are free now" if self.starts_now else f"{self.free} suitable nodes are free now"
        gpus = "with GPUs" if self.has_gpus else "without GPUs"
        fate = "jobs may be preempted" if self.preemptible else "jobs are not preempted"
        return f"{gpus}, {free}, {fate}, time limit {limit}"


def choose_partition(
    request: JobRequest,
    partitions: Sequence[Partition],
    nodes: Sequence[NodeInfo],
    preemptible: Sequence[str],
    with_gpus: bool,
) -> tuple[list[PartitionFit], list[str]]:
    """Return the partitions that accept a job, the best first, and the reasons why the others do not, a line each.

    The criteria, in this order: GPUs if the run computes on them, and else no GPUs, because other jobs wait for them; a
    start at once; no preemption; more free nodes, up to what the job can use; the default partition; the shortest time
    limit that still fits, because queues of short jobs move faster, or the longest for a job without a time limit.

    Args:
        request: a request without a partition.
        preemptible: names of the partitions whose jobs may be preempted.
        with_gpus: whether the run computes on GPUs where there are any.
    """
    fits, refused = [], []
    for partition in partitions:
        problems = check_partition(request, partition, nodes)
        if problems:
            refused += problems
        else:
            fits.append(_fit(request, partition, nodes, partition.name in preemptible, with_gpus))
    return sorted(fits, key=lambda fit: _key(fit, request, with_gpus)), refused


def _fit(
    request: JobRequest, partition: Partition, nodes: Sequence[NodeInfo], preemptible: bool, with_gpus: bool
) -> PartitionFit:
    wanted = request.gpus_per_node or 1
    free, starts_now, has_gpus = 0, True, True
    for constraint, count in request.parts:
        kind = members(partition, nodes, constraint)
        gpu_nodes = [node for node in kind if gpu_count(node.gres, request.gpu_type) >= wanted]
        suitable = gpu_nodes if gpu_nodes and (with_gpus or request.gpus_per_node) else kind
        idle = sum(node.is_free for node in suitable)
        free, starts_now = free + idle, starts_now and idle >= count
        has_gpus = has_gpus and len(gpu_nodes) >= count
    return PartitionFit(partition, has_gpus, starts_now, min(free, request.nodes_max), preemptible)


def _key(fit: PartitionFit, request: JobRequest, with_gpus: bool) -> tuple[bool, bool, bool, int, bool, float, str]:
    """Return the key by which the partitions that accept a job are sorted; the smallest key is the best partition.

    Args:
        with_gpus: whether partitions with GPUs come first; else those without GPUs.
    """
    limit = fit.partition.time_limit_s or float("inf")
    return (
        fit.has_gpus != with_gpus,
        not fit.starts_now,
        fit.preemptible,
        -fit.free,
        not fit.partition.default,
        -limit if request.time_s is None else limit,
        fit.partition.name,
    )
