"""Finds the address at which other nodes reach this machine, and its network interface."""

from __future__ import annotations

import ipaddress
import socket

import psutil

from hpctrain.base.errors import InputError


def routed_address(peer: str) -> str:
    """Return the address that this machine uses towards `peer`, from the routing table and not from its host name.

    A host name often resolves to 127.0.0.1 or to a management network. Nothing is sent.

    Raises:
        InputError: the peer's name is unknown, or only loopback leads there.
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as sock:
            sock.connect(target)
            address = str(sock.getsockname()[0])
    except OSError as error:
        raise InputError(
            f"{peer}: no route to this node ({error.strerror or error}); name the address to use with --addr"
        ) from None
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        raise InputError(f"{peer}: only loopback ({address}) leads there; name the address to use with --addr")
    return address


def interface_of(addr: str) -> str | None:
    """Return the network interface that has this address; None when there is none."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == addr for entry in entries):
            return str(name)
    # The loopback interface answers for all of 127.0.0.0/8 and lists only 127.0.0.1.
    return "lo" if addr.startswith("127.") and "lo" in psutil.net_if_addrs() else None


def own_address(sock: socket.socket) -> str:
    """Return the address of this end of a connection, as the kernel chose it; an IPv4-mapped one as IPv4."""
    address = ipaddress.ip_address(str(sock.getsockname()[0]).partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
