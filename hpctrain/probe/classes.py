"""Kinds of links, pure: pairs that leave switches of the same height behave alike, and stand for those not measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hpctrain.probe.clusters import SwitchTree
from hpctrain.probe.settings import ProbeSettings
from hpctrain.records.pair_matrix import PairMatrix
from hpctrain.records.topology import Fabric, Link, LinkClass, NodeCluster

HELD_OUT_EVERY = 20
"""One pair in so many tests the classes and is no part of them."""
HELD_OUT_BYTES = 2**20
"""Size of the message whose time is compared."""

Floats = npt.NDArray[np.floating]


def fabric_of(
    matrix: PairMatrix, tree: SwitchTree, ratios: dict[int, float], links: Sequence[Link], settings: ProbeSettings
) -> Fabric:
    """Classes, clusters and links.

    Args:
        ratios: oversubscription of each level of switches.
        links: pairs with all their figures.
    """
    levels = tree.pair_levels if tree.levels else np.zeros((len(matrix.nodes),) * 2, dtype=np.int_)
    alpha, beta = _costs(matrix)
    names = _class_names(tree, settings.loopback)
    held_out = _held_out(matrix, settings)
    classes = [
        made
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


def _costs(matrix: PairMatrix) -> tuple[Floats, Floats]:
    """(alpha in seconds, beta in seconds per byte) of each pair, NaN where not measured."""
    rate = np.where(np.isnan(matrix["bytes_per_s"]), matrix["isolated_bytes_per_s"], matrix["bytes_per_s"])
    return matrix["latency_p50_s"].astype(np.float64), 1.0 / rate.astype(np.float64)


def _class_names(tree: SwitchTree, loopback: bool) -> dict[int, str]:
    """Name of the class of each level; level 0 are the pairs that share no switch that is known."""
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
    """[a, b]: pairs that the classes are tested on; only where pairs stand for others."""
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
    """Median relative error of the classes' time for a message, over the pairs that were held out."""
    told = np.full(alpha.shape, np.nan)
    for entry in classes:
        kind = levels == (entry.level or 0) if tree.levels else np.ones_like(held_out)
        told[kind] = entry.alpha_s + entry.beta_s_per_byte * HELD_OUT_BYTES
    true = alpha + beta * HELD_OUT_BYTES
    tested = held_out & np.isfinite(true) & np.isfinite(told)
    return float(np.median(np.abs(told[tested] / true[tested] - 1))) if tested.any() else None
