"""Reads figures of a PCI device from sysfs: its link, its NUMA node, its path, the nearest network card. Nothing needs
root; a missing figure is None."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from hpctrain.base.system.kernel import kernel_number, kernel_text
from hpctrain.records.topology.evidence import GIGATRANSFERS, PcieLink

SYSFS = Path("/sys")
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
_GENERATIONS = {rate: generation for generation, rate in GIGATRANSFERS.items()}


def pcie_link(address: str, sysfs: Path = SYSFS) -> PcieLink | None:
    """Return the link of the device at a PCI address such as 0000:4e:00.0; None unless all four figures are known."""
    folder = _folder(address, sysfs)
    generation, generation_max = (_generation(folder / f"{which}_link_speed") for which in ("current", "max"))
    width, width_max = (kernel_number(folder / f"{which}_link_width") for which in ("current", "max"))
    if generation is None or generation_max is None or not width or not width_max:
        return None
    return PcieLink(generation=generation, width=width, generation_max=generation_max, width_max=width_max)


def numa_node(address: str, sysfs: Path = SYSFS) -> int | None:
    """Return the NUMA node of the device; None when the kernel does not know it (it writes -1)."""
    number = kernel_number(_folder(address, sysfs) / "numa_node")
    return number if number is not None and number >= 0 else None


def pci_path(address: str, sysfs: Path = SYSFS) -> list[str] | None:
    """Return the PCI path to the device as NCCL names it: each switch by its upstream port, the device last. None for
    a device that the kernel does not know.

    A switch has two bridges on the path, its upstream and a downstream port, so every second parent is taken.
    """
    folder = _folder(address, sysfs)
    if not folder.exists():
        return None
    ports = [part for part in folder.resolve().parts if _ADDRESS.fullmatch(part)]
    return ports[::-1][::2][::-1] or None


def nearest_nic(address: str, sysfs: Path = SYSFS) -> str | None:
    """Return the network card that shares the longest PCI path with the device: with equally long paths, an InfiniBand
    device (mlx5_0) is preferred to an Ethernet interface. None without a card that shares a bridge or the NUMA node."""
    path = _folder(address, sysfs).resolve()
    own_numa = numa_node(address, sysfs)
    best: tuple[int, int, str] | None = None
    for rank, kind in enumerate(("infiniband", "net")):
        for entry in sorted((sysfs / "class" / kind).glob("*")):
            card = entry / "device"
            if not card.exists():
                continue  # lo, bridges, veth: no hardware
            shared = _shared_parts(path, card.resolve())
            near = shared > _shared_parts(path, _root(path)) or (
                own_numa is not None and kernel_number(card / "numa_node") == own_numa
            )
            if near and (best is None or (-shared, rank) < best[:2]):
                best = (-shared, rank, entry.name)
    return best[2] if best else None


def _folder(address: str, sysfs: Path) -> Path:
    return sysfs / "bus" / "pci" / "devices" / address.lower()


def _root(path: Path) -> Path:
    """Return the host bridge above the device: /sys/devices/pci0000:4c. Devices below it need not share a switch."""
    return next((parent for parent in path.parents if parent.name.startswith("pci")), path.parent)


def _shared_parts(one: Path, other: Path) -> int:
    both = zip(one.parts, other.parts, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda parts: parts[0] == parts[1], both))


def _generation(file: Path) -> int | None:
    return _GENERATIONS.get((kernel_text(file) or "").split(" ", 1)[0])
