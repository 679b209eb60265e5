"""Reads the processor's name and the memory that a process may use from the operating system."""

from __future__ import annotations

import platform
from pathlib import Path

import psutil

from hpctrain.base.system.kernel import cgroup_folders, kernel_number, kernel_text

_UNLIMITED = 2**60
"""Smallest number that means no limit: cgroup v1 writes one near 2**63."""


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the vendor's name of the processor, else the architecture."""
    for line in (kernel_text(cpuinfo) or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "cpu"


def usable_memory_bytes() -> int:
    """Return the memory that this process may still take: free on the machine, or in its cgroup where that is less."""
    free = int(psutil.virtual_memory().available)
    room = cgroup_memory_room()
    return free if room is None else min(free, room)


def cgroup_memory_room(process: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes left below the tightest limit of this process's cgroup and its parents; None without a limit."""
    rooms = []
    for folder, version in cgroup_folders("memory", process, mount):
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
        limit, usage = (kernel_number(folder / name) for name in names)
        if limit is not None and limit < _UNLIMITED:
            rooms.append(max(0, limit - (usage or 0)))
    return min(rooms, default=None)
