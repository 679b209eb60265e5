"""Formats a topology for the terminal: verdict, unhealthy nodes, devices, links, matrices. Pure; the caller prints.

Everything fits 80 columns for node names of up to a dozen letters; longer names are folded.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection

from ClusterShell.NodeSet import NodeSet
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hpctrain.base.units import format_bytes, format_count, format_seconds, format_si
from hpctrain.records.topology.link import BackendFigures
from hpctrain.records.topology.topology import Device, Reason, Topology
from hpctrain.topology.matrix_view import ABSENT, QUANTITIES, matrices

NODES_LISTED_MAX = 16
"""Most nodes with which devices are listed one by one."""
COLOURS = {"go": "green", "ok": "green", "warn": "yellow", "degraded": "yellow", "unknown": "yellow"}
"""Colour of each verdict; all others are red."""
UNHEALTHY_NODES_MAX = 20
"""Most nodes with a fault that are listed; the rest is counted."""
_CLUSTERS_UP_TO = 24
_UNMEASURED = ("published", "prior")
"""Modes of files in which nothing was measured."""


def render(topology: Topology, quantities: Collection[str] = QUANTITIES) -> RenderableType:
    """Return the whole file for printing: verdict, unhealthy nodes, provenance, devices, links.

    Args:
        quantities: which matrices to draw, of 'latency' and 'bandwidth'.
    """
    parts: list[RenderableType] = [_verdict(topology), *_unhealthy_nodes(topology), _provenance(topology)]
    if any(node.devices for node in topology.nodes):
        parts.append(_devices(topology))
    if len(topology.nodes) > 1:
        parts.append(_classes(topology))
        parts += [_clusters(topology)] if topology.fabric.clusters else []
        parts += matrices(topology, quantities)
    parts += [Text(note, style="dim") for note in topology.provenance.notes]
    return Group(*parts)


def _verdict(topology: Topology) -> Text:
    verdict = topology.verdict
    text = Text("verdict: ")
    if topology.provenance.mode in _UNMEASURED:
        return text.append("none, nothing was measured", style="yellow")
    text.append(verdict.status, style=COLOURS.get(verdict.status, "red"))
    for fault in verdict.faults:
        text.append(f"\n  {_reason_line(fault)}")
        text.append(_evidence_and_fix(fault), style="dim")
    if verdict.exclude:
        text.append(f"\n  leave out: {verdict.sbatch_hint or ','.join(verdict.exclude)}")
    for name, value in verdict.env.items():
        text.append(f"\n  export {name}={value}")
    return text


def _unhealthy_nodes(topology: Topology) -> list[Text]:
    """Return a text for each node whose verdict is not ok, with those reasons that the verdict on the allocation does
    not list."""
    listed = {_reason_line(fault) for fault in topology.verdict.faults}
    lines: list[Text] = []
    for node in topology.nodes:
        # Where a node's reason is a fault of the verdict, the verdict puts the node's name before its text.
        texts = {f"{reason.code}: {node.id}: {reason.text}": _reason_line(reason) for reason in node.health.reasons}
        reasons = [words for named, words in texts.items() if named not in listed and words not in listed]
        if reasons:
            line = Text(f"  {node.id} ")
            line.append(node.health.verdict, style=COLOURS.get(node.health.verdict, "red"))
            lines.append(line.append(f": {'; '.join(reasons)}"))
    more = len(lines) - UNHEALTHY_NODES_MAX
    return [
        *lines[:UNHEALTHY_NODES_MAX],
        *([Text(f"  and {more} more nodes; --json has all", style="dim")] if more > 0 else []),
    ]


def _evidence_and_fix(reason: Reason) -> str:
    """Return two lines: what the figure was compared with, and what to do next."""
    labelled = (("seen", reason.evidence), ("do", reason.fix))
    return "".join(f"\n    {label}: {words}" for label, words in labelled if words)


def _reason_line(reason: Reason) -> str:
    return f"{reason.code}: {reason.text}"


def _provenance(topology: Topology) -> Text:
    provenance = topology.provenance
    where = "loopback of one machine, not a network" if provenance.loopback else provenance.transport
    text = f"{len(topology.nodes)} node(s), {provenance.created}, {where}"
    if provenance.mode in _UNMEASURED:
        text += f", {provenance.mode}"
    if provenance.rounds_planned:
        text += f", {provenance.rounds_done} of {provenance.rounds_planned} rounds"
    if provenance.wall_s is not None:
        text += f" in {format_seconds(provenance.wall_s)}"
    return Text(text)


def _classes(topology: Topology) -> Text:
    lines = [
        f"links '{entry.id}' ({entry.pairs} pairs): start-up {format_seconds(entry.alpha_s)}, "
        f"then {format_si(1 / entry.beta_s_per_byte, 'B/s') if entry.beta_s_per_byte else ABSENT}"
        + "".join(_backend(name, figures) for name, figures in entry.backend.items())
        for entry in topology.fabric.classes
    ]
    return Text("\n".join(lines or ["no link was measured"]))


def _backend(name: str, figures: BackendFigures) -> str:
    return f"; over {name} {format_seconds(figures.alpha_s)}, then {format_si(1 / figures.beta_s_per_byte, 'B/s')}"


def _clusters(topology: Topology) -> Table:
    table = Table(title="Clusters of nodes", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("cluster", "level", "in", "nodes", "members", "told by"):
        table.add_column(heading, justify="right" if heading in ("level", "nodes") else "left", overflow="fold")
    clusters = sorted(topology.fabric.clusters, key=lambda cluster: -cluster.level)
    for entry in clusters[:_CLUSTERS_UP_TO]:
        row = (entry.id, str(entry.level), entry.parent or "", str(len(entry.members)))
        table.add_row(*row, str(NodeSet.fromlist(entry.members)), entry.source)
    if len(clusters) > _CLUSTERS_UP_TO:
        table.caption = f"and {len(clusters) - _CLUSTERS_UP_TO} more; --json has all"
    return table


def _devices(topology: Topology) -> Table:
    """Return one row per device, or above 16 nodes one row per kind with minimum, median and maximum."""
    if len(topology.nodes) > NODES_LISTED_MAX:
        return _kinds(topology)
    dtypes = _dtypes(topology)
    table = _table(["node", "device"], dtypes, ["health"])
    for node in topology.nodes:
        health = Text(node.health.verdict, style=COLOURS.get(node.health.verdict, "red"))
        if not node.devices:
            table.add_row(node.id, ABSENT, *[ABSENT] * (len(dtypes) + 3), health)
        for device in node.devices:
            cells = [_one(value, form) for value, form in _figures(device, dtypes)]
            table.add_row(node.id, device.id, *cells, health)
    table.caption = "; ".join(f"{key}: {kind.name}" for key, kind in topology.device_types.items())
    table.caption_justify = "left"
    return table


def _kinds(topology: Topology) -> Table:
    dtypes = _dtypes(topology)
    table = _table(["kind", "devices"], dtypes, [])
    for key, kind in topology.device_types.items():
        devices = [device for node in topology.nodes for device in node.devices if device.type == key]
        columns = zip(*[_figures(device, dtypes) for device in devices], strict=True)
        cells = [_spread([value for value, _ in column], column[0][1]) for column in columns]
        table.add_row(kind.name, str(len(devices)), *cells)
    table.caption = f"min, median, max over the devices of {len(topology.nodes)} nodes"
    table.caption_justify = "left"
    return table


def _table(first: list[str], dtypes: list[str], last: list[str]) -> Table:
    table = Table(title="Devices", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in first:
        table.add_column(heading, overflow="fold")
    for heading in (*(f"{dtype}\nFLOP/s" for dtype in dtypes), "memory", "memory\nB/s", "tiny op"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in last:
        table.add_column(heading, no_wrap=True)
    return table


def _dtypes(topology: Topology) -> list[str]:
    return sorted({name for node in topology.nodes for device in node.devices for name in device.flops})


def _figures(device: Device, dtypes: list[str]) -> list[tuple[float | None, Callable[[float], str]]]:
    """Return each figure of a device with the function that formats it."""
    flops: list[tuple[float | None, Callable[[float], str]]] = [
        (device.flops.get(dtype), format_count) for dtype in dtypes
    ]
    rest = (device.memory_bytes, format_bytes), (device.memory_bytes_per_s, format_count)
    return [*flops, *rest, (device.launch_s, format_seconds)]


def _one(value: float | None, form: Callable[[float], str]) -> str:
    return ABSENT if value is None else form(value)


def _spread(values: list[float | None], form: Callable[[float], str]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ABSENT
    texts = dict.fromkeys(form(value) for value in (min(known), statistics.median(known), max(known)))
    return "\n".join(texts)
