"""Which pairs to measure next when measuring all of them takes too long: groups that may still be one are compared."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt

from hpctrain.probe.measure.clusters import Floats, Ints, SwitchTree, infer_tree
from hpctrain.probe.measure.rounds import Pair

ROUNDS_SHARE_MAX = 0.5
"""Of the rounds of a full measurement; switches that are not found by then are not found by the rest either."""
COMPARISONS = 2
"""Far pairs between two groups before they count as different switches: one may have been held up."""

BIN = 0.01
"""Width of the bins of the histogram of latencies: 1 %."""
_SMOOTH = np.array([1.0, 2.0, 3.0, 2.0, 1.0])

Bools = npt.NDArray[np.bool_]


class SwitchGroups:
    """Nodes that are known to share a switch, because a chain of near pairs joins them."""

    def __init__(self, distances: Floats, alive: Bools) -> None:
        """
        Args:
            distances: [a, b] in seconds, NaN where not measured.
        """
        sided = distances.copy()
        sided[~alive] = np.nan
        sided[:, ~alive] = np.nan
        self.alive = alive
        self.latency = sided - _node_effects(sided)
        self.near_below = near_limit(self.latency)
        """Seconds below which a pair shares a switch; None where there is no gap to tell by."""
        # Here, because scipy is a third of an agent's start and few agents come this far.
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import connected_components

        near = np.isfinite(sided) & (self.latency < (self.near_below or 0.0))
        self.labels: Ints = connected_components(csr_array(near), directed=False)[1]
        """For each node the number of its group; a node without a near pair is a group of its own."""

    def unknown(self) -> Bools:
        """[a, b]: True where the groups of the two nodes have not been compared often enough."""
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
    """Seconds below which a pair shares a lowest switch: the valley after the lowest peak of the latencies' histogram.

    A peak with fewer than a thousandth of the pairs below the valley, or fewer than eight, is chance; a valley is at
    most half as high as the peaks on both sides. None: there is no valley.
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
    # From each place: the highest peak before it, and the highest after it.
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
    """A round in which many nodes meet one of a group that theirs was not compared with; empty when all were."""
    unknown = groups.unknown()
    order: list[int] = np.flatnonzero(unknown.any(axis=1)).tolist()
    rng.shuffle(order)
    free = np.ones(len(unknown), dtype=bool)
    asked: set[tuple[int, int]] = set()
    met: list[Pair] = []
    for a in order:
        for b in np.flatnonzero(unknown[a] & free) if free[a] else ():
            question = (int(groups.labels[a]), int(groups.labels[b]))
            # Two groups are compared once a round: the answer may make the next comparison needless.
            if question not in asked:
                asked |= {question, question[::-1]}
                met.append((min(a, int(b)), max(a, int(b))))
                free[a] = free[b] = False
                break
    return met


def sampled_tree(groups: SwitchGroups) -> SwitchTree:
    """The switches: the groups are the leaves, levels above come from the latencies between groups."""
    names, compact = np.unique(groups.labels[groups.alive], return_inverse=True)
    if groups.near_below is None or not 1 < len(names) <= groups.alive.sum() // 2:
        return SwitchTree()
    leaves = np.full(len(groups.labels), -1, dtype=np.int_)
    leaves[groups.alive] = compact
    between = np.full((len(names), len(names)), np.nan)
    rows, columns = np.nonzero(np.isfinite(groups.latency))
    values, at = groups.latency[rows, columns], (leaves[rows], leaves[columns])
    order = np.argsort(values)[::-1]
    between[at[0][order], at[1][order]] = values[order]  # of several, the smallest is written last
    above = [np.where(leaves >= 0, level[leaves], -1) for level in infer_tree(between).levels]
    return SwitchTree((leaves, *above))


def _node_effects(latency: Floats) -> Floats:
    """[a, b]: what the two nodes add to all their pairs: how far the upper quartile of a node lies above the usual one.

    The upper quartile is a far pair for every node; the median is not when there are two switches.
    """
    upper = np.full(len(latency), np.nan)
    measured = np.isfinite(latency).any(axis=1)
    if not measured.any():
        return np.zeros_like(latency)
    upper[measured] = np.nanquantile(latency[measured], 0.75, axis=1)
    added = np.nan_to_num(upper - np.nanmedian(upper))
    effects: Floats = added[:, None] + added[None, :]
    return effects
