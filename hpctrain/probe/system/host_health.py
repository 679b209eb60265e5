"""Reads the health of a CPU device: memory errors, energy, CPU quota, NUMA node. It reads sysfs and cgroups, without
root; a figure that this machine hides is None."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ClusterShell.RangeSet import RangeSet, RangeSetParseError

from hpctrain.base.system.kernel import cgroup_folders, kernel_number, kernel_text

SYSFS = Path("/sys")

Periods = tuple[int, int]
"""(periods of a CPU quota so far, periods in which the cgroup had used up its quota)"""


def memory_errors(sysfs: Path = SYSFS) -> int | None:
    """Return the uncorrectable memory errors since the machine started (EDAC); None where they are not counted."""
    return _sum(sysfs.glob("devices/system/edac/mc/mc*/ue_count"))


def energy_j(sysfs: Path = SYSFS) -> float | None:
    """Return the energy counters of all processor packages in joules (RAPL); None where only root may read them.

    A counter starts over after some minutes, so only differences over short times are valid.
    """
    zones = sysfs.glob("class/powercap/intel-rapl:*")
    # intel-rapl:0 is a package; intel-rapl:0:0 is a part of it and counted in it.
    microjoules = _sum(zone / "energy_uj" for zone in zones if zone.name.count(":") == 1)
    return None if microjoules is None else microjoules / 1e6


def quota_periods(proc: Path = Path("/proc/self"), cgroup: Path = SYSFS / "fs/cgroup") -> dict[Path, Periods]:
    """Return the CPU quotas of this process's cgroup and its parents, from cpu.stat of cgroup v1 or v2.

    The parents count because Slurm sets a job's limit above its steps. Empty when there is no quota, or when it cannot
    be read.
    """
    folders = (folder for folder, _ in cgroup_folders("cpu", proc / "cgroup", cgroup))
    return {folder: periods for folder in folders if (periods := _periods(folder / "cpu.stat"))}


def is_held_by_quota(before: dict[Path, Periods], after: dict[Path, Periods]) -> bool:
    """Whether a CPU quota stopped one of the cgroups in at least a quarter of the periods between `before` and
    `after`."""
    for group, (periods, held) in after.items():
        then = before.get(group, (0, 0))
        if periods > then[0] and 4 * (held - then[1]) >= periods - then[0]:
            return True
    return False


def _periods(file: Path) -> Periods | None:
    """Return the counts of a cpu.stat file; None without a quota, when the kernel counts no periods."""
    try:
        counts = dict(line.split() for line in (kernel_text(file) or "").splitlines())
        periods = (int(counts["nr_periods"]), int(counts["nr_throttled"]))
    except (ValueError, KeyError):
        return None
    return periods if periods[0] else None


def own_numa_node(allowed: Iterable[int] | None = None, sysfs: Path = SYSFS) -> int | None:
    """Return the NUMA node of all processors that this process may use; None when they are on several nodes.

    Args:
        allowed: numbers of the processors; by default those of this process.
    """
    wanted = set(os.sched_getaffinity(0) if allowed is None else allowed)
    for folder in sorted(sysfs.glob("devices/system/node/node[0-9]*")):
        try:
            processors = set(RangeSet(kernel_text(folder / "cpulist") or "").intiter())
        except RangeSetParseError:
            continue
        if wanted and wanted <= processors:
            return int(folder.name.removeprefix("node"))
    return None


def _sum(files: Iterable[Path]) -> int | None:
    counts = [count for file in files if (count := kernel_number(file)) is not None]
    return sum(counts) if counts else None
