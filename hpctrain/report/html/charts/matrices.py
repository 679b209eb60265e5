"""Matrices of a report as heat maps: the measured network, from every node to every other node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hpctrain.records.topology.link import LinkFigures
from hpctrain.records.topology.topology import Topology
from hpctrain.report.html.charts.chart import Chart, HeatMap

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
        "bandwidth", "Bandwidth", "Only this pair at work, timed at the receiver.", "GB/s", 1e-9,
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
    shown = [[None if value is None else value * quantity.scale for value in row] for row in cells]
    note = quantity.note
    if len(names) < len(topology.nodes):
        note += f" Of {len(topology.nodes)} nodes, each cell has the median over the pairs of two blocks."
    return HeatMap(
        quantity.key, f"{quantity.title} ({quantity.unit})", note, x_title="to", y_title="from", columns=names,
        rows=names, cells=shown, unit=quantity.unit, with_numbers=len(names) <= MOST_LABELLED,
        height=min(560, 190 + 36 * len(names)),
    )  # fmt: skip
