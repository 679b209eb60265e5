"""Network cards of a node: name, line rate, and where they are plugged in."""

from __future__ import annotations

from pydantic import Field

from hpctrain.records.format.document import Part


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
