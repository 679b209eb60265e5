"""A topology in a terminal: devices, a matrix of latency or bandwidth, the verdict. Pure; the caller prints."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hpctrain.base.units import format_bytes, format_count, format_seconds, format_si
from hpctrain.records.topology import Device, LinkFigures, Topology

MATRIX_UP_TO = 16
"""A larger matrix does not fit a terminal; the classes stand for it."""
ABSENT = "·"
_COLOURS = {"go": "green", "ok": "green", "warn": "yellow", "degraded": "yellow", "unknown": "yellow"}


def render(topology: Topology) -> RenderableType:
    """The whole file for a person: where it is from, devices, links, verdict."""
    parts: list[RenderableType] = [_provenance(topology), _devices(topology)]
    if len(topology.nodes) > 1:
        parts.append(_classes(topology))
    if 1 < len(topology.nodes) <= MATRIX_UP_TO and topology.fabric.links:
        parts.append(_matrix(topology, "Latency, p50, row to column", _latency))
        parts.append(_matrix(topology, "Bandwidth in B/s, alone / under load, row to column", _bandwidth))
    parts += [Text(note, style="dim") for note in topology.provenance.notes]
    parts.append(_verdict(topology))
    return Group(*parts)


def _provenance(topology: Topology) -> Text:
    told = topology.provenance
    where = "loopback of one machine, not a network" if told.loopback else told.transport
    text = f"{len(topology.nodes)} node(s), {told.created}, {where}"
    if told.rounds_planned:
        text += f", {told.rounds_done} of {told.rounds_planned} rounds"
    if told.wall_s is not None:
        text += f" in {format_seconds(told.wall_s)}"
    return Text(text)


def _devices(topology: Topology) -> Table:
    dtypes = sorted({name for node in topology.nodes for device in node.devices for name in device.flops})
    table = Table(title="Devices", title_justify="left")
    for heading in ("node", "device", *(f"{dtype} FLOP/s" for dtype in dtypes), "memory", "B/s", "tiny op", "health"):
        table.add_column(heading, justify="left" if heading in ("node", "device", "health") else "right")
    for node in topology.nodes:
        health = Text(node.health.verdict, style=_COLOURS.get(node.health.verdict, "red"))
        if not node.devices:
            table.add_row(node.id, ABSENT, *[ABSENT] * (len(dtypes) + 3), health)
        for device in node.devices:
            table.add_row(node.id, device.id, *_device_cells(device, dtypes), health)
    table.caption = "; ".join(f"{key}: {kind.name}" for key, kind in topology.device_types.items())
    table.caption_justify = "left"
    return table


def _device_cells(device: Device, dtypes: list[str]) -> list[str]:
    flops = [_short(device.flops.get(dtype)) for dtype in dtypes]
    memory = ABSENT if device.memory_bytes is None else format_bytes(device.memory_bytes)
    tiny = ABSENT if device.launch_s is None else format_seconds(device.launch_s)
    return [*flops, memory, _short(device.memory_bytes_per_s), tiny]


def _classes(topology: Topology) -> Text:
    lines = [
        f"links '{entry.id}' ({entry.pairs} pairs): start-up {format_seconds(entry.alpha_s)}, "
        f"then {format_si(1 / entry.beta_s_per_byte, 'B/s') if entry.beta_s_per_byte else ABSENT}"
        for entry in topology.fabric.classes
    ]
    return Text("\n".join(lines or ["no link was measured"]))


def _matrix(topology: Topology, title: str, cell: Callable[[LinkFigures], str]) -> Table:
    figures: dict[tuple[str, str], LinkFigures] = {}
    for link in topology.fabric.links:
        figures[link.a, link.b] = link.ab
        figures[link.b, link.a] = link.ba
    names = [node.id for node in topology.nodes]
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    for a in names:
        row = ["" if a == b else cell(figures[a, b]) if (a, b) in figures else ABSENT for b in names]
        table.add_row(Text(a, style="bold"), *row)
    return table


def _latency(figures: LinkFigures) -> str:
    return ABSENT if figures.latency_s is None else format_seconds(figures.latency_s.p50)


def _bandwidth(figures: LinkFigures) -> str:
    alone, loaded = figures.isolated_bytes_per_s, figures.loaded_bytes_per_s
    return _short(alone) if loaded is None else f"{_short(alone)} / {_short(loaded)}"


def _verdict(topology: Topology) -> Text:
    verdict = topology.verdict
    text = Text("verdict: ")
    text.append(verdict.status, style=_COLOURS.get(verdict.status, "red"))
    for fault in verdict.faults:
        text.append(f"\n  {fault.code}: {fault.text}")
        for label, words in (("seen", fault.evidence), ("do", fault.fix)):
            if words:
                text.append(f"\n    {label}: {words}", style="dim")
    if verdict.exclude:
        text.append(f"\n  leave out: {verdict.sbatch_hint or ','.join(verdict.exclude)}")
    for name, value in verdict.env.items():
        text.append(f"\n  export {name}={value}")
    return text


def _short(value: float | None) -> str:
    return ABSENT if value is None else format_count(value)
