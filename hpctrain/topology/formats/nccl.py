"""Writes NCCL's topology XML of a node, for NCCL_TOPO_FILE. Pure.

Format: system > cpu > pci > gpu > nvlink, and pci > nic > net, as NCCL's src/graph/xml.cc reads it. Unknown figures are
left out, because NCCL reads them from the machine. There is no XML declaration, because NCCL's parser stops at one.
"""

from __future__ import annotations

import re
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from ClusterShell.NodeSet import NodeSet

from hpctrain.base.errors import InputError
from hpctrain.records.topology.evidence import GIGATRANSFERS, PcieLink
from hpctrain.records.topology.topology import Device, Node, Topology

_UNKNOWN_NUMA = -1
_ADDRESS = r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}(\.[0-9A-Fa-f])?"
"""Address of a PCI function: 0000:1b:00.0."""
_LONGEST = 200
"""Most characters of an attribute; NCCL stops at 255."""


def nccl_files(topology: Topology) -> dict[str, str]:
    """Return one file for each set of equal nodes, by a file name after the first node; its `name` lists all of them.

    Raises:
        InputError: the topology has no GPUs, or lacks the PCI addresses by which NCCL finds them.
    """
    kinds: dict[str, tuple[Element, list[str]]] = {}
    for node in topology.nodes:
        if any(topology.device_types[device.type].kind == "cuda" for device in node.devices):
            system = _system(topology, node)
            kinds.setdefault(_text(system), (system, []))[1].append(node.id)
    if not kinds:
        raise InputError("nodes: no GPU in this topology; NCCL's file describes GPUs and what is between them")
    for system, names in kinds.values():
        folded = str(NodeSet.fromlist(names))
        system.attrib["name"] = folded if len(folded) <= _LONGEST else _label(names)
    return {f"nccl-{_label(names)}.xml": _text(system) for system, names in kinds.values()}


def _label(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]}-and-{len(names) - 1}-like-it"


def _system(topology: Topology, node: Node) -> Element:
    gpus = [device for device in node.devices if topology.device_types[device.type].kind == "cuda"]
    cpus: dict[int, Element] = {}
    known: dict[str, Element] = {}
    for gpu in gpus:
        _place(cpus, known, gpu.numa, _path(node, gpu), _gpu(node, gpu), gpu.pcie)
    for number, nic in enumerate(node.nics or []):
        if nic.pci_path is not None:
            attributes = {"name": nic.name, "dev": str(number)}
            if nic.bytes_per_s is not None:
                attributes["speed"] = f"{nic.bytes_per_s * 8 / 1e6:.0f}"
            card = Element("nic")
            SubElement(card, "net", attributes)
            _place(cpus, known, nic.numa, nic.pci_path, card, None)
    system = Element("system", version="1")
    system.extend(cpus[numa] for numa in sorted(cpus))
    return system


def _text(system: Element) -> str:
    """Return the element as NCCL itself writes it, without a space before '/>'."""
    indent(system)
    return tostring(system, "unicode").replace(" />", "/>") + "\n"


def _path(node: Node, gpu: Device) -> list[str]:
    if gpu.pci_path is None:
        raise InputError(
            f"node {node.id}: {gpu.id} has no pci_path, and NCCL finds a GPU by its PCI address; take it over from a "
            "dump of NCCL's own (NCCL_TOPO_DUMP_FILE) with `hpctrain topology import`"
        )
    return gpu.pci_path


def _gpu(node: Node, gpu: Device) -> Element:
    digits = gpu.id.removeprefix("cuda")
    if not digits.isdecimal():
        raise InputError(f"node {node.id}: {gpu.id!r} is no GPU's name; cuda0, cuda1, … are expected")
    addresses = {device.id: device.pci_path[-1] for device in node.devices if device.pci_path}
    links = {addresses.get(peer, peer): peer_links.active for peer, peer_links in gpu.nvlink.items()}
    if not all(re.fullmatch(_ADDRESS, target) for target in links):
        links = {}  # without any, NCCL asks the driver; a partial list would be worse
    element = Element("gpu", dev=digits)
    for target, count in links.items():
        if count:
            SubElement(element, "nvlink", target=target, count=str(count))
    return element


def _place(
    cpus: dict[int, Element], known: dict[str, Element], numa: int | None, path: list[str], leaf: Element,
    pcie: PcieLink | None,
) -> None:  # fmt: skip
    """Add `leaf` below the elements of its PCI path; those that exist are shared."""
    number = _UNKNOWN_NUMA if numa is None else numa
    above = cpus.setdefault(number, Element("cpu", numaid=str(number)))
    for address in path:
        if address not in known:
            known[address] = SubElement(above, "pci", busid=address)
        above = known[address]
    if pcie is not None and pcie.generation_max in GIGATRANSFERS:
        above.attrib["link_speed"] = f"{GIGATRANSFERS[pcie.generation_max]} GT/s PCIe"
        above.attrib["link_width"] = str(pcie.width_max)
    above.append(leaf)
