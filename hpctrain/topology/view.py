"""Formats a topology for the terminal: verdict, unhealthy nodes, devices, links, matrices. Pure; the caller prints.

Everything fits 80 columns for node names of up to a dozen letters; longer names are folded.
"""

from __future__ import annotations

from collections.abc import Collection

from ClusterShell.NodeSet import NodeSet
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hpctrain.base.units import format_seconds, format_si
from hpctrain.records.topology.link import BackendFigures
from hpctrain.records.topology.topology import Reason, Topology
from hpctrain.topology.device_view import ABSENT, COLOURS, devices_table
from hpctrain.topology.matrix_view import QUANTITIES, matrices

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
        parts.append(devices_table(topology))
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
