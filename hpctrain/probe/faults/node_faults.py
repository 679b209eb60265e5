"""Finds faults of nodes and their devices. Pure.

Faults of a node show in the facts that its operating system reports: interface, host name, MTU, clock, driver. Each
check takes all nodes, because most faults show only in comparison, and skips a node that does not report the fact.
Faults of a device show in its links, throttle reasons and memory errors, and in its speed compared with devices of the
same type.
"""

from __future__ import annotations

import ipaddress
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ClusterShell.NodeSet import NodeSet

from hpctrain.base.units import format_seconds, format_si
from hpctrain.records.topology.topology import Device, DeviceType, Node, Reason

Severity = Literal["note", "warn", "exclude", "refuse"]
CLOCK_SKEW_S = 0.5
"""Clock offset in seconds beyond which timestamps in two nodes' logs no longer give the order of events."""
_CLOCK_FIX = "tell the administrators that NTP or PTP is not running; the order of log lines cannot be trusted"
_RDMA = ("ib", "hsn")
"""Prefixes of interfaces that support RDMA."""
_LOCAL_ONLY = ("docker", "veth", "virbr", "br-", "cni", "flannel", "podman", "lxc")
"""Prefixes of interfaces that lead only to containers of the same machine."""
SLOW_CUDA = 0.97
"""Share of the median of its type below which a GPU is slow. GPUs of one type differ by 1 or 2 %."""
SLOW_CPU = 0.80
"""Share of the median of its type below which a CPU is slow. CPUs of one type differ more than GPUs."""
OUTLIER_DEVIATIONS = 4.0
"""Fewest robust standard deviations (1.4826 × the median absolute deviation) by which a slow device is below the
median."""
HELD_BACK = ("hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown")
"""Throttle reasons that are never normal. (A software power cap, which is not among them, is normal under load.)"""
CPU_QUOTA = "cpu_quota"
"""Throttle reason of a CPU device that a CPU quota stopped. A CPU device has no other throttle reasons."""
NodeDevices = Sequence[tuple[Node, Device]]
"""Pairs of a node and one of its devices, for all devices of all nodes."""


@dataclass(frozen=True)
class ProbeFinding:
    """A fault that a probe found, of a node or of the whole allocation, with its severity."""

    node: str | None
    """Name of the faulty node; None for a fault of the whole allocation."""
    severity: Severity
    """note: only to be known. warn: use the node, with a warning. exclude: go on without the node. refuse: do not go
    on."""
    reason: Reason


def make_finding(node: str | None, severity: Severity, code: str, text: str, evidence: str, fix: str) -> ProbeFinding:
    """Return a finding made from its parts.

    Args:
        node: name of the faulty node; None for a fault of the whole allocation.
        code: the fault code.
        text: one sentence with the numbers.
        evidence: what the figures were compared with, and how often.
        fix: what to do next, as an imperative.
    """
    return ProbeFinding(node, severity, Reason(code=code, text=text, evidence=evidence, fix=fix))


def host_faults(nodes: Sequence[Node]) -> list[ProbeFinding]:
    """Return all faults in the facts that the operating systems of these nodes report."""
    return [fault for check in HOST_CHECKS for fault in check(nodes)]


def wrong_interface(nodes: Sequence[Node]) -> Iterator[ProbeFinding]:
    """Yield WRONG_INTERFACE faults: a node is reached over a container bridge, or over another interface than at least
    three quarters of the nodes although it has their interface, too.
    """
    used = Counter(node.iface for node in nodes if node.iface)
    usual, count = used.most_common(1)[0] if used else ("", 0)
    for node in nodes:
        if node.iface is None:
            continue
        others = node.host_facts.interfaces if node.host_facts else {}
        if node.iface.startswith(_LOCAL_ONLY):
            why, evidence = f"is reached over {node.iface}, a bridge for containers", f"its address is {node.addr}"
        elif node.iface != usual and 4 * count >= 3 * sum(used.values()) and usual in others:
            why = f"is reached over {node.iface}, and has {usual} as well"
            evidence = f"{count} of {sum(used.values())} nodes are reached over {usual}"
        else:
            continue
        fix = f"set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to {usual}, or give --addr"
        if usual.startswith(_LOCAL_ONLY):
            fix = "give each node's address on the cluster's network with --addr"
        yield make_finding(node.id, "warn", "WRONG_INTERFACE", why, evidence, fix)


def loopback_hostname(nodes: Sequence[Node]) -> Iterator[ProbeFinding]:
    """Yield LOOPBACK_HOSTNAME faults: the host name of a node resolves to a loopback address, on which Gloo then
    listens, unreachable for other nodes."""
    for node in nodes:
        address = node.host_facts.hostname_resolves_to if node.host_facts else None
        if address is None or not _is_loopback(address):
            continue
        text = f"its host name {node.host or node.id} resolves to {address}"
        fix = "set GLOO_SOCKET_IFNAME" + (f"={node.iface}" if node.iface else " to the cluster's interface")
        evidence = f"the others reach it at {node.addr}; hpctrain sets the variable for its own workers"
        yield make_finding(node.id, "note", "LOOPBACK_HOSTNAME", text, evidence, fix)


def mtu_mismatch(nodes: Sequence[Node]) -> Iterator[ProbeFinding]:
    """Yield one MTU_MISMATCH fault of the allocation if the MTU differs between nodes: some nodes then send packets
    that are too large for others."""
    sizes = {node.id: node.host_facts.mtu.get(node.iface or "") for node in nodes if node.host_facts}
    groups = _groups({name: size for name, size in sizes.items() if size})
    if len(groups) < 2:
        return
    text = f"interfaces differ in MTU: {_listing(groups)}"
    fix = "ask the administrators for one MTU; until then name nodes of one kind with --nodelist"
    yield make_finding(None, "warn", "MTU_MISMATCH", text, f"{len(sizes)} nodes told theirs", fix)


def clock_skew(nodes: Sequence[Node]) -> Iterator[ProbeFinding]:
    """Yield CLOCK_SKEW faults: a node's clock differs by more than `CLOCK_SKEW_S` from the median of all nodes. With
    two nodes it is a fault of the allocation, because either clock may be wrong."""
    all_facts = [(node.id, node.host_facts) for node in nodes if node.host_facts]
    offsets = {name: facts.clock_offset_s for name, facts in all_facts if facts.clock_offset_s is not None}
    if len(offsets) == 2:
        # Either clock may be the wrong one: a fault of the allocation.
        (first, one), (second, other) = offsets.items()
        text = f"the clocks of {first} and {second} are {format_seconds(abs(other - one))} apart"
        if abs(other - one) > CLOCK_SKEW_S:
            yield make_finding(None, "warn", "CLOCK_SKEW", text, "their own round trips", _CLOCK_FIX)
        return
    middle = statistics.median(offsets.values()) if offsets else 0.0
    for name, offset in offsets.items():
        if abs(offset - middle) > CLOCK_SKEW_S:
            side = "ahead" if offset > middle else "behind"
            text = f"its clock is {format_seconds(abs(offset - middle))} {side}"
            yield make_finding(name, "warn", "CLOCK_SKEW", text, f"median of {len(offsets)} nodes", _CLOCK_FIX)


def mixed_drivers(nodes: Sequence[Node]) -> Iterator[ProbeFinding]:
    """Yield one MIXED_DRIVERS fault of the allocation if nodes have different versions of the GPU driver. It is a
    warning if the major versions differ, because these may not work together, else a note."""
    versions = {node.id: device.driver for node in nodes for device in node.devices[:1] if device.driver}
    groups = _groups(versions)
    if len(groups) < 2:
        return
    several = len({version.partition(".")[0] for version in groups}) > 1
    fix = "take nodes of one version with --nodelist or --constraint" if several else "nothing, if NCCL starts"
    text = f"{len(groups)} driver versions: {_listing(groups)}"
    evidence = f"{len(versions)} nodes told theirs"
    yield make_finding(None, "warn" if several else "note", "MIXED_DRIVERS", text, evidence, fix)


def tcp_fallback(nodes: Sequence[Node]) -> Iterator[ProbeFinding]:
    """Yield TCP_FALLBACK faults: a node has no InfiniBand or Slingshot interface that is up, while at least three
    quarters of all nodes have one, so NCCL uses TCP with this node. The probe itself measures over TCP, so its
    bandwidths do not show this fault."""
    fast = {
        node.id: any(name.startswith(_RDMA) and addresses for name, addresses in node.host_facts.interfaces.items())
        for node in nodes
        if node.host_facts and node.host_facts.interfaces
    }
    able = sum(fast.values())
    if 4 * able < 3 * len(fast):
        return
    fix = "leave it out, or ask the administrators to bring its link up (ibstat shows the state of the port)"
    text = "has no InfiniBand or Slingshot interface that is up: NCCL falls back to TCP"
    for name in (name for name, is_fast in fast.items() if not is_fast):
        yield make_finding(name, "warn", "TCP_FALLBACK", text, f"{able} of {len(fast)} nodes have one", fix)


def interface_env(nodes: Sequence[Node]) -> dict[str, str]:
    """Return the variables GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME with the name of an interface that every node has,
    and that is neither loopback nor for containers; empty if there is none.

    Gloo takes one exact name. NCCL takes a prefix, so '=' asks for an exact match.
    """
    used = Counter(node.iface for node in nodes if node.iface)
    for name, _ in used.most_common():
        if all(name == node.iface or _has(node, name) for node in nodes) and not name.startswith(("lo", *_LOCAL_ONLY)):
            return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    return {}


def _has(node: Node, interface: str) -> bool:
    return bool(node.host_facts and node.host_facts.interfaces.get(interface))


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False  # no address: the connections that fail report it


def _groups(values: dict[str, int] | dict[str, str]) -> dict[str, list[str]]:
    """Return value -> names of the nodes with that value, the most frequent value first."""
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        groups.setdefault(str(value), []).append(name)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def _listing(groups: dict[str, list[str]]) -> str:
    return "; ".join(f"{value} on {NodeSet.fromlist(names)}" for value, names in groups.items())


HOST_CHECKS: tuple[Callable[[Sequence[Node]], Iterator[ProbeFinding]], ...] = (
    wrong_interface,
    loopback_hostname,
    mtu_mismatch,
    clock_skew,
    mixed_drivers,
    tcp_fallback,
)


def device_faults(nodes: Sequence[Node], types: dict[str, DeviceType], most: float = 1.0) -> list[ProbeFinding]:
    """Return all faults of the devices of these nodes.

    Args:
        types: name of a device type -> the type.
        most: a device never counts as slow if its figures are above this share of the medians of its type, whether it
            is a GPU or a CPU.
    """
    places = [(node, device) for node in nodes for device in node.devices]
    checked = [fault for check in DEVICE_CHECKS for fault in check(places)]
    return [*checked, *slow_devices(places, types, most)]


def pcie_downshift(places: NodeDevices) -> Iterator[ProbeFinding]:
    """Yield PCIE_DOWNSHIFT faults: under load, a device's PCIe link has fewer lanes or an older generation than both
    ends are capable of."""
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
    """Yield P2P_DISABLED faults: a device cannot read the memory of another device of its node, although NVLink
    connects both devices, or although on another node the device with the same type and name can read the same peer's
    memory.
    """
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
    """Yield NVLINK_DOWN faults: some of a device's NVLink links are not up."""
    for node, device in places:
        down = {peer: link for peer, link in device.nvlink.items() if link.active < link.links}
        if down:
            text = f"{device.id}: " + ", ".join(
                f"{link.active} of {link.links} links to {peer} are up" for peer, link in sorted(down.items())
            )
            fix = "ask the administrators to look at the fabric manager and reset the GPUs; leave the node out"
            yield make_finding(node.id, "exclude", "NVLINK_DOWN", text, "NVML's state of each link", fix)


def throttled(places: NodeDevices) -> Iterator[ProbeFinding]:
    """Yield THROTTLED faults: a GPU's clocks were lowered by heat, by a power brake or by the hardware itself."""
    for node, device in places:
        reasons = [reason for reason in device.throttle_reasons if reason in HELD_BACK]
        if reasons:
            drawn = f", at {device.power_w:.0f} W" if device.power_w is not None else ""
            text = f"{device.id} was held back under load: {', '.join(reasons)}{drawn}"
            fix = "ask the administrators to look at cooling and power of the node"
            yield make_finding(node.id, "warn", "THROTTLED", text, "NVML's reasons, read under load", fix)


def quota_reached(places: NodeDevices) -> Iterator[ProbeFinding]:
    """Yield THROTTLED faults: a CPU quota stopped a CPU device, and most devices were not stopped. If a quota stops
    half of the devices or more, it is the job's normal limit and no fault."""
    stopped = [(node, device) for node, device in places if CPU_QUOTA in device.throttle_reasons]
    evidence = "cpu.stat of its cgroup while it computed; most other nodes were not stopped"
    fix = "look at the CPU limit of its job or container (cpu.max, cpu.cfs_quota_us)"
    for node, device in stopped if 2 * len(stopped) < len(places) else ():
        text = f"{device.id} was stopped by a CPU quota under load"
        yield make_finding(node.id, "warn", "THROTTLED", text, evidence, fix)


def broken_memory(places: NodeDevices) -> Iterator[ProbeFinding]:
    """Yield ECC_ERRORS faults: a device has uncorrectable memory errors, so it lost data. The next error ends the
    training or corrupts it silently."""
    fix = "ask the administrators to reset or replace the GPU; leave the node out meanwhile"
    for node, device in places:
        if device.ecc_errors:
            text = f"{device.id} has {device.ecc_errors} uncorrectable memory errors"
            text += f", last Xid {device.xid}" if device.xid is not None else ""
            yield make_finding(node.id, "exclude", "ECC_ERRORS", text, "counted since the driver was loaded", fix)


def slow_devices(places: NodeDevices, types: dict[str, DeviceType], most: float = 1.0) -> Iterator[ProbeFinding]:
    """Yield SLOW_NODE faults: a figure of a device is well below the median of the devices of its type.

    CPUs of virtual nodes on one machine are not compared: they share its cores and memory, so their figures differ by
    chance.

    Args:
        types: name of a device type -> the type.
        most: a device never counts as slow by a figure above this share of the median, whether it is a GPU or a CPU.
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
    """Return the most frequent PCIe link, measured under load, of the other devices of the same type, as the end of a
    sentence: '; 7 of 8 others run Gen4 x16'. Empty when no other one was measured under load."""
    others = Counter(
        (other.pcie.generation, other.pcie.width)
        for _, other in places
        if other is not device and other.type == device.type and other.pcie and other.pcie.under_load
    )
    if not others:
        return ""
    (generation, width), count = others.most_common(1)[0]
    return f"; {count} of {others.total()} others run Gen{generation} x{width}"


DEVICE_CHECKS: tuple[Callable[[NodeDevices], Iterator[ProbeFinding]], ...] = (
    pcie_downshift,
    p2p_disabled,
    nvlink_down,
    throttled,
    quota_reached,
    broken_memory,
)
