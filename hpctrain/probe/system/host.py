"""Reads the processor's name and the memory that a process may use from the operating system."""

from __future__ import annotations

import platform
from pathlib import Path

import psutil

_UNLIMITED = 2**60
"""Smallest number that means no limit: cgroup v1 writes one near 2**63."""


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the vendor's name of the processor, else the architecture."""
    try:
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    except OSError:
        pass  # not Linux, or a container without /proc
    return platform.processor() or platform.machine() or "cpu"


def usable_memory_bytes() -> int:
    """Return the memory that this process may still take: free on the machine, or in its cgroup where that is less."""
    free = int(psutil.virtual_memory().available)
    room = cgroup_memory_room()
    return free if room is None else min(free, room)


def cgroup_memory_room(own: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes left below the tightest limit of this process's cgroup and its parents; None without a limit."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    rooms: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            rooms += _rooms(mount, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            rooms += _rooms(mount / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return min(rooms, default=None)


def _rooms(root: Path, path: str, limit_file: str, usage_file: str) -> list[int]:
    folder = root / path.lstrip("/")
    rooms = []
    while True:
        limit, usage = _number(folder / limit_file), _number(folder / usage_file)
        if limit is not None and limit < _UNLIMITED:
            rooms.append(max(0, limit - (usage or 0)))
        if folder in (root, folder.parent):
            return rooms
        folder = folder.parent


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None  # not there, or the word "max"
