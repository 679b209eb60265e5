"""The charts of a report as plotly figures in plain JSON: traces and layout. The measured network is drawn as matrices:
bandwidth and latency from every node to every other node.

Colours are written as '@1' … '@8' (series) and '@good', '@fault' (marks). The page replaces them by those of its light
or dark theme, so that one file serves both themes.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hpctrain.records.history.run_log import MetricRow
from hpctrain.records.topology.link import LinkFigures
from hpctrain.records.topology.topology import Topology
from hpctrain.report.html.run_view import RunView
from hpctrain.report.summaries import HELD_OUT, losses_by_set

Trace = dict[str, Any]
Value = Callable[[MetricRow], float | None]
Series = dict[str, tuple[Value, str]]
"""Lines of a chart by name: a function that returns the line's value at a step, and plotly's template for the text at
the pointer, without the step."""

MOST_POINTS = 2000
"""Most points of a line. If a run has more steps, every n-th step is shown, and the last one."""

COLOURS = 8


@dataclass(frozen=True)
class Chart:
    """A plotly figure with its title and a note of one line."""

    id: str
    """Name of the chart on its page; part of the ids of its HTML elements."""
    title: str
    note: str
    traces: list[Trace]
    layout: dict[str, Any]
    height: int = 320
    """Height in pixels."""


def colour(index: int) -> str:
    """Return the placeholder of a series' colour, such as '@1' for index 0; after the last colour the first one is used
    again."""
    return f"@{index % COLOURS + 1}"


def thinned(rows: Sequence[MetricRow]) -> list[MetricRow]:
    """Return at most `MOST_POINTS` + 1 rows, evenly spaced, including the last one."""
    stride = -(-len(rows) // MOST_POINTS) or 1
    spaced = list(rows[::stride])
    return spaced if not rows or spaced[-1] is rows[-1] else [*spaced, rows[-1]]


def loss_chart(view: RunView) -> Chart:
    """Return the chart of the training loss, a line for each generation, and the validation losses; each recovery is
    marked."""
    traces = by_generation(view.rows, lambda row: row.loss, "%{y:.4f} nats a token, step %{x}")
    validated = [(row.step, losses) for row in view.history if (losses := losses_by_set(row))]
    names = dict.fromkeys(name for _, losses in validated for name in losses)
    for number, name in enumerate(names):
        points = [(step, losses[name]) for step, losses in validated if name in losses]
        title = name.replace(HELD_OUT, "validation", 1)
        ink = "@ink" if name == HELD_OUT else colour(COLOURS - 1 - number)  # generations take colours from the start
        hover = f"{title} %{{y:.4f}} after step %{{x}}<extra></extra>"
        style = {
            "mode": "lines+markers",
            "line": {"color": ink, "width": 1.5, "dash": "dot"},
            "marker": {"size": 8, "symbol": "diamond", "color": ink},
        }
        traces.append({**line(title, [step for step, _ in points], [loss for _, loss in points], 0, hover), **style})
    note = "Mean cross-entropy of the global batch. A vertical line marks the first step after a fault."
    return Chart("loss", "Loss (nats a token)", note, traces, layout("step", recovery_lines=view), 380)


def throughput_chart(view: RunView) -> Chart:
    """Return the chart of tokens per second of the whole job over the steps."""
    traces = by_generation(view.rows, lambda row: row.tokens_per_s, "%{y:.4s} tokens/s, step %{x}")
    note = "Tokens of the whole job, by the time from one step's end to the next."
    return Chart("throughput", "Throughput (tokens/s)", note, traces, layout("step", zero=True, recovery_lines=view))


def step_time_chart(view: RunView) -> Chart:
    """Return the chart of seconds per step."""
    traces = by_generation(view.rows, lambda row: row.step_time_s, "%{y:.3s} s, step %{x}")
    note = "The first step of a generation also warms up caches and connections."
    return Chart("step-time", "Time of a step (s)", note, traces, layout("step", zero=True, recovery_lines=view))


def stage_chart(view: RunView) -> Chart | None:
    """Return the chart of each pipeline stage's compute time over the steps; None if no step has reported it."""
    stages = range(max((len(row.stage_time_s) for row in view.history), default=0))
    series: Series = {
        f"stage {stage}": (partial(_stage_time, stage=stage), f"stage {stage}: %{{y:.3s}}s") for stage in stages
    }
    note = "Forward and backward in a step, of the slowest replica. The slowest stage sets the pace."
    return _step_chart(view, "stages", "Compute time by stage (s)", note, series)


def _stage_time(row: MetricRow, stage: int) -> float | None:
    return row.stage_time_s[stage] if stage < len(row.stage_time_s) else None


def bubble_chart(view: RunView) -> Chart | None:
    """Return the chart of the bubble fraction over the steps; None if no step had a pipeline."""
    note = "Share of the pipeline's time in which a device waited for its neighbours; mean over devices."
    series: Series = {"bubble": (lambda row: row.bubble_fraction, "%{y:.1%} idle")}
    chart = _step_chart(view, "bubble", "Pipeline bubble", note, series)
    if chart is not None:
        chart.layout["yaxis"]["tickformat"] = ".0%"
        chart.layout["showlegend"] = False
    return chart


def bytes_chart(view: RunView) -> Chart | None:
    """Return the chart of the bytes sent in a step, by mesh axis; None if nothing was sent."""
    series: Series = {name: (partial(_bytes_sent, axis=axis), f"{name}: %{{y:.4s}}B") for axis, name in _AXES.items()}
    note = "On the wire of the whole job, counted where it is sent."
    return _step_chart(view, "bytes", "Bytes sent in a step (B)", note, series)


def _bytes_sent(row: MetricRow, axis: str) -> float:
    sent: int = getattr(row.bytes_sent, axis)
    return sent


def wall_chart(view: RunView) -> Chart:
    """Return the chart of steps over elapsed time: a drop is work lost to a fault, a flat stretch is time without
    training."""
    start = view.start_s or 0.0
    traces = by_generation(view.rows, lambda row: row.step, "step %{y} at %{x:.1f} s", x=lambda row: row.time_s - start)
    faults = [event for recovery in view.recoveries for event in recovery.faults]
    shape = layout("seconds since the start", zero=True)
    shape["xaxis"]["rangemode"] = "tozero"
    shape["shapes"] = [_mark(event.time_s - start, "@fault") for event in faults] + [
        _mark(recovery.time_s - start, "@good") for recovery in view.recoveries if recovery.time_s is not None
    ]
    note = "Red: a fault was seen. Green: the first step afterwards. A fall is work that had to be done again."
    return Chart("wall", "Steps done over time", note, traces, shape)


def by_generation(rows: Sequence[MetricRow], y: Value, hover: str, x: Value = lambda row: row.step) -> list[Trace]:
    """Return one line per generation, so that steps repeated by a later generation appear twice. Each line has at most
    `MOST_POINTS` + 1 points.

    Args:
        y: returns the vertical coordinate of a row.
        hover: plotly's template for the text at the pointer.
        x: returns the horizontal coordinate of a row; by default the step.
    """
    generations: dict[int, list[MetricRow]] = {}
    for row in rows:
        generations.setdefault(row.generation, []).append(row)
    return [
        line(
            f"generation {generation}",
            [x(row) for row in thinned(steps)],
            [y(row) for row in thinned(steps)],
            index,
            f"{hover}, generation {generation}<extra></extra>",
        )
        for index, (generation, steps) in enumerate(generations.items())
    ]


def _step_chart(view: RunView, id_: str, title: str, note: str, series: Series) -> Chart | None:
    """Return a chart of `series` over the steps; a repeated step appears once, as it was made last. None if no step has
    a value other than 0.

    Args:
        id_: name of the chart in the page.
    """
    rows = thinned(view.history)
    steps = [row.step for row in rows]
    traces = [
        line(name, steps, values, index, f"{hover} in step %{{x}}<extra></extra>")
        for index, (name, (value, hover)) in enumerate(series.items())
        if any(values := [value(row) for row in rows])
    ]
    return Chart(id_, title, note, traces, layout("step", zero=True)) if traces else None


def line(name: str, x: list[Any], y: list[Any], index: int, hover: str) -> Trace:
    """Return one line of a chart. A single point appears as a dot, and an infinite or NaN value (a diverged loss) as a
    gap.

    Args:
        index: number of the line's colour.
        hover: plotly's template for the text at the pointer.
    """
    return {
        "type": "scatter",
        "mode": "lines" if len(x) > 1 else "markers",
        "name": name,
        "x": x,
        "y": [value if value is None or math.isfinite(value) else None for value in y],
        "line": {"color": colour(index), "width": 2},
        "marker": {"color": colour(index), "size": 8},
        "hovertemplate": hover,
    }


def layout(x_title: str, zero: bool = False, recovery_lines: RunView | None = None) -> dict[str, Any]:
    """Return plotly's layout of a line chart: its axes, legend and marks.

    Args:
        x_title: title of the horizontal axis.
        zero: begin the vertical axis at 0.
        recovery_lines: the run whose recoveries are marked with vertical lines; None: no marks.
    """
    shape: dict[str, Any] = {
        "xaxis": {"title": {"text": x_title, "standoff": 8}},
        "yaxis": {"rangemode": "tozero" if zero else "normal"},
        "showlegend": True,
    }
    if recovery_lines is not None:
        shape["shapes"] = [
            _mark(recovery.step, "@good") for recovery in recovery_lines.recoveries if recovery.step is not None
        ]
    return shape


def _mark(x: float, ink: str) -> dict[str, Any]:
    line_style = {"color": ink, "width": 1.5, "dash": "dash"}
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line_style}


_AXES = {"dp": "data parallel", "pp": "pipeline", "tp": "tensor parallel"}


MOST_LABELLED = 12
"""Most nodes of a matrix whose cells show their numbers; with more nodes, a number shows only at the pointer."""
MOST_ROWS = 128
"""Most rows of a matrix. With more nodes, a cell is the median over the pairs of two blocks of nodes: a million cells
would be unreadable, and 20 MB."""

Matrix = list[list[float | None]]


@dataclass(frozen=True)
class Quantity:
    """A measured quantity of links, drawn as one heat map."""

    key: str
    """Name of the heat map on its page."""
    title: str
    """Heading of the heat map."""
    note: str
    """Sentence for the reader: how the quantity was measured."""
    unit: str
    """Unit in which the quantity is shown, such as GB/s."""
    scale: float
    """Factor from the unit in the topology file (SI) to the shown unit, `unit`."""
    of_link: Callable[[LinkFigures], float | None]
    """Function that returns the quantity of a link in SI units, or None if it was not measured."""
    of_pairs: str
    """Name of the quantity in `pairs-<hash>.npz`, which holds the links of a large cluster instead of topology.json."""


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
    """Return a heat map for each quantity of `QUANTITIES` that at least one pair of nodes has."""
    return [chart for quantity in QUANTITIES if (chart := _heat_map(topology, quantity)) is not None]


def matrix(topology: Topology, quantity: Quantity) -> tuple[list[str], Matrix]:
    """Return (names of the rows, cells[source][target]) of one quantity, in the node order and unit of the topology
    file.

    A cell that was not measured is None. A row is a node. If the topology keeps its pairs in a file of their own
    (`pairs-<hash>.npz`, more than 64 nodes), a row may be several successive nodes, so that there are at most
    `MOST_ROWS` rows; a cell is then the median over its pairs of nodes.
    """
    names = [node.id for node in topology.nodes]
    if topology.pairs is not None:
        size = -(-len(names) // MOST_ROWS)
        blocks = [names[start : start + size] for start in range(0, len(names), size)]
        labels = [block[0] if len(block) == 1 else f"{block[0]} to {block[-1]}" for block in blocks]
        return labels, _block_medians(topology, quantity.of_pairs, size)
    index = {name: position for position, name in enumerate(names)}
    cells: Matrix = [[None] * len(index) for _ in index]
    for link in topology.fabric.links:
        a, b = index[link.a], index[link.b]
        cells[a][b], cells[b][a] = quantity.of_link(link.ab), quantity.of_link(link.ba)
    return names, cells


def _block_medians(topology: Topology, figure: str, size: int) -> Matrix:
    """Return cells[source][target]: the median of a figure over the pairs of two blocks of nodes. A cell is None if no
    pair of the two blocks was measured.

    Args:
        figure: one of `pair_matrix.FIGURES`.
        size: nodes of a block.
    """
    import numpy as np  # for large clusters only

    def median(values: np.ndarray) -> float | None:
        known = values[np.isfinite(values)]
        return float(np.median(known)) if known.size else None

    assert topology.pairs is not None, "the caller has checked"
    values, places = topology.pairs[figure], range(0, len(topology.nodes), size)
    return [[median(values[row : row + size, column : column + size]) for column in places] for row in places]


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
