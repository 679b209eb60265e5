"""Reads clusters from Slurm's network files: topology.conf (tree, block) and topology.yaml. Pure.

Formats: topology.conf(5) and topology.yaml(5) of Slurm.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpctrain.base.errors import FieldError, FileError
from hpctrain.records.format.node_set import expand_node_set
from hpctrain.records.format.yaml_file import YamlFile, parse_yaml
from hpctrain.records.topology.topology import NodeCluster

_KEYS = ("switchname", "blockname", "nodes", "switches", "blocksizes", "linkspeed")
_IGNORED = ("blocksizes", "linkspeed")
"""Keys that do not say which nodes are near each other; Slurm itself does not use LinkSpeed."""


@dataclass(frozen=True)
class _Switch:
    name: str
    nodes: tuple[str, ...]
    switches: tuple[str, ...]
    line: int | None


def clusters_of_conf(text: str, source: str) -> list[NodeCluster]:
    """Return the switches of a topology.conf, those next to the nodes first.

    Args:
        source: names the file in errors.

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
    """Return the switches or blocks of a topology.yaml: of its default topology, else of the first that has any.

    Raises:
        FileError: the file has errors; all are listed with their lines.
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
    """Return (number, text) of each line without comments; lines that end in a backslash are joined to the next."""
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
    """Return the switch in one line of topology.conf; a ValueError has the message for the user."""
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
    """Return the index of the topology to read, in a topology.yaml with several."""
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
