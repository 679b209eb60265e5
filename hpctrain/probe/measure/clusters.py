"""Which nodes share a switch, from latencies, pure: average-linkage clustering, cut where the heights jump."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hpctrain.records.topology.pair_matrix import PairMatrix

Floats = npt.NDArray[np.floating]
Ints = npt.NDArray[np.int_]

MIN_NODES_FOR_TREE = 8
"""Fewer nodes differ by chance as much as by a switch, and every pair of them is in the file anyway."""
MIN_GAP = 0.10
"""A level of switches adds at least this share to the latency of the level below."""
MIN_SEPARATION = 3.0
"""And at least this many standard deviations of the latencies within its clusters."""


@dataclass(frozen=True)
class SwitchTree:
    """The levels of switches, lowest first: for each node the number of its cluster, -1 where it is unknown."""

    levels: tuple[Ints, ...] = ()
    source: str = "measured"

    @cached_property
    def pair_levels(self) -> Ints:
        """[a, b]: height of the lowest cluster that holds both (1 is a leaf switch), 0 where none does."""
        n = len(self.levels[0]) if self.levels else 0
        found = np.zeros((n, n), dtype=np.int_)
        for height in range(len(self.levels), 0, -1):
            labels = self.levels[height - 1]
            found[(labels[:, None] == labels[None, :]) & (labels >= 0)[:, None]] = height
        return found


def distances_of(matrix: PairMatrix) -> Floats:
    """[a, b]: latency of each pair in seconds, the same in both directions, NaN where not measured.

    The mean of both directions, and of the fastest and the median round trip: the fastest hangs on one sample, the
    median on what else the network does.
    """
    one_way = (matrix["latency_min_s"].astype(np.float64) + matrix["latency_p50_s"]) / 2
    mean: Floats = (one_way + one_way.T) / 2
    return np.where(np.isnan(mean), np.fmin(one_way, one_way.T), mean)


def infer_tree(sided: Floats) -> SwitchTree:
    """The switches, from the distances of (nearly) every pair, NaN elsewhere; no levels where all are alike.

    What a node adds to all its pairs is taken off first: a node with a slow processor is behind the same switch as
    before. Nodes without any figure get -1.
    """
    known = np.flatnonzero(np.isfinite(sided).sum(axis=1) > 0)
    if len(known) < MIN_NODES_FOR_TREE:
        return SwitchTree()
    distances = _completed(sided[np.ix_(known, known)].astype(np.float64))
    distances = _without_node_effects(distances)
    levels = []
    for labels in _cuts(distances):
        whole = np.full(len(sided), -1, dtype=np.int_)
        whole[known] = labels
        levels.append(whole)
    return SwitchTree(tuple(levels))


def _completed(distances: Floats) -> Floats:
    """Pairs that were not measured get the median of the two nodes' other pairs: neither near nor far."""
    np.fill_diagonal(distances, np.nan)
    usual = np.nanmedian(distances, axis=1)
    filled = np.where(np.isnan(distances), (usual[:, None] + usual[None, :]) / 2, distances)
    np.fill_diagonal(filled, 0.0)
    return filled


def _without_node_effects(distances: Floats) -> Floats:
    """Subtract what each node adds to all its pairs, the near and the far ones alike.

    A node that only has fewer near ones is on a small switch: its nearest and farthest are as far as those of others.
    """
    n, made = len(distances), distances
    for _ in range(3):  # a slow node is among the farthest of all others, until it is taken off
        profiles = np.sort(made + np.diag(np.full(n, np.inf)), axis=1)[:, : n - 1]
        above = profiles - np.median(profiles, axis=0)
        near, far = above[:, :2].mean(axis=1), above[:, -max(2, n // 10) :].mean(axis=1)
        added = np.where(np.abs(near) < np.abs(far), near, far)
        made = np.maximum(made - added[:, None] - added[None, :], np.median(profiles) * 1e-3)
        np.fill_diagonal(made, 0.0)
    return made


def _cuts(distances: Floats) -> list[Ints]:
    """Labels of each level, lowest first."""
    # Here, because scipy is a third of an agent's start and few agents come this far.
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    tree = linkage(squareform(distances, checks=False), "average")
    heights = np.maximum(tree[:, 2], 1e-12)
    jumps = np.flatnonzero(heights[1:] > heights[:-1] * (1 + MIN_GAP / 2))
    found: list[Ints] = []
    for jump in jumps:
        labels = fcluster(tree, float(np.sqrt(heights[jump] * heights[jump + 1])), "distance")
        count = int(labels.max())
        if not 1 < count <= len(labels) // 2:
            continue
        below = found[-1] if found else None
        if _is_level(distances, labels, below):
            found.append(np.asarray(labels - 1, dtype=np.int_))
    return found


def _is_level(distances: Floats, labels: Ints, below: Ints | None) -> bool:
    """Whether pairs that leave these clusters are clearly farther apart than those within (and not within `below`)."""
    same = labels[:, None] == labels[None, :]
    np.fill_diagonal(same, False)
    if below is not None:
        same &= below[:, None] != below[None, :]
    other = labels[:, None] != labels[None, :]
    if not same.any():
        return False
    within, beyond = distances[same], distances[other]
    near, far = float(np.median(within)), float(np.median(beyond))
    # Half of the middle 68 %: what a standard deviation is where there are no outliers.
    low, high = np.quantile(within, [0.16, 0.84])
    return far >= near * (1 + MIN_GAP) and far - near >= MIN_SEPARATION * float(high - low) / 2


def declared_tree(paths: Sequence[Sequence[str]], source: str) -> SwitchTree:
    """The switches as somebody told them.

    Args:
        paths: for each node the switches above it, the highest first; empty where nothing was told.
        source: who told: slurm, prior.
    """
    depth = min((len(path) for path in paths if path), default=0)
    levels = []
    for height in range(1, depth + 1):
        names = [path[-height] if path else None for path in paths]
        numbers = {name: number for number, name in enumerate(sorted({name for name in names if name is not None}))}
        if len(numbers) > 1:
            levels.append(np.array([-1 if name is None else numbers[name] for name in names], dtype=np.int_))
    return SwitchTree(tuple(levels), source)


def pair_f1(labels: Ints, truth: Ints) -> float:
    """How well clusters were recovered: F1 of 'these two share a switch' over all pairs; 1 is perfect."""
    upper = np.triu_indices(len(truth), 1)
    said = (labels[:, None] == labels[None, :])[upper] & (labels >= 0)[upper[0]]
    true = (truth[:, None] == truth[None, :])[upper]
    hits = int((said & true).sum())
    return 2 * hits / max(1, int(said.sum()) + int(true.sum()))
