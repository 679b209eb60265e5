"""Writes Slurm's network files: topology.conf of topology/tree, topology.yaml of topology/block. Pure.

Formats: topology.conf(5) and topology.yaml(5) of Slurm.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ClusterShell.NodeSet import NodeSet

from hpctrain.base.errors import InputError
from hpctrain.records.topology.topology import NodeCluster, Topology

_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def tree_conf(topology: Topology) -> str:
    """Return topology.conf for `TopologyPlugin=topology/tree`.

    Nodes that are in no cluster get a switch of their own, and several trees get a common root: Slurm runs no job
    across switches that are not connected, and these nodes reached each other.

    Raises:
        InputError: the topology's clusters are no tree of switches, or Slurm cannot read a name.
    """
    switches = _switches(topology)
    lines = _head(topology)
    for name, (nodes, children) in switches.items():
        kind, members = ("Nodes", nodes) if nodes else ("Switches", children)
        lines.append(f"SwitchName={name} {kind}={_folded(members)}")
    return "\n".join(lines) + "\n"


def block_yaml(topology: Topology) -> str:
    """Return topology.yaml for topology/block (Slurm 25.05 and later): a block for each cluster next to the nodes.

    Raises:
        InputError: as for `tree_conf`.
    """
    blocks = {name: nodes for name, (nodes, _) in _switches(topology).items() if nodes}
    smallest = min(len(nodes) for nodes in blocks.values())
    lines = [*_head(topology), "- topology: hpctrain", "  cluster_default: true", "  block:"]
    lines += ["    block_sizes:", f"      - {smallest}", "    blocks:"]
    for name, nodes in blocks.items():
        lines += [f"      - block: {name}", f"        nodes: {_folded(nodes)}"]
    return "\n".join(lines) + "\n"


def _head(topology: Topology) -> list[str]:
    source = topology.provenance
    sources = sorted({cluster.source for cluster in topology.fabric.clusters}) or ["no clusters known"]
    text = f"{len(topology.nodes)} nodes, topology of {source.created} ({source.mode}; clusters: {', '.join(sources)})"
    return [f"# {' '.join(text.split())}"]


def _switches(topology: Topology) -> dict[str, tuple[list[str], list[str]]]:
    """Return (nodes, switches) directly below each switch; switches next to the nodes come first."""
    clusters = topology.fabric.clusters
    parents = {cluster.id: cluster.parent for cluster in clusters}
    if len(parents) != len(clusters):
        raise InputError("fabric.clusters: a name is given twice; each cluster needs a name of its own")
    inner = list(dict.fromkeys(parent for parent in parents.values() if parent is not None))
    _check_names([*(node.id for node in topology.nodes), *parents, *inner])
    leaves = {cluster.id: list(cluster.members) for cluster in clusters if cluster.id not in inner}
    _check_members(topology, clusters, leaves)
    loose = [node.id for node in topology.nodes if not any(node.id in members for members in leaves.values())]
    if loose:
        leaves[_unused_name("loose" if leaves else "all", parents)] = loose
    children: dict[str, list[str]] = {}
    for name, parent in [*parents.items(), *((leaf, None) for leaf in leaves if leaf not in parents)]:
        if parent is not None:
            children.setdefault(parent, []).append(name)
    roots = [name for name in dict.fromkeys([*parents, *inner, *leaves]) if parents.get(name) is None]
    if len(roots) > 1:
        children[_unused_name("fabric", [*parents, *inner, *leaves])] = roots
    order = _bottom_up(leaves, children)
    below = {name: [child for child in names if child in order] for name, names in children.items()}
    return {name: (leaves.get(name, []), below.get(name, [])) for name in order}


def _check_names(names: list[str]) -> None:
    for name in names:
        if not _NAME.fullmatch(name):
            raise InputError(f"fabric.clusters: Slurm cannot read the name {name!r}; allowed: letters, digits, . _ -")


def _check_members(topology: Topology, clusters: Iterable[NodeCluster], leaves: dict[str, list[str]]) -> None:
    known = {node.id for node in topology.nodes}
    strange = [name for cluster in clusters for name in cluster.members if name not in known]
    if strange:
        raise InputError(f"fabric.clusters: {strange[0]!r} is not a node of this file; take it out of its cluster")
    place: dict[str, str] = {}
    for leaf, members in leaves.items():
        for name in members:
            if place.setdefault(name, leaf) != leaf:
                raise InputError(
                    f"fabric.clusters: {name!r} is in {place[name]!r} and in {leaf!r}; a node hangs on one switch"
                )


def _bottom_up(leaves: dict[str, list[str]], children: dict[str, list[str]]) -> list[str]:
    """Return the switches, each after those below it."""
    done = [name for name, nodes in leaves.items() if nodes]
    pending = dict(children)
    while pending:
        ready = [name for name, below in pending.items() if not any(child in pending for child in below)]
        if not ready:
            raise InputError(
                f"fabric.clusters: {', '.join(sorted(pending))} lie in each other; `parent` must lead to a root"
            )
        for name in ready:
            # Slurm does not accept a switch with nothing below it.
            if any(child in done for child in pending.pop(name)):
                done.append(name)
    return done


def _unused_name(name: str, taken: Iterable[str]) -> str:
    """Return `name`, or a name derived from it if it is in `taken`."""
    used, number = set(taken), 0
    while (candidate := name if number == 0 else f"{name}{number}") in used:
        number += 1
    return candidate


def _folded(names: list[str]) -> str:
    nodes = NodeSet.fromlist(names)
    nodes.fold_axis = (-1,)  # Slurm's lists have one range per name
    return str(nodes)
