"""topology.json: measured figures of nodes, devices and links. A number that was not measured is absent."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PrivateAttr, model_validator

from hpctrain.records.format.document import Document, Part
from hpctrain.records.format.node_name import DEVICE_NAME, NODE_NAME, DeviceId
from hpctrain.records.topology.evidence import HostFacts, Nic, NvlinkPeer, PcieLink
from hpctrain.records.topology.link import Link, LinkClass

if TYPE_CHECKING:
    from hpctrain.records.topology.pair_matrix import PairMatrix


class Provenance(Part):
    """How the file was made."""

    version: str
    """Version of hpctrain."""
    created: str
    """When the file was made, UTC."""
    transport: str
    """Transport of the messages: tcp."""
    loopback: bool = False
    """Whether the nodes are processes of one machine, so that the links are memory and not a network."""
    mode: str = "full"
    """full: every pair was measured. sampled: enough pairs to know which nodes share a switch. health: each node with a
    few others, enough to judge it. published: figures from data sheets and papers, nothing was measured. prior:
    imported from another tool's file, nothing was measured."""
    seed: int | None = None
    """Seed for the order of the probe's rounds."""
    notes: list[str] = []
    """Sources of figures that were not measured, and what readers must know."""
    rounds_done: int = 0
    """Number of rounds that were measured."""
    rounds_planned: int = 0
    """Number of rounds of the complete measurement."""
    wall_s: float | None = None
    """Duration of the probe, seconds."""
    job_id: str | None = None
    """Id of the Slurm job that ran the probe."""


class DeviceType(Part):
    """A kind of device, which several nodes may have."""

    kind: Literal["cpu", "cuda"]
    """Whether it is a CPU or a CUDA device."""
    name: str
    """The vendor's name of the device."""


class CodecSeconds(Part):
    """Seconds of processor time that each codec takes for one number of a gradient."""

    bf16: float = Field(gt=0)
    """Codec bf16: rounding, summing in fp32, and copying back."""
    quantized: float = Field(gt=0)
    """Codec int4: encoding as integers of 4 bits, summing, encoding and decoding the sums, and storing the rounding
    error."""
    topk: float = Field(gt=0)
    """Codec topk: selecting 7 % of the numbers, encoding, decoding and applying a message of them, and storing the
    residual."""
    power_sgd: float = Field(gt=0)
    """Codec power_sgd at rank 4: both products and orthonormal columns, applying them, and storing the residual."""


class Device(Part):
    """One device of a node, with its measured figures."""

    id: str = Field(pattern=DEVICE_NAME)
    """Name within the node: cpu0, cuda1."""
    type: str
    """Key into device_types."""
    flops: dict[str, float] = {}
    """Sustained FLOP/s of matrix products, by dtype (fp32, bf16)."""
    memory_bytes: float | None = None
    """Memory that a run may use."""
    memory_bytes_per_s: float | None = None
    """Bandwidth of copies within the device's memory, read plus write."""
    launch_s: float | None = None
    """Launch time: median seconds of one tiny operation. Every operation takes at least this long."""
    codec_s: CodecSeconds | None = None
    """Seconds of gradient compression on the device, without messages."""
    pcie: PcieLink | None = None
    """The device's PCIe link to the host."""
    nvlink: dict[str, NvlinkPeer] = {}
    """NVLink to other devices of the node, by device; through a switch, by 'switch' or the switch's address."""
    throttle_reasons: list[str] = []
    """Why the device's clocks were lowered under load, in NVML's terms: hw_slowdown, sw_power_cap; for a CPU:
    cpu_quota."""
    p2p: dict[str, Literal["ok", "no", "unknown"]] = {}
    """Other device of the node -> whether this device can read its memory."""
    ecc_errors: int | None = None
    """Uncorrectable memory errors since the driver was loaded."""
    xid: int | None = None
    """Last error number (Xid) that the NVIDIA driver reported for the device."""
    power_w: float | None = None
    """Power drawn under load, in watts."""
    driver: str | None = None
    """Version of the device's driver."""
    numa: int | None = None
    """NUMA node of the host that the device is attached to."""
    nic: str | None = None
    """Network card with the shortest PCI path to the device: mlx5_0, eth0."""
    pci_path: list[str] | None = Field(default=None, min_length=1)
    """PCI addresses on the path to the device: switches first, the device last."""
    host_to_device_bytes_per_s: float | None = None
    """Bandwidth of copies from page-locked memory of the host."""
    device_to_host_bytes_per_s: float | None = None
    """Bandwidth of copies to page-locked memory of the host."""
    copy_bytes_per_s: dict[str, float] = {}
    """Other device of the node -> bandwidth of a copy to it, measured one at a time."""


class Reason(Part):
    """A fault that is a reason for a verdict, with its evidence and fix."""

    code: str
    """Fault code: UNREACHABLE, SLOW_NODE, PCIE_DOWNSHIFT."""
    text: str
    """One sentence that describes the fault, with the numbers."""
    evidence: str | None = None
    """What the node's figure was compared with, and how often it was measured."""
    fix: str | None = None
    """What to do next."""


class Health(Part):
    """The verdict on a node."""

    verdict: Literal["ok", "degraded", "bad", "unknown"] = "unknown"
    """Nodes that are ok or degraded are used, bad ones are excluded; unknown ones were not measured."""
    reasons: list[Reason] = []
    """Reasons, where the verdict is not ok."""


class Node(Part):
    """A node and its devices."""

    id: str = Field(pattern=NODE_NAME)
    """Slurm's name of the node, or local0, local1, … for virtual ones."""
    addr: str
    """Address at which other nodes reached it."""
    iface: str | None = None
    """Network interface of that address."""
    host: str | None = None
    """Host name of the machine."""
    devices: list[Device]
    """The node's devices."""
    intra_bytes_per_s: float | None = None
    """Bandwidth from one device of the node to another."""
    nics: list[Nic] | None = None
    """The node's network cards."""
    host_facts: HostFacts | None = None
    """Facts that the node's operating system reports."""
    health: Health = Health()
    """The verdict on the node."""


class NodeCluster(Part):
    """Nodes behind one switch, measured or declared."""

    id: str
    """Name of the cluster."""
    level: int = 1
    """Level in the tree of switches; 1 is next to the nodes."""
    parent: str | None = None
    """Id of the cluster that contains this one."""
    members: list[str]
    """Names of the cluster's nodes."""
    source: str = "measured"
    """Where the cluster comes from: measured, slurm, or prior (an earlier file)."""
    oversubscription: float | None = None
    """Oversubscription ratio: bandwidth of a single pair that leaves the cluster, divided by a pair's bandwidth while
    all members send to another cluster."""


class MatrixFile(Part):
    """The file beside topology.json with the figures of every pair. Its name contains its hash, so the two files are
    always of one probe."""

    file: str = Field(pattern=r"^pairs-[0-9a-f]{12}\.npz$")
    """Name of the file, in the folder of the topology."""
    sha256: str
    """SHA-256 of the file."""


class Fabric(Part):
    """The network between nodes."""

    classes: list[LinkClass] = []
    """Link classes."""
    clusters: list[NodeCluster] = []
    """Groups of nodes that are near each other."""
    links: list[Link] = []
    """Measured pairs. For a pair that is not listed, the figures of the matrix hold, else those of its class."""
    broken: list[tuple[str, str]] = []
    """Pairs of living nodes that could not reach each other in the probe: a plan uses at most one node of each pair."""
    matrix: MatrixFile | None = None
    """The file with the figures of all pairs; only with more than 64 nodes."""
    held_out_error: float | None = None
    """Median relative error of the classes' predicted message times, over measured pairs that were left out of the
    classes (0.05 is 5 %)."""


class Verdict(Part):
    """The probe's advice for the whole allocation."""

    status: Literal["go", "warn", "refuse"] = "go"
    """go: run on these nodes. warn: run, with warnings. refuse: do not run."""
    exclude: list[str] = []
    """Nodes to exclude."""
    faults: list[Reason] = []
    """Faults of nodes, devices and links."""
    sbatch_hint: str | None = None
    """Option of sbatch that excludes the nodes in `exclude`."""
    env: dict[str, str] = {}
    """Environment variables with an interface that every node has: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME."""


class Topology(Document):
    """Nodes, devices and links as measured."""

    schema_kind: ClassVar[str] = "topology"

    provenance: Provenance
    """How the file was made."""
    device_types: dict[str, DeviceType]
    """Kinds of devices, by the name that devices refer to."""
    nodes: list[Node] = Field(min_length=1)
    """Every node that took part."""
    fabric: Fabric = Fabric()
    """The network between the nodes."""
    verdict: Verdict = Verdict()
    """The probe's advice for the whole allocation."""

    _pairs: PairMatrix | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _check(self) -> Topology:
        names = [node.id for node in self.nodes]
        if len(set(names)) != len(names):
            raise ValueError(f"nodes: a name is given twice: {sorted(n for n in set(names) if names.count(n) > 1)}")
        for node in self.nodes:
            for device in node.devices:
                if device.type not in self.device_types:
                    raise ValueError(f"node {node.id}: device type {device.type!r} is not in device_types")
        for field, pairs in (
            ("links", [(link.a, link.b) for link in self.fabric.links]),
            ("broken", self.fabric.broken),
        ):
            for end in (end for pair in pairs for end in pair):
                if end not in names:
                    raise ValueError(f"fabric.{field}: {end!r} is not a node of this file")
        return self

    @property
    def pairs(self) -> PairMatrix | None:
        """Figures of every node pair as a matrix; None where this topology has no such matrix."""
        return self._pairs

    def with_pairs(self, pairs: PairMatrix) -> Topology:
        """Return this topology with `pairs` as the figures of every pair; `write` stores them in a file beside
        topology.json."""
        fabric = self.fabric.model_copy(update={"matrix": MatrixFile(file=pairs.file_name, sha256=pairs.sha256)})
        made = self.model_copy(update={"fabric": fabric})
        made._pairs = pairs
        return made

    def write(self, path: Path) -> None:
        """Write the file of pairs, if any, and then topology.json, each atomically, so that topology.json never names a
        missing file.

        Raises:
            StorageError: one of the files cannot be written.
        """
        if self._pairs is not None:
            self._pairs.write(path.parent)
        super().write(path)

    @classmethod
    def read(cls, path: Path, *, owned: bool = False) -> Topology:
        """Read and check topology.json, and the file of pairs if topology.json names one.

        Raises:
            FileError: topology.json is missing, not JSON or has errors, or the file of pairs is missing or has another
                hash.
        """
        made = super().read(path, owned=owned)
        if made.fabric.matrix is not None:
            from hpctrain.records.topology.pair_matrix import read_pairs  # numpy is only for large clusters

            nodes = [node.id for node in made.nodes]
            made._pairs = read_pairs(path.with_name(made.fabric.matrix.file), made.fabric.matrix.sha256, nodes, path)
        return made

    def node(self, name: str) -> Node:
        """Return the node of that name; KeyError when there is none."""
        for node in self.nodes:
            if node.id == name:
                return node
        raise KeyError(name)

    def device(self, device_id: DeviceId) -> Device:
        """Return the device of that name; KeyError when there is none."""
        for device in self.node(device_id.node).devices:
            if device.id == device_id.device:
                return device
        raise KeyError(device_id)

    def device_ids(self) -> list[DeviceId]:
        """Return the name of every device, in file order."""
        return [DeviceId.of(node.id, device.id) for node in self.nodes for device in node.devices]

    def only(self, names: Iterable[str]) -> Topology:
        """Return the topology of these nodes only."""
        keep = set(names)
        links = [link for link in self.fabric.links if link.a in keep and link.b in keep]
        clusters = [
            cluster.model_copy(update={"members": [name for name in cluster.members if name in keep]})
            for cluster in self.fabric.clusters
        ]
        broken = [pair for pair in self.fabric.broken if keep.issuperset(pair)]
        update = {"links": links, "broken": broken, "clusters": [c for c in clusters if c.members], "matrix": None}
        fabric = self.fabric.model_copy(update=update)
        nodes = [node for node in self.nodes if node.id in keep]
        exclude = [name for name in self.verdict.exclude if name in keep]
        verdict = self.verdict.model_copy(update={"exclude": exclude})
        made = self.model_copy(update={"nodes": nodes, "fabric": fabric, "verdict": verdict})
        made._pairs = None
        return made if self._pairs is None else made.with_pairs(self._pairs.only(keep))
