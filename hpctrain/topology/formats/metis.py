"""Writes clusterfile.json and hostfile of the Metis planner (Um et al., USENIX ATC 2024). Pure.

Format: the files of that name in SamsungLabs/Metis; units as its cost estimator reads them.
"""

from __future__ import annotations

import json

from hpctrain.base.errors import InputError
from hpctrain.records.topology.topology import Node, Topology
from hpctrain.topology.formats.rates import between_nodes, within_node

_RATE = 2**20 * 1000
"""Metis multiplies a bandwidth by 2^20 and divides bytes by it to get milliseconds."""
_GIB = 2**30
MAX_SLOTS = 9
"""Most devices of a node: Metis reads one digit after 'slots=' in its host file."""


def metis_files(topology: Topology) -> dict[str, str]:
    """Return the text of each file, by its name.

    Memory is that of a node's smallest device, in GiB rounded down. A node with one device has no bandwidth between
    devices, so the bandwidth of its links stands for both.

    Raises:
        InputError: the format cannot express these nodes, or needs a figure that is absent.
    """
    names = _names(topology)
    cluster = {names[node.id]: _entry(topology, node) for node in topology.nodes}
    hosts = "".join(f"{names[node.id]} slots={len(node.devices)}\n" for node in topology.nodes)
    return {"clusterfile.json": json.dumps(cluster, indent=4) + "\n", "hostfile": hosts}


def _names(topology: Topology) -> dict[str, str]:
    """Return the address of each node, or its name where nodes share addresses, as on one machine."""
    addresses = {node.addr for node in topology.nodes}
    distinct = len(addresses) == len(topology.nodes) and "" not in addresses
    return {node.id: node.addr if distinct else node.id for node in topology.nodes}


def _entry(topology: Topology, node: Node) -> dict[str, str | float | int]:
    types = sorted({device.type for device in node.devices})
    if len(types) != 1:
        listed = ", ".join(types) or "no device"
        raise InputError(
            f"node {node.id}: found {listed}; Metis describes a node by one device type; name the others with --nodes"
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
