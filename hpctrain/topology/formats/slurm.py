"""Writes and reads Slurm's files about switches: topology.conf and topology.yaml, for the plugins topology/tree and
topology/block. Pure.

The manual pages topology.conf(5) and topology.yaml(5) of Slurm describe the formats.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ClusterShell.NodeSet import NodeSet

from hpctrain import __version__
from hpctrain.base.clock import utc_text
from hpctrain.base.errors import FieldError, FileError, InputError
from hpctrain.records.format.node_name import expand_node_set
from hpctrain.records.format.yaml_file import YamlFile, parse_yaml
from hpctrain.records.topology.topology import Fabric, Node, NodeCluster, Provenance, Topology

_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def tree_conf(topology: Topology) -> str:
    """Return the content of topology.conf for `TopologyPlugin=topology/tree`, with a switch for each cluster of nodes.

    The nodes that are in no cluster get a switch together. Several trees get a common root, because Slurm runs no job
    across switches that are not connected.

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
    """Return the content of topology.yaml for topology/block (Slurm 25.05 and later), with a block for each cluster of
    nodes that contains no other cluster.

    Raises:
        InputError: the topology's clusters are no tree of switches, or Slurm cannot read a name.
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
    """Return name of a switch -> (names of the nodes directly below it, names of the switches directly below it).
    Switches next to the nodes come first.

    Nodes that are in no innermost cluster get a switch of their own together. If several switches have none above them,
    one more switch joins them.

    Raises:
        InputError: the topology's clusters or names do not fit Slurm's format.
    """
    clusters = topology.fabric.clusters
    parents = {cluster.id: cluster.parent for cluster in clusters}
    inner = list(dict.fromkeys(parent for parent in parents.values() if parent is not None))
    _check_names([*(node.id for node in topology.nodes), *parents, *inner])
    leaves = {cluster.id: list(cluster.members) for cluster in clusters if cluster.id not in inner}
    _check_members(leaves)
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


def _check_members(leaves: dict[str, list[str]]) -> None:
    place: dict[str, str] = {}
    for leaf, members in leaves.items():
        for name in members:
            if place.setdefault(name, leaf) != leaf:
                raise InputError(
                    f"fabric.clusters: {name!r} is in {place[name]!r} and in {leaf!r}; a node hangs on one switch"
                )


def _bottom_up(leaves: dict[str, list[str]], children: dict[str, list[str]]) -> list[str]:
    """Return the names of the switches, each after the switches below it. Switches without any node are left out.

    Args:
        leaves: switch next to the nodes -> its nodes.
        children: every other switch -> the switches directly below it.

    Raises:
        InputError: switches lie in each other.
    """
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
    """Return `name`, or if it is in `taken`, `name` with the first number from 1 that makes it unused."""
    used, number = set(taken), 0
    while (candidate := name if number == 0 else f"{name}{number}") in used:
        number += 1
    return candidate


def _folded(names: list[str]) -> str:
    nodes = NodeSet.fromlist(names)
    nodes.fold_axis = (-1,)  # Slurm's lists have one range per name
    return str(nodes)


_KEYS = ("switchname", "blockname", "nodes", "switches", "blocksizes", "linkspeed")
_IGNORED = ("blocksizes", "linkspeed")
"""Keys of topology.conf that are not read, because they do not say which nodes are behind which switch."""


@dataclass(frozen=True)
class _Switch:
    name: str
    nodes: tuple[str, ...]
    switches: tuple[str, ...]
    line: int | None


def from_slurm(text: str, source: str, wall: float) -> Topology:
    """Return a topology with the nodes and switches of a topology.conf or topology.yaml, without devices and links.

    Args:
        text: content of the file.
        source: path of the file, for errors and notes. The suffix .yaml or .yml means topology.yaml.
        wall: present time in seconds since 1970, for the provenance.

    Raises:
        FileError: the file has errors. The message lists all of them with their lines, except where a topology.yaml is
            not YAML or has no readable list of switches or blocks; it then has only this error.
    """
    read = clusters_of_yaml if source.endswith((".yaml", ".yml")) else clusters_of_conf
    clusters = read(text, source)
    notes = [
        f"Nothing in this file was measured: the switches are those of Slurm's {Path(source).name}, as it was given.",
        "Devices and links are absent: run `hpctrain probe`.",
    ]
    names = dict.fromkeys(name for cluster in clusters if cluster.level == 1 for name in cluster.members)
    nodes = [Node(id=name, addr=name, devices=[]) for name in names]
    provenance = Provenance(version=__version__, created=utc_text(wall), transport="slurm", mode="prior", notes=notes)
    return Topology(provenance=provenance, device_types={}, nodes=nodes, fabric=Fabric(clusters=clusters))


def clusters_of_conf(text: str, source: str) -> list[NodeCluster]:
    """Return the switches or blocks of a topology.conf as clusters of nodes, those next to the nodes first.

    Args:
        text: content of the file.
        source: path of the file, for errors.

    Raises:
        FileError: the file has errors; all are listed with their lines.
    """
    switches: list[_Switch] = []
    mistakes: list[FieldError] = []
    for number, line in _joined_lines(text):
        try:
            switch = _conf_line(line, number)
        except ValueError as error:
            mistakes.append(FieldError("", str(error), number))
            continue
        if switch is not None:
            switches.append(switch)
    return _clusters(switches, mistakes, source)


def clusters_of_yaml(text: str, source: str) -> list[NodeCluster]:
    """Return the switches or blocks of a topology.yaml as clusters of nodes, those next to the nodes first. If the file
    has several topologies, the default one is read, else the first one of kind tree or block.

    Args:
        text: content of the file.
        source: path of the file, for errors.

    Raises:
        FileError: the text is not YAML, has no readable list of switches or blocks, or rows of the list are wrong; the
            message has all wrong rows with their lines.
    """
    file = parse_yaml(text, source)
    index = _chosen(file)
    mistakes: list[FieldError] = []
    switches = []
    kind, names = ("tree", "switches") if "tree" in file.value[index] else ("block", "blocks")
    path = (index, kind, names)
    rows = file.value[index][kind].get(names) if isinstance(file.value[index][kind], dict) else None
    if not isinstance(rows, list):
        raise FileError(
            source, [FieldError(f"{kind}.{names}", "missing; a list of them is expected", file.lines.get(path))]
        )
    for number, row in enumerate(rows):
        line = file.lines.get((*path, number))
        try:
            switches.append(_yaml_row(row, "switch" if kind == "tree" else "block", line))
        except ValueError as error:
            mistakes.append(FieldError("", str(error), line))
    return _clusters(switches, mistakes, source)


def _joined_lines(text: str) -> list[tuple[int, str]]:
    """Return (line number, text without comment) of each line. A line that ends in a backslash is joined to the next
    line; the joined line has the number of its first part."""
    joined: list[tuple[int, str]] = []
    begun: tuple[int, str] | None = None
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.partition("#")[0].rstrip()
        first, before = begun or (number, "")
        begun = (first, before + line[:-1] + " ") if line.endswith("\\") else None
        if begun is None:
            joined.append((first, before + line))
    return [*joined, *([begun] if begun else [])]


def _conf_line(line: str, number: int) -> _Switch | None:
    """Return the switch or block that a line of topology.conf states; None if it states none.

    Args:
        line: text of the line, without comment.
        number: line number in the file.

    Raises:
        ValueError: the line has an error; the exception's text is the message for the user.
    """
    pairs: dict[str, str] = {}
    # A list in brackets may have spaces after its commas.
    for word in re.sub(r"\s*([=,])\s*", r"\1", line).split():
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise ValueError(f"found {_short(word)}; Key=Value is expected, as in SwitchName=s0 Nodes=n[1-4]")
        if key.lower() not in _KEYS:
            raise ValueError(
                f"found the key {_short(key)}; allowed: SwitchName, BlockName, Nodes, Switches, LinkSpeed, BlockSizes"
            )
        if key.lower() in pairs:
            raise ValueError(f"{key} is given twice")
        pairs[key.lower()] = value
    name = pairs.get("switchname") or pairs.get("blockname")
    if name is None:
        if set(pairs) <= set(_IGNORED):
            return None
        raise ValueError("the name is missing; begin with SwitchName= or BlockName=")
    return _switch(name, pairs.get("nodes"), pairs.get("switches"), number)


def _yaml_row(row: Any, kind: str, line: int | None) -> _Switch:
    if not isinstance(row, dict) or not isinstance(row.get(kind), str):
        raise ValueError(f"found {_short(row)}; keys are expected, with `{kind}` as the name")
    for key in ("nodes", "children"):
        if not isinstance(row.get(key), str | None):
            raise ValueError(f"{key}: found {_short(row[key])}; a node set is expected, as in n[1-4]")
    return _switch(row[kind], row.get("nodes"), row.get("children"), line)


def _switch(name: str, nodes: str | None, switches: str | None, line: int | None) -> _Switch:
    if (nodes is None) == (switches is None):
        raise ValueError(f"{name} has {'both nodes and switches' if nodes else 'nothing'} below it; Slurm allows one")
    return _Switch(name, _unfolded(nodes), _unfolded(switches), line)


def _unfolded(text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    if not re.fullmatch(r"[\w.,\[\]-]+", text):
        raise ValueError(f"found {_short(text)}; a node set is expected, as in n[1-4],m7")
    try:
        return tuple(expand_node_set(text))
    except ValueError as error:
        raise ValueError(f"{error}; a node set is expected, as in n[1-4],m7") from None


def _clusters(switches: list[_Switch], mistakes: list[FieldError], source: str) -> list[NodeCluster]:
    named: dict[str, _Switch] = {}
    for switch in switches:
        named.setdefault(switch.name, switch)
    parents: dict[str, str] = {}
    homes: dict[str, str] = {}
    for switch in switches:
        if named[switch.name] is not switch:
            mistakes.append(FieldError("", f"{switch.name} is given twice; each switch needs one line", switch.line))
        for child in switch.switches:
            if child not in named:
                mistakes.append(FieldError("", f"{child} below {switch.name} has no line of its own", switch.line))
            elif parents.setdefault(child, switch.name) != switch.name:
                text = f"{child} is below {parents[child]} and below {switch.name}; a tree is expected"
                mistakes.append(FieldError("", text, switch.line))
        for node in switch.nodes:
            if homes.setdefault(node, switch.name) != switch.name:
                text = f"{node} is on {homes[node]} and on {switch.name}; a node hangs on one switch"
                mistakes.append(FieldError("", text, switch.line))
    if not switches and not mistakes:
        mistakes.append(FieldError("", "there is no switch and no block in it"))
    mistakes += [
        FieldError("", f"{switch.name} lies below itself; a tree is expected", switch.line)
        for switch in switches
        if _has_cycle(switch.name, parents.get)
    ]
    if mistakes:
        raise FileError(source, sorted(mistakes, key=lambda mistake: mistake.line or 0))
    clusters = [_cluster(switch, named, parents.get(switch.name)) for switch in switches]
    return sorted(clusters, key=lambda cluster: cluster.level)


def _has_cycle(name: str, parent: Callable[[str], str | None]) -> bool:
    seen: set[str] = set()
    here: str | None = name
    while here is not None and here not in seen:
        seen.add(here)
        here = parent(here)
    return here == name


def _cluster(switch: _Switch, named: dict[str, _Switch], parent: str | None) -> NodeCluster:
    level, members, below = 1, list(switch.nodes), list(switch.switches)
    while below:
        level += 1
        members += [node for name in below for node in named[name].nodes]
        below = [child for name in below for child in named[name].switches]
    return NodeCluster(id=switch.name, level=level, parent=parent, members=members, source="slurm")


def _chosen(file: YamlFile) -> int:
    """Return the index of the topology to read in a topology.yaml, which is a list of topologies: of the default one,
    else of the first one of kind tree or block.

    Raises:
        FileError: the file is no list, or none of its topologies is of kind tree or block.
    """
    if not isinstance(file.value, list):
        raise FileError(
            file.path, [FieldError("", "a list of topologies is expected, each with `topology` as its name")]
        )
    usable = [
        number
        for number, entry in enumerate(file.value)
        if isinstance(entry, dict) and ("tree" in entry or "block" in entry)
    ]
    if not usable:
        raise FileError(
            file.path, [FieldError("", "no topology of kind tree or block; others say nothing of switches")]
        )
    return next((number for number in usable if file.value[number].get("cluster_default") is True), usable[0])


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
