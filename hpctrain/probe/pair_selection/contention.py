"""Measures the oversubscription of each switch level: makes rounds that load it, and computes the ratio from their
results. Pure.

Random pairs load each uplink by chance and do not show it. Here the clusters of a level are matched in twos: first one
pair of nodes measures alone across them, then all members of one cluster send to members of the other at once.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

from hpctrain.probe.measure.clusters import SwitchTree
from hpctrain.probe.measure.outcome import ContentionRound, PairResult
from hpctrain.probe.measure.rounds import Pair, Round, rounds

ROUNDS_PER_LEVEL = 3
"""Number of rounds with one pair, and of rounds with all members, for each level; each round matches other clusters."""
MIN_MEMBERS = 2
"""Fewest nodes of a cluster: a single node shares no uplink."""
OVERSUBSCRIBED_FROM = 1.5
"""Ratio from which a finding is made. Below, the hashing of flows onto equal uplinks may explain it."""


def contention_rounds(tree: SwitchTree, alive: Sequence[int], seed: int) -> list[Round]:
    """Return, for each switch level, rounds with one pair for each two clusters, and rounds with all members of both
    clusters."""
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
    """Return switch level -> oversubscription: bandwidth of a pair alone, divided by a pair's bandwidth while all
    members send at once.

    The ratio of a level includes the levels below it: a pair that crosses a spine also crosses two leaves. With fixed
    routes it includes the loss when several flows take the same uplink. A level that was not measured is absent.
    """
    ratios: dict[int, float] = {}
    for height in range(1, len(tree.levels) + 1):
        alone, loaded = (_rates(tree, index, done, height, kind) for kind in (True, False))
        if alone and loaded:
            # The mean, because the sum over a cluster is what its uplinks carry, however unevenly its flows share them.
            ratios[height] = max(1.0, statistics.median(alone) / statistics.fmean(loaded))
    return ratios


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
    """Return the highest level whose clusters this pair leaves."""
    shared = int(tree.pair_levels[index[result.a], index[result.b]])
    return (shared or len(tree.levels) + 1) - 1


def _families(tree: SwitchTree, height: int, alive: Sequence[int], rng: random.Random) -> list[list[list[int]]]:
    """Return the members of this level's clusters, grouped by the cluster above. Only clusters of one group are
    matched, because other flows would cross the level above as well."""
    families: dict[int, list[list[int]]] = {}
    for nodes in tree.members(height, alive):
        family = families.setdefault(int(tree.levels[height][nodes[0]]) if height < len(tree.levels) else 0, [])
        if len(nodes) >= MIN_MEMBERS:
            family.append(nodes)
    for nodes in (nodes for family in families.values() for nodes in family):
        rng.shuffle(nodes)
    return list(families.values())


def _between(ones: Sequence[int], others: Sequence[int], alone: bool) -> list[Pair]:
    """Return pairs of nodes from one cluster to the other. The first nodes of all pairs are in one cluster, so that one
    direction is fully loaded."""
    pairs = list(zip(ones, others, strict=False))
    return pairs[:1] if alone else pairs
