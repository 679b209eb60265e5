"""Infers from latencies which nodes share a switch, and checks declared switches against the latencies. Pure.

Where nearly all pairs are measured, the switches are clusters of average-linkage clustering, with a switch level
wherever the height of the merges jumps. Where measuring all pairs takes too long, nodes with a short latency between
them form groups, and the next pairs are chosen between groups that may still share a switch.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hpctrain.records.topology.pair_matrix import PairMatrix
from hpctrain.records.topology.topology import Topology

Pair = tuple[int, int]
Floats = npt.NDArray[np.floating]
Ints = npt.NDArray[np.int_]

MIN_NODES_FOR_TREE = 8
"""Fewest living nodes for which switches are inferred. With fewer, noise hides a switch, and the topology lists every
pair anyway."""
MIN_GAP = 0.10
"""Least latency that a switch level adds, as a share of the latency within the level's clusters."""
MIN_SEPARATION = 3.0
"""Least latency that a switch level adds, in standard deviations of the latencies within the level's clusters."""
ROUNDS_SHARE_MAX = 0.5
"""Most rounds of the mode sampled, as a share of the rounds of the mode full. More rounds find no further switches."""
COMPARISONS = 2
"""Number of measured pairs between two groups after which they count as two switches, if none of the pairs is near. A
single pair may have been delayed."""
BIN = 0.01
"""Width of the bins of the histogram of latencies, in natural logarithms: 1 %."""
_SMOOTH = np.array([1.0, 2.0, 3.0, 2.0, 1.0])
Bools = npt.NDArray[np.bool_]
PriorSwitches = Mapping[str, Sequence[str]]
"""Node -> names of the switches above the node, the highest first."""


@dataclass(frozen=True)
class SwitchTree:
    """The switches above the nodes of a probe.

    `levels` has an array for each switch level, the leaf switches first. The array holds for each node the number of
    its cluster, -1 where it is unknown. `source` says where the switches come from: measured, slurm, prior.
    """

    levels: tuple[Ints, ...] = ()
    source: str = "measured"

    @cached_property
    def pair_levels(self) -> Ints:
        """Array [a, b]: level of the lowest cluster that contains both nodes (1 is a leaf switch), 0 where no known
        cluster does."""
        n = len(self.levels[0]) if self.levels else 0
        lowest = np.zeros((n, n), dtype=np.int_)
        for height in range(len(self.levels), 0, -1):
            labels = self.levels[height - 1]
            lowest[(labels[:, None] == labels[None, :]) & (labels >= 0)[:, None]] = height
        return lowest

    def members(self, height: int, nodes: Iterable[int]) -> list[list[int]]:
        """Return the given nodes grouped by their cluster on level `height` (1 is the lowest), without nodes whose
        cluster is unknown."""
        labels, clusters = self.levels[height - 1], dict[int, list[int]]()
        for node in nodes:
            if labels[node] >= 0:
                clusters.setdefault(int(labels[node]), []).append(node)
        return list(clusters.values())


def distances_of(matrix: PairMatrix) -> Floats:
    """Return an array [a, b]: latency between the nodes a and b in seconds, the same in both directions, NaN where not
    measured.

    The latency is the mean of both directions' minima and medians: the minimum depends on one sample, the median on
    other traffic.
    """
    one_way = (matrix["latency_min_s"].astype(np.float64) + matrix["latency_p50_s"]) / 2
    mean: Floats = (one_way + one_way.T) / 2
    return np.where(np.isnan(mean), np.fmin(one_way, one_way.T), mean)


def infer_tree(sided: Floats) -> SwitchTree:
    """Return the switches, inferred from the latencies of (nearly) all pairs. The tree has no levels when all latencies
    are alike, or when fewer than `MIN_NODES_FOR_TREE` nodes measured. Nodes without any latency get the cluster -1.

    The latency that a node adds to all its pairs is subtracted first, because a slow processor does not change a node's
    switch.

    Args:
        sided: one-way latency [a, b] in seconds, equal to that of [b, a]; NaN where not measured.
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
    """Return the latencies [a, b] with unmeasured pairs filled in: each gets the mean of the median latencies of its
    two nodes, which is neither near nor far. The diagonal is 0.

    Args:
        distances: latencies [a, b], NaN for unmeasured pairs; the diagonal is overwritten.
    """
    np.fill_diagonal(distances, np.nan)
    usual = np.nanmedian(distances, axis=1)
    filled = np.where(np.isnan(distances), (usual[:, None] + usual[None, :]) / 2, distances)
    np.fill_diagonal(filled, 0.0)
    return filled


def _without_node_effects(distances: Floats) -> Floats:
    """Return the latencies [a, b] without the latency that each node adds to all its pairs, near and far.

    A node's addition follows from its nearest or its farthest pairs, not from all: a node on a small switch has fewer
    near pairs, but its nearest and farthest are as far as those of other nodes.
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
    """Return for each switch level, the lowest first, an array [node] -> number of the node's cluster. `distances` are
    the latencies [a, b] between nodes, in seconds."""
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
    """Return whether the clusters form a switch level: whether pairs across clusters clearly have a higher latency than
    pairs within them. False if no pair lies within a cluster.

    Args:
        distances: [a, b] -> latency between the nodes a and b in seconds.
        labels: number of each node's cluster.
        below: number of each node's cluster on the level below, whose inner pairs are not counted; None for the lowest
            level.
    """
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
    """Return the switches as Slurm or a prior declares them. A level with only one switch is left out.

    Args:
        paths: for each node the names of the switches above it, the highest first; empty for an undeclared node.
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


class SwitchGroups:
    """Groups of nodes that share a leaf switch as far as latencies show: two nodes are in one group if a chain of pairs
    with latencies below `near_below` seconds links them."""

    def __init__(self, distances: Floats, alive: Bools) -> None:
        """Group the nodes by the measured latencies.

        Args:
            distances: latency [a, b] in seconds, NaN where not measured.
            alive: for each node whether it is alive; pairs with a node that is not alive are ignored.
        """
        sided = distances.copy()
        sided[~alive] = np.nan
        sided[:, ~alive] = np.nan
        self.alive = alive
        self.latency = sided - _node_effects(sided)
        self.near_below = near_limit(self.latency)
        """Seconds below which a pair shares a leaf switch; None when the latencies have no gap."""
        # Imported here, because scipy takes a third of an agent's start and few agents need it.
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import connected_components

        near = np.isfinite(sided) & (self.latency < (self.near_below or 0.0))
        self.labels: Ints = connected_components(csr_array(near), directed=False)[1]
        """For each node the number of its group. A node without a near pair is alone in its group."""

    def unknown(self) -> Bools:
        """Return an array [a, b]: True if the pair is not measured and fewer than `COMPARISONS` pairs are measured
        between the groups of its two nodes. False within a group and for lost nodes."""
        count = int(self.labels.max()) + 1
        compared = np.zeros((count, count), dtype=np.int_)
        rows, columns = np.nonzero(np.triu(np.isfinite(self.latency), 1))
        np.add.at(compared, (self.labels[rows], self.labels[columns]), 1)
        compared += compared.T
        np.fill_diagonal(compared, COMPARISONS)
        unknown: Bools = (compared < COMPARISONS)[np.ix_(self.labels, self.labels)] & ~np.isfinite(self.latency)
        unknown[~self.alive] = False
        unknown[:, ~self.alive] = False
        return unknown


def near_limit(latency: Floats) -> float | None:
    """Return the seconds below which a pair shares a leaf switch; None when the latencies show no such limit.

    The limit lies in a valley of the histogram of latencies, in the one with the shortest latencies. A valley is at
    most half as high as the highest peak on each of its two sides, and each side has at least a thousandth of the
    pairs, and at least eight.

    Args:
        latency: [a, b] in seconds, NaN where not measured.
    """
    values = latency[np.isfinite(latency)]
    values = values[values > 0]
    least = max(8, len(values) // 1000)
    if len(values) < 2 * least:
        return None
    logs = np.log(values)
    edges = np.arange(logs.min() - 3 * BIN, logs.max() + 3 * BIN, BIN)
    counts, _ = np.histogram(logs, edges)
    height = np.convolve(counts, _SMOOTH / _SMOOTH.sum(), "same")
    below = np.cumsum(counts)
    # For each bin: the highest peak up to it, and the highest from it on.
    before, after = np.maximum.accumulate(height), np.maximum.accumulate(height[::-1])[::-1]
    lowest = height <= np.minimum(before, after) / 2
    valley = lowest & (below >= least) & (len(values) - below >= least)
    places = np.flatnonzero(valley)
    if not len(places):
        return None
    run = places[: int(np.argmax(np.append(np.diff(places) > 1, True))) + 1]
    floor = run[height[run] <= height[run].min() * 1.001]
    return float(np.exp(edges[floor].mean() + BIN / 2))


def next_round(groups: SwitchGroups, rng: random.Random) -> list[Pair]:
    """Return a round with one pair of nodes for each two groups between which fewer than `COMPARISONS` pairs were
    measured, as far as free nodes are left. The list is empty when there are no such groups."""
    unknown = groups.unknown()
    order: list[int] = np.flatnonzero(unknown.any(axis=1)).tolist()
    rng.shuffle(order)
    free = np.ones(len(unknown), dtype=bool)
    asked: set[tuple[int, int]] = set()
    met: list[Pair] = []
    for a in order:
        for b in np.flatnonzero(unknown[a] & free) if free[a] else ():
            question = (int(groups.labels[a]), int(groups.labels[b]))
            # Two groups are compared once a round: the result may make another comparison needless.
            if question not in asked:
                asked |= {question, question[::-1]}
                met.append((min(a, int(b)), max(a, int(b))))
                free[a] = free[b] = False
                break
    return met


def sampled_tree(groups: SwitchGroups) -> SwitchTree:
    """Return the switches of a probe in the mode sampled. Groups are the leaf switches, and the levels above follow
    from the latencies between groups. The tree has no levels if the latencies show no leaf switches."""
    names, compact = np.unique(groups.labels[groups.alive], return_inverse=True)
    if groups.near_below is None or not 1 < len(names) <= groups.alive.sum() // 2:
        return SwitchTree()
    leaves = np.full(len(groups.labels), -1, dtype=np.int_)
    leaves[groups.alive] = compact
    between = np.full((len(names), len(names)), np.nan)
    rows, columns = np.nonzero(np.isfinite(groups.latency))
    values, at = groups.latency[rows, columns], (leaves[rows], leaves[columns])
    order = np.argsort(values)[::-1]
    between[at[0][order], at[1][order]] = values[order]  # the smallest latency of two groups is written last and stays
    above = [np.where(leaves >= 0, level[leaves], -1) for level in infer_tree(between).levels]
    return SwitchTree((leaves, *above))


def _node_effects(latency: Floats) -> Floats:
    """Return an array [a, b]: by how many seconds the latency of the pair (a, b) is longer because the nodes a and b
    are slow in all their pairs.

    A node adds the upper quartile of its latencies minus the median of all nodes' upper quartiles; the result is the
    sum of what a and b add. The upper quartile is a far pair for every node; with two switches, the median of a node's
    latencies is not.
    """
    upper = np.full(len(latency), np.nan)
    measured = np.isfinite(latency).any(axis=1)
    if not measured.any():
        return np.zeros_like(latency)
    upper[measured] = np.nanquantile(latency[measured], 0.75, axis=1)
    added = np.nan_to_num(upper - np.nanmedian(upper))
    effects: Floats = added[:, None] + added[None, :]
    return effects


def switches_of(topology: Topology) -> PriorSwitches:
    """Return node -> names of the switches above it, the highest first, from the topology file of an earlier probe or
    of another tool (`hpctrain topology import`)."""
    above: dict[str, list[str]] = {}
    for cluster in sorted(topology.fabric.clusters, key=lambda cluster: -cluster.level):
        for member in cluster.members:
            above.setdefault(member, []).append(cluster.id)
    return above


def contradicts(declared: SwitchTree, groups: SwitchGroups) -> bool:
    """Return whether latencies show that a node is not on its declared leaf switch: most of its measured pairs within
    that switch have a latency above the limit for pairs that share a leaf switch (`near_limit`).

    False when there is no such limit. Two declared switches with latencies below the limit between their nodes are no
    contradiction, because the declaration may be finer than latencies show.
    """
    if groups.near_below is None or not declared.levels:
        return False
    labels = declared.levels[0]
    measured = np.isfinite(groups.latency) & groups.alive[:, None] & groups.alive[None, :]
    inside = measured & (labels[:, None] == labels[None, :]) & (labels >= 0)[:, None]
    np.fill_diagonal(inside, False)
    far = inside & (groups.latency >= groups.near_below)
    elsewhere = 2 * far.sum(axis=1) > inside.sum(axis=1)
    return bool(elsewhere.any())
