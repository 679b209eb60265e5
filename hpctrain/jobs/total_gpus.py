"""Divides a number of GPUs that is asked for the whole job, as sbatch's `--gpus` does, over nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from hpctrain.base.errors import InputError, RefusedError
from hpctrain.jobs.partition_checks import candidate_partitions
from hpctrain.records.format.node_name import expand_node_set
from hpctrain.slurm.cluster import gpu_count
from hpctrain.slurm.commands import Slurm
from hpctrain.slurm.limits import JobRequest, check_request, members


def divide_gpus(option: str, total: int, nodes: int | None, per_node: int | None, sizes: Sequence[int]) -> int:
    """Return the number of nodes on which a job gets `total` GPUs, the same number on each node.

    Args:
        option: option that gave the total, for errors.
        nodes: number of nodes that the user asks for; None: as few as `per_node` or `sizes` allow.
        per_node: number of GPUs on each node that the user asks for; None: any.
        sizes: number of GPUs of each node that the job may get; used if `nodes` and `per_node` are None.

    Raises:
        InputError: the GPUs do not divide over the nodes.
    """
    if total < 1:
        raise InputError(f"{option}: found {total}; allowed: at least 1 GPU")
    if nodes is None and per_node is None:
        for count in range(1, min(total, len(sizes)) + 1):
            if total % count == 0 and sum(size >= total // count for size in sizes) >= count:
                return count
        most = max(sizes, default=0)
        raise InputError(
            f"{option}: {total} GPUs, the same number on each node, fit no number of nodes: a node has up to {most}, "
            f"all have {sum(sizes)}; give -N, another total or another partition"
        )
    if nodes is not None and per_node is not None:
        if total != nodes * per_node:
            raise InputError(f"{option}: found {total}; {nodes} nodes of {per_node} GPUs have {nodes * per_node}")
        return nodes
    unit = nodes or per_node or 1
    if total % unit:
        below = total - total % unit
        fitting = f"{below} or {below + unit}" if below else str(unit)
        what = f"over {nodes} nodes" if nodes is not None else f"into nodes of {per_node} GPUs"
        raise InputError(f"{option}: {total} GPUs do not divide {what}; fitting: {fitting}")
    return nodes if nodes is not None else total // unit


@dataclass(frozen=True)
class NodeFilter:
    """The nodes that a job may get. None: any."""

    partition: str | None
    """Names of partitions, separated by commas."""
    gpu_type: str | None
    constraint: str | None
    exclude: str | None
    """Node set that the job must not get."""

    @property
    def words(self) -> str:
        """The filter as a person writes it: 'partition low, exclude gpu1'; "" for any node."""
        given = ((item.name, getattr(self, item.name)) for item in fields(self))
        return ", ".join(f"{name} {value}" for name, value in given if value is not None)


def gpus_of_nodes(option: str, slurm: Slurm, wanted: NodeFilter) -> list[int]:
    """Return the number of GPUs of each node that the job may get and that has some, as Slurm lists them; at least one
    node.

    Args:
        option: option that asks for GPUs, for errors.

    Raises:
        CommandError: there is no Slurm here, or it does not answer.
        RefusedError: there is no such node; the message has the reasons.
    """
    state = slurm.state()
    names = wanted.partition or ",".join(item.name for item in state.partitions)
    excluded = set(expand_node_set(wanted.exclude or ""))
    nodes = {
        node.name: gpu_count(node.gres, wanted.gpu_type)
        for item in candidate_partitions(names, state.partitions)
        for node in members(item, state.nodes, wanted.constraint)
        if node.name not in excluded
    }
    sizes = [count for count in nodes.values() if count]
    if not sizes:
        request = JobRequest(
            partition=names, nodes_min=1, nodes_max=1, time_s=None, gpus_per_node=1 if wanted.gpu_type else None,
            account=None, qos=None, gpu_type=wanted.gpu_type, kinds=((wanted.constraint, 1),),
        )  # fmt: skip
        reasons = check_request(request, state.partitions, state.nodes)
        reasons = reasons or [f"no node has GPUs ({wanted.words or 'any node'}); choose others, or leave out {option}"]
        raise RefusedError("\n".join(f"{option}: {reason}" for reason in reasons))
    return sizes
