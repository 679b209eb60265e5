"""Writes topologies for Metis and ASTRA-sim, which take one figure for a node or for the whole cluster. Pure.

Metis is a planner (Um et al., USENIX ATC 2024): clusterfile.json and hostfile are as in SamsungLabs/Metis, in the units
that its cost estimator reads. ASTRA-sim is a simulator: network.yml of its analytical network is as in
examples/network/analytical of astra-sim/astra-sim. Its GB are 2^30 bytes (bw_GBps_to_Bpns), its latencies are ns.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable

from hpctrain.base.errors import InputError
from hpctrain.records.topology.link_cost import INTRA_NODE_LATENCY_S, LinkCost
from hpctrain.records.topology.topology import Node, Topology


def between_nodes(topology: Topology, sources: Iterable[str]) -> tuple[float, float]:
    """Return (alpha in seconds, bandwidth in bytes/s) of messages between nodes, as medians over the links from the
    nodes `sources` to all other nodes.

    Raises:
        InputError: figures of a link are unknown, or the bandwidth is unlimited.
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
    """Return the bandwidth from one device of the node to another, in bytes/s.

    Raises:
        InputError: the bandwidth was not measured.
    """
    if not node.intra_bytes_per_s:
        raise InputError(
            f"node {node.id}: intra_bytes_per_s is absent, which this format needs for {len(node.devices)} devices; "
            "run `hpctrain probe`, or write it in"
        )
    return node.intra_bytes_per_s


_RATE = 2**20 * 1000
"""Unit of a bandwidth in Metis's files, in bytes/s. Metis multiplies a bandwidth by 2^20 and divides bytes by the
product to get milliseconds."""
_GIB = 2**30
MAX_SLOTS = 9
"""Most devices of a node: Metis reads one digit after 'slots=' in its hostfile."""


def metis_files(topology: Topology) -> dict[str, str]:
    """Return file name -> content of Metis's files: clusterfile.json and hostfile.

    The memory of a node is that of its smallest device, in GiB, rounded down. If a node has one device, the bandwidth
    to other nodes also stands for the bandwidth between its devices. In a topology of one node, the bandwidth between
    devices also stands for the bandwidth to other nodes.

    Raises:
        InputError: the format cannot express a node, or needs a figure that is absent.
    """
    names = _names(topology)
    cluster = {names[node.id]: _entry(topology, node) for node in topology.nodes}
    hosts = "".join(f"{names[node.id]} slots={len(node.devices)}\n" for node in topology.nodes)
    return {"clusterfile.json": json.dumps(cluster, indent=4) + "\n", "hostfile": hosts}


def _names(topology: Topology) -> dict[str, str]:
    """Return node -> its name in Metis's files: its address, or its own name if nodes share addresses, as on one
    machine."""
    addresses = {node.addr for node in topology.nodes}
    distinct = len(addresses) == len(topology.nodes) and "" not in addresses
    return {node.id: node.addr if distinct else node.id for node in topology.nodes}


def _entry(topology: Topology, node: Node) -> dict[str, str | float | int]:
    types = sorted({device.type for device in node.devices})
    if len(types) != 1:
        listed = ", ".join(types) or "no device"
        raise InputError(
            f"node {node.id}: found {listed}; Metis describes a node by one device type; name others with --nodelist"
        )
    if len(node.devices) > MAX_SLOTS:
        raise InputError(f"node {node.id}: found {len(node.devices)} devices; Metis reads up to {MAX_SLOTS} a node")
    memory = [device.memory_bytes for device in node.devices if device.memory_bytes]
    if len(memory) != len(node.devices):
        raise InputError(f"node {node.id}: memory_bytes of a device is absent, which Metis needs; run `hpctrain probe`")
    among = between_nodes(topology, [node.id])[1] if len(topology.nodes) > 1 else within_node(node)
    within = within_node(node) if len(node.devices) > 1 else among
    return {
        "instance_type": types[0],
        "inter_bandwidth": round(among / _RATE, 3),
        "intra_bandwidth": round(within / _RATE, 3),
        "memory": int(min(memory) // _GIB),
    }


def network_yml(topology: Topology) -> str:
    """Return ASTRA-sim's network.yml. The network has a dimension of type `Switch` for the devices within a node, if
    there are several, and then one for the nodes, if there are several.

    Each dimension has one bandwidth and one latency: between nodes the medians over pairs, within nodes the bandwidth
    of the slowest node and an assumed latency.

    Raises:
        InputError: nodes differ in their number of devices, there is only one device, or a figure is absent.
    """
    counts = sorted({len(node.devices) for node in topology.nodes})
    if len(counts) != 1 or counts[0] == 0:
        raise InputError(
            f"nodes: found {' and '.join(map(str, counts))} devices a node; ASTRA-sim takes the same number on each "
            "(1 or more); name nodes that are alike with --nodelist"
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
        ("bandwidth", [f"{rate / _GIB:.6g}" for _, rate, _ in dimensions]),
        ("latency", [f"{alpha * 1e9:.6g}" for _, _, alpha in dimensions]),
    ):
        lines.append(f"{key}: [ {', '.join(values)} ]")
    return "\n".join(lines) + "\n"
