"""What a placement of units says about messages and sums, worked out once: nothing here depends on the cut, the
micro-batches or the schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, permutations

from hpctrain.planner.devices.links import Links, around, message_cost, node_of, rings_leaving
from hpctrain.planner.devices.tensor_parallel_group import Cells

MOST_NODES = 64
"""Nodes of a group whose pairs are all looked at."""

Hop = tuple[tuple[float, float], tuple[float, float]]
"""(alpha, beta) of a message to the next rank and of one back."""


@dataclass(frozen=True)
class Rings:
    """Rings of `size` devices that sum at the same time."""

    size: int
    costs: tuple[tuple[float, float, float], ...]
    """The unlike ones: (alpha, beta within nodes, beta between nodes times the rings that share a card)."""

    def sum_s(self, size_bytes: float, chunks: int) -> float:
        """All-reduce by the slowest ring, 2(n−1)(alpha + size/n·beta), while each rank sums `chunks` stages."""
        if self.size == 1:
            return 0.0
        part = size_bytes / self.size
        hop_s = max(a + max(within, chunks * between) * part for a, within, between in self.costs)
        return 2 * (self.size - 1) * hop_s


class Ground:
    """The links under a placement."""

    def __init__(self, cells: Cells, links: Links) -> None:
        self.cells = cells
        self.links = links
        self._shard_rings: dict[int, tuple[list[Rings], list[Rings]]] = {}
        self._copies: dict[tuple[int, bool], list[Rings]] = {}

    @cached_property
    def patterns(self) -> tuple[int, ...]:
        """[replica] -> number of its pattern; replicas of one have the same devices and the same links."""
        numbers: dict[tuple[int, tuple[Hop, ...]], int] = {}
        return tuple(
            numbers.setdefault((alike, self._hops(replica)), len(numbers))
            for replica, alike in enumerate(self.cells.alike)
        )

    @cached_property
    def examples(self) -> tuple[int, ...]:
        """[pattern] -> a replica of it."""
        found: dict[int, int] = {}
        for replica, pattern in enumerate(self.patterns):
            found.setdefault(pattern, replica)
        return tuple(found.values())

    def shard_rings(self, shards: int) -> tuple[list[Rings], list[Rings]]:
        """[pipeline rank] -> the rings of `shards` consecutive replicas, and those across such groups."""
        if shards not in self._shard_rings:
            own = [
                [places[at : at + shards] for places in column for at in range(0, len(places), shards)]
                for column in self._columns
            ]
            self._shard_rings[shards] = _rings(self.links, own), self.copies(shards)
        return self._shard_rings[shards]

    def copies(self, shards: int, pairs: bool = False) -> list[Rings]:
        """[pipeline rank] -> the rings across groups of `shards` consecutive replicas that share a state, one for each
        of a unit's devices; with 1, over all replicas.

        Args:
            pairs: with the links that messages from everyone to everyone cross.
        """
        if (shards, pairs) not in self._copies:
            across = [[places[at::shards] for places in column for at in range(shards)] for column in self._columns]
            self._copies[shards, pairs] = _rings(self.links, across, pairs)
        return self._copies[shards, pairs]

    @cached_property
    def slowest_alpha(self) -> float:
        """Of a ring through all devices."""
        places = [place for row in self.cells for unit in row for place in unit.places]
        return max((self.links.between(a, b)[0] for a, b in around(places)), default=0.0)

    @cached_property
    def _columns(self) -> list[list[tuple[str, ...]]]:
        return [list(zip(*(unit.places for unit in column), strict=True)) for column in zip(*self.cells, strict=True)]

    def _hops(self, replica: int) -> tuple[Hop, ...]:
        """To the next rank and back, with the way from the last rank to the first that interleaved stages take."""
        row = self.cells[replica]
        return tuple(
            (message_cost(self.links, a.places, b.places), message_cost(self.links, b.places, a.places))
            for a, b in pairwise((*row, row[0]))
            if a is not b
        )


def _rings(links: Links, by_rank: Sequence[Sequence[Sequence[str]]], pairs: bool = False) -> list[Rings]:
    every = [ring for rank in by_rank for ring in rank]
    leaving: Mapping[str, float] = _pairs_leaving(every) if pairs else rings_leaving(every)
    found = []
    for rings in by_rank:
        costs = set()
        # Rings through the same nodes cost the same.
        for places in {tuple(map(node_of, places)): places for places in rings}.values():
            alpha = within = between = 0.0
            for source, target in _crossed(places) if pairs else around(places):
                a, b = links.between(source, target)
                alpha = max(alpha, a)
                node = node_of(source)
                if node == node_of(target):
                    within = max(within, b)
                else:
                    between = max(between, b * leaving.get(node, 1))
            costs.add((alpha, within, between))
        found.append(Rings(len(rings[0]), tuple(sorted(costs))))
    return found


def _crossed(places: Sequence[str]) -> list[tuple[str, str]]:
    """The links that messages from everyone to everyone cross; of large groups those of a ring."""
    by_node = {node_of(place): place for place in places}
    if len(by_node) > MOST_NODES:
        return around(places)
    within = [(a, b) for a, b in around(places) if node_of(a) == node_of(b)]
    return [*within, *permutations(by_node.values(), 2)]


def _pairs_leaving(groups: Sequence[Sequence[str]]) -> dict[str, float]:
    """How many rings' bytes leave each node where groups send from everyone to everyone: of n places, k on a node,
    k·(n−k)/n of a message's bytes, where a ring has (n−1)/n."""
    count: dict[str, float] = {}
    for places in groups:
        n = len(places)
        for node, own in Counter(map(node_of, places)).items():
            if own < n:
                count[node] = count.get(node, 0.0) + own * (n - own) / (n - 1)
    return count
