"""Parts of topology.json with facts about a node: PCIe links and NVLinks of its devices, its network cards, and what
its operating system reports.
"""

from __future__ import annotations

from pydantic import Field

from hpctrain.records.format.document import Part
from hpctrain.records.topology.figures import Count, Rate, Seconds

GIGATRANSFERS = {1: "2.5", 2: "5.0", 3: "8.0", 4: "16.0", 5: "32.0", 6: "64.0"}
"""Generation of PCIe -> GT/s of one lane, as Linux and NCCL write the number."""


class PcieLink(Part):
    """The PCI Express link of a device: its generation and lanes in use, and the highest that are possible."""

    generation: Count
    """PCIe generation in use."""
    width: Count
    """Lanes in use."""
    generation_max: Count
    """Highest generation that device and slot support."""
    width_max: Count
    """Most lanes that device and slot support."""
    under_load: bool = False
    """Whether the link's state was read while data flowed. An idle device slows its link down, which is no fault."""


class NvlinkPeer(Part):
    """The NVLinks from one device of a node to another device or to a switch."""

    links: Count
    """Number of NVLinks."""
    active: Count
    """Number of NVLinks that are up."""


class HostFacts(Part):
    """Facts that a node's operating system reports. A fact that could not be read is absent."""

    kernel: str | None = None
    """Release of the kernel, as `uname -r` prints it."""
    boot_id: str | None = None
    """Random id that the kernel gets when it boots. Nodes with equal ids are on one machine."""
    cpus: Count | None = None
    """CPUs of the node that the job may use."""
    memory_bytes: Count | None = None
    """Bytes of the node's memory that the job may use."""
    mtu: dict[str, int] = {}
    """Interface -> largest packet (MTU) in bytes."""
    clock_offset_s: float | None = None
    """This node's clock minus the clock of the node with the probe's coordinator, seconds."""
    clock_error_s: Seconds | None = None
    """Uncertainty of `clock_offset_s`, seconds."""
    hostname_resolves_to: str | None = None
    """Network address to which the node's host name resolves on the node itself."""
    interfaces: dict[str, list[str]] = {}
    """Network interface that is up -> its addresses."""
    infiniband: list[str] = []
    """Active InfiniBand and RoCE ports, as card/port: mlx5_0/1."""


class Nic(Part):
    """A network card of a node."""

    name: str
    """Name in the operating system: mlx5_0, eth0."""
    bytes_per_s: Rate | None = None
    """Nominal rate of the card's port in one direction."""
    pci_path: list[str] | None = Field(default=None, min_length=1)
    """PCI addresses on the path from the CPU to the card: PCI switches first, the card last."""
    numa: int | None = None
    """NUMA node that the card is attached to."""
