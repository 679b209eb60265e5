"""Makes rounds of a probe: those that together measure every pair of nodes, those that show oversubscription, and
retests of suspects.

The module also computes the oversubscription and the results of retests from the measurements. Pure.

To show oversubscription, clusters of a switch level are matched in twos. First a single pair of nodes, one from each
cluster, measures. Then all members of one cluster send to the members of the other cluster at once. Random pairs would
load each uplink by chance and hide the oversubscription.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import numpy as np

from hpctrain.probe.measure.outcome import ContentionRound, PairResult
from hpctrain.probe.measure.settings import Mode, ProbeSettings
from hpctrain.probe.pair_selection.switches import Pair, SwitchTree

Purpose = Literal["pairs", "contention", "retest"]
ROUNDS_PER_LEVEL = 3
"""Number of rounds in which one pair of nodes measures for each two clusters of a switch level, and of rounds in which
all members of the two clusters do. Each round matches other clusters."""
MIN_MEMBERS = 2
"""Fewest living nodes of a cluster that is measured for oversubscription: a single node shares no uplink."""
OVERSUBSCRIBED_FROM = 1.5
"""Oversubscription from which the probe reports the fault OVERSUBSCRIBED. A smaller ratio can come from flows that hash
onto the same one of several equal uplinks."""
RETEST_PARTNERS = 2
"""Number of partners with which each suspected node measures again."""
RETEST_REPEATS = 3
"""Number of measurements of each pair in a retest. Their median counts for a node, their best for a link, so that one
burst of other traffic decides nothing."""
PAIRS_AT_ONCE = 16
"""Most pairs of one retest round, suspects and good pairs together, so that the network is quiet."""
MAX_SUSPECTS = 64
MAX_LINKS = 16


@dataclass(frozen=True)
class Round:
    """Pairs of nodes that measure at the same time, no node twice. A node is given by its index. The first node of a
    pair connects and sends first.

    `alone` says whether so few pairs measure that each has the network to itself, `purpose` what the measurements are
    for.
    """

    pairs: tuple[Pair, ...]
    alone: bool
    """Whether so few pairs measure that each has the network to itself."""
    purpose: Purpose = "pairs"
    """pairs: figures of links. contention: bandwidth of a switch level. retest: suspects, measured again with good
    partners."""


def rounds(n: int, seed: int, most: int | None = None) -> list[list[Pair]]:
    """Return rounds that together have every pair (a, b) of the nodes 0 to n-1 once, with a < b, no node twice in a
    round. There are n-1 rounds for even n and n rounds for odd n (circle method).

    The nodes are shuffled first: in the order of their names, all pairs of a round would cross the same uplinks of a
    fat tree at once. The same seed gives the same rounds.

    Args:
        most: largest number of rounds to return; None for all.
    """
    rng = random.Random(seed)
    circle: list[int | None] = list(range(n))
    rng.shuffle(circle)
    if n % 2:
        circle.append(None)  # the partner of None pauses
    schedule = []
    for _ in islice(range(len(circle) - 1), most):
        half = len(circle) // 2
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        met = [(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None]
        schedule.append(met)
        # The first node stays, the others move by one position.
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return schedule if n > 1 else []


def plan_rounds(n: int, settings: ProbeSettings) -> list[Round]:
    """Return the first rounds of a probe of `n` nodes: every pair in the mode full, otherwise as many rounds as the
    mode begins with (`health_rounds`, `sampled_rounds`).

    In the mode full with 4 to `isolated_up_to` nodes, rounds of a single pair, which measure each pair alone, come
    first. With two or three nodes every round has only one pair anyway.
    """
    begin: dict[Mode, int | None] = {
        "full": None,
        "health": settings.health_rounds,
        "sampled": settings.sampled_rounds,
    }
    met = rounds(n, settings.seed, begin[settings.mode])
    isolated = settings.mode == "full" and 3 < n <= settings.isolated_up_to
    alone = [Round((pair,), alone=True) for pairs in met for pair in pairs] if isolated else []
    # The first sender is drawn: if it were always the smaller number, the first switch would at first only send.
    rng = random.Random(settings.seed)
    drawn = [tuple(pair if rng.random() < 0.5 else pair[::-1] for pair in pairs) for pairs in met]
    return alone + [Round(pairs, alone=False) for pairs in drawn]


def contention_rounds(tree: SwitchTree, alive: Sequence[int], seed: int) -> list[Round]:
    """Return the rounds that show the oversubscription of each switch level. In each round, the clusters of the level
    are matched in twos. In up to `ROUNDS_PER_LEVEL` rounds, one pair of nodes measures for each two matched clusters;
    then all members of both clusters measure, in as many rounds.

    Args:
        alive: indexes of the living nodes.
    """
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
    """Return switch level (1 is the lowest) -> oversubscription: median bandwidth of a pair alone, divided by the mean
    bandwidth of a pair while all members send at once; at least 1.

    The ratio of a level includes the levels below it: a pair that crosses a spine also crosses two leaf switches. With
    fixed routes the ratio includes the loss when several flows take the same uplink. A level that was not measured is
    absent.

    Args:
        index: node -> its index in the tree.
        done: results of the contention rounds.
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
    """Return the highest switch level on which the two nodes of the pair are in different clusters, counted from 1 for
    the leaf switches; 0 if the nodes share a leaf switch.

    Args:
        index: node -> its index in the tree.
    """
    shared = int(tree.pair_levels[index[result.a], index[result.b]])
    return (shared or len(tree.levels) + 1) - 1


def _families(tree: SwitchTree, height: int, alive: Sequence[int], rng: random.Random) -> list[list[list[int]]]:
    """Return the clusters of switch level `height` as lists of living nodes in random order, grouped by the cluster
    above them.

    Only clusters of one group are matched with each other, because pairs across groups would cross the level above as
    well. Clusters with fewer than `MIN_MEMBERS` nodes are left out.
    """
    families: dict[int, list[list[int]]] = {}
    for nodes in tree.members(height, alive):
        family = families.setdefault(int(tree.levels[height][nodes[0]]) if height < len(tree.levels) else 0, [])
        if len(nodes) >= MIN_MEMBERS:
            family.append(nodes)
    for nodes in (nodes for family in families.values() for nodes in family):
        rng.shuffle(nodes)
    return list(families.values())


def _between(ones: Sequence[int], others: Sequence[int], alone: bool) -> list[Pair]:
    """Return pairs of a node of the cluster `ones` and a node of the cluster `others`: one pair if `alone`, else as
    many as the smaller cluster has nodes. All pairs begin in `ones`, so that one direction is fully loaded."""
    pairs = list(zip(ones, others, strict=False))
    return pairs[:1] if alone else pairs


@dataclass(frozen=True)
class NodePerformance:
    """Bandwidth and latency of one node as ratios. In the first measurement they are relative to the median of all
    nodes. In a retest they are relative to good pairs in the same rounds, and each figure is the median of the repeats
    with one partner: the one with which this median is best."""

    sent: float
    received: float
    latency: float
    times: int
    """Number of the node's measurements: one for each partner in the first measurement, one for each repeat with each
    partner in a retest."""

    @property
    def bandwidth(self) -> float:
        """The node's bandwidth in its slower direction, relative to other nodes (see the class): the smaller one of
        `sent` and `received`."""
        return min(self.sent, self.received)


def retest_nodes(suspects: Sequence[int], good: Sequence[int], tree: SwitchTree) -> list[Round]:
    """Return rounds in which each suspect measures again with `RETEST_PARTNERS` good nodes, below the suspect's own
    leaf switch where there are some. Good pairs measure in the same rounds, for comparison. Each round comes
    `RETEST_REPEATS` times.

    Args:
        suspects: indexes of the suspected nodes.
        good: indexes of the other living nodes.
    """
    planned: list[Round] = []
    batch = max(1, min(PAIRS_AT_ONCE // 2, len(good) // 4 or 1))
    for start in range(0, len(suspects), batch):
        some = suspects[start : start + batch]
        for turn in range(RETEST_PARTNERS):
            pairs = _with_partners(some, good, tree, turn)
            planned += [Round(tuple(pairs), alone=True, purpose="retest")] * RETEST_REPEATS
    return planned


def retest_links(links: Sequence[Pair], good: Sequence[int], tree: SwitchTree) -> list[Round]:
    """Return rounds in which suspected links measure again, together with good pairs for comparison. No two suspected
    links of a round touch the same node or switch.

    Args:
        links: suspected links, as pairs of node indexes.
        good: indexes of the living nodes that are not suspected.
    """
    planned: list[Round] = []
    remaining = list(links)
    while remaining:
        busy: set[tuple[int, int]] = set()
        some: list[Pair] = []
        for pair in remaining:
            used = {part for node in pair for part in ((-1, node), *_switches(node, tree))}
            if not busy & used and len(some) < PAIRS_AT_ONCE // 2:
                some.append(pair)
                busy |= used
        remaining = [pair for pair in remaining if pair not in some]
        pairs = some + _controls(some, good, tree)
        planned += [Round(tuple(pairs), alone=True, purpose="retest")] * RETEST_REPEATS
    return planned


def _switches(node: int, tree: SwitchTree) -> list[tuple[int, int]]:
    return [(height, int(labels[node])) for height, labels in enumerate(tree.levels)]


def retested_nodes(
    results: Sequence[PairResult], suspects: Sequence[str], links: Sequence[tuple[str, str]]
) -> dict[str, NodePerformance]:
    """Return suspect -> its bandwidth and latency in the retest as ratios to those of good pairs. A suspect that was
    not measured again is absent; without good pairs in the retest, every suspect is absent.

    Args:
        results: measurements of the retest rounds.
        links: suspected links; they do not count as good pairs.
    """
    doubted = set(suspects)
    usual = _usual(results, doubted, set(links))
    retested: dict[str, NodePerformance] = {}
    for name in suspects:
        by_partner: dict[str, list[tuple[float, float, float]]] = {}
        for seen in (result.seen_from(name) for result in results if name in (result.a, result.b)):
            figures = (seen.at_b.bytes_per_s, seen.at_a.bytes_per_s, seen.at_a.latency.p50)
            by_partner.setdefault(seen.b, []).append(figures)
        if usual is None or not by_partner:
            continue
        rate, latency = usual
        medians = [[statistics.median(column) for column in zip(*rows, strict=True)] for rows in by_partner.values()]
        retested[name] = NodePerformance(
            sent=max(row[0] for row in medians) / rate,
            received=max(row[1] for row in medians) / rate,
            latency=min(row[2] for row in medians) / latency,
            times=sum(len(rows) for rows in by_partner.values()),
        )
    return retested


def retested_links(
    results: Sequence[PairResult], suspects: Sequence[str], links: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], tuple[float, float]]:
    """Return link -> (bandwidth from its first node to its second, bandwidth back), both divided by the median
    bandwidth of the good pairs in the retest. A link that was not measured again is absent; without good pairs in the
    retest, every link is absent.

    The best measurement of a link counts: a bad cable is always slow, other traffic comes in bursts.

    Args:
        results: measurements of the retest rounds.
        suspects: suspected nodes; their pairs do not count as good pairs.
        links: the links to look up, which do not count as good pairs either.
    """
    usual = _usual(results, set(suspects), set(links))
    ratios = {}
    for pair in links:
        seen = [result.seen_from(pair[0]) for result in results if {result.a, result.b} == set(pair)]
        if seen and usual is not None:
            there, back = max(one.at_b.bytes_per_s for one in seen), max(one.at_a.bytes_per_s for one in seen)
            ratios[pair] = (there / usual[0], back / usual[0])
    return ratios


def _with_partners(some: Sequence[int], good: Sequence[int], tree: SwitchTree, turn: int) -> list[Pair]:
    """Return the pairs of a round: (suspect, partner) for each suspect, and pairs of the remaining good nodes for
    comparison. A suspect for which no good node is left gets no pair.

    Args:
        some: suspects of the round.
        good: nodes that are no suspects; each is in one pair at most.
        tree: known switches; a partner below the suspect's leaf switch is preferred.
        turn: 0 for the rounds with each suspect's first partner, 1 for those with the second.
    """
    free = list(good)
    met: list[Pair] = []
    for place, suspect in enumerate(some):
        leaf = tree.levels[0] if tree.levels else None
        choice = [node for node in free if leaf is not None and leaf[node] == leaf[suspect] >= 0] or free
        if not choice:
            break
        # Each turn takes another partner, also when there is only one suspect.
        partner = choice[(place + turn * (1 + len(choice) // 2)) % len(choice)]
        free.remove(partner)
        met.append((suspect, partner))
    return met + _controls(met, free, tree)


def _controls(taken: Sequence[Pair], good: Sequence[int], tree: SwitchTree) -> list[Pair]:
    """Return pairs of good nodes with which the pairs of `taken` are compared, about as many as `taken`. Their nodes
    are in `good` and in no pair of `taken`. Where switches are known, the two nodes of a pair share a leaf switch,
    because such pairs use no uplink.

    Args:
        taken: the round's pairs that measure again because one of their nodes, or their link, is suspected.
        good: indexes of the living nodes that are not suspected.
    """
    busy = {node for pair in taken for node in pair}
    free = [node for node in good if node not in busy]
    wanted = max(1, min(len(taken), PAIRS_AT_ONCE - len(taken)))
    if not tree.levels:
        return list(zip(free[: 2 * wanted : 2], free[1 : 2 * wanted : 2], strict=False))
    by_leaf: dict[int, list[int]] = {}
    for node in free:
        by_leaf.setdefault(int(tree.levels[0][node]), []).append(node)
    near = [(nodes[0], nodes[1]) for nodes in by_leaf.values() if len(nodes) > 1]
    return near[:wanted]


def _usual(results: Sequence[PairResult], doubted: set[str], links: set[tuple[str, str]]) -> tuple[float, float] | None:
    """Return the median bandwidth in bytes/s and the median latency in seconds of the good pairs: those that have no
    node in `doubted` and are not in `links`. None when there are none."""
    good = [
        result
        for result in results
        if not {result.a, result.b} & doubted and not {(result.a, result.b), (result.b, result.a)} & links
    ]
    rates = [end.bytes_per_s for result in good for end in (result.at_a, result.at_b)]
    latencies = [end.latency.p50 for result in good for end in (result.at_a, result.at_b)]
    return (float(np.median(rates)), float(np.median(latencies))) if rates else None
