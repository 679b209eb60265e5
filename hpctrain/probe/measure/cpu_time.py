"""Measures the time in which this thread ran on a processor or waited for one."""

from __future__ import annotations

import time
from pathlib import Path

CONTENDED = 0.9
"""Share of a transfer's time in which its thread needs a processor; above it, the processor and not the network limits
the transfer."""


def cpu_demand_s(schedstat: Path = Path("/proc/thread-self/schedstat")) -> float:
    """Return the seconds that this thread has run on a processor or waited for one. Without CONFIG_SCHED_INFO in the
    kernel, the waiting is not counted."""
    try:
        on_cpu_ns, waiting_ns, _ = schedstat.read_text().split()
        return (int(on_cpu_ns) + int(waiting_ns)) / 1e9
    except (OSError, ValueError):
        return time.thread_time()
