"""Formats a topology for the terminal: verdict, unhealthy nodes, devices, links, matrices. Also formats the differences
between two topologies: a table for each group, and one line of summary. Pure; the caller prints.

All output fits 80 columns if node names have at most a dozen letters; longer names are wrapped.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Collection

from ClusterShell.NodeSet import NodeSet
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hpctrain.base.units import format_bytes, format_count, format_seconds, format_si
from hpctrain.records.topology.link import BackendFigures
from hpctrain.records.topology.topology import Device, Reason, Topology
from hpctrain.topology.compare import GROUPS, Difference, Value
from hpctrain.topology.matrix_view import ABSENT, QUANTITIES, matrices

NODES_LISTED_MAX = 16
"""Most nodes of a topology whose devices are listed one by one; with more nodes, a row stands for a type of device."""
COLOURS = {"go": "green", "ok": "green", "warn": "yellow", "degraded": "yellow", "unknown": "yellow"}
"""Verdict -> its colour; verdicts that are not listed are red."""
UNHEALTHY_NODES_MAX = 20
"""Most unhealthy nodes that are listed; the others are counted."""
ROWS_PER_GROUP_MAX = 20
"""Most differences that are listed of a group, the largest ones; the others are counted, and --json has all."""
_TITLES = {"nodes": "Nodes", "health": "Health", "drivers": "Drivers", "devices": "Devices", "links": "Links"}
_CLUSTERS_UP_TO = 24
_UNMEASURED = ("published", "prior")
"""Modes (`provenance.mode`) of topologies in which nothing was measured."""


def render(topology: Topology, quantities: Collection[str] = QUANTITIES) -> RenderableType:
    """Return a topology for printing: verdict, unhealthy nodes, provenance, devices, links and matrices.

    Args:
        quantities: the matrices to draw: 'latency', 'bandwidth', or both.
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
    """Return a line for each node that has faults which are missing in the verdict on the allocation. The line names
    only these faults. There are at most `UNHEALTHY_NODES_MAX` such lines, then one with the number of further nodes."""
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
    """Return indented lines with a fault's evidence and fix, each after a line break; '' if the fault has neither."""
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
    """Return the table of devices: one row per device, or for more than 16 nodes one row per type of device with the
    minimum, median and maximum of each figure."""
    dtypes = sorted({name for node in topology.nodes for device in node.devices for name in device.flops})
    if len(topology.nodes) > NODES_LISTED_MAX:
        return _kinds(topology, dtypes)
    table = _devices_table(["node", "device"], dtypes, ["health"])
    for node in topology.nodes:
        health = Text(node.health.verdict, style=COLOURS.get(node.health.verdict, "red"))
        if not node.devices:
            table.add_row(node.id, ABSENT, *[ABSENT] * (len(dtypes) + 3), health)
        for device in node.devices:
            cells = [_spread([value], form) for value, form in _figures(device, dtypes)]
            table.add_row(node.id, device.id, *cells, health)
    table.caption = "; ".join(f"{key}: {kind.name}" for key, kind in topology.device_types.items())
    return table


def _kinds(topology: Topology, dtypes: list[str]) -> Table:
    table = _devices_table(["kind", "devices"], dtypes, [])
    for key, kind in topology.device_types.items():
        devices = [device for node in topology.nodes for device in node.devices if device.type == key]
        columns = zip(*[_figures(device, dtypes) for device in devices], strict=True)
        cells = [_spread([value for value, _ in column], column[0][1]) for column in columns]
        table.add_row(kind.name, str(len(devices)), *cells)
    table.caption = f"min, median, max over the devices of {len(topology.nodes)} nodes"
    return table


def _devices_table(first: list[str], dtypes: list[str], last: list[str]) -> Table:
    table = Table(title="Devices", title_justify="left", caption_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in first:
        table.add_column(heading, overflow="fold")
    for heading in (*(f"{dtype}\nFLOP/s" for dtype in dtypes), "memory", "memory\nB/s", "tiny op"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in last:
        table.add_column(heading, no_wrap=True)
    return table


def _figures(device: Device, dtypes: list[str]) -> list[tuple[float | None, Callable[[float], str]]]:
    """Return (figure, function that formats it) for each column of the table of devices; the figure is None if
    absent."""
    flops: list[tuple[float | None, Callable[[float], str]]] = [
        (device.flops.get(dtype), format_count) for dtype in dtypes
    ]
    rest = (device.memory_bytes, format_bytes), (device.memory_bytes_per_s, format_count)
    return [*flops, *rest, (device.launch_s, format_seconds)]


def _spread(values: list[float | None], form: Callable[[float], str]) -> str:
    """Return minimum, median and maximum of the values that are not None, formatted by `form`, in a line each. Equal
    texts are printed once; without any value, the result is a dot."""
    known = [value for value in values if value is not None]
    if not known:
        return ABSENT
    texts = dict.fromkeys(form(value) for value in (min(known), statistics.median(known), max(known)))
    return "\n".join(texts)


def render_differences(differences: list[Difference], tolerance: float) -> RenderableType:
    """Return the differences for printing: a table for each group with its largest changes first, then the summary.
    `tolerance` is the relative change up to which figures counted as equal."""
    if not differences:
        return Text(f"nothing differs; figures may, by up to {tolerance:.0%}")
    parts: list[RenderableType] = []
    for group in GROUPS:
        rows = sorted((entry for entry in differences if entry.group == group), key=_size, reverse=True)
        if rows:
            parts.append(_group_table(_TITLES[group], rows[:ROWS_PER_GROUP_MAX]))
        if len(rows) > ROWS_PER_GROUP_MAX:
            parts.append(Text(f"and {len(rows) - ROWS_PER_GROUP_MAX} smaller changes; --json has all", style="dim"))
    return Group(*parts, Text(summary(differences)))


def summary(differences: list[Difference]) -> str:
    """Return the numbers of differences in one line: '1 node(s) went; 1 node(s) came; links: 3 worse, 1 better', with a
    hint if most of the worse links share one node."""
    went = sum(entry.group == "nodes" and entry.after is None for entry in differences)
    came = sum(entry.group == "nodes" and entry.before is None for entry in differences)
    parts = [f"{went} node(s) went" if went else "", f"{came} node(s) came" if came else ""]
    for group in GROUPS[1:]:
        directions = Counter(_direction(entry) for entry in differences if entry.group == group)
        if directions:
            counts = [f"{directions[word]} {word}" for word in ("worse", "better", "other") if directions[word]]
            culprit = _common_node([entry for entry in differences if entry.group == group and entry.better is False])
            parts.append(f"{_TITLES[group].lower()}: {', '.join(counts)}{culprit if group == 'links' else ''}")
    return "; ".join(filter(None, parts))


def _common_node(worse: list[Difference]) -> str:
    """Return a hint if most of the worse links share one node, because then the node has changed, not the network: ' (4
    of the worse at node3)'. Otherwise return ''."""
    ends = Counter(node for entry in worse for node in entry.nodes)
    for node, count in ends.most_common(1):
        if count > 2 and count > 2 / 3 * len(worse):
            return f" ({count} of the worse at {node})"
    return ""


def _direction(entry: Difference) -> str:
    return "other" if entry.better is None else "better" if entry.better else "worse"


def _size(entry: Difference) -> float:
    """Return the factor by which a value grew or shrank, at least 1. It is infinite for a difference without a ratio,
    so that this difference is listed first."""
    ratio = entry.ratio
    return float("inf") if not ratio else max(ratio, 1 / ratio)


def _group_table(title: str, rows: list[Difference]) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("what", overflow="fold")
    for heading in ("before", "after", "ratio"):
        table.add_column(heading, justify="right", overflow="fold")
    for entry in rows:
        ratio = entry.ratio
        change = ABSENT if ratio is None else f"{'↑' if ratio > 1 else '↓'} {ratio:.2f}"
        style = {"better": "green", "worse": "red", "other": ""}[_direction(entry)]
        values = [_value_text(value, entry.unit) for value in (entry.before, entry.after)]
        table.add_row(entry.what, *values, Text(change, style=style))
    return table


def _value_text(value: Value, unit: str) -> str:
    if value is None or isinstance(value, str):
        return value or ABSENT
    if unit == "s":
        return format_seconds(value)
    return format_bytes(value) if unit == "B" else format_si(value, unit)
