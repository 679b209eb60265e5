"""Finds differences between two topologies: nodes, health, drivers, devices and links. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.topology.link import LinkFigures
from hpctrain.records.topology.link_cost import LinkCost
from hpctrain.records.topology.topology import Node, Topology

if TYPE_CHECKING:
    from hpctrain.records.topology.pair_matrix import PairMatrix

Group = Literal["nodes", "health", "drivers", "devices", "links"]
GROUPS: tuple[Group, ...] = ("nodes", "health", "drivers", "devices", "links")
"""Groups of differences in the order in which they are printed."""

_MATRIX_FIGURES = (
    ("isolated_bytes_per_s", "bandwidth", "B/s"),
    ("bytes_per_s", "bandwidth under load", "B/s"),
    ("latency_p50_s", "latency", "s"),
)
"""(figure of the pair matrix, name of the figure in `Difference.what`, unit) for each figure that is compared."""
_VERDICTS = ("ok", "degraded", "unknown", "bad")
"""Health verdicts, from the best to the worst."""
Value = float | str | None
_Key = tuple[Group, tuple[str, ...], str, str]
"""(group, nodes, what, unit): fields of `Difference` that identify a value in both topologies."""
_Figure = tuple[str, str, float | None]
"""(name of a figure, unit, value); the value is None if the figure is absent."""


@dataclass(frozen=True)
class Difference:
    """One difference between two topologies: a value in the earlier one (`before`) and in the later one (`after`). None
    stands for a topology that does not have the value."""

    group: Group
    what: str
    """What differs: 'n1:cuda0 bf16', 'n1 -> n2 bandwidth', or the name of a node that only one topology has."""
    unit: str
    """Unit of the values; '' if they are not figures."""
    before: Value
    after: Value
    better: bool | None = None
    """Whether the later value is better than the earlier one; None if that is unknown, as for a driver or for a figure
    that one topology does not have."""
    nodes: tuple[str, ...] = ()
    """The node that differs, or the two nodes of a link that differs; empty for a link class."""

    @property
    def ratio(self) -> float | None:
        """Return the later value divided by the earlier one; None if a value is absent or is a text, or if the earlier
        value is 0."""
        before, after = self.before, self.after
        if isinstance(before, str) or isinstance(after, str) or not before or after is None:
            return None
        return after / before


def differences(before: Topology, after: Topology, tolerance: float) -> list[Difference]:
    """Return the differences between two topologies, in the order of their groups (`GROUPS`). A figure differs if it
    changed by more than `tolerance` (0.1 is 10 %) of its value in `before`.

    A node that only one topology has is one difference: its devices and links are not listed.
    """
    old_names, new_names = {node.id for node in before.nodes}, {node.id for node in after.nodes}
    both = old_names & new_names
    gone, come = _ordered(before, old_names - both), _ordered(after, new_names - both)
    changes = [Difference("nodes", name, "", "there", None, nodes=(name,)) for name in gone]
    changes += [Difference("nodes", name, "", None, "there", nodes=(name,)) for name in come]
    if before.pairs is not None and after.pairs is not None:
        changes += _pair_differences(before.pairs, after.pairs, both, tolerance)
        # The matrices contain every pair that the files list as links.
        before, after = _without_links(before), _without_links(after)
    once = _pairs(before) ^ _pairs(after)
    old, new = dict(_values(before, both, once)), dict(_values(after, both, once))
    for key in dict.fromkeys([*old, *new]):
        difference = _difference(key, old.get(key), new.get(key))
        ratio = difference.ratio
        if abs(ratio - 1) > tolerance if ratio is not None else difference.before != difference.after:
            changes.append(difference)
    return sorted(changes, key=lambda difference: GROUPS.index(difference.group))


def _without_links(topology: Topology) -> Topology:
    return topology.model_copy(update={"fabric": topology.fabric.model_copy(update={"links": []})})


def _ordered(topology: Topology, names: set[str]) -> list[str]:
    return [node.id for node in topology.nodes if node.id in names]


def _difference(key: _Key, before: Value, after: Value) -> Difference:
    group, nodes, what, unit = key
    better = None
    if group == "health":
        better = _VERDICTS.index(str(after)) < _VERDICTS.index(str(before))
    elif isinstance(before, float | int) and isinstance(after, float | int):
        better = after < before if unit == "s" else after > before
    return Difference(group, what, unit, before, after, better, nodes)


def _pairs(topology: Topology) -> set[tuple[str, str]]:
    return {ends for link in topology.fabric.links for ends, _ in link.directions()}


def _values(topology: Topology, names: set[str], once: set[tuple[str, str]]) -> Iterator[tuple[_Key, Value]]:
    """Yield (key, value) for each value of a topology that is compared with another topology.

    Args:
        names: nodes that both topologies have; other nodes are left out.
        once: pairs (source, target) that only one of the topologies lists as a link. For such a pair, the figures that
            the planner uses are yielded, because they exist in both topologies, perhaps from a link class.
    """
    for node in topology.nodes:
        if node.id in names:
            yield ("health", (node.id,), node.id, ""), node.health.verdict
            yield from _of_devices(node)
    for entry in topology.fabric.classes:
        yield from _known("links", (), f"class {entry.id}", _of_cost(entry.alpha_s, entry.beta_s_per_byte, "bandwidth"))
    costs = LinkCost(topology)
    for source, target in sorted(pair for pair in once if set(pair) <= names):
        if cost := costs.find(source, target):
            figures = _of_cost(*cost, "bandwidth under load")
            yield from _known("links", (source, target), f"{source} -> {target}", figures)
    for link in topology.fabric.links:
        for (source, target), side in link.directions():
            if {source, target} <= names and (source, target) not in once:
                yield from _known("links", (link.a, link.b), f"{source} -> {target}", _of_direction(side))


def _known(group: Group, nodes: tuple[str, ...], name: str, figures: Iterable[_Figure]) -> Iterator[tuple[_Key, Value]]:
    """Yield (key, value) for each figure that is not absent. `group` and `nodes` go into the keys as they are. `name`
    says what the figures are of, and begins the key's `what`: 'n1:cuda0', 'n1 -> n2'."""
    for what, unit, value in figures:
        if value is not None:
            yield (group, nodes, f"{name} {what}", unit), value


def _of_cost(alpha: float, beta: float, what: str) -> list[_Figure]:
    return [("latency", "s", alpha), (what, "B/s", 1 / beta if beta > 0 else None)]


def _of_direction(side: LinkFigures) -> list[_Figure]:
    return [
        ("bandwidth", "B/s", side.isolated_bytes_per_s),
        ("bandwidth under load", "B/s", side.loaded_bytes_per_s),
        ("latency", "s", side.latency_s.p50 if side.latency_s else None),
    ]


def _of_devices(node: Node) -> Iterator[tuple[_Key, Value]]:
    for device in node.devices:
        place = DeviceId.of(node.id, device.id)
        yield ("devices", (node.id,), f"{place} type", ""), device.type
        if device.driver is not None:
            yield ("drivers", (node.id,), place, ""), device.driver
        figures: list[_Figure] = [(dtype, "FLOP/s", flops) for dtype, flops in device.flops.items()]
        figures += [("memory", "B", device.memory_bytes), ("memory bandwidth", "B/s", device.memory_bytes_per_s)]
        yield from _known("devices", (node.id,), place, figures)
    within: list[_Figure] = [("device to device", "B/s", node.intra_bytes_per_s)]
    within += [("device to device, alpha", "s", node.intra_alpha_s)]
    yield from _known("devices", (node.id,), node.id, within)


def _pair_differences(
    before: PairMatrix, after: PairMatrix, names: Collection[str], tolerance: float
) -> Iterator[Difference]:
    """Yield the differences between two pair matrices, among the nodes that both have (`names`).

    A million pairs as keys of a dictionary take a gigabyte. So arrays are compared, and only differences become
    objects.

    Args:
        tolerance: largest change of a figure, as a share of its value in `before`, that is no difference.
    """
    import numpy as np  # only for large clusters, as the matrices themselves

    both = [name for name in before.nodes if name in names]
    old_at = np.ix_(*[[before.index[name] for name in both]] * 2)
    new_at = np.ix_(*[[after.index[name] for name in both]] * 2)
    for figure, what, unit in _MATRIX_FIGURES:
        old, new = before[figure][old_at].astype(np.float64), after[figure][new_at].astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            differs = (np.abs(new / old - 1) > tolerance) | (np.isnan(old) != np.isnan(new))
        for row, column in zip(*(places.tolist() for places in np.nonzero(differs)), strict=True):
            ends = (both[row], both[column])
            values = (None if math.isnan(value) else float(value) for value in (old[row, column], new[row, column]))
            yield _difference(("links", ends, f"{ends[0]} -> {ends[1]} {what}", unit), *values)
