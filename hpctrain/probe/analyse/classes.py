"""Makes link classes: pairs that cross the same switch level form a class, whose medians stand for its unmeasured
pairs. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hpctrain.probe.measure.settings import ProbeSettings
from hpctrain.probe.pair_selection.switches import SwitchTree
from hpctrain.records.topology.link import BackendFigures, Link, LinkClass
from hpctrain.records.topology.pair_matrix import PairMatrix
from hpctrain.records.topology.topology import Fabric, NodeCluster

HELD_OUT_EVERY = 20
"""In the mode sampled, about one of this many pairs is held out: it tests the classes and is not part of them."""
HELD_OUT_BYTES = 2**20
"""Size in bytes of the message whose predicted and measured times are compared over the held-out pairs."""

Floats = npt.NDArray[np.floating]
Backend = Mapping[tuple[str, str], tuple[str, BackendFigures]]
"""(sending node, receiving node) -> (name of the training backend, figures of messages over it)."""


def fabric_of(
    matrix: PairMatrix,
    tree: SwitchTree,
    ratios: dict[int, float],
    links: Sequence[Link],
    backend: Backend,
    settings: ProbeSettings,
) -> Fabric:
    """Return the fabric: link classes with their held-out error, clusters and links.

    Args:
        matrix: the main figures of all measured pairs.
        tree: the switches above the nodes; without levels, all pairs form one class.
        ratios: switch level -> its oversubscription.
        links: the measured pairs, each with all figures that were measured.
        backend: figures of messages over the training backend.
    """
    levels = tree.pair_levels if tree.levels else np.zeros((len(matrix.nodes),) * 2, dtype=np.int_)
    alpha, beta = _costs(matrix, links)
    names = _class_names(tree, settings.loopback)
    held_out = _held_out(matrix, settings)
    over = _by_level(backend, matrix.index, levels)
    classes = [
        made.model_copy(update={"backend": _usual_backend(over.get(level, []))})
        for level, name in names.items()
        if (made := _class(name, level if tree.levels else None, (levels == level) & ~held_out, alpha, beta))
    ]
    return Fabric(
        classes=classes,
        clusters=_clusters(tree, matrix.nodes, ratios),
        links=[
            link.model_copy(update={"class_": names.get(int(levels[matrix.index[link.a], matrix.index[link.b]]))})
            for link in links
        ],
        held_out_error=_error(classes, tree, levels, held_out, alpha, beta),
    )


def _costs(matrix: PairMatrix, links: Sequence[Link]) -> tuple[Floats, Floats]:
    """Return (alpha in seconds, beta in seconds per byte) as arrays [sender, receiver], NaN where not measured. The
    figures of `links` replace those of `matrix`."""
    alpha, beta = (array.astype(np.float64) for array in matrix.costs())
    for link in links:
        for (source, target), side in link.directions():
            if side.alpha_s is not None and side.beta_s_per_byte is not None:
                cell = matrix.index[source], matrix.index[target]
                alpha[cell], beta[cell] = side.alpha_s, side.beta_s_per_byte
    return alpha, beta


def _by_level(
    backend: Backend, index: Mapping[str, int], levels: npt.NDArray[np.int_]
) -> dict[int, list[tuple[str, BackendFigures]]]:
    """Return switch level -> (name of the backend, figures) of each direction between nodes whose lowest common switch
    is on that level; 0 for nodes without a known common switch.

    Args:
        index: node -> its index in `levels`.
        levels: level of the lowest common switch [a, b].
    """
    by_level: dict[int, list[tuple[str, BackendFigures]]] = {}
    for (source, target), figures in backend.items():
        by_level.setdefault(int(levels[index[source], index[target]]), []).append(figures)
    return by_level


def _usual_backend(measured: Sequence[tuple[str, BackendFigures]]) -> dict[str, BackendFigures]:
    """Return name of the backend -> medians of its measured alpha and beta."""
    by_name: dict[str, list[BackendFigures]] = {}
    for name, figures in measured:
        by_name.setdefault(name, []).append(figures)
    return {
        name: BackendFigures(
            alpha_s=statistics.median(entry.alpha_s for entry in entries),
            beta_s_per_byte=statistics.median(entry.beta_s_per_byte for entry in entries),
        )
        for name, entries in by_name.items()
    }


def _class_names(tree: SwitchTree, loopback: bool) -> dict[int, str]:
    """Return switch level -> name of the link class of pairs whose lowest common switch is on that level. Leaf switches
    are level 1. The key 0 stands for the pairs that share no known switch.

    Args:
        loopback: whether the nodes are processes of one machine; their pairs then have one class, with the key 0.
    """
    if loopback or not tree.levels:
        return {0: "loopback" if loopback else "network"}
    lower = {height: f"same_level{height}" for height in range(2, len(tree.levels) + 1)}
    return {1: "same_switch", **lower, 0: "across"}


def _class(name: str, level: int | None, kind: npt.NDArray[np.bool_], alpha: Floats, beta: Floats) -> LinkClass | None:
    measured = kind & np.isfinite(alpha) & np.isfinite(beta)
    if not measured.any():
        return None
    return LinkClass(
        id=name,
        level=level,
        alpha_s=float(np.median(alpha[measured])),
        beta_s_per_byte=float(np.median(beta[measured])),
        pairs=int((measured | measured.T).sum()) // 2,
    )


def _clusters(tree: SwitchTree, nodes: Sequence[str], ratios: dict[int, float]) -> list[NodeCluster]:
    made: list[NodeCluster] = []
    for height, labels in enumerate(tree.levels, start=1):
        above = tree.levels[height] if height < len(tree.levels) else None
        for label in sorted({int(value) for value in labels if value >= 0}):
            rows = np.flatnonzero(labels == label)
            made.append(
                NodeCluster(
                    id=f"switch{height}.{label}",
                    level=height,
                    parent=None if above is None or above[rows[0]] < 0 else f"switch{height + 1}.{above[rows[0]]}",
                    members=[nodes[row] for row in rows.tolist()],
                    source=tree.source,
                    oversubscription=ratios.get(height),
                )
            )
    return made


def _held_out(matrix: PairMatrix, settings: ProbeSettings) -> npt.NDArray[np.bool_]:
    """Return an array [a, b]: whether the pair of the nodes a and b is held out, that is, not used to make link classes
    but to check them. Pairs are held out only in the mode sampled, because only there measured pairs stand for
    others."""
    n = len(matrix.nodes)
    if settings.mode != "sampled":
        return np.zeros((n, n), dtype=bool)
    drawn = np.triu(np.random.default_rng(settings.seed).integers(0, HELD_OUT_EVERY, (n, n)) == 0, 1)
    return drawn | drawn.T


def _error(
    classes: Sequence[LinkClass],
    tree: SwitchTree,
    levels: npt.NDArray[np.int_],
    held_out: npt.NDArray[np.bool_],
    alpha: Floats,
    beta: Floats,
) -> float | None:
    """Return the held-out error: over the held-out pairs, the median relative error of the time that the pair's class
    predicts for a message of `HELD_OUT_BYTES`. None if no held-out pair was measured.

    Args:
        levels: [a, b] -> the lowest switch level that the nodes a and b share; 0 if they share no known switch.
        held_out: [a, b] -> whether the pair is held out.
        alpha: [a, b] -> measured alpha of the pair in seconds; NaN if not measured.
        beta: [a, b] -> measured beta in seconds per byte; NaN if not measured.
    """
    predicted = np.full(alpha.shape, np.nan)
    for entry in classes:
        kind = levels == (entry.level or 0) if tree.levels else np.ones_like(held_out)
        predicted[kind] = entry.alpha_s + entry.beta_s_per_byte * HELD_OUT_BYTES
    true = alpha + beta * HELD_OUT_BYTES
    tested = held_out & np.isfinite(true) & np.isfinite(predicted)
    return float(np.median(np.abs(predicted[tested] / true[tested] - 1))) if tested.any() else None
