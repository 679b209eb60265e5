"""Chooses on which node the snapshot of a rank's state lies: a pure function of the plan and the switches."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.checkpoint.memory.choose import Piece, pieces_of
from hpctrain.records.plan.plan import Plan


def hosts_of(plan: Plan, switches: Mapping[str, str]) -> dict[int, int]:
    """Return rank -> the rank on another node that keeps its snapshots, too, for the ranks whose part of the state no
    other node has. The two nodes are behind different switches, unless more than half of the nodes share one switch.
    Empty if the plan has one node.

    Args:
        switches: node -> name of its switch. A node that is missing counts as behind a switch of its own.
    """
    if len(plan.nodes) == 1:
        return {}
    on_node: dict[str, list[int]] = {}
    holders: dict[Piece, set[str]] = {}
    pieces = pieces_of(plan)
    for rank, device in enumerate(plan.ranks):
        on_node.setdefault(device.node, []).append(rank)
        holders.setdefault(pieces[rank], set()).add(device.node)
    behind: dict[str, list[str]] = {}
    for node in on_node:
        behind.setdefault(switches.get(node, f"of {node}"), []).append(node)
    # The nodes behind one switch follow each other, so a node and the one that many places on are behind two.
    ring = [node for nodes in behind.values() for node in nodes]
    distance = min(max(len(nodes) for nodes in behind.values()), len(ring) // 2)
    hosts = {}
    for place, node in enumerate(ring):
        there = on_node[ring[(place + distance) % len(ring)]]
        for number, rank in enumerate(on_node[node]):
            if len(holders[pieces[rank]]) == 1:
                hosts[rank] = there[number % len(there)]
    return hosts
