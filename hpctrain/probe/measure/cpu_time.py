"""How much of a stretch of time this thread needed a processor, whether it got one or not."""

from __future__ import annotations

import time
from pathlib import Path

CONTENDED = 0.9
"""Above this share of the time, a processor and not the wire sets the pace."""


def cpu_demand_s(schedstat: Path = Path("/proc/thread-self/schedstat")) -> float:
    """Seconds of this thread so far on a processor or in the queue for one; without the queue where the kernel keeps no
    count of it (CONFIG_SCHED_INFO)."""
    try:
        on_cpu_ns, waiting_ns, _ = schedstat.read_text().split()
        return (int(on_cpu_ns) + int(waiting_ns)) / 1e9
    except (OSError, ValueError):
        return time.thread_time()
