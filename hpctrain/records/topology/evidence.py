"""Parts of topology.json with facts about a node or device: its links, its network cards, and what its operating system
reports.
"""

from __future__ import annotations

from pydantic import Field

from hpctrain.records.format.document import Part

GIGATRANSFERS = {1: "2.5", 2: "5.0", 3: "8.0", 4: "16.0", 5: "32.0", 6: "64.0"}
"""GT/s of a lane, by generation of PCIe, as Linux and NCCL write them."""


class PcieLink(Part):
    """The PCI Express link of a device."""

    generation: int
    """PCIe generation in use."""
    width: int
    """Lanes in use."""
    generation_max: int
    """Highest generation that device and slot support."""
    width_max: int
    """Most lanes that device and slot support."""
    under_load: bool = False
    """Whether the link was read while data flowed: an idle device slows its link down, which is no fault."""


class NvlinkPeer(Part):
    """NVLink between two devices of a node."""

    links: int
    """Number of links."""
    active: int
    """Number of links that are up."""


class HostFacts(Part):
    """Facts that a node's operating system reports; a fact that could not be read is absent."""

    kernel: str | None = None
    """Release of the kernel."""
    boot_id: str | None = None
    """Id of the kernel's boot: nodes with equal ids are on one machine."""
    mtu: dict[str, int] = {}
    """Interface -> largest packet (MTU) in bytes."""
    clock_offset_s: float | None = None
    """This node's clock minus the clock of the node that ran the probe, seconds."""
    clock_error_s: float | None = None
    """Uncertainty of `clock_offset_s`, seconds."""
    hostname_resolves_to: str | None = None
    """Address to which the node's own name resolves."""
    interfaces: dict[str, list[str]] = {}
    """Addresses of each interface that is up."""
    infiniband: list[str] = []
    """Active InfiniBand and RoCE ports: mlx5_0/1."""


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
