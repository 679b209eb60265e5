"""Chooses the next pairs to measure when measuring all takes too long: pairs of groups of nodes that may still share a
switch."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt

from hpctrain.probe.measure.clusters import Floats, Ints, SwitchTree, infer_tree
from hpctrain.probe.measure.rounds import Pair

ROUNDS_SHARE_MAX = 0.5
"""Most rounds of a sampled measurement, as a share of the rounds of a full one; more rounds find no further
switches."""
COMPARISONS = 2
"""Number of far pairs between two groups after which the groups count as different switches: a single pair may have
been delayed."""

BIN = 0.01
"""Width of the bins of the histogram of latencies: 1 %."""
_SMOOTH = np.array([1.0, 2.0, 3.0, 2.0, 1.0])

Bools = npt.NDArray[np.bool_]


class SwitchGroups:
    """Groups of nodes taken to share a switch: a chain of pairs with latencies below `near_below` links them."""

    def __init__(self, distances: Floats, alive: Bools) -> None:
        """Group the nodes by the measured distances.

        Args:
            distances: [a, b] in seconds, NaN where not measured.
        """
        sided = distances.copy()
        sided[~alive] = np.nan
        sided[:, ~alive] = np.nan
        self.alive = alive
        self.latency = sided - _node_effects(sided)
        self.near_below = near_limit(self.latency)
        """Seconds below which a pair shares a switch; None when the latencies have no gap."""
        # Imported here, because scipy takes a third of an agent's start and few agents need it.
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import connected_components

        near = np.isfinite(sided) & (self.latency < (self.near_below or 0.0))
        self.labels: Ints = connected_components(csr_array(near), directed=False)[1]
        """For each node the number of its group. A node without a near pair is alone in its group."""

    def unknown(self) -> Bools:
        """Return an array [a, b]: whether the groups of the two nodes have not been compared often enough."""
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

    The limit is the valley after the lowest peak of the histogram of latencies. A valley is at most half as high as the
    highest peaks on both sides, with at least a thousandth of the pairs, and at least eight, on each side.
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
    """Return a round of pairs whose groups were not compared often enough; empty when all groups were."""
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
    """Return the switches: groups are leaf switches, and levels above come from the latencies between groups."""
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
    """Return an array [a, b]: the latency in seconds that the two nodes add to all their pairs.

    A node adds the difference of its upper quartile to the median of all upper quartiles. The upper quartile is a far
    pair for every node; with two switches, the median is not.
    """
    upper = np.full(len(latency), np.nan)
    measured = np.isfinite(latency).any(axis=1)
    if not measured.any():
        return np.zeros_like(latency)
    upper[measured] = np.nanquantile(latency[measured], 0.75, axis=1)
    added = np.nan_to_num(upper - np.nanmedian(upper))
    effects: Floats = added[:, None] + added[None, :]
    return effects
