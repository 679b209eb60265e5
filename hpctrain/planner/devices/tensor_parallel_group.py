"""Units: the devices that hold one stage together, sharing each of its matrices (one device where tp is 1)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hpctrain.planner.devices.links import Links, message_s
from hpctrain.planner.devices.pool import Fleet, Worker
from hpctrain.records.topology.topology import CodecSeconds

SAME_SPEED = 0.15
"""Devices and links whose figures differ by less count as the same when orders are enumerated."""


class Figures(NamedTuple):
    """What a unit can do."""

    kind: str
    type: str
    tp: int
    flops: float
    bytes_per_s: float
    launch_s: float
    memory_bytes: float
    codec_s: CodecSeconds | None


@dataclass(frozen=True, eq=False)
class Unit:
    """`tp` devices that work in lockstep."""

    index: int
    workers: tuple[Worker, ...]

    @cached_property
    def flops(self) -> float:
        """FLOP/s of the slowest of its devices: the others wait for it."""
        return min(worker.flops for worker in self.workers)

    @cached_property
    def bytes_per_s(self) -> float:
        return min(worker.bytes_per_s for worker in self.workers)

    @cached_property
    def launch_s(self) -> float:
        return max(worker.launch_s for worker in self.workers)

    @cached_property
    def codec_s(self) -> CodecSeconds | None:
        """What compression takes on the slowest of its devices; None where one was not measured."""
        known = [worker.codec_s for worker in self.workers]
        return max((each for each in known if each), key=lambda each: each.power_sgd) if all(known) else None

    @cached_property
    def memory_bytes(self) -> float:
        """Memory of its smallest device; infinite where none was measured."""
        known = [worker.memory_bytes for worker in self.workers if worker.memory_bytes is not None]
        return min(known, default=float("inf"))

    @cached_property
    def places(self) -> tuple[str, ...]:
        return tuple(worker.place for worker in self.workers)

    @cached_property
    def figures(self) -> Figures:
        """Everything that decides how long it computes and what it holds, but for the links between its devices."""
        return Figures(
            self.kind, self.workers[0].type, len(self.workers), self.flops, self.bytes_per_s, self.launch_s,
            self.memory_bytes, self.codec_s,
        )  # fmt: skip

    @property
    def kind(self) -> str:
        return self.workers[0].kind


class Cells(tuple[tuple[Unit, ...], ...]):
    """cells[replica][pipeline rank]."""

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """[replica] -> a number; replicas of one have the same devices rank by rank, wherever these stand."""
        numbers: dict[tuple[Figures, ...], int] = {}
        return tuple(numbers.setdefault(tuple(unit.figures for unit in row), len(numbers)) for row in self)

    @cached_property
    def examples(self) -> tuple[int, ...]:
        """[number in `alike`] -> a replica of it."""
        found: dict[int, int] = {}
        for replica, number in enumerate(self.alike):
            found.setdefault(number, replica)
        return tuple(found.values())


def make_units(fleet: Fleet, tp: int) -> list[Unit]:
    """The fleet in groups of `tp` devices, each within a node; across nodes where every node has a single device.

    Devices of different types are never put together: the faster would wait for the slower in every block.
    """
    nodes = fleet.by_node()
    groups: list[tuple[Worker, ...]] = []
    if tp > 1 and all(len(workers) == 1 for workers in nodes.values()):
        groups = _groups(_near_each_other(fleet), tp)
    else:
        for workers in nodes.values():
            groups += _groups(workers, tp)
    return [Unit(index, group) for index, group in enumerate(groups)]


def alike_classes(units: list[Unit], links: Links, message_bytes: float, tolerance: float = SAME_SPEED) -> list[int]:
    """Class of each unit: exchanging two units of a class changes no figure by a larger part than `tolerance`.

    message_bytes: size of the message that links are compared at.
    """
    times = [[0.0 if a is b else message_s(links, a.places, b.places, message_bytes) for b in units] for a in units]
    classes: list[int] = []
    first: list[int] = []
    for index, unit in enumerate(units):
        for number, other in enumerate(first):
            if _same_device(unit, units[other], tolerance) and _same_links(times, index, other, tolerance):
                classes.append(number)
                break
        else:
            classes.append(len(first))
            first.append(index)
    return classes


def _groups(workers: list[Worker], tp: int) -> list[tuple[Worker, ...]]:
    found = []
    for kind in dict.fromkeys(worker.type for worker in workers):
        same = [worker for worker in workers if worker.type == kind]
        found += [tuple(same[start : start + tp]) for start in range(0, len(same) - tp + 1, tp)]
    return found


def _near_each_other(fleet: Fleet) -> list[Worker]:
    """The workers as a chain, each followed by the one that it reaches fastest among those left."""
    left = list(fleet.workers)
    chain = [left.pop(0)]
    while left:
        nearest = min(left, key=lambda worker: fleet.links.between(chain[-1].place, worker.place)[1])
        left.remove(nearest)
        chain.append(nearest)
    return chain


def _same_device(a: Unit, b: Unit, tolerance: float) -> bool:
    return a.workers[0].type == b.workers[0].type and all(
        _close(*pair, tolerance)
        for pair in (
            (a.flops, b.flops),
            (a.bytes_per_s, b.bytes_per_s),
            (a.memory_bytes, b.memory_bytes),
            (a.launch_s, b.launch_s),
        )
    )


def _same_links(times: list[list[float]], i: int, j: int, tolerance: float) -> bool:
    others = [k for k in range(len(times)) if k not in (i, j)]
    return _close(times[i][j], times[j][i], tolerance) and all(
        _close(times[i][k], times[j][k], tolerance) and _close(times[k][i], times[k][j], tolerance) for k in others
    )


def _close(a: float, b: float, tolerance: float) -> bool:
    return a == b or abs(a - b) <= tolerance * max(abs(a), abs(b))
