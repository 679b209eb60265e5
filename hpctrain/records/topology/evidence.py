"""Parts of topology.json that say why a node or device is what it is: its links, and what its system says of itself."""

from __future__ import annotations

from hpctrain.records.format.document import Part


class PcieLink(Part):
    """The PCI Express link of a device."""

    generation: int
    """Generation in use."""
    width: int
    """Lanes in use."""
    generation_max: int
    """Generation that device and slot are capable of."""
    width_max: int
    """Lanes that they are capable of."""
    under_load: bool = False
    """True when read while data flowed: an idle device lowers its link, which is no fault."""


class NvlinkPeer(Part):
    """NVLink between two devices of a node."""

    links: int
    """Links that there are."""
    active: int
    """Links that are up."""


class HostFacts(Part):
    """What a node's operating system says of itself; a fact that could not be read is absent."""

    kernel: str | None = None
    """Release of the kernel."""
    boot_id: str | None = None
    """Of the kernel since its start: nodes that have it in common are parts of one machine."""
    mtu: dict[str, int] = {}
    """Largest packet in bytes, by interface."""
    clock_offset_s: float | None = None
    """This node's clock less that of the node that measured."""
    clock_error_s: float | None = None
    """How wrong the offset may be."""
    hostname_resolves_to: str | None = None
    """Address that the node's own name leads to."""
    interfaces: dict[str, list[str]] = {}
    """Addresses of each interface that is up."""
    infiniband: list[str] = []
    """InfiniBand and RoCE ports that are active: mlx5_0/1."""
