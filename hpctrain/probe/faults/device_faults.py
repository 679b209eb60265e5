"""Finds faults of devices: links, throttling, memory errors, and speed compared with devices of the same type. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from hpctrain.base.units import format_si
from hpctrain.probe.faults.finding import ProbeFinding, make_finding
from hpctrain.records.topology.topology import Device, DeviceType, Node

SLOW_CUDA = 0.97
"""Share of the peers' median below which a device is slow. GPUs of one type differ by 1 or 2 %, CPUs by more."""
SLOW_CPU = 0.80
OUTLIER_DEVIATIONS = 4.0
_HELD_BACK = ("hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown")
"""Throttle reasons that are never normal. A software power cap is normal under load."""
CPU_QUOTA = "cpu_quota"
"""The only throttle reason of a CPU device."""

NodeDevices = Sequence[tuple[Node, Device]]


def device_faults(nodes: Sequence[Node], types: dict[str, DeviceType], most: float = 1.0) -> list[ProbeFinding]:
    """Return all faults of the devices of these nodes.

    Args:
        most: share of the peers' median above which no device counts as slow, whatever its type.
    """
    places = [(node, device) for node in nodes for device in node.devices]
    checked = [fault for check in CHECKS for fault in check(places)]
    return [*checked, *slow_devices(places, types, most)]


def pcie_downshift(places: NodeDevices) -> Iterator[ProbeFinding]:
    """Yield PCIE_DOWNSHIFT faults: under load, fewer lanes or an older generation than both ends are capable of."""
    for node, device in places:
        link = device.pcie
        if link is None or not link.under_load:
            continue  # an idle device lowers its link by itself
        if link.generation < link.generation_max or link.width < link.width_max:
            text = f"{device.id} runs PCIe Gen{link.generation} x{link.width}"
            evidence = (
                f"capable of Gen{link.generation_max} x{link.width_max}, read under load{_peer_words(places, device)}"
            )
            fix = "ask the administrators to reseat the card or its riser; leave the node out meanwhile"
            yield make_finding(node.id, "exclude", "PCIE_DOWNSHIFT", text, evidence, fix)


def p2p_disabled(places: NodeDevices) -> Iterator[ProbeFinding]:
    """Yield P2P_DISABLED faults: a device cannot read the memory of another device of its node, although the same two
    devices of other nodes can, or NVLink connects the two. Where no node can, it is no fault."""
    able = {(device.type, device.id, peer) for _, device in places for peer, word in device.p2p.items() if word == "ok"}
    for node, device in places:
        refused = [peer for peer, word in device.p2p.items() if word == "no"]
        lost = [peer for peer in refused if (device.type, device.id, peer) in able or peer in device.nvlink]
        if lost:
            text = f"{device.id} cannot reach the memory of {', '.join(sorted(lost))}"
            evidence = "the same devices of other nodes can, or NVLink joins these"
            fix = "ask the administrators to look at ACS and the IOMMU (NCCL_P2P_DISABLE=1 goes on without, slower)"
            yield make_finding(node.id, "exclude", "P2P_DISABLED", text, evidence, fix)


def nvlink_down(places: NodeDevices) -> Iterator[ProbeFinding]:
    """Yield NVLINK_DOWN faults: NVLink links that exist and are not up."""
    for node, device in places:
        down = {peer: link for peer, link in device.nvlink.items() if link.active < link.links}
        if down:
            text = f"{device.id}: " + ", ".join(
                f"{link.active} of {link.links} links to {peer} are up" for peer, link in sorted(down.items())
            )
            fix = "ask the administrators to look at the fabric manager and reset the GPUs; leave the node out"
            yield make_finding(node.id, "exclude", "NVLINK_DOWN", text, "NVML's state of each link", fix)


def throttled(places: NodeDevices) -> Iterator[ProbeFinding]:
    """Yield THROTTLED faults: clocks lowered by heat, a power brake or the hardware itself."""
    for node, device in places:
        reasons = [reason for reason in device.throttle_reasons if reason in _HELD_BACK]
        if reasons:
            drawn = f", at {device.power_w:.0f} W" if device.power_w is not None else ""
            text = f"{device.id} was held back under load: {', '.join(reasons)}{drawn}"
            fix = "ask the administrators to look at cooling and power of the node"
            yield make_finding(node.id, "warn", "THROTTLED", text, "NVML's reasons, read under load", fix)


def quota_reached(places: NodeDevices) -> Iterator[ProbeFinding]:
    """Yield THROTTLED faults: a CPU quota that stops this node's processor while most others run freely. Where a quota
    stops half of the nodes or more, it is the job's normal limit and no fault."""
    stopped = [(node, device) for node, device in places if CPU_QUOTA in device.throttle_reasons]
    evidence = "cpu.stat of its cgroup while it computed; most other nodes were not stopped"
    fix = "look at the CPU limit of its job or container (cpu.max, cpu.cfs_quota_us)"
    for node, device in stopped if 2 * len(stopped) < len(places) else ():
        text = f"{device.id} was stopped by a CPU quota under load"
        yield make_finding(node.id, "warn", "THROTTLED", text, evidence, fix)


def broken_memory(places: NodeDevices) -> Iterator[ProbeFinding]:
    """Yield ECC_ERRORS faults: memory that lost data. The next error ends the training or corrupts it silently."""
    fix = "ask the administrators to reset or replace the GPU; leave the node out meanwhile"
    for node, device in places:
        if device.ecc_errors:
            text = f"{device.id} has {device.ecc_errors} uncorrectable memory errors"
            text += f", last Xid {device.xid}" if device.xid is not None else ""
            yield make_finding(node.id, "exclude", "ECC_ERRORS", text, "counted since the driver was loaded", fix)


def slow_devices(places: NodeDevices, types: dict[str, DeviceType], most: float = 1.0) -> Iterator[ProbeFinding]:
    """Yield SLOW_NODE faults: a figure of a device well below the median of the devices of its type.

    CPUs of virtual nodes on one machine are not compared: they share its cores and memory, so their figures differ by
    chance.
    """
    machines = Counter(
        node.host_facts.boot_id for node in {node.id: node for node, _ in places}.values() if node.host_facts
    )
    groups: dict[tuple[str, str, str], dict[tuple[str, str], float]] = {}
    for node, device in places:
        boot_id = node.host_facts.boot_id if node.host_facts else None
        if boot_id is not None and machines[boot_id] > 1 and types[device.type].kind == "cpu":
            continue
        for what, unit, value in _figures(device):
            groups.setdefault((device.type, what, unit), {})[node.id, device.id] = value
    for (kind, what, unit), values in groups.items():
        yield from _below(values, min(most, SLOW_CUDA if types[kind].kind == "cuda" else SLOW_CPU), what, unit)


def _below(values: dict[tuple[str, str], float], ratio: float, what: str, unit: str) -> Iterator[ProbeFinding]:
    if len(values) < 2:
        return  # nothing to compare with
    middle = statistics.median(values.values())
    # Two values are equally far from their median, so they give no spread.
    away = [abs(value - middle) for value in values.values()] if len(values) > 2 else [0.0]
    spread = 1.4826 * statistics.median(away)
    for (node, device), value in values.items():
        if value < ratio * middle and middle - value > OUTLIER_DEVIATIONS * spread:
            share = f"{value / middle:.0%} of the median {format_si(middle, unit)}"
            text = f"{device} {what} {format_si(value, unit)} is {share}"
            evidence = f"{len(values)} devices of its type"
            fix = "run `hpctrain probe` again; if it stays, tell the administrators, or let the plan give it less work"
            yield make_finding(node, "warn", "SLOW_NODE", text, evidence, fix)


def _figures(device: Device) -> Iterable[tuple[str, str, float]]:
    for dtype, value in device.flops.items():
        yield f"{dtype} matrix products", "FLOP/s", value
    if device.memory_bytes_per_s is not None:
        yield "memory bandwidth", "B/s", device.memory_bytes_per_s


def _peer_words(places: NodeDevices, device: Device) -> str:
    """Return how the other devices of the same type are linked, as the end of a sentence; empty when there are none."""
    others = Counter(
        (other.pcie.generation, other.pcie.width)
        for _, other in places
        if other is not device and other.type == device.type and other.pcie and other.pcie.under_load
    )
    if not others:
        return ""
    (generation, width), count = others.most_common(1)[0]
    return f"; {count} of {others.total()} others run Gen{generation} x{width}"


CHECKS: tuple[Callable[[NodeDevices], Iterator[ProbeFinding]], ...] = (
    pcie_downshift,
    p2p_disabled,
    nvlink_down,
    throttled,
    quota_reached,
    broken_memory,
)
