"""Finds faults in the facts that the nodes' operating systems report: interface, host name, MTU, clock, driver. Pure.

Each check takes all nodes, because most faults show only in comparison. A node that does not report a fact is skipped
in its check.
"""

from __future__ import annotations

import ipaddress
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from ClusterShell.NodeSet import NodeSet

from hpctrain.base.units import format_seconds
from hpctrain.probe.faults.finding import ProbeFinding, make_finding
from hpctrain.records.topology.topology import Node

CLOCK_SKEW_S = 0.5
"""Clock offset in seconds beyond which timestamps in two nodes' logs no longer give the order of events."""
_CLOCK_FIX = "tell the administrators that NTP or PTP is not running; the order of log lines cannot be trusted"
_RDMA = ("ib", "hsn")
"""Prefixes of interfaces that support RDMA."""
_LOCAL_ONLY = ("docker", "veth", "virbr", "br-", "cni", "flannel", "podman", "lxc")
"""Prefixes of interfaces that lead only to containers of the same machine."""


def host_faults(nodes: Sequence[Node]) -> list[ProbeFinding]:
    """Return all faults in the facts that these nodes report."""
    return [fault for check in CHECKS for fault in check(nodes)]


def wrong_interface(nodes: Sequence[Node]) -> Iterator[ProbeFinding]:
    """Yield WRONG_INTERFACE faults: a node is reached over a container bridge, or over another interface than most
    nodes although it has that interface too."""
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
    """Yield LOOPBACK_HOSTNAME faults: the host name resolves to loopback, and Gloo listens on that address."""
    for node in nodes:
        address = node.host_facts.hostname_resolves_to if node.host_facts else None
        if address is None or not _is_loopback(address):
            continue
        text = f"its host name {node.host or node.id} resolves to {address}"
        fix = "set GLOO_SOCKET_IFNAME" + (f"={node.iface}" if node.iface else " to the cluster's interface")
        evidence = f"the others reach it at {node.addr}; hpctrain sets the variable for its own workers"
        yield make_finding(node.id, "note", "LOOPBACK_HOSTNAME", text, evidence, fix)


def mtu_mismatch(nodes: Sequence[Node]) -> Iterator[ProbeFinding]:
    """Yield MTU_MISMATCH faults: some nodes send packets that are too large for others."""
    sizes = {node.id: node.host_facts.mtu.get(node.iface or "") for node in nodes if node.host_facts}
    groups = _groups({name: size for name, size in sizes.items() if size})
    if len(groups) < 2:
        return
    text = f"interfaces differ in MTU: {_listing(groups)}"
    fix = "ask the administrators for one MTU; until then name nodes of one kind with --nodelist"
    yield make_finding(None, "warn", "MTU_MISMATCH", text, f"{len(sizes)} nodes told theirs", fix)


def clock_skew(nodes: Sequence[Node]) -> Iterator[ProbeFinding]:
    """Yield CLOCK_SKEW faults: a clock is more than `CLOCK_SKEW_S` off the median of all."""
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
    """Yield MIXED_DRIVERS faults: nodes have different driver versions. Different branches may not work together."""
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
    """Yield TCP_FALLBACK faults: a node has no InfiniBand or Slingshot interface that is up, while most others have
    one, so NCCL uses TCP with this node. The probe itself measures over TCP, so its bandwidths do not show this
    fault."""
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
    """Return GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME with an interface that every node has; empty if there is none.

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
    """Return value -> names of the nodes with that value, the most common value first."""
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        groups.setdefault(str(value), []).append(name)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def _listing(groups: dict[str, list[str]]) -> str:
    return "; ".join(f"{value} on {NodeSet.fromlist(names)}" for value, names in groups.items())


CHECKS: tuple[Callable[[Sequence[Node]], Iterator[ProbeFinding]], ...] = (
    wrong_interface,
    loopback_hostname,
    mtu_mismatch,
    clock_skew,
    mixed_drivers,
    tcp_fallback,
)
