"""Divides a number of GPUs that is asked for the whole job, as sbatch's `--gpus` does, over nodes."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.base.errors import CommandError, InputError
from hpctrain.slurm.cluster import gpu_count
from hpctrain.slurm.commands import Slurm
from hpctrain.slurm.limits import members


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


def gpus_of_nodes(slurm: Slurm, partition: str | None, gpu_type: str | None, constraint: str | None) -> list[int]:
    """Return the number of GPUs of each node that has some, as Slurm lists them; [] if Slurm does not answer.

    Args:
        partition: partitions of the nodes, separated by commas; None: every partition.
        gpu_type: count only GPUs of this type.
        constraint: count only nodes that satisfy this constraint.
    """
    if not slurm.available():
        return []
    try:
        state = slurm.state()
    except CommandError:
        return []
    names = None if partition is None else partition.split(",")
    nodes = {
        node.name: gpu_count(node.gres, gpu_type)
        for item in state.partitions
        if names is None or item.name in names
        for node in members(item, state.nodes, constraint)
    }
    return [count for count in nodes.values() if count]
