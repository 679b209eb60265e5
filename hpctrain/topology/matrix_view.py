"""Draws latency and bandwidth between nodes as coloured matrices in the terminal; for many nodes, between clusters of
nodes. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hpctrain.records.topology.link import Link, LinkFigures
from hpctrain.records.topology.link_cost import LinkCost
from hpctrain.records.topology.topology import Topology

ABSENT = "·"
MATRIX_NODES_MAX = 16
"""Most nodes of a topology whose matrices have a row for each node; with more nodes, the rows are clusters of nodes."""
_COLUMNS_UP_TO = 12
"""Most columns of a table, so that it fits a terminal of 80 characters; a wider matrix continues in another table."""
QUANTITIES = ("latency", "bandwidth")
_LATENCY_SCALES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_RATE_SCALES = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"))

_Cell = tuple[str, str]
"""(row, column) of a matrix: the nodes or clusters that send and receive."""


@dataclass(frozen=True)
class _Quantity:
    """What a matrix shows: its title, the figure of a link that is shown, the units to choose from as (size, name), and
    whether high values are bad."""

    title: str
    value: Callable[[LinkFigures], float | None]
    scales: tuple[tuple[float, str], ...]
    high_is_bad: bool

    def colour(self, value: float, usual: float) -> str:
        """Return the colour of a value by its ratio to `usual`, the median of comparable pairs: green up to 5 % worse
        (15 % where high is bad), yellow up to 20 % worse (50 %), else red; '' if the value or `usual` is not above 0.
        """
        if usual <= 0 or value <= 0:
            return ""
        if self.high_is_bad:
            return "green" if value <= 1.15 * usual else "yellow" if value <= 1.5 * usual else "red"
        return "green" if value >= 0.95 * usual else "yellow" if value >= 0.8 * usual else "red"


_KNOWN = {
    "latency": (
        _Quantity("Latency, p50", lambda side: side.latency_s.p50 if side.latency_s else None, _LATENCY_SCALES, True),
    ),
    "bandwidth": (
        _Quantity("Bandwidth, alone", lambda side: side.isolated_bytes_per_s, _RATE_SCALES, False),
        _Quantity("Bandwidth, under load", lambda side: side.loaded_bytes_per_s, _RATE_SCALES, False),
    ),
}


def matrices(topology: Topology, quantities: Collection[str]) -> list[RenderableType]:
    """Return titles and tables that draw the matrices of `quantities` ('latency', 'bandwidth'): between nodes, or with
    more than `MATRIX_NODES_MAX` nodes between clusters of nodes. A matrix without any figure is left out."""
    if len(topology.nodes) > MATRIX_NODES_MAX:
        return _between_groups(topology, quantities)
    drawn: list[RenderableType] = []
    for name in QUANTITIES:
        for quantity in _KNOWN[name] if name in quantities else ():
            values = _values(topology.fabric.links, quantity)
            drawn += _nodes(topology, quantity, values) if values else []
    return drawn


def _values(links: Iterable[Link], quantity: _Quantity) -> dict[_Cell, tuple[float, str | None]]:
    """Return (source, target) -> (value, link class) for each direction of a link that has the quantity's figure."""
    return {
        ends: (value, link.class_)
        for link in links
        for ends, side in link.directions()
        if (value := quantity.value(side)) is not None
    }


def _nodes(
    topology: Topology, quantity: _Quantity, values: dict[_Cell, tuple[float, str | None]]
) -> list[RenderableType]:  # fmt: skip
    names = [node.id for node in topology.nodes]
    scale, unit = _scale(quantity, [value for value, _ in values.values()])
    classes: dict[str | None, list[float]] = {}
    for value, kind in values.values():
        classes.setdefault(kind, []).append(value)
    usual = {kind: statistics.median(members) for kind, members in classes.items()}
    cells = {
        cell: Text(_short(value / scale), style=quantity.colour(value, usual[kind]))
        for cell, (value, kind) in values.items()
    }
    sick = {node.id for node in topology.nodes if node.health.verdict in ("degraded", "bad")}
    return _matrix_tables(f"{quantity.title} in {unit}, row to column", names, cells, sick)


def _between_groups(topology: Topology, quantities: Collection[str]) -> list[RenderableType]:
    """Return titles and tables that draw the matrices between clusters of nodes. Each pair of nodes counts with the
    figures that the planner uses, because the topology of a large cluster lists only unusual links."""
    home, costs = _cluster_of_node(topology), LinkCost(topology)
    figures: dict[str, dict[_Cell, list[float]]] = {name: {} for name in QUANTITIES}
    for a, b in itertools.permutations([node.id for node in topology.nodes], 2):
        cost = costs.find(a, b)
        if cost is None:
            continue
        figures["latency"].setdefault((home[a], home[b]), []).append(cost[0])
        if cost[1] > 0:
            figures["bandwidth"].setdefault((home[a], home[b]), []).append(1 / cost[1])
    names = list(dict.fromkeys(home.values()))
    return [
        part
        for name in QUANTITIES
        if name in quantities and figures[name]
        for part in _folded(_KNOWN[name][-1], names, figures[name])
    ]


def _folded(quantity: _Quantity, names: list[str], groups: dict[_Cell, list[float]]) -> list[RenderableType]:
    scale, unit = _scale(quantity, [value for group in groups.values() for value in group])
    cells = {}
    for cell, group in groups.items():
        usual = statistics.median(group)
        text = Text()
        for value in (min(group), usual, max(group)):
            text.append(("\n" if text else "") + _short(value / scale), style=quantity.colour(value, usual))
        cells[cell] = text
    return _matrix_tables(
        f"{quantity.title} in {unit}, row to column: min, median, max of all pairs", names, cells, set()
    )


def _cluster_of_node(topology: Topology) -> dict[str, str]:
    """Return node -> the name of its row in a matrix between clusters. Rows are the clusters of the lowest level with
    at most 12 clusters, else of the highest level. Nodes without a cluster are in the row 'others'. If there are no
    clusters, or more than 24 on the highest level, all nodes are in one row, 'all nodes'."""
    best: dict[str, str] = {}
    for level in sorted({cluster.level for cluster in topology.fabric.clusters}):
        clusters = [cluster for cluster in topology.fabric.clusters if cluster.level == level]
        best = {name: cluster.id for cluster in clusters for name in cluster.members}
        if len(clusters) <= _COLUMNS_UP_TO:
            break
    few = len(set(best.values())) <= 2 * _COLUMNS_UP_TO
    rest = "others" if best and few else "all nodes"
    return {node.id: best.get(node.id, rest) if few else rest for node in topology.nodes}


def _matrix_tables(title: str, names: list[str], cells: dict[_Cell, Text], sick: set[str]) -> list[RenderableType]:
    """Return the title and the table of a matrix, or several tables if there are too many columns. A row begins with
    its number and name, a column has only the number.

    Args:
        names: names of the rows and columns.
        cells: (row, column) -> text; an absent cell gets a dot, on the diagonal a dash.
        sick: names of rows that are printed in red.
    """
    tables: list[RenderableType] = [Text(title)]
    for start in range(0, len(names), _COLUMNS_UP_TO):
        columns = range(start, min(start + _COLUMNS_UP_TO, len(names)))
        table = Table(box=None, padding=(0, 0, 0, 1))
        table.add_column("", overflow="fold", max_width=18)
        for number in columns:
            table.add_column(str(number), justify="right", no_wrap=True)
        for number, a in enumerate(names):
            row = [Text("-", style="dim") if (a, names[c]) not in cells and c == number else None for c in columns]
            drawn = [cells.get((a, names[c]), blank or Text(ABSENT)) for c, blank in zip(columns, row, strict=True)]
            table.add_row(Text(f"{number} {a}", style="bold red" if a in sick else "bold"), *drawn)
        tables.append(table)
    return tables


def _scale(quantity: _Quantity, values: list[float]) -> tuple[float, str]:
    """Return (size, name) of the unit for a matrix: the largest unit in which the median of the values is at least 1,
    else the smallest unit."""
    middle = statistics.median(values)
    for size, unit in quantity.scales:
        if middle >= size:
            return size, unit
    return quantity.scales[-1]


def _short(value: float) -> str:
    """Return the value as text: from 100 on as a whole number, below 100 with at most three significant digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
