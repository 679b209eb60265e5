"""How many replicas, and how many devices of a tensor-parallel group, share a node. This decides whether gradients and
activations can be summed by level: within nodes, then between them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import groupby

from hpctrain.records.plan.codec_spec import CodecSpec


def consecutive_per_node(columns: Iterable[Iterable[Hashable]]) -> int:
    """Return the number of consecutive replicas, or devices of a tensor-parallel group, that share a node; 1 if it is
    not the same everywhere.

    Args:
        columns: for each pipeline rank, the node or nodes of its devices in each replica, in the order of replicas; or
            for each tensor-parallel group, the nodes of its devices, in the order of ranks.
    """
    runs = {len(list(run)) for column in columns for _, run in groupby(column)}
    return runs.pop() if len(runs) == 1 else 1


def part_shape(shape: Sequence[int], ranks: int) -> list[int]:
    """Return the shape of one of the `ranks` equal parts into which the ranks of a node cut a gradient, along its first
    dimension. The last parts may reach beyond the end of the gradient; zeros fill them."""
    rows, *others = shape or (1,)
    return [-(-rows // ranks), *others]


def check_levels(compression: Sequence[CodecSpec], replicas: int, shards: int, per_node: int) -> None:
    """Check that the levels of a sum of gradients go together, and that the devices allow them.

    Args:
        compression: the entries of `compression` in plan.json.
        replicas: number of replicas.
        shards: number of consecutive replicas over which one copy of the state is sharded; 1 if each has a whole copy.
        per_node: number of consecutive replicas that share a node; 1 if it is not the same everywhere.

    Raises:
        ValueError: the levels do not go together, or the devices do not allow them.
    """
    levels = [spec.level for spec in compression]
    if levels == ["dp"]:
        return
    if levels != ["intra_node", "inter_node"]:
        raise ValueError(
            f"compression: found levels {', '.join(levels)}; allowed: one entry with level dp, or two, with levels "
            "intra_node and inter_node"
        )
    if not 1 < per_node < replicas:
        raise ValueError(
            f"compression: found levels intra_node and inter_node with {per_node} of {replicas} replicas on each node; "
            "allowed where replicas of a node follow each other, equally many on each of several nodes; use one entry "
            "with level dp"
        )
    if shards not in (1, per_node, replicas):
        raise ValueError(
            f"shard: found {shards} with levels intra_node and inter_node and {per_node} replicas on a node; allowed: "
            f"{per_node}, or one entry of compression with level dp"
        )


def check_tensor_parallel_sums(groups: Iterable[Sequence[str]]) -> None:
    """Check that the devices allow sums of tensor parallelism by level.

    Args:
        groups: for each tensor-parallel group, the nodes of its devices, in the order of ranks.

    Raises:
        ValueError: the groups have unequal numbers of devices on nodes, or a node's devices do not follow each other.
    """
    sizes: set[int] = set()
    for nodes in groups:
        runs = [(node, len(list(run))) for node, run in groupby(nodes)]
        sizes |= {size for _, size in runs}
        if len(sizes) > 1 or len({node for node, _ in runs}) < len(runs):
            raise ValueError(
                f"tensor_parallel_sums: found bf16 with a tensor-parallel group on nodes {', '.join(nodes)}, in the "
                "order of ranks; allowed where each group has equally many devices on each of its nodes, one after the "
                "other; use none"
            )
