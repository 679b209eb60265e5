"""How long messages and sums between devices take, from the alpha and beta of the links they cross."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hpctrain.base.errors import InputError
from hpctrain.records.link_cost import LinkCost


Hop = tuple[str, str]
"""From one 'node:device' to another."""


class Links:
    """Alpha and beta between devices; a missing figure is an error for the person, not a KeyError."""

    def __init__(self, costs: LinkCost, factor: float = 1.0) -> None:
        self._costs = costs
        self._factor = factor
        self._known: dict[tuple[str, str], tuple[float, float]] = {}

    def between(self, source: str, target: str) -> tuple[float, float]:
        """(alpha in seconds, beta in seconds per byte) between two 'node:device'.

        Raises:
            InputError: the topology says nothing about the pair.
        """
        cost = self._known.get((source, target))
        if cost is None:
            try:
                cost = self._costs.between(source, target)
            except KeyError:
                pair = " and ".join(sorted({node_of(source), node_of(target)}))
                raise InputError(
                    f"topology: fabric.links: no alpha_s and beta_s_per_byte between {pair}; run `hpctrain probe` again"
                ) from None
            cost = (cost[0] * self._factor, cost[1] * self._factor)
            self._known[source, target] = cost
        return cost

    def least(self) -> tuple[float, float]:
        """(alpha, beta) that no message between two nodes stays below."""
        alpha, beta = self._costs.least()
        return alpha * self._factor, beta * self._factor


def message_s(links: Links, sources: Sequence[str], targets: Sequence[str], size_bytes: float) -> float:
    """Every source sends `size_bytes` to its target at once; those that leave a node together share its bandwidth."""
    alpha, beta = message_cost(links, sources, targets)
    return alpha + beta * size_bytes


def message_cost(links: Links, sources: Sequence[str], targets: Sequence[str]) -> tuple[float, float]:
    """Alpha and beta of such messages."""
    if len(sources) == 1:
        return links.between(sources[0], targets[0])
    pairs = list(zip(sources, targets, strict=True))
    leaving = [node_of(source) for source, target in pairs if node_of(source) != node_of(target)]
    sharing = max((leaving.count(node) for node in leaving), default=1)
    costs = [links.between(source, target) for source, target in pairs]
    return max(alpha for alpha, _ in costs), max(beta for _, beta in costs) * sharing


class SumCost(NamedTuple):
    """A group of `size` devices that all-reduce: the slowest hops of the ring through all of them."""

    size: int
    alpha: float
    within: float
    """Beta within nodes."""
    between: float
    """Beta between nodes, times the rings that share a card."""
    nodes: int = 1
    """Of equally many of the devices each, where the sum may go node by node; else 1."""
    alpha_within: float = 0.0
    """Alpha within nodes."""

    def seconds(self, size_bytes: float, hop_s: float = 0.0, chunks: int = 1) -> float:
        """All-reduce of `size_bytes`: around one ring, 2(n−1)(alpha + size/n·beta), or, if that is faster and allowed,
        in each node and then between nodes, as NCCL's trees do.

        Args:
            hop_s: added to each hop's alpha by whoever starts it.
            chunks: sums that each device takes part in at the same time.
        """
        n = self.size
        beta = max(self.within, chunks * self.between)
        ring = 2 * (n - 1) * (self.alpha + hop_s + beta * size_bytes / n)
        if self.nodes == 1:
            return ring
        own, nodes = n // self.nodes, self.nodes
        inside = 2 * (own - 1) * (self.alpha_within + hop_s + self.within * size_bytes / own)
        outside = 2 * (nodes - 1) * (self.alpha + hop_s + chunks * self.between * size_bytes / nodes)
        return min(ring, inside + outside)


def sum_cost(
    links: Links, places: Sequence[str], sharing: Mapping[str, float], by_node: bool, hops: Sequence[Hop] | None = None
) -> SumCost:
    """What a group's sum crosses.

    Args:
        sharing: how many rings leave a node at the same time and divide its bandwidth; 1 where it is missing.
        by_node: whether sums may go node by node.
        hops: the links that count; left out, those of a ring.
    """
    alpha = within = between = alpha_within = 0.0
    for source, target in around(places) if hops is None else hops:
        a, b = links.between(source, target)
        alpha = max(alpha, a)
        node = node_of(source)
        if node == node_of(target):
            within, alpha_within = max(within, b), max(alpha_within, a)
        else:
            between = max(between, b * sharing.get(node, 1))
    counts = Counter(map(node_of, places))
    several = by_node and 1 < len(counts) < len(places) and len(set(counts.values())) == 1
    return SumCost(len(places), alpha, within, between, len(counts) if several else 1, alpha_within)


def sum_s(links: Links, places: Sequence[str], size_bytes: float, hop_s: float = 0.0, by_node: bool = False) -> float:
    """All-reduce of a group that has its links for itself; see `SumCost`."""
    if len(places) == 1:
        return 0.0
    return sum_cost(links, places, {}, by_node).seconds(size_bytes, hop_s)


def number_sum_s(alpha: float, devices: int) -> float:
    """All-reduce of a single number: 2·log2(n) messages of no size."""
    return 2 * math.ceil(math.log2(devices)) * alpha


def rings_leaving(rings: Sequence[Sequence[str]]) -> dict[str, int]:
    """How many of the rings cross the network card of each node."""
    count: dict[str, int] = {}
    for ring in rings:
        for node in {node_of(a) for a, b in around(ring) if node_of(a) != node_of(b)}:
            count[node] = count.get(node, 0) + 1
    return count


def around(places: Sequence[str]) -> list[Hop]:
    """The hops of a ring."""
    return list(zip(places, [*places[1:], *places[:1]], strict=True))


def node_of(place: str) -> str:
    """'node:device' -> 'node'."""
    return place.partition(":")[0]
