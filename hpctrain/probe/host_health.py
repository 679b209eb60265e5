"""What a CPU device has of the figures that GPUs have: memory errors, energy, NUMA node. From sysfs, without root;
what this machine hides is None."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ClusterShell.RangeSet import RangeSet, RangeSetParseError

SYSFS = Path("/sys")


def memory_errors(sysfs: Path = SYSFS) -> int | None:
    """Memory errors since the start of the machine that could not be corrected (EDAC); None where nobody counts."""
    counts = _numbers(sysfs.glob("devices/system/edac/mc/mc*/ue_count"))
    return sum(counts) if counts else None


def energy_j(sysfs: Path = SYSFS) -> float | None:
    """Energy of all processor packages so far (RAPL); readable by root only on most machines. The counter starts over
    after some minutes, so that only short differences mean something."""
    zones = sysfs.glob("class/powercap/intel-rapl:*")
    # intel-rapl:0 is a package, intel-rapl:0:0 a part of it that it counts as well.
    counts = _numbers(zone / "energy_uj" for zone in zones if zone.name.count(":") == 1)
    return sum(counts) / 1e6 if counts else None


def quota_periods(proc: Path = Path("/proc/self"), cgroup: Path = SYSFS / "fs/cgroup") -> tuple[int, int] | None:
    """(periods, those in which this process's group had used up its CPU time) so far, from cpu.stat of cgroup v1 or v2;
    None where no quota is set on the group, or it cannot be read."""
    try:
        rows = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
    except OSError:
        return None
    for _, controllers, group in rows:
        if "cpu" in controllers.split(","):
            folder = cgroup / "cpu" / group.lstrip("/")
        elif not controllers:
            folder = cgroup / group.lstrip("/")
        else:
            continue
        try:
            told = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
            periods, held = int(told["nr_periods"]), int(told["nr_throttled"])
        except (OSError, ValueError, KeyError):
            continue
        if periods:
            return periods, held
    return None


def is_held_by_quota(before: tuple[int, int] | None, after: tuple[int, int] | None) -> bool:
    """Whether a CPU quota stopped the group in most of the periods in between."""
    if after is None:
        return False
    periods, held = (now - then for now, then in zip(after, before or (0, 0), strict=True))
    return periods > 0 and 2 * held > periods


def own_numa_node(allowed: Iterable[int] | None = None, sysfs: Path = SYSFS) -> int | None:
    """The NUMA node that holds all processors this process may use; None when they are on several.

    Args:
        allowed: processors; default: those of this process.
    """
    wanted = set(os.sched_getaffinity(0) if allowed is None else allowed)
    for folder in sorted(sysfs.glob("devices/system/node/node[0-9]*")):
        try:
            held = set(RangeSet((folder / "cpulist").read_text().strip()).intiter())
        except (OSError, RangeSetParseError):
            continue
        if wanted and wanted <= held:
            return int(folder.name.removeprefix("node"))
    return None


def _numbers(files: Iterable[Path]) -> list[int]:
    found = []
    for file in files:
        try:
            found.append(int(file.read_text()))
        except (OSError, ValueError):
            continue
    return found
