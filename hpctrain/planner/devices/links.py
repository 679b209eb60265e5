"""Seconds of messages and all-reduces between devices, from the alpha and beta of the links that they cross."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.base.errors import InputError
from hpctrain.planner.devices.contention import DirectedLoad, Port, SharedPorts
from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.topology.link_cost import LinkCost


@dataclass(frozen=True, eq=False)
class Route:
    """Links and ports that simultaneous messages between two tensor-parallel groups take."""

    alpha: float
    """Largest alpha of the links, in seconds."""
    beta: float
    """Largest beta of the links, in seconds per byte, of a message that shares nothing."""
    load: tuple[tuple[tuple[Port, bool], float], ...]
    """What these messages add to the load of ports, as items of a `DirectedLoad`; empty within a node."""

    def factor(self, load: DirectedLoad) -> float:
        """Return the factor on beta of the slowest message under the load of all messages that are sent at the same
        time, these included.
        """
        return max((load[way] for way, _ in self.load), default=1.0)


CPU_RING_FACTOR = 2.7
"""Seconds of a byte in a collective within a CPU node, divided by those in a message one way. Measured as CPU seconds
of the busiest process for each byte of a hop, gloo over loopback, 16 MiB, torch 2.13, with two and four devices:
all-reduce 2.9 and 2.7 times a message's, all-to-all 2.7 and 2.4 times."""


class Links:
    """Looks up alpha and beta between devices, and multiplies them by a factor.

    Args:
        costs: alpha and beta of each pair of nodes.
        factor: factor on every alpha and beta, which a profile of measured steps gives.
        ports: what messages share; None: one card a node.
    """

    def __init__(self, costs: LinkCost, factor: float = 1.0, ports: SharedPorts | None = None) -> None:
        self._costs = costs
        self.ports = ports or SharedPorts()
        self._factor = factor
        self._known: dict[tuple[str, str], tuple[float, float]] = {}
        self._routes: dict[tuple[tuple[str, ...], tuple[str, ...]], Route] = {}

    def between(self, source: DeviceId, target: DeviceId) -> tuple[float, float]:
        """Return (alpha in seconds, beta in seconds per byte) between two devices.

        Raises:
            InputError: the topology says nothing about the pair.
        """
        nodes = source.node, target.node
        cost = self._known.get(nodes)
        if cost is None:
            try:
                cost = self._costs.between(*nodes)
            except KeyError:
                pair = " and ".join(sorted({source.node, target.node}))
                raise InputError(
                    f"topology: fabric.links: no alpha_s and beta_s_per_byte between {pair}; run `hpctrain probe` again"
                ) from None
            cost = (cost[0] * self._factor, cost[1] * self._factor)
            self._known[nodes] = cost
        return cost

    def in_a_ring(self, source: DeviceId, target: DeviceId) -> tuple[float, float]:
        """Return (alpha in seconds, beta in seconds per byte) between two devices that both send and receive at the
        same time, as in a ring or an all-to-all.

        Network cards and links between GPUs carry both directions at full rate. Between CPU devices of a node, the
        cores that send are those that receive and add up, so beta is `CPU_RING_FACTOR` times that of a message.

        Raises:
            InputError: the topology says nothing about the pair.
        """
        alpha, beta = self.between(source, target)
        shares_cores = source.node == target.node and source.device.startswith("cpu")
        return alpha, beta * (CPU_RING_FACTOR if shares_cores else 1.0)

    def route(self, sources: tuple[DeviceId, ...], targets: tuple[DeviceId, ...]) -> Route:
        """Return the links and ports of simultaneous messages of equal size, one from every source to its target.

        Args:
            targets: the target of each source, in the order of `sources`.

        Raises:
            InputError: the topology says nothing about a link.
        """
        key = self.ports.cards(sources), self.ports.cards(targets)
        route = self._routes.get(key)
        if route is None:
            ways = Counter(zip(*key, strict=True))
            ends = dict(zip(zip(*key, strict=True), zip(sources, targets, strict=True), strict=True))
            costs = [self.between(*ends[way]) for way in ways]
            load: DirectedLoad = {}
            for way, count in ways.items():
                for port, part, outward in self.ports.passed(*ends[way]):
                    load[port, outward] = load.get((port, outward), 0.0) + count * part
            slowest = max(alpha for alpha, _ in costs), max(beta for _, beta in costs)
            route = Route(*slowest, tuple(load.items()))
            self._routes[key] = route
        return route

    def least(self) -> tuple[float, float]:
        """Return the smallest alpha in seconds and the smallest beta in seconds per byte over all pairs of nodes; the
        alpha and the beta may be those of different pairs.
        """
        alpha, beta = self._costs.least()
        return alpha * self._factor, beta * self._factor


def message_s(links: Links, sources: Sequence[DeviceId], targets: Sequence[DeviceId], size_bytes: float) -> float:
    """Return the seconds until every source has sent `size_bytes` to its target, if all start together and nobody else
    sends.

    Args:
        targets: the target of each source, in the order of `sources`.

    Raises:
        InputError: the topology says nothing about a link.
    """
    alpha, beta = message_alpha_beta(links, sources, targets)
    return alpha + beta * size_bytes


def message_alpha_beta(links: Links, sources: Sequence[DeviceId], targets: Sequence[DeviceId]) -> tuple[float, float]:
    """Return (alpha in seconds, beta in seconds per byte) of simultaneous messages from every source to its target, if
    nobody else sends.

    If each message has `size` bytes, the slowest one has arrived after `alpha + beta * size` seconds. Messages that
    leave or enter a node together share its network card, which makes beta larger.

    Args:
        targets: the target of each source, in the order of `sources`.

    Raises:
        InputError: the topology says nothing about a link.
    """
    if len(sources) == 1:
        return links.between(sources[0], targets[0])
    route = links.route(tuple(sources), tuple(targets))
    return route.alpha, route.beta * route.factor(dict(route.load))


def ring_all_reduce_s(
    links: Links,
    device_ids: Sequence[DeviceId],
    size_bytes: float,
    hop_s: float = 0.0,
    by_node: bool = False,
    contention: float = 1.0,
) -> float:
    """Return the seconds of a ring all-reduce: 2(n−1)(alpha + size/n·beta) for n devices, by the slowest link of the
    ring.

    Args:
        hop_s: seconds added to each hop's alpha.
        by_node: use rings within each node and then between nodes, if nodes have equally many of the devices and these
            rings are faster than one ring. NCCL's trees take about as long; they cross the network less often.
        contention: factor on beta between nodes, because other groups use the same cards and uplinks.

    Raises:
        InputError: the topology says nothing about a link.
    """
    n = len(device_ids)
    if n == 1:
        return 0.0
    alpha, beta, alpha_within, beta_within = 0.0, 0.0, 0.0, 0.0
    for source, target in ring_hops(device_ids):
        a, b = links.in_a_ring(source, target)
        if source.node == target.node:
            alpha_within, beta_within = max(alpha_within, a), max(beta_within, b)
        else:
            b *= contention
        alpha, beta = max(alpha, a), max(beta, b)
    ring = 2 * (n - 1) * (alpha + hop_s + beta * size_bytes / n)
    counts = Counter(device_id.node for device_id in device_ids)
    if not by_node or len(set(counts.values())) > 1 or len(counts) in (1, n):
        return ring
    nodes, per_node = len(counts), n // len(counts)
    inside = 2 * (per_node - 1) * (alpha_within + hop_s + beta_within * size_bytes / per_node)
    # All devices of a node together send as much as one ring between the nodes would.
    outside = 2 * (nodes - 1) * (alpha + hop_s + beta * size_bytes / nodes)
    return min(ring, inside + outside)


def ring_contention(links: Links, rings: Sequence[Sequence[DeviceId]]) -> list[float]:
    """Return, for each of the rings, the factor on beta between nodes if all rings run at the same time; 1 within a
    node."""
    load = links.ports.ring_load(rings)
    return [max(links.ports.factor(load, a, b) for a, b in ring_hops(ring)) for ring in rings]


def scalar_all_reduce_s(alpha: float, devices: int) -> float:
    """Return the seconds of the all-reduce of one number over n devices: 2·⌈log2(n)⌉ messages, each of which takes
    alpha.

    Args:
        alpha: seconds of a message of size 0.
    """
    return 2 * math.ceil(math.log2(devices)) * alpha


def ring_hops(device_ids: Sequence[DeviceId]) -> list[tuple[DeviceId, DeviceId]]:
    """Return the (source, target) pairs of a ring: each device sends to the next one, and the last one to the first."""
    return list(zip(device_ids, [*device_ids[1:], *device_ids[:1]], strict=True))
