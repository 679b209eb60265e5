"""The measured network as matrices: bandwidth and latency from every node to every other node."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpctrain.records.topology.link import LinkFigures
from hpctrain.records.topology.topology import Topology
from hpctrain.report.charts import Chart

MOST_LABELLED = 12
"""Most nodes for which cells show their numbers; above it, the numbers show only at the pointer."""
MOST_ROWS = 128
"""Most rows of a matrix. With more nodes, a cell is the median of a block of pairs: a million cells would be
unreadable, and 20 MB."""

Matrix = list[list[float | None]]


@dataclass(frozen=True)
class Quantity:
    """A measured quantity, drawn as one heat map."""

    key: str
    title: str
    note: str
    unit: str
    scale: float
    """Factor from the unit in the topology file to the shown unit."""
    of_link: Callable[[LinkFigures], float | None]
    of_pairs: str
    """Name of this figure in the file of all pairs, which belongs to the topology of a large cluster."""


QUANTITIES = (
    Quantity(
        "bandwidth", "Bandwidth", "Few pairs at work at once, timed at the receiver.", "GB/s", 1e-9,
        lambda figures: figures.isolated_bytes_per_s, "isolated_bytes_per_s",
    ),
    Quantity(
        "loaded-bandwidth", "Loaded bandwidth", "What a pair gets while all others send too.", "GB/s", 1e-9,
        lambda figures: figures.loaded_bytes_per_s, "bytes_per_s",
    ),
    Quantity(
        "latency", "Latency", "Half the round trip of a small message, median.", "µs", 1e6,
        lambda figures: figures.latency_s.p50 if figures.latency_s else None, "latency_p50_s",
    ),
)  # fmt: skip


def fabric_charts(topology: Topology) -> list[Chart]:
    """Return the heat maps of the measured quantities, without quantities that no pair has."""
    return [chart for quantity in QUANTITIES if (chart := _heat_map(topology, quantity)) is not None]


def matrix(topology: Topology, quantity: Quantity) -> tuple[list[str], Matrix]:
    """Return (names of the rows, cells[source][target]) in the order and the unit of the topology file; a cell that was
    not measured is None.

    A row is a node; with more than `MOST_ROWS` nodes, a row is a block of nodes.
    """
    names = [node.id for node in topology.nodes]
    if topology.pairs is not None:
        from hpctrain.report.pair_blocks import block_medians, block_names  # needs numpy, for large clusters only

        size = -(-len(names) // MOST_ROWS)
        return block_names(names, size), block_medians(topology.pairs, quantity.of_pairs, size)
    index = {name: position for position, name in enumerate(names)}
    cells: Matrix = [[None] * len(index) for _ in index]
    for link in topology.fabric.links:
        a, b = index[link.a], index[link.b]
        cells[a][b], cells[b][a] = quantity.of_link(link.ab), quantity.of_link(link.ba)
    return names, cells


def _heat_map(topology: Topology, quantity: Quantity) -> Chart | None:
    names, cells = matrix(topology, quantity)
    if all(value is None for row in cells for value in row):
        return None
    # Four digits exceed the precision of the measurement; all sixteen would make the page three times as large.
    shown = [[None if value is None else float(f"{value * quantity.scale:.4g}") for value in row] for row in cells]
    # Names from a file are plain text, but plotly would interpret HTML in labels.
    labels = [html.escape(name, quote=False) for name in names]
    gap = 2 if topology.pairs is None else 0  # gaps between many cells would take all the space
    trace: dict[str, Any] = {
        "type": "heatmap",
        "x": labels,
        "y": labels,
        "z": shown,
        "colorscale": "@ramp",
        "colorbar": {"title": {"text": quantity.unit}, "thickness": 12, "outlinewidth": 0},
        "xgap": gap,
        "ygap": gap,
        "hovertemplate": f"from %{{y}} to %{{x}}: %{{z:.4g}} {quantity.unit}<extra></extra>",
    }
    if len(names) <= MOST_LABELLED:
        trace["texttemplate"] = "%{z:.3g}"
    layout = {
        "xaxis": {"title": {"text": "to"}, "type": "category", "showgrid": False},
        "yaxis": {"title": {"text": "from"}, "type": "category", "autorange": "reversed", "showgrid": False},
    }
    note = quantity.note
    if len(names) < len(topology.nodes):
        note += f" Of {len(topology.nodes)} nodes, each cell has the median over the pairs of two blocks."
    title = f"{quantity.title} ({quantity.unit})"
    return Chart(quantity.key, title, note, [trace], layout, height=min(640, 180 + 40 * len(names)))
