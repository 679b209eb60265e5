"""What simultaneous messages share: network cards of nodes, and oversubscribed uplinks of switches.

A message from one node to another passes the card of its source and the card of its target. It also passes the uplink
of every cluster (the nodes behind one switch) that it leaves or enters. Cards and uplinks carry both directions at full
rate at the same time. A message alone gets the rate of its link. A card carries one message at this rate, and k
messages at a k-th of it each. If `oversubscription` of a cluster with n nodes is o, the uplink carries n/o messages at
this rate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.topology.topology import Topology

Port = tuple[str, str]
"""What messages share: ("card", name of a network card) or ("uplink", name of a cluster)."""
Load = dict[Port, float]
"""Port -> messages that pass it at the same time in each direction, as a multiple of those that it carries at the rate
of a link."""
DirectedLoad = dict[tuple[Port, bool], float]
"""(port, whether outward) -> messages that pass it at the same time in this direction, as in `Load`."""


class _Uplink(NamedTuple):
    port: Port
    members: frozenset[str]
    """The nodes of the cluster."""
    part: float
    """Share of the uplink's rate that a message at the rate of a link takes."""


class PassedPort(NamedTuple):
    """A port that a message passes."""

    port: Port
    part: float
    """What the message adds to the port's load."""
    outward: bool
    """Whether the message leaves the node or the cluster by the port; otherwise it enters."""


class SharedPorts:
    """Knows which cards and uplinks messages pass.

    A node has one card, unless the topology assigns its devices to several network cards (`nic` of a device): then each
    device sends and receives over its own card (rails).

    Args:
        topology: the topology with cards and clusters; None: each node has one card, and no uplink is oversubscribed.
    """

    def __init__(self, topology: Topology | None = None) -> None:
        self._rails: dict[DeviceId, str] = {}
        self._uplinks: dict[str, list[_Uplink]] = {}
        self._cards: dict[tuple[DeviceId, ...], tuple[str, ...]] = {}
        self._passed: dict[tuple[str, str], tuple[PassedPort, ...]] = {}
        self.most_cards = 1
        """The largest number of cards of a node."""
        for node in [] if topology is None else topology.nodes:
            cards = {device.nic for device in node.devices}
            if len(cards) > 1 and None not in cards:
                self._rails |= {DeviceId.of(node.id, device.id): f"{node.id}:{device.nic}" for device in node.devices}
                self.most_cards = max(self.most_cards, len(cards))
        for cluster in [] if topology is None else topology.fabric.clusters:
            ratio = min(cluster.oversubscription or 1.0, len(cluster.members))
            if ratio > 1:
                port = "uplink", cluster.id
                uplink = _Uplink(port, frozenset(cluster.members), ratio / len(cluster.members))
                for member in cluster.members:
                    self._uplinks.setdefault(member, []).append(uplink)

    def card(self, device_id: DeviceId) -> str:
        """Return the name of the network card over which a device sends and receives."""
        return self._rails.get(device_id, device_id.node) if self._rails else device_id.node

    def cards(self, device_ids: tuple[DeviceId, ...]) -> tuple[str, ...]:
        """Return the names of the devices' cards, in the order of the devices."""
        names = self._cards.get(device_ids)
        if names is None:
            names = self._cards[device_ids] = tuple(map(self.card, device_ids))
        return names

    def passed(self, source: DeviceId, target: DeviceId) -> tuple[PassedPort, ...]:
        """Return the ports that a message passes; () within a node."""
        if source.node == target.node:
            return ()
        cards = self.card(source), self.card(target)
        if (known := self._passed.get(cards)) is not None:
            return known
        ports = [PassedPort(("card", card), 1.0, outward) for card, outward in zip(cards, (True, False), strict=True)]
        for node, other, outward in ((source.node, target.node, True), (target.node, source.node, False)):
            for uplink in self._uplinks.get(node, ()):
                if other not in uplink.members:
                    ports.append(PassedPort(uplink.port, uplink.part, outward))
        self._passed[cards] = tuple(ports)
        return self._passed[cards]

    def ring_load(self, rings: Iterable[Sequence[DeviceId]]) -> Load:
        """Return the load of rings that run at the same time, which is the same in both directions. Each device of a
        ring sends to the next one.

        If several devices of a ring have cards of their own on a node, the ring uses these cards in equal parts, as
        NCCL does with several channels.
        """
        load: Load = {}
        hops: dict[tuple[str, str], tuple[DeviceId, DeviceId]] = {}
        counts: Counter[tuple[str, str]] = Counter()
        for ring in rings:
            for a, b in zip(ring, [*ring[1:], *ring[:1]], strict=True):
                if a.node != b.node:
                    hops[a.node, b.node] = a, b
                    counts[a.node, b.node] += 1
                    if self._rails:
                        cards = self._cards_by_node(ring)[a.node]
                        for card in cards:
                            load["card", card] = load.get(("card", card), 0.0) + 1 / len(cards)
        # A ring enters nodes and clusters as often as it leaves them.
        for nodes, count in counts.items():
            for port, part, outward in self.passed(*hops[nodes]):
                if outward and not (self._rails and port[0] == "card"):
                    load[port] = load.get(port, 0.0) + count * part
        return load

    def all_to_all_load(self, groups: Iterable[Sequence[DeviceId]]) -> Load:
        """Return the load of all-to-alls that run at the same time, in messages of rings: the bytes that pass a port,
        divided by those that one hop of a ring sends in a reduce-scatter of the same tensor.

        If k of a group's n devices are behind a port and each device has a tensor of B bytes, k·(n−k)/n·B bytes pass
        the port, and (n−1)/n·B bytes pass each hop of a ring.

        Args:
            groups: the devices of each all-to-all.
        """
        load: Load = {}
        for group in groups:
            n, nodes = len(group), Counter(device_id.node for device_id in group)
            behind: Counter[_Uplink] = Counter()
            for node, k in nodes.items():
                for uplink in self._uplinks.get(node, ()):
                    behind[uplink] += k
            parts = [(uplink.port, k, uplink.part) for uplink, k in behind.items()]
            for node, cards in self._cards_by_node(group).items():
                parts += [(("card", card), nodes[node], 1 / len(cards)) for card in cards]
            for port, k, part in parts:
                if k < n:
                    load[port] = load.get(port, 0.0) + part * k * (n - k) / (n - 1)
        return load

    def factor(self, load: Load, source: DeviceId, target: DeviceId) -> float:
        """Return the factor on beta of a message from `source` to `target` under this load; 1 within a node."""
        return max((load[passed.port] for passed in self.passed(source, target)), default=1.0)

    def _cards_by_node(self, device_ids: Sequence[DeviceId]) -> dict[str, tuple[str, ...]]:
        cards: dict[str, dict[str, None]] = {}
        for device_id in device_ids:
            cards.setdefault(device_id.node, {})[self.card(device_id)] = None
        return {node: tuple(names) for node, names in cards.items()}
