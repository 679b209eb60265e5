"""Retests suspected nodes and links: each with good partners, in quiet rounds, with good pairs to compare with.
Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.probe.measure.clusters import SwitchTree
from hpctrain.probe.measure.outcome import PairResult
from hpctrain.probe.measure.rounds import Pair, Round

RETEST_PARTNERS = 2
RETEST_REPEATS = 3
"""Number of measurements with each partner. Their median counts, so that one burst of other traffic decides nothing."""
PAIRS_AT_ONCE = 16
"""Most pairs of one round, suspects and good pairs together, so that the network is quiet."""
MAX_SUSPECTS = 64
MAX_LINKS = 16


@dataclass(frozen=True)
class RetestResult:
    """Performance of a node with its better partner, relative to good pairs in the same rounds."""

    sent: float
    received: float
    latency: float
    times: int
    """Number of measurements."""

    @property
    def bandwidth(self) -> float:
        """Relative bandwidth of the slower direction."""
        return min(self.sent, self.received)


def retest_nodes(suspects: Sequence[int], good: Sequence[int], tree: SwitchTree) -> list[Round]:
    """Return rounds in which each suspect measures with two good nodes, of the suspect's own leaf switch where there
    are some."""
    planned: list[Round] = []
    batch = max(1, min(PAIRS_AT_ONCE // 2, len(good) // 4 or 1))
    for start in range(0, len(suspects), batch):
        some = suspects[start : start + batch]
        for turn in range(RETEST_PARTNERS):
            pairs = _with_partners(some, good, tree, turn)
            planned += [Round(tuple(pairs), alone=True, purpose="retest")] * RETEST_REPEATS
    return planned


def retest_links(links: Sequence[Pair], good: Sequence[int], tree: SwitchTree) -> list[Round]:
    """Return rounds of suspected links with good pairs. No two suspected links of a round touch the same switch."""
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
) -> dict[str, RetestResult]:
    """Return the retest results of the suspects; a suspect that was not measured again is absent."""
    doubted = set(suspects)
    usual = _usual(results, doubted, set(links))
    retested: dict[str, RetestResult] = {}
    for name in suspects:
        by_partner: dict[str, list[tuple[float, float, float]]] = {}
        for seen in (result.seen_from(name) for result in results if name in (result.a, result.b)):
            figures = (seen.at_b.bytes_per_s, seen.at_a.bytes_per_s, seen.at_a.latency.p50)
            by_partner.setdefault(seen.b, []).append(figures)
        if usual is None or not by_partner:
            continue
        rate, latency = usual
        medians = [[statistics.median(column) for column in zip(*rows, strict=True)] for rows in by_partner.values()]
        retested[name] = RetestResult(
            sent=max(row[0] for row in medians) / rate,
            received=max(row[1] for row in medians) / rate,
            latency=min(row[2] for row in medians) / latency,
            times=sum(len(rows) for rows in by_partner.values()),
        )
    return retested


def retested_links(
    results: Sequence[PairResult], suspects: Sequence[str], links: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], tuple[float, float]]:
    """Return the bandwidth (first to second, back) of each suspected link, relative to good pairs in the same rounds.

    The best measurement counts: a bad cable is always slow, other traffic comes in bursts.
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
    """Return the suspects with their partners in round number `turn`, and good pairs of the remaining nodes."""
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
    """Return good pairs to compare with, about as many as `taken`, from free nodes. Where switches are known, the two
    nodes of a pair share a switch, because such pairs share no uplink with others."""
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
    """Return the median bandwidth and latency of the good pairs; None when there are none."""
    good = [
        result
        for result in results
        if not {result.a, result.b} & doubted and not {(result.a, result.b), (result.b, result.a)} & links
    ]
    rates = [end.bytes_per_s for result in good for end in (result.at_a, result.at_b)]
    latencies = [end.latency.p50 for result in good for end in (result.at_a, result.at_b)]
    return (float(np.median(rates)), float(np.median(latencies))) if rates else None
