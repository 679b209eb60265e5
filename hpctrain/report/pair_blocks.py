"""The pairs of a large cluster as a matrix small enough for a page: nodes that follow each other in the topology file
form blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpctrain.records.topology.pair_matrix import PairMatrix


def block_medians(pairs: PairMatrix, figure: str, size: int) -> list[list[float | None]]:
    """Return cells[source][target]: the median of the figure over the pairs of two blocks of `size` nodes; None without
    figures.

    Args:
        figure: one of pair_matrix.FIGURES.
    """
    values, places = pairs[figure], range(0, len(pairs.nodes), size)
    return [[_median(values[row : row + size, column : column + size]) for column in places] for row in places]


def block_names(nodes: Sequence[str], size: int) -> list[str]:
    """Return the name of each block of `size` nodes: its first and its last node, or its only node."""
    blocks = [nodes[start : start + size] for start in range(0, len(nodes), size)]
    return [block[0] if len(block) == 1 else f"{block[0]} to {block[-1]}" for block in blocks]


def _median(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else None
