"""Infers from latencies which nodes share a switch: average-linkage clustering, cut where the heights jump. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hpctrain.records.topology.pair_matrix import PairMatrix

Floats = npt.NDArray[np.floating]
Ints = npt.NDArray[np.int_]

MIN_NODES_FOR_TREE = 8
"""Fewest nodes for which switches are inferred. With fewer, noise hides a switch, and the topology lists every pair
anyway."""
MIN_GAP = 0.10
"""Least share that a switch level adds to the latency of the level below."""
MIN_SEPARATION = 3.0
"""Least latency that a switch level adds, in standard deviations of the latencies within its clusters."""


@dataclass(frozen=True)
class SwitchTree:
    """The switch levels, lowest first: for each node the number of its cluster, -1 where it is unknown."""

    levels: tuple[Ints, ...] = ()
    source: str = "measured"

    @cached_property
    def pair_levels(self) -> Ints:
        """Array [a, b]: level of the lowest cluster that contains both nodes (1 is a leaf switch), 0 where none
        does."""
        n = len(self.levels[0]) if self.levels else 0
        lowest = np.zeros((n, n), dtype=np.int_)
        for height in range(len(self.levels), 0, -1):
            labels = self.levels[height - 1]
            lowest[(labels[:, None] == labels[None, :]) & (labels >= 0)[:, None]] = height
        return lowest

    def members(self, height: int, nodes: Iterable[int]) -> list[list[int]]:
        """Return the given nodes grouped by their cluster of a level (1 is the lowest), without those whose cluster is
        unknown."""
        labels, clusters = self.levels[height - 1], dict[int, list[int]]()
        for node in nodes:
            if labels[node] >= 0:
                clusters.setdefault(int(labels[node]), []).append(node)
        return list(clusters.values())


def distances_of(matrix: PairMatrix) -> Floats:
    """Return an array [a, b]: latency of each pair in seconds, the same in both directions, NaN where not measured.

    The latency is the mean of both directions' minima and medians: the minimum depends on one sample, the median on
    other traffic.
    """
    one_way = (matrix["latency_min_s"].astype(np.float64) + matrix["latency_p50_s"]) / 2
    mean: Floats = (one_way + one_way.T) / 2
    return np.where(np.isnan(mean), np.fmin(one_way, one_way.T), mean)


def infer_tree(sided: Floats) -> SwitchTree:
    """Infer the switches from the distances of (nearly) all pairs.

    The latency that a node adds to all its pairs is subtracted first, because a slow processor does not change a
    node's switch.

    Args:
        sided: [a, b] in seconds, NaN where not measured.

    Returns:
        The tree; without levels when all distances are alike. Nodes without any distance get -1.
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
    """Return the distances with unmeasured pairs filled in: the mean of the two nodes' median distances, which is
    neither near nor far."""
    np.fill_diagonal(distances, np.nan)
    usual = np.nanmedian(distances, axis=1)
    filled = np.where(np.isnan(distances), (usual[:, None] + usual[None, :]) / 2, distances)
    np.fill_diagonal(filled, 0.0)
    return filled


def _without_node_effects(distances: Floats) -> Floats:
    """Return the distances without the latency that each node adds to all its pairs, near and far.

    A node on a small switch has fewer near pairs, but its nearest and farthest are as far as those of other nodes.
    """
    n, made = len(distances), distances
    for _ in range(3):  # a slow node is among the farthest of all others until its excess is subtracted
        profiles = np.sort(made + np.diag(np.full(n, np.inf)), axis=1)[:, : n - 1]
        above = profiles - np.median(profiles, axis=0)
        near, far = above[:, :2].mean(axis=1), above[:, -max(2, n // 10) :].mean(axis=1)
        added = np.where(np.abs(near) < np.abs(far), near, far)
        made = np.maximum(made - added[:, None] - added[None, :], np.median(profiles) * 1e-3)
        np.fill_diagonal(made, 0.0)
    return made


def _cuts(distances: Floats) -> list[Ints]:
    """Return for each switch level, lowest first, the cluster number of each node."""
    # Imported here, because scipy takes a third of an agent's start and few agents need it.
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    tree = linkage(squareform(distances, checks=False), "average")
    heights = np.maximum(tree[:, 2], 1e-12)
    jumps = np.flatnonzero(heights[1:] > heights[:-1] * (1 + MIN_GAP / 2))
    levels: list[Ints] = []
    for jump in jumps:
        labels = fcluster(tree, float(np.sqrt(heights[jump] * heights[jump + 1])), "distance")
        count = int(labels.max())
        if not 1 < count <= len(labels) // 2:
            continue
        below = levels[-1] if levels else None
        if _is_level(distances, labels, below):
            levels.append(np.asarray(labels - 1, dtype=np.int_))
    return levels


def _is_level(distances: Floats, labels: Ints, below: Ints | None) -> bool:
    """Whether pairs across these clusters are clearly farther apart than pairs within them (and not within `below`)."""
    same = labels[:, None] == labels[None, :]
    np.fill_diagonal(same, False)
    if below is not None:
        same &= below[:, None] != below[None, :]
    other = labels[:, None] != labels[None, :]
    if not same.any():
        return False
    within, beyond = distances[same], distances[other]
    near, far = float(np.median(within)), float(np.median(beyond))
    # Half the width of the middle 68 %: a standard deviation that ignores outliers.
    low, high = np.quantile(within, [0.16, 0.84])
    return far >= near * (1 + MIN_GAP) and far - near >= MIN_SEPARATION * float(high - low) / 2


def declared_tree(paths: Sequence[Sequence[str]], source: str) -> SwitchTree:
    """Return the switches as Slurm or an earlier file declares them.

    Args:
        paths: for each node the switches above it, the highest first; empty for an undeclared node.
        source: where the paths come from: slurm, prior.
    """
    depth = min((len(path) for path in paths if path), default=0)
    levels = []
    for height in range(1, depth + 1):
        names = [path[-height] if path else None for path in paths]
        numbers = {name: number for number, name in enumerate(sorted({name for name in names if name is not None}))}
        if len(numbers) > 1:
            levels.append(np.array([-1 if name is None else numbers[name] for name in names], dtype=np.int_))
    return SwitchTree(tuple(levels), source)
