"""Faults of devices: links, throttling, memory errors, and speed compared with their peers. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from hpctrain.base.units import format_si
from hpctrain.probe.faults.finding import ProbeFinding, make_finding
from hpctrain.records.topology.topology import Device, DeviceType, Node

SLOW_CUDA = 0.97
"""Share of the peers' median below which a device is slow. GPUs of one type differ by 1 or 2 %; CPUs by more, also
because of other processes."""
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
        most: share of the peers' median above which no device is slow, whatever its type.
    """
    places = [(node, device) for node in nodes for device in node.devices]
    told = [fault for check in CHECKS for fault in check(places)]
    return told + slow_devices(places, types, most)


def pcie_downshift(places: NodeDevices) -> list[ProbeFinding]:
    """Return PCIE_DOWNSHIFT faults: under load, fewer lanes or an older generation than both ends are capable of."""
    faults = []
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
            faults.append(make_finding(node.id, "exclude", "PCIE_DOWNSHIFT", text, evidence, fix))
    return faults


def p2p_disabled(places: NodeDevices) -> list[ProbeFinding]:
    """Return P2P_DISABLED faults: a device cannot read a neighbour's memory, though the same devices of other nodes
    can, or NVLink joins the two. Where no node can, it is no fault."""
    able = {(device.type, device.id, peer) for _, device in places for peer, word in device.p2p.items() if word == "ok"}
    faults = []
    for node, device in places:
        lost = [
            peer
            for peer, word in device.p2p.items()
            if word == "no" and ((device.type, device.id, peer) in able or peer in device.nvlink)
        ]
        if lost:
            text = f"{device.id} cannot reach the memory of {', '.join(sorted(lost))}"
            evidence = "the same devices of other nodes can, or NVLink joins these"
            fix = "ask the administrators to look at ACS and the IOMMU (NCCL_P2P_DISABLE=1 goes on without, slower)"
            faults.append(make_finding(node.id, "exclude", "P2P_DISABLED", text, evidence, fix))
    return faults


def nvlink_down(places: NodeDevices) -> list[ProbeFinding]:
    """Return NVLINK_DOWN faults: NVLink links that exist and are not up."""
    faults = []
    for node, device in places:
        down = {peer: link for peer, link in device.nvlink.items() if link.active < link.links}
        if down:
            text = f"{device.id}: " + ", ".join(
                f"{link.active} of {link.links} links to {peer} are up" for peer, link in sorted(down.items())
            )
            fix = "ask the administrators to look at the fabric manager and reset the GPUs; leave the node out"
            faults.append(make_finding(node.id, "exclude", "NVLINK_DOWN", text, "NVML's state of each link", fix))
    return faults


def throttled(places: NodeDevices) -> list[ProbeFinding]:
    """Return THROTTLED faults: clocks lowered by heat, a power brake or the hardware itself."""
    faults = []
    for node, device in places:
        held = [reason for reason in device.throttle_reasons if reason in _HELD_BACK]
        if held:
            drawn = f", at {device.power_w:.0f} W" if device.power_w is not None else ""
            text = f"{device.id} was held back under load: {', '.join(held)}{drawn}"
            fix = "ask the administrators to look at cooling and power of the node"
            faults.append(make_finding(node.id, "warn", "THROTTLED", text, "NVML's reasons, read under load", fix))
    return faults


def quota_reached(places: NodeDevices) -> list[ProbeFinding]:
    """Return THROTTLED faults: a CPU quota that stops this node's processor while most others run freely. Where a quota
    stops half of them or more, it is what the job was given."""
    held = [(node, device) for node, device in places if CPU_QUOTA in device.throttle_reasons]
    if 2 * len(held) >= len(places):
        return []
    evidence = "cpu.stat of its cgroup while it computed; most other nodes were not stopped"
    fix = "look at the CPU limit of its job or container (cpu.max, cpu.cfs_quota_us)"
    return [
        make_finding(node.id, "warn", "THROTTLED", f"{device.id} was stopped by a CPU quota under load", evidence, fix)
        for node, device in held
    ]


def broken_memory(places: NodeDevices) -> list[ProbeFinding]:
    """Return ECC_ERRORS faults: memory that lost data. The next error ends the training or corrupts it silently."""
    return [
        make_finding(
            node.id,
            "exclude",
            "ECC_ERRORS",
            f"{device.id} has {device.ecc_errors} uncorrectable memory errors"
            + (f", last Xid {device.xid}" if device.xid is not None else ""),
            "counted since the driver was loaded",
            "ask the administrators to reset or replace the GPU; leave the node out meanwhile",
        )
        for node, device in places
        if device.ecc_errors
    ]


def slow_devices(places: NodeDevices, types: dict[str, DeviceType], most: float = 1.0) -> list[ProbeFinding]:
    """Return SLOW_NODE faults: a figure of a device well below the median of the devices of its type.

    CPUs of nodes on the same machine are not compared: they share its cores and memory, and chance decides.
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
    faults = []
    for (kind, what, unit), values in groups.items():
        faults += list(_below(values, min(most, SLOW_CUDA if types[kind].kind == "cuda" else SLOW_CPU), what, unit))
    return faults


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
    """Return how the other devices of its type are linked, as the end of a sentence; empty when there are none."""
    others = Counter(
        (other.pcie.generation, other.pcie.width)
        for _, other in places
        if other is not device and other.type == device.type and other.pcie and other.pcie.under_load
    )
    if not others:
        return ""
    (generation, width), count = others.most_common(1)[0]
    return f"; {count} of {others.total()} others run Gen{generation} x{width}"


CHECKS: tuple[Callable[[NodeDevices], list[ProbeFinding]], ...] = (
    pcie_downshift,
    p2p_disabled,
    nvlink_down,
    throttled,
    quota_reached,
    broken_memory,
)
