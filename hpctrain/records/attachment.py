"""How devices and network cards sit in a node: PCI addresses, PCIe lanes, NVLinks."""

from __future__ import annotations

from pydantic import Field

from hpctrain.records.document import Part


class Pcie(Part):
    """A PCIe link between a device and what is above it."""

    generation: int
    """1 to 7: 2.5 GT/s a lane, and about twice that with each generation."""
    width: int
    """Lanes."""


class NvLinks(Part):
    """NVLinks from one device to one neighbour."""

    links: int
    """How many there are."""
    active: int | None = None
    """How many of them are up."""


class Nic(Part):
    """A network card of a node."""

    name: str
    """As the system calls it: mlx5_0, eth0."""
    bytes_per_s: float | None = None
    """Line rate of its port."""
    pci_path: list[str] | None = Field(default=None, min_length=1)
    """PCI addresses on the way to it, switches first, its own last."""
    numa: int | None = None
    """NUMA node that it hangs on."""
