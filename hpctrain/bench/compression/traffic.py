"""Bytes that really left a network interface, and how many of them were headers and acknowledgements."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

COUNTERS = Path("/proc/self/net/dev")
LOOPBACK = "lo"
CALIBRATION_NUMBERS = 2 * 2**20
"""fp32 numbers in an all-reduce whose payload is known: large enough that the barriers beside it do not count."""


def sent_bytes(text: str, interface: str) -> int:
    """Bytes sent by an interface since it exists, out of /proc/net/dev (proc(5)).

    Raises:
        ValueError: no such interface is there.
    """
    for line in text.splitlines():
        name, colon, figures = line.partition(":")
        if colon and name.strip() == interface:
            return int(figures.split()[8])
    raise ValueError(f"no interface {interface} in /proc/net/dev")


class Counter:
    """What this process's node sends. All processes share one loopback, where each is given an equal part."""

    def __init__(self, interface: str, world: int) -> None:
        self._interface = interface
        self._sharers = world if interface == LOOPBACK else 1

    def read(self) -> float:
        """Bytes since the interface exists; a share of them on a loopback."""
        return sent_bytes(COUNTERS.read_text(), self._interface) / self._sharers

    def during(self, work: Callable[[], object]) -> float:
        """Bytes sent between two barriers around `work`. Collective."""
        dist.barrier()
        before = self.read()
        work()
        dist.barrier()
        return self.read() - before


def header_factor(counter: Counter, repeats: int = 3) -> float:
    """Bytes at the interface for each byte of payload in an all-reduce by ring: the median of some. Collective."""
    world = dist.get_world_size()
    numbers = torch.zeros(CALIBRATION_NUMBERS)
    payload = 2 * (world - 1) * numbers.numel() * numbers.element_size() / world
    factors = sorted(counter.during(lambda: dist.all_reduce(numbers)) / payload for _ in range(repeats))
    return factors[len(factors) // 2]
