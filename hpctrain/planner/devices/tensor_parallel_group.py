"""Tensor-parallel groups: the devices that hold a stage together and share its matrices; a single device if tp is 1."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

from hpctrain.planner.devices.links import Links, message_s, ring_contention
from hpctrain.planner.devices.pool import DevicePool, DeviceSpec
from hpctrain.records.topology.topology import CodecSeconds

Item = TypeVar("Item")
SPEED_TOLERANCE = 0.15
"""Devices and links whose figures differ by at most this share count as equal when orders of devices are enumerated."""


class GroupSpec(NamedTuple):
    """The figures that decide a tensor-parallel group's times and memory, except for the links between its devices.

    Each of the speeds, times and sizes is that of the group's slowest or smallest device.
    """

    kind: str
    """Kind of the devices: cpu or cuda."""
    type: str
    """Model of the first device, as the topology names it."""
    tp: int
    """Number of devices."""
    flops: float
    """Sustained FLOP/s at the run's precision."""
    bytes_per_s: float
    """Memory bandwidth in bytes/s."""
    launch_s: float
    """Launch time in seconds."""
    memory_bytes: float
    """Bytes of memory; infinite if no device's memory was measured."""
    codec_s: CodecSeconds | None
    """Seconds per number of each codec; None if a device was not measured."""


class TensorParallelGroup:
    """`tp` devices that hold a stage together and work in lockstep, so that the slowest device sets the pace.

    Args:
        index: number of the group among all groups, in the topology's order.
        contention: factor on beta between the group's nodes, because other groups use the same cards and uplinks.
    """

    def __init__(self, index: int, devices: tuple[DeviceSpec, ...], contention: float = 1.0) -> None:
        self.index, self.devices, self.contention = index, devices, contention
        self.device_ids = tuple(device.device_id for device in devices)
        self.kind, self.node = devices[0].kind, devices[0].node
        self.spans_nodes = any(device.node != self.node for device in devices)
        self.flops = min(device.flops for device in devices)
        """FLOP/s of the slowest device; the others wait for it."""
        self.bytes_per_s = min(device.bytes_per_s for device in devices)
        self.launch_s = max(device.launch_s for device in devices)
        sizes = [device.memory_bytes for device in devices if device.memory_bytes is not None]
        self.memory_bytes = min(sizes, default=float("inf"))
        """Memory of the smallest device; infinite if none was measured."""
        rates = [device.codec_s for device in devices]
        slowest = max((rate for rate in rates if rate), key=lambda rate: rate.power_sgd, default=None)
        self.codec_s = slowest if all(rates) else None
        """Seconds per number of each codec on the slowest device; None if a device was not measured."""
        self.group_spec = GroupSpec(
            self.kind, devices[0].type, len(devices), self.flops, self.bytes_per_s, self.launch_s, self.memory_bytes,
            self.codec_s,
        )  # fmt: skip
        """The figures that decide the group's times and memory, except for the links between its devices."""


def class_numbers(keys: Iterable[Hashable]) -> tuple[int, ...]:
    """Return a number for each key. Equal keys have equal numbers, which count up from 0 in the order of first
    occurrence.
    """
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(key, len(numbers)) for key in keys)


def nearest_chain(items: Iterable[Item], distance: Callable[[Item, Item], float]) -> list[Item]:
    """Return the items as a chain that begins with the first item. Each item is followed by the remaining item nearest
    to it.

    Args:
        distance: distance from an item to another.
    """
    first, *remaining = items
    chain = [first]
    while remaining:
        nearest = min(remaining, key=lambda item: distance(chain[-1], item))
        remaining.remove(nearest)
        chain.append(nearest)
    return chain


def first_of_each(keys: Iterable[Hashable]) -> tuple[int, ...]:
    """Return the index of the first occurrence of each distinct key, in the order of these indices."""
    first: dict[Hashable, int] = {}
    for index, key in enumerate(keys):
        first.setdefault(key, index)
    return tuple(first.values())


class Placement(tuple[tuple[TensorParallelGroup, ...], ...]):
    """Which tensor-parallel group takes which replica and pipeline rank: placement[replica][pipeline rank]."""

    @cached_property
    def replica_classes(self) -> tuple[int, ...]:
        """[replica] -> class. Replicas of one class have devices with equal figures (`GroupSpec`) at every pipeline
        rank, on any nodes.
        """
        return class_numbers(tuple(unit.group_spec for unit in row) for row in self)

    @cached_property
    def representatives(self) -> tuple[int, ...]:
        """[class of `replica_classes`] -> the first replica of the class."""
        return first_of_each(self.replica_classes)


def distinct_placements(placements: Iterable[Placement]) -> list[Placement]:
    """Return the placements without repetitions, in the given order."""
    by_units: dict[tuple[int, ...], Placement] = {}
    for placement in placements:
        by_units.setdefault(tuple(unit.index for row in placement for unit in row), placement)
    return list(by_units.values())


def make_tensor_parallel_groups(pool: DevicePool, tp: int) -> list[TensorParallelGroup]:
    """Return the pool's devices in groups of `tp` devices within a node, or across nodes if every node has one device.

    A group never mixes types of devices, because the faster device would wait for the slower one in every block.
    Devices that do not fill a group are left out.

    Raises:
        InputError: groups lie across nodes, and the topology says nothing about a link.
    """
    nodes = pool.by_node()
    groups: list[tuple[DeviceSpec, ...]] = []
    if tp > 1 and all(len(devices) == 1 for devices in nodes.values()):
        # Each device is followed by the remaining device with the smallest beta from it.
        chain = nearest_chain(pool.devices, lambda a, b: pool.links.between(a.device_id, b.device_id)[1])
        groups = _groups(chain, tp)
    else:
        for devices in nodes.values():
            groups += _groups(devices, tp)
    return sharing_groups(groups, pool.links)


def sharing_groups(groups: Sequence[tuple[DeviceSpec, ...]], links: Links) -> list[TensorParallelGroup]:
    """Return the tensor-parallel groups of these devices. Groups across nodes all send at the same time, so that they
    share cards and uplinks.

    Raises:
        InputError: groups lie across nodes, and the topology says nothing about a link.
    """
    contention = [1.0] * len(groups)
    if any(device.node != group[0].node for group in groups for device in group):
        contention = ring_contention(links, [[device.device_id for device in group] for group in groups])
    return [
        TensorParallelGroup(index, group, factor)
        for index, (group, factor) in enumerate(zip(groups, contention, strict=True))
    ]


def interchangeable_classes(
    units: list[TensorParallelGroup], links: Links, message_bytes: float, tolerance: float = SPEED_TOLERANCE
) -> list[int]:
    """Return [group] -> number of its class. Exchanging a group with the first group of its class changes no speed,
    memory or message time by a larger share than `tolerance`.

    Args:
        message_bytes: message size in bytes at which links are compared.

    Raises:
        InputError: the topology says nothing about a link.
    """
    times = [
        [0.0 if a is b else message_s(links, a.device_ids, b.device_ids, message_bytes) for b in units] for a in units
    ]
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


def _groups(devices: list[DeviceSpec], tp: int) -> list[tuple[DeviceSpec, ...]]:
    groups = []
    for kind in dict.fromkeys(device.type for device in devices):
        same = [device for device in devices if device.type == kind]
        groups += [tuple(same[start : start + tp]) for start in range(0, len(same) - tp + 1, tp)]
    return groups


def _same_device(a: TensorParallelGroup, b: TensorParallelGroup, tolerance: float) -> bool:
    figures = ((spec.flops, spec.bytes_per_s, spec.memory_bytes, spec.launch_s) for spec in (a, b))
    return a.group_spec.type == b.group_spec.type and all(
        _close(x, y, tolerance) for x, y in zip(*figures, strict=True)
    )


def _same_links(times: list[list[float]], i: int, j: int, tolerance: float) -> bool:
    others = [k for k in range(len(times)) if k not in (i, j)]
    return _close(times[i][j], times[j][i], tolerance) and all(
        _close(times[i][k], times[j][k], tolerance) and _close(times[k][i], times[k][j], tolerance) for k in others
    )


def _close(a: float, b: float, tolerance: float) -> bool:
    return a == b or abs(a - b) <= tolerance * max(abs(a), abs(b))
