"""Chooses a partition for a job that names none: every partition is checked, and those that fit are ranked. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.slurm.cluster import NodeInfo, Partition
from hpctrain.slurm.gres import gpu_count
from hpctrain.slurm.limits import JobRequest, check_partition, members
from hpctrain.slurm.time import format_time_limit


@dataclass(frozen=True)
class PartitionFit:
    """How well a partition fits a job that it accepts."""

    partition: Partition
    has_gpus: bool
    """Whether enough of the partition's nodes have GPUs."""
    starts_now: bool
    """Whether enough suitable nodes are free."""
    free: int
    """Suitable nodes that are free, no more than the job can use."""
    preemptible: bool

    @property
    def words(self) -> str:
        """Return the properties of the fit as text, for a person."""
        limit = format_time_limit(self.partition.time_limit_s)
        free = "enough nodes are free now" if self.starts_now else f"{self.free} suitable nodes are free now"
        gpus = "with GPUs" if self.has_gpus else "without GPUs"
        fate = "jobs may be preempted" if self.preemptible else "jobs are not preempted"
        return f"{gpus}, {free}, {fate}, time limit {limit}"


@dataclass(frozen=True)
class PartitionChoice:
    """The partitions of a cluster, ranked for a job."""

    ranked: list[PartitionFit]
    """The partitions that accept the job, the best first."""
    refused: list[str]
    """Why the other partitions do not accept the job, a line for each reason."""


def choose_partition(
    request: JobRequest,
    partitions: Sequence[Partition],
    nodes: Sequence[NodeInfo],
    preemptible: Sequence[str],
    with_gpus: bool,
) -> PartitionChoice:
    """Rank the partitions for a job.

    The criteria, in this order: GPUs if the run computes on them (and none otherwise: other jobs wait for those nodes);
    a start at once; no preemption; more free nodes, up to what the job can use; the site's default; the tightest time
    limit that still fits, as short queues move faster, or the longest for a job without a time.

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
    return PartitionChoice(sorted(fits, key=lambda fit: _key(fit, request, with_gpus)), refused)


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
    """Return the sort key of a fit; the smallest is best."""
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
