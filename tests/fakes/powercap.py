"""A folder like the kernel's powercap tree: counters of energy that start over after their largest value."""

from __future__ import annotations

from pathlib import Path


class FakePowercap:
    """A machine's counters in a folder. They count what `use` says, and start over after `largest_uj`."""

    def __init__(self, folder: Path, largest_uj: int = 262_143_328_850) -> None:
        self.folder = folder
        self._largest_uj = largest_uj
        self._used_j: dict[str, float] = {}
        self._begun_uj: dict[str, int] = {}

    def add(self, zone: str, name: str, counter_uj: int = 0) -> None:
        """Add a domain, whose counter stands at `counter_uj`."""
        path = self.folder / zone
        path.mkdir(parents=True)
        (path / "name").write_text(name + "\n")
        (path / "max_energy_range_uj").write_text(f"{self._largest_uj}\n")
        self._used_j[zone], self._begun_uj[zone] = 0.0, counter_uj
        self.use(zone, 0.0)

    def use(self, zone: str, joules: float) -> None:
        """Let the domain use energy."""
        self._used_j[zone] += joules
        counter = (self._begun_uj[zone] + round(self._used_j[zone] * 1e6)) % self._largest_uj
        file = self.folder / zone / "energy_uj"
        whole = file.with_suffix(".new")  # who reads meanwhile never sees half a number
        whole.write_text(f"{counter}\n")
        whole.replace(file)
