"""What the kernel counted of this process's TCP connections (Linux `TCP_INFO`), by the address of the peer. Nothing is
sent for it."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple

_COUNTERS = struct.Struct("=Q")
_ACKED_AT, _BUSY_AT, _FULL_AT = 120, 168, 176
"""Offsets in `struct tcp_info` of bytes_acked, busy_time and rwnd_limited (linux/tcp.h, since Linux 4.9)."""
_INFO_BYTES = 256
_DESCRIPTORS = Path("/proc/self/fd")


class TcpCounters(NamedTuple):
    """Counters of all connections to one address since they began."""

    sent_bytes: int = 0
    """Bytes that the peer has acknowledged."""
    busy_s: float = 0.0
    """Seconds in which bytes were on the way, without those in which the peer had no room for more."""


def tcp_counters() -> dict[str, TcpCounters]:
    """Return address of a peer -> counters of this process's connections to it. {} where the kernel does not count.
    Connections within this machine are left out."""
    counters: dict[str, TcpCounters] = {}
    for link in _DESCRIPTORS.iterdir() if _DESCRIPTORS.is_dir() else []:
        try:
            if not str(link.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                peer, here = connection.getpeername()[0], connection.getsockname()[0]
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        except (OSError, AttributeError):  # closed meanwhile, not connected, not TCP, or no Linux
            continue
        if peer == here or len(info) < _FULL_AT + _COUNTERS.size:
            continue
        acked, busy_us, full_us = (_COUNTERS.unpack_from(info, at)[0] for at in (_ACKED_AT, _BUSY_AT, _FULL_AT))
        before = counters.get(peer, TcpCounters())
        counters[peer] = TcpCounters(before.sent_bytes + acked, before.busy_s + max(0, busy_us - full_us) / 1e6)
    return counters
