"""Part of topology.json about a node's network cards: name, line rate, and position in the machine."""

from __future__ import annotations

from pydantic import Field

from hpctrain.records.format.document import Part


class Nic(Part):
    """A network card of a node."""

    name: str
    """Name in the operating system: mlx5_0, eth0."""
    bytes_per_s: float | None = None
    """Line rate of the card's port."""
    pci_path: list[str] | None = Field(default=None, min_length=1)
    """PCI addresses on the path to the card: switches first, the card last."""
    numa: int | None = None
    """NUMA node that the card is attached to."""
