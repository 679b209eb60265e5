"""What each level of switches carries when everyone uses it, pure: rounds that fill it, and the ratio they show.

Full rounds cannot tell: a random pairing loads each uplink by chance. Here the clusters of a level are matched two by
two, and all members of the one send to members of the other at once; one pair alone shows what there is without them.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import numpy as np

from hpctrain.probe.measure.clusters import SwitchTree
from hpctrain.probe.measure.outcome import ContentionRound, PairResult
from hpctrain.probe.measure.rounds import Pair, Round, rounds

ROUNDS_PER_LEVEL = 3
"""Of each kind; each matches other clusters."""
MIN_MEMBERS = 2
"""A cluster of one node has no uplink to share."""
OVERSUBSCRIBED_FROM = 1.5
"""Ratio from which it is worth saying; below, hashing of flows onto equal uplinks alone may cost as much."""


def contention_rounds(tree: SwitchTree, alive: Sequence[int], seed: int) -> list[Round]:
    """For each level, rounds with one pair for each two clusters, and rounds with all their members."""
    rng = random.Random(seed)
    planned: list[Round] = []
    for height in range(1, len(tree.levels) + 1):
        families = _families(tree, height, alive, rng)
        matches = [rounds(len(clusters), seed, ROUNDS_PER_LEVEL) for clusters in families]
        for alone in (True, False):
            for turn in range(ROUNDS_PER_LEVEL):
                pairs = [
                    pair
                    for clusters, schedule in zip(families, matches, strict=True)
                    for a, b in (schedule[turn] if turn < len(schedule) else [])
                    for pair in _between(clusters[a], clusters[b], alone)
                ]
                if pairs:
                    planned.append(Round(tuple(pairs), alone, "contention"))
    return planned


def oversubscription(tree: SwitchTree, index: dict[str, int], done: Sequence[ContentionRound]) -> dict[int, float]:
    """For each level, what a pair has alone over what it has when all members of its cluster leave the cluster.

    The ratio of a level holds those below it: who crosses a spine crosses two leaves as well. A level is absent when it
    was not measured. With fixed routes it also holds what is lost because several flows took one of several uplinks.
    """
    found: dict[int, float] = {}
    for height in range(1, len(tree.levels) + 1):
        alone, loaded = (_rates(tree, index, done, height, kind) for kind in (True, False))
        if alone and loaded:
            # The sum over a cluster is what its uplinks carry, however unevenly its flows share them.
            found[height] = max(1.0, statistics.median(alone) / statistics.fmean(loaded))
    return found


def _rates(
    tree: SwitchTree, index: dict[str, int], done: Sequence[ContentionRound], height: int, alone: bool
) -> list[float]:
    return [
        rate
        for step in done
        if step.alone == alone
        for result in step.results
        if _crossed(tree, index, result) == height
        for rate in (result.at_a.bytes_per_s, result.at_b.bytes_per_s)
    ]


def _crossed(tree: SwitchTree, index: dict[str, int], result: PairResult) -> int:
    """The highest level whose clusters this pair leaves."""
    shared = int(tree.pair_levels[index[result.a], index[result.b]])
    return (shared or len(tree.levels) + 1) - 1


def _families(tree: SwitchTree, height: int, alive: Sequence[int], rng: random.Random) -> list[list[list[int]]]:
    """Members of the clusters of this level, by the cluster above: only siblings are matched, or their flows would
    cross the level above as well."""
    labels = tree.levels[height - 1]
    above = tree.levels[height] if height < len(tree.levels) else np.zeros_like(labels)
    members: dict[int, dict[int, list[int]]] = {}
    for node in alive:
        if labels[node] >= 0:
            members.setdefault(int(above[node]), {}).setdefault(int(labels[node]), []).append(node)
    families = [[nodes for nodes in family.values() if len(nodes) >= MIN_MEMBERS] for family in members.values()]
    for nodes in (nodes for family in families for nodes in family):
        rng.shuffle(nodes)
    return families


def _between(ones: Sequence[int], others: Sequence[int], alone: bool) -> list[Pair]:
    """Pairs from one cluster to the other; all callers on one side, or each direction would be half empty."""
    pairs = list(zip(ones, others, strict=False))
    return pairs[:1] if alone else pairs
