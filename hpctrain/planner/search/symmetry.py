"""Tensor-parallel groups and nodes that can change places without any effect on a step's predicted time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations

from hpctrain.planner.devices.links import Links, message_s
from hpctrain.planner.devices.tensor_parallel_group import Placement, TensorParallelGroup


class PlacementSymmetry:
    """Which tensor-parallel groups, and which whole nodes, are equal: exchanging two of them changes no figure of a
    device, no link, and nothing about the network cards and uplinks that messages share.

    Args:
        units: all groups, each with its number in this list as its `index`.
        links: the links between their devices.
        message_bytes: message size in bytes at which links are compared.

    Raises:
        InputError: the topology says nothing about a link.
    """

    def __init__(self, units: Sequence[TensorParallelGroup], links: Links, message_bytes: float) -> None:
        self._units, self._ports = units, links.ports
        self._times = [
            [0.0 if a is b else message_s(links, a.device_ids, b.device_ids, message_bytes) for b in units]
            for a in units
        ]
        self.classes: list[int] = []
        """[group] -> number of its class; the groups of a class are equal."""
        first: list[int] = []
        for index in range(len(units)):
            same = (number for number, other in enumerate(first) if self._is_symmetric({index: other, other: index}))
            self.classes.append(next(same, len(first)))
            if self.classes[-1] == len(first):
                first.append(index)
        self._exchanges: list[dict[int, int]] = []
        """For each two equal nodes, the exchange of their groups: class -> class that takes its place."""
        self.node_orders = 1
        """Number of orders of the nodes that differ only by exchanges of equal ones."""
        self._compare_nodes()

    def is_first_of_equals(self, placement: Placement) -> bool:
        """Return whether no placement that differs from this one by an exchange of two equal nodes, or of replicas,
        comes before it in the order of the classes of its groups, replica by replica."""
        rows = [[self.classes[unit.index] for unit in row] for row in placement]
        return all(
            rows <= sorted([exchange.get(number, number) for number in row] for row in rows)
            for exchange in self._exchanges
        )

    def _compare_nodes(self) -> None:
        by_node: dict[str, list[int]] = {}
        for unit in self._units:
            by_node.setdefault(unit.node, []).append(unit.index)
        equal = Counter[str]()
        for (_, one), (node, other) in combinations(by_node.items(), 2):
            both = dict(zip([*one, *other], [*other, *one], strict=True)) if len(one) == len(other) else None
            if both and self._is_symmetric(both):
                self._exchanges.append({self.classes[a]: self.classes[b] for a, b in both.items()})
                equal[node] += 1
        # The n-th of some equal nodes has n - 1 equal ones before it.
        for before in equal.values():
            self.node_orders *= before + 1

    def _is_symmetric(self, exchange: dict[int, int]) -> bool:
        """Return whether groups can take each other's place as the exchange says (group -> group), with the same
        predicted times."""
        units, times, ports = self._units, self._times, self._ports
        if any(units[a].group_spec != units[b].group_spec for a, b in exchange.items()):
            return False
        new = [exchange.get(index, index) for index in range(len(units))]
        cards = [ports.cards(unit.device_ids) for unit in units]
        for a, b in exchange.items():
            ways = zip(units[a].device_ids, units[b].device_ids, strict=True)
            if any(passed.port[0] == "uplink" for way in ways for passed in ports.passed(*way)):
                return False
            for other, moved in enumerate(new):
                if times[a][other] != times[b][moved] or times[other][a] != times[moved][b]:
                    return False
                if _shared(cards[a], cards[other]) != _shared(cards[b], cards[moved]):
                    return False
        return True


def _shared(a: tuple[str, ...], b: tuple[str, ...]) -> list[list[bool]]:
    """Return [device][device] -> whether two groups' devices use the same network card."""
    return [[one == other for other in b] for one in a]
