"""Makes a table of a topology's devices: one row per device, or for many nodes the spread of each kind of device.
Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from rich.table import Table
from rich.text import Text

from hpctrain.base.units import format_bytes, format_count, format_seconds
from hpctrain.records.topology.topology import Device, Topology

NODES_LISTED_MAX = 16
"""Most nodes with which devices are listed one by one."""
ABSENT = "·"
COLOURS = {"go": "green", "ok": "green", "warn": "yellow", "degraded": "yellow", "unknown": "yellow"}
"""Colour of each verdict; all others are red."""


def devices_table(topology: Topology) -> Table:
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
