"""The order in which an agent of a large job looks for its upstream, the one agent with a lower index that it connects
to. Pure."""

from __future__ import annotations

FULL_MESH_NODES = 32
"""Most nodes of a job in which each pair of agents has a connection. Agents of more nodes form a tree."""
FAN_OUT = 32
"""Nodes in the smallest block of the tree, and blocks in a block of the next size."""


def upstream_order(index: int, fan_out: int = FAN_OUT) -> list[int]:
    """Return all lower indices: first those of the node's own block of `fan_out` nodes, then those of the block of
    `fan_out` such blocks, and so on; ascending within each block.

    If each node connects to the first living one of its order, the connections are a tree of all living nodes: every
    edge leads to a lower index, and only the lowest living node has none. Each node has at most `fan_out - 1` others
    below it for each size of blocks.

    Args:
        index: the node's index in the job's list of nodes, in which neighbours usually share a switch.
    """
    order: list[int] = []
    begin, size = index, 1
    while begin > 0:
        size *= fan_out
        start = index // size * size
        order.extend(range(start, begin))
        begin = start
    return order
