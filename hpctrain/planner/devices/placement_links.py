"""The links that a placement's messages and all-reduces cross.

They are computed once for each placement, because they do not depend on cut, micro-batches and schedule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise, permutations
from typing import NamedTuple

from hpctrain.base.collector import cached_method
from hpctrain.planner.devices.contention import DirectedLoad, Load
from hpctrain.planner.devices.links import Links, Route, ring_hops
from hpctrain.planner.devices.tensor_parallel_group import Placement, class_numbers, first_of_each
from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.plan.levels import consecutive_per_node

MAX_PAIRED_NODES = 64
"""Largest number of nodes of an all-to-all whose links are all compared. With more nodes, the links of a ring stand in
for them.
"""

HopCost = tuple[tuple[float, float], tuple[float, float]]
"""(alpha, beta) of a message to the next pipeline rank, and (alpha, beta) of a message back, in s and s/byte."""


class RingGroup(NamedTuple):
    """Groups of `size` devices, each of which runs a ring or an all-to-all at the same time, and the costs of their
    links."""

    size: int
    costs: tuple[tuple[float, float, float], ...]
    """One entry for each distinct group: (alpha, beta within nodes, beta between nodes), in s and s/byte, each the
    largest of the group's links. The beta of a link between nodes is first multiplied by the factor by which all groups
    together share cards and uplinks.
    """

    def all_reduce_s(self, size_bytes: float) -> float:
        """Return the seconds of an all-reduce in the slowest group: 2(n−1)(alpha + beta·b/n), with the n = `self.size`
        devices of a group, b = `size_bytes`, and as beta the larger of the beta within nodes and the beta between
        nodes.

        Args:
            size_bytes: bytes that are summed.
        """
        if self.size == 1:
            return 0.0
        part = size_bytes / self.size
        hop_s = max([a + max(within, between) * part for a, within, between in self.costs])
        return 2 * (self.size - 1) * hop_s


class SlowestRates(NamedTuple):
    """The rates of the slowest devices of a pipeline rank, each the worst of any replica."""

    flops: float
    """FLOP/s at the run's precision."""
    bytes_per_s: float
    """Bytes of memory read or written in a second."""
    launch_s: float
    """Seconds to start an operation."""


class PlacementLinks:
    """The links that the messages and all-reduces of one placement cross. Results are computed once and kept, except
    those of `end_ring_group`; arguments of kept results are given by position and have no defaults, so that equal calls
    are one key of the cache. A result that needs a link about which the topology says nothing raises InputError."""

    def __init__(self, placement: Placement, links: Links) -> None:
        self.placement = placement
        self.links = links

    @cached_property
    def link_patterns(self) -> tuple[int, ...]:
        """[replica] -> number of its link pattern. Replicas with equal devices and equal costs of their stage messages
        have the same number.
        """
        return class_numbers(zip(self.placement.replica_classes, self._hops, strict=True))

    @cached_property
    def representatives(self) -> tuple[int, ...]:
        """[number of a link pattern, as in `link_patterns`] -> the first replica with this pattern."""
        return first_of_each(self.link_patterns)

    @cached_property
    def slowest_rates(self) -> list[SlowestRates]:
        """[pipeline rank] -> the rates of its slowest devices in any replica."""
        columns = zip(*(self.placement[replica] for replica in self.representatives), strict=True)
        return [
            SlowestRates(
                min([unit.flops for unit in units]),
                min([unit.bytes_per_s for unit in units]),
                max([unit.launch_s for unit in units]),
            )
            for units in columns
        ]

    @cached_property
    def level_replicas(self) -> int:
        """What the function `level_replicas` of this module returns for the placement."""
        return level_replicas(self.placement)

    @cached_method
    def shard_ring_groups(self, shards: int, pairs: bool, /) -> list[RingGroup]:
        """Return [pipeline rank] -> rings within shard groups.

        Args:
            shards: number of consecutive replicas that share a state (a shard group).
            pairs: use the links of an all-to-all instead of those of a ring.
        """
        rings = [
            [device_ids[at : at + shards] for device_ids in column for at in range(0, len(device_ids), shards)]
            for column in self._columns
        ]
        return _ring_groups(self.links, rings, pairs)

    @cached_method
    def replicate_ring_groups(self, shards: int, pairs: bool, /) -> list[RingGroup]:
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

    def message_alpha_beta(self, replica: int, source: int, target: int) -> tuple[float, float]:
        """Return (alpha, beta), in s and s/byte, of a stage message of a replica from one pipeline rank to the next or
        the one before, while all other replicas send theirs.

        Args:
            source: pipeline rank that sends.
            target: another pipeline rank, next to `source`; the last rank is next to the first.
        """
        hops = self._hops[replica]
        return hops[source][0] if (source + 1) % len(hops) == target else hops[target][1]

    @cached_method
    def message_costs(self, replica: int, rank_of_stage: tuple[int, ...]) -> tuple[tuple[float, float], ...]:
        """Return [message, as in `lanes`] -> (alpha, beta) as in `message_alpha_beta`; (0, 0) within one pipeline rank.

        Args:
            rank_of_stage: [stage] -> its pipeline rank.
        """
        hops = list(pairwise(rank_of_stage))
        return tuple(
            self.message_alpha_beta(replica, a, b) if a != b else (0.0, 0.0)
            for a, b in [*hops, *((b, a) for a, b in hops)]
        )

    def end_ring_group(self, first: int, last: int) -> RingGroup:
        """Return the rings of two devices each between the pipeline ranks `first` and `last`, in all replicas, which
        all-reduce the gradient of a tied embedding at the same time.
        """
        pairs = [
            pair for row in self.placement for pair in zip(row[first].device_ids, row[last].device_ids, strict=True)
        ]
        (group,) = _ring_groups(self.links, [pairs])
        return group

    @cached_method
    def busiest_port_beta(self, rank_of_stage: tuple[int, ...]) -> float:
        """Return beta, in s/byte, such that beta times the bytes of one stage message is the time that the busiest
        network card or uplink needs, in one direction, for the messages of one micro-batch of each replica.

        Args:
            rank_of_stage: [stage] -> its pipeline rank.
        """
        pp = len(self.placement[0])
        # A port carries the messages of a hop once in each direction: forward in one, back in the other.
        counts = Counter(a if (a + 1) % pp == b else b for a, b in pairwise(rank_of_stage) if a != b)
        busy: Load = {}
        for rank, count in counts.items():
            for route in self._routes[rank]:
                for (port, _), part in route.load:
                    busy[port] = busy.get(port, 0.0) + count * part * route.beta
        return max(busy.values(), default=0.0)

    @cached_method
    def lanes(self, replica: int, rank_of_stage: tuple[int, ...]) -> tuple[int, ...]:
        """Return [message] -> its lane, for the messages that each stage sends to the next one, then those that each
        stage sends back. Messages that leave a pipeline rank's node follow each other; each message within a node has a
        lane of its own.

        Args:
            rank_of_stage: [stage] -> its pipeline rank.
        """
        row, hops = self.placement[replica], list(pairwise(rank_of_stage))
        return class_numbers(
            ("rank", a) if self.links.route(row[a].device_ids, row[b].device_ids).load else ("message", message)
            for message, (a, b) in enumerate([*hops, *((b, a) for a, b in hops)])
        )

    @cached_property
    def _routes(self) -> list[list[Route]]:
        """[pipeline rank][replica] -> route of messages to the next rank; from the last rank to the first one, which
        interleaved stages need. With one pipeline rank there are none.
        """
        pp = len(self.placement[0])
        return [
            [self.links.route(row[rank].device_ids, row[(rank + 1) % pp].device_ids) for row in self.placement]
            for rank in range(pp if pp > 1 else 0)
        ]

    @cached_property
    def _hop_loads(self) -> list[DirectedLoad]:
        """[pipeline rank] -> load of the messages of all replicas to the next rank."""
        loads: list[DirectedLoad] = []
        for routes in self._routes:
            load: DirectedLoad = {}
            for route in routes:
                for way, part in route.load:
                    load[way] = load.get(way, 0.0) + part
            loads.append(load)
        return loads

    @cached_property
    def _sum_loads(self) -> list[Load]:
        """[pipeline rank] -> load of the rings over all replicas of the rank."""
        return [self.links.ports.ring_load(rings) for rings in self._columns]

    @cached_method
    def factor_beside(self, replica: int, source: int, target: int, ranks: tuple[int, ...]) -> float:
        """Return by what factor a byte of a stage message takes longer while sums over the replicas pass: the load of
        the most loaded card or uplink that the message passes with these sums, divided by that without them.

        Args:
            source, target: pipeline ranks next to each other.
            ranks: pipeline ranks whose sums pass.
        """
        hop = source if (source + 1) % len(self._routes) == target else target
        route, load = self._routes[hop][replica], self._hop_loads[hop]
        both = {
            (port, outward): load[port, outward] + sum(self._sum_loads[rank].get(port, 0.0) for rank in ranks)
            for (port, outward), _ in route.load
        }
        return route.factor(both) / route.factor(load)

    @cached_method
    def ranks_beside(self, replica: int, source: int, target: int) -> tuple[int, ...]:
        """Return the pipeline ranks whose sums over the replicas make a stage message longer; arguments as in
        `factor_beside`."""
        ranks = range(len(self._routes))
        return tuple(rank for rank in ranks if self.factor_beside(replica, source, target, (rank,)) > 1.0)

    @cached_property
    def _hops(self) -> list[tuple[HopCost, ...]]:
        """[replica] -> the costs of messages between neighbouring pipeline ranks, rank by rank, as in `_routes`.

        The messages of all replicas between the same two ranks are sent at the same time. Messages back pass the same
        cards and uplinks in the other direction, so they share as much.
        """
        by_rank = []
        for rank, (routes, load) in enumerate(zip(self._routes, self._hop_loads, strict=True)):
            costs: dict[Route, HopCost] = {}
            for route, row in zip(routes, self.placement, strict=True):
                if route not in costs:
                    factor = route.factor(load)
                    back = self.links.route(row[(rank + 1) % len(row)].device_ids, row[rank].device_ids)
                    costs[route] = (route.alpha, route.beta * factor), (back.alpha, back.beta * factor)
            by_rank.append([costs[route] for route in routes])
        return list(zip(*by_rank, strict=True)) if by_rank else [()] * len(self.placement)


def level_replicas(placement: Placement) -> int:
    """Return the number of consecutive replicas that share a node, if gradients can be summed within nodes and then
    between them: equally many on each of several nodes; 1 if they cannot."""
    per_node = consecutive_per_node(
        [tuple(device_id.node for device_id in unit.device_ids) for unit in column]
        for column in zip(*placement, strict=True)
    )
    return per_node if per_node < len(placement) else 1


def _ring_groups(links: Links, by_rank: Sequence[Sequence[Sequence[DeviceId]]], pairs: bool = False) -> list[RingGroup]:
    every, ports = [ring for rank in by_rank for ring in rank], links.ports
    load = ports.all_to_all_load(every) if pairs else ports.ring_load(every)
    groups = []
    for rings in by_rank:
        costs = set()
        # Rings through the same cards have the same costs.
        for device_ids in {tuple(map(ports.card, ring)): ring for ring in rings}.values():
            alpha = within = between = 0.0
            for source, target in _crossed(device_ids) if pairs else ring_hops(device_ids):
                a, b = links.in_a_ring(source, target)
                alpha = max(alpha, a)
                if source.node == target.node:
                    within = max(within, b)
                else:
                    between = max(between, b * ports.factor(load, source, target))
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
