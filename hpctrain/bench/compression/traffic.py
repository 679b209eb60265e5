"""Bytes that left a network interface, and the share of them that is headers and acknowledgements."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import torch
import torch.distributed as dist

LOOPBACK = "lo"
CALIBRATION_NUMBERS = 2 * 2**20
"""Number of fp32 values in an all-reduce of known payload; with so many, the barriers around it do not matter."""


class Counter:
    """Bytes that this process's node sends. Processes that share one loopback each count an equal part of its bytes."""

    def __init__(self, interface: str, world: int) -> None:
        self._interface = interface
        self._sharers = world if interface == LOOPBACK else 1

    def read(self) -> float:
        """Bytes since the interface came up; on a loopback, this process's share of them."""
        return psutil.net_io_counters(pernic=True, nowrap=False)[self._interface].bytes_sent / self._sharers

    def during(self, work: Callable[[], object]) -> float:
        """Bytes sent between two barriers around `work`. Collective."""
        dist.barrier()
        before = self.read()
        work()
        dist.barrier()
        return self.read() - before


def header_factor(counter: Counter, repeats: int = 3) -> float:
    """Bytes at the interface per byte of payload in a ring all-reduce: median of `repeats`. Collective."""
    world = dist.get_world_size()
    numbers = torch.zeros(CALIBRATION_NUMBERS)
    payload = 2 * (world - 1) * numbers.numel() * numbers.element_size() / world
    factors = sorted(counter.during(lambda: dist.all_reduce(numbers)) / payload for _ in range(repeats))
    return factors[len(factors) // 2]
