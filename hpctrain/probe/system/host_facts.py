"""Reads facts of this machine: interfaces, MTU, the address of its host name, InfiniBand ports, the kernel."""

from __future__ import annotations

import ipaddress
import platform
import socket
from pathlib import Path

import psutil

from hpctrain.base.system.kernel import kernel_text
from hpctrain.records.topology.evidence import HostFacts

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_facts(hostname: str, infiniband: Path = Path("/sys/class/infiniband")) -> HostFacts:
    """Return the facts of this machine, without its clock offset, which pairs measure.

    Args:
        hostname: the machine's own host name. Resolving it takes as long as the name servers need, as in every library
            that resolves it.
        infiniband: the kernel's folder of InfiniBand devices.
    """
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return HostFacts(
        kernel=platform.release() or None,
        boot_id=kernel_text(_BOOT_ID),
        interfaces={name: addresses for name, addresses in sorted(_addresses().items()) if name in up},
        mtu={name: state.mtu for name, state in sorted(psutil.net_if_stats().items()) if name in up and state.mtu > 0},
        infiniband=active_ports(infiniband),
        hostname_resolves_to=resolve(hostname),
    )


def resolve(hostname: str) -> str | None:
    """Return the first address of a host name, to which libraries bind; None when it cannot be resolved."""
    try:
        return str(socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def active_ports(infiniband: Path) -> list[str]:
    """Return the InfiniBand and RoCE ports that are up, as device/port; unreadable ones are skipped."""
    states = {file: kernel_text(file) or "" for file in sorted(infiniband.glob("*/ports/*/state"))}
    return [
        f"{file.parts[-4]}/{file.parts[-2]}"
        for file, state in states.items()
        if state.partition(":")[2].strip() == "ACTIVE"
    ]


def _addresses() -> dict[str, list[str]]:
    addresses: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            address = entry.address.partition("%")[0]
            # Every interface has a link-local IPv6 address; it does not show where the interface leads.
            if not ipaddress.ip_address(address).is_link_local:
                addresses.setdefault(name, []).append(address)
    return addresses
