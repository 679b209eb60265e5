"""What a CPU device has of the figures that GPUs have: memory errors, energy, NUMA node. From sysfs, without root;
what this machine hides is None."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ClusterShell.RangeSet import RangeSet, RangeSetParseError

SYSFS = Path("/sys")

Periods = tuple[int, int]
"""(periods of a CPU quota so far, those in which the group had used it up)"""


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


def quota_periods(proc: Path = Path("/proc/self"), cgroup: Path = SYSFS / "fs/cgroup") -> dict[Path, Periods]:
    """The CPU quotas that hold for this process, from cpu.stat of cgroup v1 or v2: its own group's and those above, for
    a job's limit is set above its steps. Empty where no group has one, or it cannot be read."""
    try:
        rows = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
    except OSError:
        return {}
    found: dict[Path, Periods] = {}
    for _, controllers, group in rows:
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = cgroup / "cpu" if controllers else cgroup
        own = root / group.lstrip("/")
        for folder in (own, *own.parents):
            periods = _periods(folder / "cpu.stat")
            if periods is not None:
                found[folder] = periods
            if folder == root:
                break
    return found


def is_held_by_quota(before: dict[Path, Periods], after: dict[Path, Periods]) -> bool:
    """Whether a quota stopped one of the groups in a quarter of the periods in between, or more."""
    for group, (periods, held) in after.items():
        then = before.get(group, (0, 0))
        if periods > then[0] and 4 * (held - then[1]) >= periods - then[0]:
            return True
    return False


def _periods(file: Path) -> Periods | None:
    """None without a quota: its periods are not counted then."""
    try:
        told = dict(line.split() for line in file.read_text().splitlines())
        periods = (int(told["nr_periods"]), int(told["nr_throttled"]))
    except (OSError, ValueError, KeyError):
        return None
    return periods if periods[0] else None


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
