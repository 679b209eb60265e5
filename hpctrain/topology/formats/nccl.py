"""NCCL's topology XML of a node: written for NCCL_TOPO_FILE, and read from a dump (NCCL_TOPO_DUMP_FILE). Pure.

The elements are system > cpu > pci > gpu > nvlink, and pci > nic > net, as NCCL's src/graph/xml.cc reads and writes
them. A written file leaves out unknown figures, because NCCL then reads them from the machine. It has no XML
declaration, because NCCL's parser stops at one. Speeds in a dump are nominal, not measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, indent, tostring
from xml.parsers import expat

from ClusterShell.NodeSet import NodeSet

from hpctrain import __version__
from hpctrain.base.clock import utc_text
from hpctrain.base.errors import FieldError, FileError, InputError
from hpctrain.records.topology.evidence import GIGATRANSFERS, Nic, NvlinkPeer, PcieLink
from hpctrain.records.topology.names import DEVICE_TYPE
from hpctrain.records.topology.topology import Device, DeviceType, Node, Provenance, Topology

_UNKNOWN_NUMA = -1
_ADDRESS = r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}(\.[0-9A-Fa-f])?"
"""Pattern of a PCI address, such as 0000:1b:00.0."""
_LONGEST = 200
"""Most characters of a written attribute; NCCL reads at most 255."""


def nccl_files(topology: Topology) -> dict[str, str]:
    """Return name -> content of NCCL's XML files, one file for all nodes that are alike. The file has the name of the
    first of these nodes, and its attribute `name` lists all of them.

    Raises:
        InputError: the topology has no GPUs, or a GPU has no PCI path, by which NCCL finds it, or another name than
            cuda0, cuda1, ….
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
    """Return the XML of an element as NCCL writes it: indented, and without a space before '/>'."""
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
    """Add the element `leaf` of a GPU or network card below the elements of its PCI path, which are made if they do not
    exist.

    Args:
        cpus: number of a NUMA node -> its element.
        known: PCI address -> its element.
        numa: number of the NUMA node of `leaf`; None if it is not known.
        path: PCI addresses of the elements above `leaf`, outermost first.
        pcie: PCIe link that is written to the last element of the path.
    """
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


_DEPTH_MAX = 64
_NVLINK_BYTES_PER_S = {60: 20e9, 70: 25e9, 80: 25e9, 90: 25e9, 100: 50e9}
"""Compute capability × 10 -> bytes/s of one NVLink in one direction, from the data sheets of P100, V100, A100, H100 and
B200."""


@dataclass
class _Element:
    tag: str
    attributes: dict[str, str]
    line: int
    children: list[_Element] = field(default_factory=list)


@dataclass(frozen=True)
class _Place:
    """Position of an element in the tree of a dump: its NUMA node, and the `pci` elements above it, outermost first."""

    numa: int | None
    pci: tuple[_Element, ...]


def from_nccl(text: str, source: str, nodes: Sequence[str], wall: float) -> Topology:
    """Return a topology in which each of `nodes` has the GPUs, network cards and links of an NCCL dump of one node.

    Args:
        text: content of the dump.
        source: path of the dump, for errors and for the notes of the provenance.
        nodes: names of the nodes, which are alike; a dump has none.
        wall: present time in seconds since 1970, for the provenance.

    Raises:
        FileError: the dump cannot be used.
    """
    node, types = node_of_dump(text, source, nodes[0])
    alike = [node.model_copy(update={"id": name, "addr": name}) for name in nodes]
    notes = [
        f"Nothing in this file was measured: taken over from NCCL's topology dump {Path(source).name}.",
        "intra_bytes_per_s is the nominal rate of the slowest GPU's way to another: NVLinks by NVIDIA's data sheets, "
        "else PCIe lanes at their rate. FLOP/s, memory and the network between nodes are absent: run `hpctrain probe`.",
    ]
    provenance = Provenance(version=__version__, created=utc_text(wall), transport="nccl", mode="prior", notes=notes)
    return Topology(provenance=provenance, device_types=types, nodes=alike)


def node_of_dump(text: str, source: str, name: str) -> tuple[Node, dict[str, DeviceType]]:
    """Return (node with its GPUs, network cards and NVLinks; name of a type -> type of its GPUs) from an NCCL dump.

    Args:
        text: content of the dump.
        source: path of the dump, for errors.
        name: name and address that the node gets; a dump has none.

    Raises:
        FileError: the text is not XML, has a document type (which could name other files), or is no dump of a node.
    """
    system = _parse(text, source)
    if system.tag != "system":
        hint = "; NCCL_GRAPH_DUMP_FILE writes that, NCCL_TOPO_DUMP_FILE is meant" if system.tag == "graphs" else ""
        raise _error(source, f"found <{system.tag}>; <system> is expected{hint}", system)
    if len({cpu.attributes.get("host_hash") for cpu in system.children if cpu.tag == "cpu"}) > 1:
        raise _error(source, "it describes several hosts; a dump of one node is expected", system)
    places = list(_walk(system, _Place(None, ()), source))
    gpus = {_gpu_name(element, source): (element, place) for element, place in places if element.tag == "gpu"}
    if len(gpus) != sum(element.tag == "gpu" for element, _ in places):
        raise _error(source, "two GPUs have the same `dev`; each has its own", system)
    if not gpus:
        raise _error(source, "there is no <gpu> in it", system)
    addresses = {place.pci[-1].attributes["busid"]: gpu for gpu, (_, place) in gpus.items()}
    types: dict[str, DeviceType] = {}
    devices = []
    for gpu in sorted(gpus, key=lambda gpu: int(gpu.removeprefix("cuda"))):
        element, place = gpus[gpu]
        key, types_name = _kind(element, place)
        if not re.fullmatch(DEVICE_TYPE, key):
            text = f"device and sm of the <gpu> give the type a name of {len(key)} characters"
            raise _error(source, f"{text}; allowed: up to 200, without '=' and control characters", element)
        types[key] = DeviceType(kind="cuda", name=types_name)
        devices.append(_device(gpu, key, element, place, addresses, source))
    nics = [_nic(element, place, source) for element, place in places if element.tag == "net"]
    intra = _within([gpus[device.id][0] for device in devices], devices, source)
    return Node(id=name, addr=name, devices=devices, intra_bytes_per_s=intra, nics=nics or None), types


def _parse(text: str, source: str) -> _Element:
    """Return the root element of an XML text; `source` is the path of its file, for errors. A document type
    (<!DOCTYPE>) is refused, because its entities could grow without bound or name other files.

    Raises:
        FileError: the text is not XML, has a document type, or is nested deeper than a topology of NCCL.
    """
    parser = expat.ParserCreate()
    roots: list[_Element] = []
    open_: list[_Element] = []

    def start(tag: str, attributes: dict[str, str]) -> None:
        element = _Element(tag, attributes, parser.CurrentLineNumber)
        if len(open_) >= _DEPTH_MAX:
            raise _error(source, "nested too deep to be a topology of NCCL", element)
        (open_[-1].children if open_ else roots).append(element)
        open_.append(element)

    def end(_tag: str) -> None:
        open_.pop()

    def doctype(*_: object) -> None:
        text = "a document type (<!DOCTYPE>) is not allowed; NCCL writes none"
        raise FileError(source, [FieldError("", text, parser.CurrentLineNumber)])

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.StartDoctypeDeclHandler = doctype
    try:
        parser.Parse(text, True)
    except expat.ExpatError as error:
        problem = f"not valid XML: {expat.ErrorString(error.code)}"
        raise FileError(source, [FieldError("", problem, error.lineno)]) from None
    return roots[0]


def _walk(element: _Element, place: _Place, source: str) -> Iterator[tuple[_Element, _Place]]:
    for child in element.children:
        if child.tag == "cpu":
            inner = _Place(_integer(child, "numaid", source), ())
        elif child.tag == "pci":
            if "busid" not in child.attributes:
                raise _error(source, "<pci> has no busid", child)
            inner = _Place(place.numa, (*place.pci, child))
        else:
            inner = place
        if child.tag == "gpu" and not place.pci:
            raise _error(source, "<gpu> is not inside a <pci>, so it has no address", child)
        yield child, place
        yield from _walk(child, inner, source)


def _gpu_name(gpu: _Element, source: str) -> str:
    number = _integer(gpu, "dev", source)
    if number is None or number < 0:
        raise _error(source, "<gpu> has no dev; a number from 0 is expected", gpu)
    return f"cuda{number}"


def _kind(gpu: _Element, place: _Place) -> tuple[str, str]:
    """Return (key in `device_types`, name) of a GPU's type, made from PCI numbers and compute capability, because a
    dump has no names of GPUs."""
    pci, sm = place.pci[-1].attributes, gpu.attributes.get("sm")
    number = pci.get("device")
    key = "gpu" + (f"-{number}" if number else "") + (f"-sm{sm}" if sm else "")
    words = [
        f"PCI device {pci.get('vendor', '?')}:{number}" if number else "",
        f"compute capability {sm}" if sm else "",
    ]
    return key, "GPU, " + (", ".join(filter(None, words)) or "kind not told")


def _device(
    name: str, kind: str, gpu: _Element, place: _Place, addresses: dict[str, str], source: str
) -> Device:  # fmt: skip
    links: dict[str, NvlinkPeer] = {}
    for link in gpu.children:
        if link.tag == "nvlink":
            target, count = link.attributes.get("target"), _integer(link, "count", source)
            if target is None or count is None or count < 1:
                raise _error(source, "<nvlink> needs a target and a count of 1 or more", link)
            links[addresses.get(target, target)] = NvlinkPeer(links=count, active=count)
    return Device(
        id=name,
        type=kind,
        pci_path=[pci.attributes["busid"] for pci in place.pci],
        numa=_numa(place),
        pcie=_pcie(place.pci[-1], source),
        nvlink=links,
    )


def _nic(net: _Element, place: _Place, source: str) -> Nic:
    name, speed = net.attributes.get("name"), _integer(net, "speed", source)
    if name is None:
        raise _error(source, "<net> has no name", net)
    path = [pci.attributes["busid"] for pci in place.pci] or None
    rate = speed * 1e6 / 8 if speed is not None and speed > 0 else None
    return Nic(name=name, bytes_per_s=rate, pci_path=path, numa=_numa(place))


def _numa(place: _Place) -> int | None:
    return place.numa if place.numa is not None and place.numa >= 0 else None


def _pcie(pci: _Element, source: str) -> PcieLink | None:
    """Return the PCIe link that a `pci` element states; None if it states none, as in most virtual machines.
    NCCL writes only the highest generation and width that are possible, so the result has them as those in use, too.
    """
    speed, width = pci.attributes.get("link_speed", ""), _integer(pci, "link_width", source)
    rate = re.match(r"\d+(\.\d+)?", speed)
    generations = [number for number, text in GIGATRANSFERS.items() if rate and float(text) == float(rate.group())]
    if not generations or not width:
        return None
    # NCCL writes the link that card and slot are capable of, not the one in use.
    return PcieLink(generation=generations[0], width=width, generation_max=generations[0], width_max=width)


def _within(gpus: list[_Element], devices: list[Device], source: str) -> float | None:
    """Return the bytes/s between the slowest pair of GPUs of a node, by the nominal rates of their links; None if a
    rate is unknown or there is only one GPU.

    Args:
        gpus: elements of the GPUs in the dump, which state compute capabilities.
        devices: the same GPUs with their links, in the same order.
    """
    rates = []
    for gpu, device in zip(gpus, devices, strict=True):
        rate = _NVLINK_BYTES_PER_S.get(_integer(gpu, "sm", source) or 0)
        others = {other.id for other in devices} - {device.id}
        # Through switches a GPU reaches any other with all its links; without them only with those between the two.
        links = device.nvlink
        through = sum(link.links for peer, link in links.items() if peer not in others)
        direct = min((links[peer].links if peer in links else 0 for peer in others), default=0)
        count = max(through, direct)
        rates.append(rate * count if rate and count else _pcie_bytes_per_s(device.pcie))
    return min((rate for rate in rates if rate), default=None) if len(rates) > 1 and all(rates) else None


def _pcie_bytes_per_s(pcie: PcieLink | None) -> float | None:
    """Return the bytes/s of all lanes of a PCIe link in one direction, after its line code: 8b/10b up to generation 2,
    128b/130b from generation 3. None if the link is unknown."""
    if pcie is None:
        return None
    coding = 8 / 10 if pcie.generation <= 2 else 128 / 130
    return pcie.width * float(GIGATRANSFERS[pcie.generation]) * 1e9 * coding / 8


def _integer(element: _Element, key: str, source: str) -> int | None:
    text = element.attributes.get(key)
    if not text:
        return None
    try:
        return int(text, 0) if text.startswith("0x") else int(text)
    except ValueError:
        raise _error(source, f"<{element.tag}> {key}: found {text[:40]!r}; a number is expected", element) from None


def _error(source: str, text: str, element: _Element) -> FileError:
    return FileError(source, [FieldError("", text, element.line)])
