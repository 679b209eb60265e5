"""Faults that show in what the nodes' systems say, pure: interface, host name, packet size, clock, driver.

Each check takes all nodes, because most of these are faults only in comparison. Who did not tell is passed over.
"""

from __future__ import annotations

import ipaddress
import statistics
from collections import Counter
from collections.abc import Callable, Sequence

from ClusterShell.NodeSet import NodeSet

from hpctrain.base.units import format_seconds
from hpctrain.probe.faults.finding import ProbeFinding, make_finding
from hpctrain.records.topology.topology import Node

CLOCK_SKEW_S = 0.5
"""Beyond this, time stamps of two nodes' logs no longer tell what came first."""
_CLOCK_FIX = "tell the administrators that NTP or PTP is not running; the order of log lines cannot be trusted"
_RDMA = ("ib", "hsn")
"""Interfaces of cards that do RDMA."""
_LOCAL_ONLY = ("docker", "veth", "virbr", "br-", "cni", "flannel", "podman", "lxc")
"""Interfaces that lead to containers of the same machine."""


def host_faults(nodes: Sequence[Node]) -> list[ProbeFinding]:
    """Everything that is wrong with the systems of these nodes."""
    return [fault for check in CHECKS for fault in check(nodes)]


def wrong_interface(nodes: Sequence[Node]) -> list[ProbeFinding]:
    """WRONG_INTERFACE: reached over a bridge of containers, or over another interface than nearly all, which it has."""
    used = Counter(node.iface for node in nodes if node.iface)
    usual, count = used.most_common(1)[0] if used else ("", 0)
    faults = []
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
        faults.append(make_finding(node.id, "warn", "WRONG_INTERFACE", why, evidence, fix))
    return faults


def loopback_hostname(nodes: Sequence[Node]) -> list[ProbeFinding]:
    """LOOPBACK_HOSTNAME: the node's own name leads to itself, and Gloo listens where the name leads."""
    faults = []
    for node in nodes:
        address = node.host_facts.hostname_resolves_to if node.host_facts else None
        if address is None or not _is_loopback(address):
            continue
        text = f"its host name {node.host or node.id} resolves to {address}"
        fix = (
            f"set GLOO_SOCKET_IFNAME={node.iface}"
            if node.iface
            else "set GLOO_SOCKET_IFNAME to the cluster's interface"
        )
        evidence = f"the others reach it at {node.addr}; hpctrain sets the variable for its own workers"
        faults.append(make_finding(node.id, "note", "LOOPBACK_HOSTNAME", text, evidence, fix))
    return faults


def mtu_mismatch(nodes: Sequence[Node]) -> list[ProbeFinding]:
    """MTU_MISMATCH: packets that some nodes send are too large for others."""
    sizes = {node.id: node.host_facts.mtu.get(node.iface or "") for node in nodes if node.host_facts}
    groups = _groups({name: size for name, size in sizes.items() if size})
    if len(groups) < 2:
        return []
    text = f"interfaces differ in MTU: {_listing(groups)}"
    fix = "ask the administrators for one MTU; until then name nodes of one kind with --nodelist"
    return [make_finding(None, "warn", "MTU_MISMATCH", text, f"{len(sizes)} nodes told theirs", fix)]


def clock_skew(nodes: Sequence[Node]) -> list[ProbeFinding]:
    """CLOCK_SKEW: a clock that is off from the median of all."""
    offsets = {
        node.id: node.host_facts.clock_offset_s
        for node in nodes
        if node.host_facts and node.host_facts.clock_offset_s is not None
    }
    if len(offsets) < 2:
        return []
    if len(offsets) == 2:
        return _skew_of_two(offsets)
    middle = statistics.median(offsets.values())
    return [
        make_finding(
            name,
            "warn",
            "CLOCK_SKEW",
            f"its clock is {format_seconds(abs(offset - middle))} {'ahead' if offset > middle else 'behind'}",
            f"median of {len(offsets)} nodes",
            _CLOCK_FIX,
        )
        for name, offset in offsets.items()
        if abs(offset - middle) > CLOCK_SKEW_S
    ]


def _skew_of_two(offsets: dict[str, float]) -> list[ProbeFinding]:
    """Of two clocks that differ, either may be the wrong one: it is a fault of neither node."""
    (first, one), (second, other) = offsets.items()
    if abs(other - one) <= CLOCK_SKEW_S:
        return []
    text = f"the clocks of {first} and {second} are {format_seconds(abs(other - one))} apart"
    return [make_finding(None, "warn", "CLOCK_SKEW", text, "their own round trips", _CLOCK_FIX)]


def mixed_drivers(nodes: Sequence[Node]) -> list[ProbeFinding]:
    """MIXED_DRIVERS: several versions of one driver; another branch of it may refuse to talk to this one."""
    versions = {node.id: device.driver for node in nodes for device in node.devices[:1] if device.driver}
    groups = _groups(versions)
    if len(groups) < 2:
        return []
    branches = {version.partition(".")[0] for version in groups}
    fix = (
        "take nodes of one version with --nodelist or --constraint" if len(branches) > 1 else "nothing, if NCCL starts"
    )
    text = f"{len(groups)} driver versions: {_listing(groups)}"
    return [
        make_finding(
            None,
            "warn" if len(branches) > 1 else "note",
            "MIXED_DRIVERS",
            text,
            f"{len(versions)} nodes told theirs",
            fix,
        )
    ]


def tcp_fallback(nodes: Sequence[Node]) -> list[ProbeFinding]:
    """TCP_FALLBACK: no InfiniBand or Slingshot interface is up on this node, while nearly all others have one: NCCL
    takes TCP to and from it. The probe itself speaks TCP, so this is all that it can see of it."""
    told = {
        node.id: any(name.startswith(_RDMA) and addresses for name, addresses in node.host_facts.interfaces.items())
        for node in nodes
        if node.host_facts and node.host_facts.interfaces
    }
    without = [name for name, able in told.items() if not able]
    able = len(told) - len(without)
    if 4 * able < 3 * len(told):
        return []
    fix = "leave it out, or ask the administrators to bring its link up (ibstat shows the state of the port)"
    text = "has no InfiniBand or Slingshot interface that is up: NCCL falls back to TCP"
    return [
        make_finding(name, "warn", "TCP_FALLBACK", text, f"{able} of {len(told)} nodes have one", fix)
        for name in without
    ]


def interface_env(nodes: Sequence[Node]) -> dict[str, str]:
    """GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME with an interface that every node has; empty where there is none.

    Gloo takes exactly one name; NCCL would also take any that begins with it, so '=' asks for this one alone.
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
        return False  # a name that leads nowhere is told by what cannot connect


def _groups(values: dict[str, int] | dict[str, str]) -> dict[str, list[str]]:
    """Names by value, the commonest value first."""
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        groups.setdefault(str(value), []).append(name)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def _listing(groups: dict[str, list[str]]) -> str:
    return "; ".join(f"{value} on {NodeSet.fromlist(names)}" for value, names in groups.items())


CHECKS: tuple[Callable[[Sequence[Node]], list[ProbeFinding]], ...] = (
    wrong_interface,
    loopback_hostname,
    mtu_mismatch,
    clock_skew,
    mixed_drivers,
    tcp_fallback,
)
