"""What changed between two topologies, pure: nodes that came and went, devices and links that differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpctrain.records.topology import Topology


@dataclass(frozen=True)
class Difference:
    """One thing that differs: a figure with both values, or a thing that only one file has (the other is None)."""

    what: str
    """'n1:cuda0 bf16', 'n1 -> n2 bandwidth'."""
    unit: str
    before: float | None
    after: float | None

    @property
    def ratio(self) -> float | None:
        """After over before, where both were measured."""
        return self.after / self.before if self.before and self.after is not None else None


def differences(before: Topology, after: Topology, tolerance: float) -> list[Difference]:
    """Figures that are in one file only, or differ by more than `tolerance` (0.1 is 10 %) of the earlier value."""
    old, new = dict(_figures(before)), dict(_figures(after))
    found = []
    for what, unit in dict.fromkeys([*old, *new]):
        difference = Difference(what, unit, old.get((what, unit)), new.get((what, unit)))
        ratio = difference.ratio
        if ratio is None or abs(ratio - 1) > tolerance:
            found.append(difference)
    return found


def _figures(topology: Topology) -> Iterator[tuple[tuple[str, str], float]]:
    for node in topology.nodes:
        for device in node.devices:
            place = f"{node.id}:{device.id}"
            for dtype, value in device.flops.items():
                yield (f"{place} {dtype}", "FLOP/s"), value
            if device.memory_bytes is not None:
                yield (f"{place} memory", "B"), device.memory_bytes
            if device.memory_bytes_per_s is not None:
                yield (f"{place} memory bandwidth", "B/s"), device.memory_bytes_per_s
    for link in topology.fabric.links:
        for source, target, figures in ((link.a, link.b, link.ab), (link.b, link.a, link.ba)):
            if figures.isolated_bytes_per_s is not None:
                yield (f"{source} -> {target} bandwidth", "B/s"), figures.isolated_bytes_per_s
            if figures.latency_s is not None:
                yield (f"{source} -> {target} latency", "s"), figures.latency_s.p50
