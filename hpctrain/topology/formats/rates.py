"""Combines a topology's figures into one for a node or for the whole cluster, for formats that cannot list pairs.
Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from hpctrain.base.errors import InputError
from hpctrain.records.topology.link_cost import LinkCost
from hpctrain.records.topology.topology import Node, Topology


def between_nodes(topology: Topology, sources: Iterable[str]) -> tuple[float, float]:
    """Return (alpha in seconds, bytes/s): medians over the links from `sources` to all other nodes.

    Raises:
        InputError: the topology has no figures of a link.
    """
    costs, names = LinkCost(topology), [node.id for node in topology.nodes]
    try:
        known = [costs.between(a, b) for a in sources for b in names if a != b]
    except KeyError as error:
        pair = str(error).strip("'")
        raise InputError(
            f"fabric: no alpha_s and beta_s_per_byte for {pair}, which this format needs; run `hpctrain probe`"
        ) from None
    beta = statistics.median(beta for _, beta in known)
    if beta <= 0:
        raise InputError("fabric: beta_s_per_byte is 0, so there is no bandwidth to write; run `hpctrain probe` again")
    return statistics.median(alpha for alpha, _ in known), 1 / beta


def within_node(node: Node) -> float:
    """Return bytes/s from one device of the node to another.

    Raises:
        InputError: the bandwidth was not measured.
    """
    if not node.intra_bytes_per_s:
        raise InputError(
            f"node {node.id}: intra_bytes_per_s is absent, which this format needs for {len(node.devices)} devices; "
            "run `hpctrain probe`, or write it in"
        )
    return node.intra_bytes_per_s
