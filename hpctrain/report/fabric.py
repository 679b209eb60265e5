"""The measured network as matrices: bandwidth and latency from every node to every other one."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

from hpctrain.records.link import LinkFigures
from hpctrain.records.topology import Topology
from hpctrain.report.charts import Chart

MOST_LABELLED = 12
"""With more nodes than this the cells carry no numbers; the pointer still tells them."""

Matrix = list[list[float | None]]


def matrix(topology: Topology, figure: Callable[[LinkFigures], float | None]) -> Matrix:
    """matrix[source][target] in the file's order of nodes; None where it was not measured."""
    index = {node.id: position for position, node in enumerate(topology.nodes)}
    cells: Matrix = [[None] * len(index) for _ in index]
    for link in topology.fabric.links:
        a, b = index[link.a], index[link.b]
        cells[a][b], cells[b][a] = figure(link.ab), figure(link.ba)
    return cells


def fabric_charts(topology: Topology) -> list[Chart]:
    """Heat maps of what was measured; a matrix without any figure is left out."""
    wanted = [
        _heat_map(
            topology,
            "bandwidth",
            "Bandwidth (GB/s)",
            "Few pairs at work at once, timed at the receiver.",
            lambda figures: _scaled(figures.isolated_bytes_per_s, 1e-9),
            "GB/s",
        ),
        _heat_map(
            topology,
            "loaded-bandwidth",
            "Loaded bandwidth (GB/s)",
            "What a pair gets while all others send too.",
            lambda figures: _scaled(figures.loaded_bytes_per_s, 1e-9),
            "GB/s",
        ),
        _heat_map(
            topology,
            "latency",
            "Latency (µs)",
            "Half the round trip of a small message, median.",
            lambda figures: _scaled(figures.latency_s.p50 if figures.latency_s else None, 1e6),
            "µs",
        ),
    ]
    return [chart for chart in wanted if chart is not None]


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _heat_map(
    topology: Topology, key: str, title: str, note: str, figure: Callable[[LinkFigures], float | None], unit: str
) -> Chart | None:
    cells = matrix(topology, figure)
    if all(value is None for row in cells for value in row):
        return None
    # Plotly reads a little HTML in labels; names from a file are text.
    names = [html.escape(node.id, quote=False) for node in topology.nodes]
    trace: dict[str, Any] = {
        "type": "heatmap",
        "x": names,
        "y": names,
        "z": cells,
        "colorscale": "@ramp",
        "colorbar": {"title": {"text": unit}, "thickness": 12, "outlinewidth": 0},
        "xgap": 2,
        "ygap": 2,
        "hovertemplate": f"from %{{y}} to %{{x}}: %{{z:.4g}} {unit}<extra></extra>",
    }
    if len(names) <= MOST_LABELLED:
        trace["texttemplate"] = "%{z:.3g}"
    layout = {
        "xaxis": {"title": {"text": "to"}, "type": "category", "showgrid": False},
        "yaxis": {"title": {"text": "from"}, "type": "category", "autorange": "reversed", "showgrid": False},
    }
    return Chart(key, title, note, [trace], layout, height=min(640, 180 + 40 * len(names)))
