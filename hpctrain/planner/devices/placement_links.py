"""The links that a placement's messages and all-reduces cross.

They are computed once for each placement, because they do not depend on cut, micro-batches and schedule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise, permutations

from hpctrain.planner.devices.links import Links, message_alpha_beta, ring_hops, rings_crossing_nodes
from hpctrain.planner.devices.tensor_parallel_group import Placement, class_numbers, first_of_each
from hpctrain.records.format.node_name import DeviceId

MAX_PAIRED_NODES = 64
"""Largest number of nodes of an all-to-all whose links are all compared. With more nodes, the links of a ring stand in
for them.
"""

HopCost = tuple[tuple[float, float], tuple[float, float]]
"""(alpha, beta) of a message to the next pipeline rank, and (alpha, beta) of a message back, in s and s/byte."""


@dataclass(frozen=True)
class RingGroup:
    """Rings of `size` devices that all-reduce at the same time, and the costs of their links."""

    size: int
    costs: tuple[tuple[float, float, float], ...]
    """One entry for each distinct ring: (alpha, beta within nodes, beta between nodes), in s and s/byte, each the
    largest of the ring's links. The beta of a link between nodes is first multiplied by the number of rings whose
    messages leave the same node.
    """

    def all_reduce_s(self, size_bytes: float, chunks: int) -> float:
        """Return the seconds of the slowest ring: 2(n−1)(alpha + beta·b/n), with the n = `self.size` devices of a ring,
        b = `size_bytes`, and as beta the larger of the beta within nodes and `chunks` times the beta between nodes.

        Args:
            size_bytes: bytes that are summed.
            chunks: all-reduces that each rank runs at the same time, one for each of its stages; they share the links
                between nodes.
        """
        if self.size == 1:
            return 0.0
        part = size_bytes / self.size
        hop_s = max(a + max(within, chunks * between) * part for a, within, between in self.costs)
        return 2 * (self.size - 1) * hop_s


class PlacementLinks:
    """The links that the messages and all-reduces of one placement cross. Each result is computed once and kept. A
    result that needs a link about which the topology says nothing raises InputError."""

    def __init__(self, placement: Placement, links: Links) -> None:
        self.placement = placement
        self.links = links
        self.shard_ring_groups = cache(self._shard_ring_groups)
        self.replicate_ring_groups = cache(self._replicate_ring_groups)

    @cached_property
    def link_patterns(self) -> tuple[int, ...]:
        """[replica] -> number of its link pattern. Replicas with equal devices and equal links between their stages
        have the same number.
        """
        classes = self.placement.replica_classes
        return class_numbers((number, self._hops(replica)) for replica, number in enumerate(classes))

    @cached_property
    def representatives(self) -> tuple[int, ...]:
        """[number of a link pattern, as in `link_patterns`] -> the first replica with this pattern."""
        return first_of_each(self.link_patterns)

    def _shard_ring_groups(self, shards: int) -> tuple[list[RingGroup], list[RingGroup]]:
        """Return the rings within shard groups, and the rings across shard groups, each as [pipeline rank] -> rings.

        Args:
            shards: number of consecutive replicas that share a state (a shard group).
        """
        rings = [
            [device_ids[at : at + shards] for device_ids in column for at in range(0, len(device_ids), shards)]
            for column in self._columns
        ]
        return _ring_groups(self.links, rings), self.replicate_ring_groups(shards)

    def _replicate_ring_groups(self, shards: int, pairs: bool = False) -> list[RingGroup]:
        """Return [pipeline rank] -> rings across shard groups. Each ring joins the devices that hold the same part of a
        state.

        Args:
            shards: number of consecutive replicas that share a state (a shard group); with 1 the rings go over all
                replicas.
            pairs: use the links of an all-to-all instead of those of a ring.
        """
        across = [[device_ids[at::shards] for device_ids in column for at in range(shards)] for column in self._columns]
        return _ring_groups(self.links, across, pairs)

    @cached_property
    def slowest_alpha(self) -> float:
        """The largest alpha in seconds between neighbours in a ring through all devices of the placement, in the order
        of replicas, and within a replica in the order of pipeline ranks."""
        device_ids = [device_id for row in self.placement for unit in row for device_id in unit.device_ids]
        return max((self.links.between(a, b)[0] for a, b in ring_hops(device_ids)), default=0.0)

    @cached_property
    def _columns(self) -> list[list[tuple[DeviceId, ...]]]:
        return [
            list(zip(*(unit.device_ids for unit in column), strict=True))
            for column in zip(*self.placement, strict=True)
        ]

    def _hops(self, replica: int) -> tuple[HopCost, ...]:
        """Return the costs of messages between neighbouring pipeline ranks of a replica, rank by rank.

        They include the hop from the last rank to the first, which interleaved stages need. With one pipeline rank
        there are none.
        """
        row = self.placement[replica]
        return tuple(
            (
                message_alpha_beta(self.links, a.device_ids, b.device_ids),
                message_alpha_beta(self.links, b.device_ids, a.device_ids),
            )
            for a, b in pairwise((*row, row[0]))
            if a is not b
        )


def _ring_groups(links: Links, by_rank: Sequence[Sequence[Sequence[DeviceId]]], pairs: bool = False) -> list[RingGroup]:
    every = [ring for rank in by_rank for ring in rank]
    leaving: Mapping[str, float] = _pairs_leaving(every) if pairs else rings_crossing_nodes(every)
    groups = []
    for rings in by_rank:
        costs = set()
        # Rings through the same nodes have the same costs.
        for device_ids in {tuple(device_id.node for device_id in ring): ring for ring in rings}.values():
            alpha = within = between = 0.0
            for source, target in _crossed(device_ids) if pairs else ring_hops(device_ids):
                a, b = links.between(source, target)
                alpha = max(alpha, a)
                node = source.node
                if node == target.node:
                    within = max(within, b)
                else:
                    between = max(between, b * leaving.get(node, 1))
            costs.add((alpha, within, between))
        groups.append(RingGroup(len(rings[0]), tuple(sorted(costs))))
    return groups


def _crossed(device_ids: Sequence[DeviceId]) -> list[tuple[DeviceId, DeviceId]]:
    """Return the (source, target) pairs whose links decide the time of an all-to-all among devices.

    One device stands for each node: the pairs join it with the device of each other node, in both directions. Added to
    these pairs are the hops between devices of one node in the ring that joins all devices in the given order
    (`ring_hops`). For more than `MAX_PAIRED_NODES` nodes, the pairs are all hops of this ring instead.
    """
    by_node = {device_id.node: device_id for device_id in device_ids}
    if len(by_node) > MAX_PAIRED_NODES:
        return ring_hops(device_ids)
    within = [(a, b) for a, b in ring_hops(device_ids) if a.node == b.node]
    return [*within, *permutations(by_node.values(), 2)]


def _pairs_leaving(groups: Sequence[Sequence[DeviceId]]) -> dict[str, float]:
    """Return node -> bytes that leave the node in the all-to-alls of all groups, divided by the bytes that would leave
    the node in a reduce-scatter over one ring. A node whose groups lie wholly within it is absent.

    If k of a group's n devices are on a node and each device has a tensor of B bytes, k·(n−k)/n·B bytes leave the node
    in the all-to-all, and (n−1)/n·B bytes leave it over a ring.

    Args:
        groups: the devices of each all-to-all.
    """
    count: dict[str, float] = {}
    for device_ids in groups:
        n = len(device_ids)
        for node, ranks_here in Counter(device_id.node for device_id in device_ids).items():
            if ranks_here < n:
                count[node] = count.get(node, 0.0) + ranks_here * (n - ranks_here) / (n - 1)
    return count
