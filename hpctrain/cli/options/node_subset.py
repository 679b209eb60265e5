"""`--nodes`: a part of a topology, by the names a person gives."""

from __future__ import annotations

from pathlib import Path

from hpctrain.base.errors import InputError, RefusedError
from hpctrain.records.format.node_set import compress_node_set, expand_node_set
from hpctrain.records.topology.topology import Topology


def select_nodes(topology: Topology, nodes: str, source: Path) -> Topology:
    """The same measurements for the nodes of a node set.

    Args:
        nodes: as a person wrote it: local[0-2].
        source: the topology's file, for errors.

    Raises:
        InputError: it is no node set.
        RefusedError: the file has no figures of some of them.
    """
    try:
        wanted = expand_node_set(nodes)
    except ValueError as error:
        raise InputError(f"--nodes {nodes}: {error}; write it like local[0-2] or a,b") from None
    known = [node.id for node in topology.nodes]
    missing = [node for node in wanted if node not in known]
    if missing or not wanted:
        raise RefusedError(
            f"{source}: nodes: found {compress_node_set(known)}, it has no figures of {compress_node_set(missing)}; "
            "probe these nodes, or name others with --nodes"
        )
    return topology.only(wanted)
