"""Writes network.yml of ASTRA-sim's analytical network: devices of a node, then nodes, each behind a switch. Pure.

Format: examples/network/analytical of astra-sim/astra-sim. Its GB are 2^30 bytes (bw_GBps_to_Bpns), latencies are ns.
"""

from __future__ import annotations

from hpctrain.base.errors import InputError
from hpctrain.records.topology.link_cost import INTRA_NODE_LATENCY_S
from hpctrain.records.topology.topology import Topology
from hpctrain.topology.formats.rates import between_nodes, within_node

_GB = 2**30


def network_yml(topology: Topology) -> str:
    """Return the network as one or two dimensions of type `Switch`, innermost first.

    Every dimension has one bandwidth and one latency: between nodes the medians over pairs, within nodes the bandwidth
    of the slowest node and an assumed latency.

    Raises:
        InputError: nodes differ in their number of devices, there is only one device, or a figure is absent.
    """
    counts = sorted({len(node.devices) for node in topology.nodes})
    if len(counts) != 1 or counts[0] == 0:
        raise InputError(
            f"nodes: found {' and '.join(map(str, counts))} devices a node; ASTRA-sim takes the same number on each "
            "(1 or more); name nodes that are alike with --nodes"
        )
    dimensions: list[tuple[int, float, float]] = []
    comments = ["hpctrain topology of " + " ".join(topology.provenance.created.split())]
    if counts[0] > 1:
        slowest = min(within_node(node) for node in topology.nodes)
        dimensions.append((counts[0], slowest, INTRA_NODE_LATENCY_S))
        comments.append("dimension 1: devices of a node; its latency is assumed, not measured")
    if len(topology.nodes) > 1:
        names = [node.id for node in topology.nodes]
        alpha, rate = between_nodes(topology, names)
        dimensions.append((len(topology.nodes), rate, alpha))
        comments.append(f"dimension {len(dimensions)}: nodes; medians over all pairs")
    if not dimensions:
        raise InputError("nodes: found one node with one device; a network needs two devices")
    lines = [f"# {comment}" for comment in comments]
    for key, values in (
        ("topology", ["Switch"] * len(dimensions)),
        ("npus_count", [str(count) for count, _, _ in dimensions]),
        ("bandwidth", [f"{rate / _GB:.6g}" for _, rate, _ in dimensions]),
        ("latency", [f"{alpha * 1e9:.6g}" for _, _, alpha in dimensions]),
    ):
        lines.append(f"{key}: [ {', '.join(values)} ]")
    return "\n".join(lines) + "\n"
