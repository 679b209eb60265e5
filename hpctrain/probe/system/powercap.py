"""Reads the energy counters of processors and memory (RAPL) in the kernel's powercap tree, without root where the
administrator allows it.

The tree has a folder for each domain: intel-rapl:0 is a processor (package-0) or the whole machine (psys), and
intel-rapl:0:1 a part of it. `dram` is the only part whose energy its processor does not count. The kernel's document
Documentation/power/powercap/powercap.rst describes the files. AMD's processors have the same tree.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpctrain.base.system.kernel import kernel_number, kernel_text

POWERCAP = "HPCTRAIN_POWERCAP"
"""Environment variable that names a folder in place of `/sys/class/powercap`, for machines and images where the
kernel's tree is mounted elsewhere."""
GAP_S = 60.0
"""Longest time between two readings, in seconds, whose difference counts: in a longer time a counter may have started
over more than once."""
_ZONE = re.compile(r"intel-rapl:\d+(:\d+)?")
_PACKAGE = re.compile(r"package-\d+(-die-\d+)?")
_PART_W, _WHOLE_W = 3_000.0, 30_000.0
"""More watts than a processor, its memory or a machine can take. A counter that jumps further was set back."""


def powercap_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of the powercap tree."""
    return Path(environment.get(POWERCAP) or "/sys/class/powercap")


class RaplCounters:
    """The energy counters of this machine, read again and again."""

    def __init__(self, folder: Path | None = None) -> None:
        """Prepare to read.

        Args:
            folder: the powercap tree; None: that of `powercap_folder`.
        """
        self._folder = powercap_folder(os.environ) if folder is None else folder
        self._readings: dict[Path, tuple[int, float]] = {}
        """Folder of a domain -> (its counter in microjoules, when it was read in seconds)."""

    def take(self, now_s: float) -> dict[str, float]:
        """Return domain (package-0, dram-0, psys) -> joules since the last call.

        A domain is absent if its counter could not be read now or at the last call, if the last call was more than
        `GAP_S` ago, or if the counter shows more energy than the hardware can take. A counter that started over in
        between, after `max_energy_range_uj`, is continued.

        Args:
            now_s: a monotonic time in seconds.
        """
        before, self._readings = self._readings, {}
        joules: dict[str, float] = {}
        for zone, name in self._zones():
            counter = kernel_number(zone / "energy_uj")
            if counter is None or counter < 0:
                continue
            self._readings[zone] = counter, now_s
            if zone in before:
                used = self._used_j(zone, before[zone], (counter, now_s), name)
                if used is not None:
                    joules[name] = joules.get(name, 0.0) + used
        return joules

    def _zones(self) -> Iterator[tuple[Path, str]]:
        """Yield (folder, name) of each domain that is not counted in another one."""
        try:
            zones = sorted(path for path in self._folder.iterdir() if _ZONE.fullmatch(path.name))
        except OSError:
            return
        for zone in zones:
            name = kernel_text(zone / "name") or ""
            _, number, *part = zone.name.split(":")
            if part and name == "dram":
                yield zone, f"dram-{number}"
            elif not part and (name == "psys" or _PACKAGE.fullmatch(name)):
                yield zone, name

    @staticmethod
    def _used_j(zone: Path, before: tuple[int, float], now: tuple[int, float], name: str) -> float | None:
        used_uj, seconds = now[0] - before[0], now[1] - before[1]
        if used_uj < 0:
            largest = kernel_number(zone / "max_energy_range_uj")
            if largest is None or largest < max(before[0], now[0]):
                return None
            used_uj += largest
        most_w = _WHOLE_W if name == "psys" else _PART_W
        # A counter changes about each millisecond, so within very short times its power may seem larger than it is.
        is_possible = 0 <= seconds <= GAP_S and used_uj <= most_w * (seconds + 1.0) * 1e6
        return used_uj / 1e6 if is_possible else None
