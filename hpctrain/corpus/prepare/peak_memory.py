"""Measures the peak memory of this process and of the processes that it started."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import NamedTuple

_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024


class PeakMemory(NamedTuple):
    """Peak resident memory; pages that processes share count in each of them."""

    own_bytes: int
    worker_bytes: int
    """Peak of the largest process that this one started and that has ended; 0 if there was none."""


def peak_memory() -> PeakMemory:
    """Return the peak memory of this process and of its ended child processes, each since it began."""
    worker = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * _MAXRSS_BYTES
    return PeakMemory(_own_bytes(), worker)


def _own_bytes() -> int:
    # ru_maxrss begins with the peak of the parent process; VmHWM does not.
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return int(value.split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES
