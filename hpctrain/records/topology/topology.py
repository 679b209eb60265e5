"""topology.json: measured figures of nodes, devices and links. A number that was not measured is absent."""

from __future__ import annotations

from collections.abc import Iterable, Set
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, PrivateAttr, model_validator

from hpctrain.records.format.document import Document, Part
from hpctrain.records.format.node_name import DEVICE_NAME, NODE_NAME, DeviceId
from hpctrain.records.topology.evidence import HostFacts, Nic, NvlinkPeer, PcieLink
from hpctrain.records.topology.figures import (
    Bytes,
    Count,
    Level,
    PositiveSeconds,
    PositiveSecondsPerByte,
    Rate,
    Ratio,
    Seconds,
)
from hpctrain.records.topology.link import Link, LinkClass
from hpctrain.records.topology.names import DEVICE_TYPE, check_known, distinct

if TYPE_CHECKING:
    from hpctrain.records.topology.pair_matrix import PairMatrix


class Provenance(Part):
    """How, when and by which probe a topology.json was made."""

    version: str
    """Version of hpctrain that wrote the file."""
    created: str
    """When the file was made: date and time in UTC."""
    transport: str
    """Transport of the measured messages: tcp. In an imported topology: the program whose file was imported (slurm,
    nccl)."""
    loopback: bool = False
    """Whether the nodes are processes of one machine, so that the links are memory and not a network."""
    shared: bool = False
    """Whether other jobs could run on the nodes during the probe, because its job had only a part of each."""
    mode: str = "full"
    """What was measured. full: every pair. sampled: enough pairs to know which nodes share a switch. health: each node
    with a few others, enough to judge the node. published: nothing, figures are from data sheets and papers. prior:
    nothing, the topology was imported from another tool's file."""
    seed: int | None = None
    """Seed for the order of the probe's rounds."""
    notes: list[str] = []
    """Sources of figures that were not measured, and further remarks for readers of the file."""
    rounds_done: Count = 0
    """Number of rounds that were measured."""
    rounds_planned: Count = 0
    """Number of rounds that the probe planned to measure."""
    wall_s: Seconds | None = None
    """Duration of the probe, seconds."""
    job_id: str | None = None
    """Id of the Slurm job that ran the probe."""


class DeviceType(Part):
    """A type of device, such as one model of GPU, which several nodes may have."""

    kind: Literal["cpu", "cuda"]
    """Whether devices of this type are CPUs or CUDA devices."""
    name: str
    """The vendor's name for devices of this type."""


class CodecSeconds(Part):
    """Seconds that a device computes for one number of a gradient, for each codec that a probe measures; the time of
    messages is not included."""

    bf16: PositiveSecondsPerByte
    """Codec bf16: rounding, summing in fp32, and copying back."""
    quantized: PositiveSecondsPerByte
    """Codec int4: encoding as integers of 4 bits, summing, encoding and decoding the sums, and storing the rounding
    error."""
    topk: PositiveSecondsPerByte
    """Codec topk: selecting 7 % of the numbers, encoding, decoding and applying a message of them, and storing the
    residual."""
    power_sgd: PositiveSecondsPerByte
    """Codec power_sgd at rank 4: computing both thin matrices with orthonormal columns, decoding their product, and
    storing the residual."""
    rotated: PositiveSecondsPerByte | None = None
    """Codec rotated_int3: as int4, with rotations. None: the probe is older."""


class RatesAlone(Part):
    """Figures of one device of several on a CPU node, measured while the node's other devices were idle."""

    flops: dict[str, Rate] = {}
    """Precision (fp32, bf16) -> sustained FLOP/s of matrix products."""
    memory_bytes_per_s: Rate | None = None
    """Bandwidth of copies within the node's memory; bytes read and bytes written both count."""


class Device(Part):
    """One device of a node, with its measured figures. If a CPU node has several devices, all of them are busy while
    the figures are measured, except for those in `alone`."""

    id: str = Field(pattern=DEVICE_NAME)
    """Name of the device within the node: cpu0, cuda1."""
    type: str
    """Type of the device, a key of `device_types`."""
    flops: dict[str, Rate] = {}
    """Precision (fp32, bf16) -> sustained FLOP/s of matrix products."""
    memory_bytes: Bytes | None = None
    """Bytes of the device's memory that a run may use."""
    memory_bytes_per_s: Rate | None = None
    """Bandwidth of copies within the device's memory; bytes read and bytes written both count."""
    launch_s: PositiveSeconds | None = None
    """Launch time: median seconds of one tiny operation. In the cost model, no operation takes less."""
    codec_s: CodecSeconds | None = None
    """Seconds that the device computes for one number of a gradient, by codec."""
    alone: RatesAlone | None = None
    """The device's figures while the other devices of its CPU node were idle. The planner does not use them."""
    pcie: PcieLink | None = None
    """The device's PCIe link to the host."""
    nvlink: dict[str, NvlinkPeer] = {}
    """Other device of the node -> NVLinks to it. NVLinks to a switch have the key 'switch' or the switch's PCI
    address."""
    throttle_reasons: list[str] = []
    """Why the device was slowed down under load: for a GPU in NVML's terms (hw_slowdown, sw_power_cap), for a CPU
    cpu_quota."""
    p2p: dict[str, Literal["ok", "no", "unknown"]] = {}
    """Other device of the node -> whether this device can read the other's memory."""
    ecc_errors: Count | None = None
    """Uncorrectable memory errors since the driver was loaded."""
    xid: int | None = None
    """Last error number (Xid) that the NVIDIA driver reported for the device."""
    power_w: Ratio | None = None
    """Power drawn under load, in watts."""
    driver: str | None = None
    """Version of the device's driver."""
    numa: int | None = None
    """NUMA node of the host that the device is attached to."""
    nic: str | None = None
    """Network card with the shortest PCI path to the device: mlx5_0, eth0."""
    pci_path: list[str] | None = Field(default=None, min_length=1)
    """PCI addresses on the path from the CPU to the device: PCI switches first, the device last."""
    host_to_device_bytes_per_s: Rate | None = None
    """Bandwidth of copies from page-locked memory of the host."""
    device_to_host_bytes_per_s: Rate | None = None
    """Bandwidth of copies to page-locked memory of the host."""
    copy_bytes_per_s: dict[str, Rate] = {}
    """Other device of the node -> bandwidth of a copy from this device to it, without other copies at the same time."""


class Reason(Part):
    """A fault of a node, a device or a link as the reason for a verdict, with evidence and fix."""

    code: str
    """Fault code, such as UNREACHABLE, SLOW_NODE or PCIE_DOWNSHIFT."""
    text: str
    """One sentence that describes the fault, with the measured figures."""
    evidence: str | None = None
    """With what the measured figure was compared, and how often it was measured."""
    fix: str | None = None
    """What the user can do about the fault."""


class Health(Part):
    """The verdict on a node."""

    verdict: Literal["ok", "degraded", "bad", "unknown"] = "unknown"
    """ok: no fault was seen. degraded: faulty, but the plan may use the node. bad: the node is excluded. unknown: the
    node was not measured."""
    reasons: list[Reason] = []
    """Faults that are the reasons for the verdict; empty if the verdict is ok."""


class Node(Part):
    """A node with its devices, its network cards and the verdict on it (`health`)."""

    id: str = Field(pattern=NODE_NAME)
    """Slurm's name of the node, or local0, local1, … for virtual nodes."""
    addr: str
    """Network address at which other nodes reach this node."""
    iface: str | None = None
    """Network interface that has the address `addr`."""
    host: str | None = None
    """Host name of the machine."""
    devices: list[Device]
    """The node's devices."""
    intra_bytes_per_s: Rate | None = None
    """Bandwidth of messages from one device of the node to another."""
    intra_alpha_s: PositiveSeconds | None = None
    """Alpha of messages from one device of the node to another: their time is alpha + bytes / bandwidth."""
    nics: list[Nic] | None = None
    """The node's network cards."""
    host_facts: HostFacts | None = None
    """Facts that the node's operating system reports."""
    health: Health = Health()
    """The verdict on the node."""


class NodeCluster(Part):
    """A cluster of nodes: the nodes behind one switch, as measured or as declared in a file."""

    id: str
    """Name of the cluster."""
    level: Level = 1
    """Level of the cluster's switch in the tree of switches; 1 is next to the nodes."""
    parent: str | None = None
    """Name of the cluster of the next higher level that contains this cluster."""
    members: list[str]
    """Names of the cluster's nodes."""
    source: str = "measured"
    """How the cluster is known: measured, slurm (declared by Slurm), or prior (from the topology that the probe was
    given as its prior)."""
    oversubscription: Ratio | None = None
    """Bandwidth from a node of the cluster to a node outside while only this pair sends, divided by the bandwidth of
    the pair while all members of the cluster send to another cluster. With n members, the uplink carries n divided by
    this ratio pairs at full rate; in predictions, more messages share its rate. Absent: taken as 1."""

    def only(self, names: Set[str]) -> NodeCluster:
        """Return the cluster without members that are not in `names`, with the same rate of its uplink."""
        members = [name for name in self.members if name in names]
        ratio = self.oversubscription
        if ratio is not None and members:
            ratio = max(1.0, ratio * len(members) / len(self.members))
        return self.model_copy(update={"members": members, "oversubscription": ratio})


class MatrixFile(Part):
    """Reference to the file beside topology.json that has the pair matrix. The file's name contains its hash, so
    topology.json and the file are always of one probe."""

    file: str = Field(pattern=r"^pairs-[0-9a-f]{12}\.npz$")
    """Name of the file, which is in the folder of topology.json."""
    sha256: str
    """SHA-256 of the file's content."""


class Fabric(Part):
    """The network between nodes: links, link classes and clusters of nodes."""

    classes: list[LinkClass] = []
    """Classes of links with similar figures."""
    clusters: list[NodeCluster] = []
    """Groups of nodes behind one switch."""
    links: list[Link] = []
    """Pairs of nodes with their figures. A pair that is not listed has the figures of the pair matrix, else those of
    its link class."""
    broken: list[tuple[str, str]] = []
    """Broken links: pairs of living nodes that could not measure each other. A plan uses at most one node of each
    pair."""
    matrix: MatrixFile | None = None
    """The file with the pair matrix, the figures of all pairs; only with more than 64 nodes."""
    held_out_error: Ratio | None = None
    """Median relative error of the message times that the link classes predict (0.05 is 5 %), over measured pairs that
    were not used to make the classes."""


class Verdict(Part):
    """The probe's advice for the whole allocation."""

    status: Literal["go", "warn", "refuse"] = "go"
    """go: run on the nodes that are not excluded. warn: run on them, but there are faults. refuse: do not run."""
    exclude: list[str] = []
    """Names of nodes that a run should not use."""
    faults: list[Reason] = []
    """Faults of nodes, devices and links that the probe saw."""
    sbatch_hint: str | None = None
    """Option of sbatch that excludes the nodes in `exclude`."""
    env: dict[str, str] = {}
    """Environment variables for a run (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) that name a network interface which
    every node has."""


class Topology(Document):
    """topology.json: nodes, devices, links and verdict, as measured."""

    schema_kind: ClassVar[str] = "topology"

    provenance: Provenance
    """How, when and by which probe the file was made."""
    device_types: dict[Annotated[str, Field(pattern=DEVICE_TYPE)], DeviceType]
    """Name of a type -> type of device; `type` of a device is such a name."""
    nodes: list[Node] = Field(min_length=1)
    """All nodes that took part in the probe."""
    fabric: Fabric = Fabric()
    """The network between the nodes."""
    verdict: Verdict = Verdict()
    """The probe's advice for the whole allocation."""

    _pairs: PairMatrix | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _check(self) -> Topology:
        nodes = distinct("nodes", "name", [node.id for node in self.nodes])
        for number, node in enumerate(self.nodes):
            distinct(f"nodes[{number}].devices", "name", [device.id for device in node.devices])
            for place, device in enumerate(node.devices):
                if device.type not in self.device_types:
                    raise ValueError(f"nodes[{number}].devices[{place}].type: {device.type!r} is not in device_types")
        fabric = self.fabric
        distinct("fabric.classes", "id", [entry.id for entry in fabric.classes])
        distinct("fabric.classes", "level", [str(entry.level) for entry in fabric.classes if entry.level is not None])
        distinct("fabric.clusters", "id", [cluster.id for cluster in fabric.clusters])
        for number, cluster in enumerate(fabric.clusters):
            check_known(f"fabric.clusters[{number}].members", cluster.members, nodes)
            distinct(f"fabric.clusters[{number}].members", "node", cluster.members)
        pairs = [(link.a, link.b) for link in fabric.links]
        for field, ends in (("links", pairs), ("broken", fabric.broken)):
            for number, pair in enumerate(ends):
                check_known(f"fabric.{field}[{number}]", pair, nodes)
                if pair[0] == pair[1]:
                    raise ValueError(f"fabric.{field}[{number}]: found {pair[0]!r} twice; expected two nodes")
        distinct("fabric.links", "pair", [" and ".join(sorted(pair)) for pair in pairs])
        return self

    @property
    def pairs(self) -> PairMatrix | None:
        """Return the pair matrix, with the figures of all pairs of nodes; None if the topology has none."""
        return self._pairs

    def with_pairs(self, pairs: PairMatrix) -> Topology:
        """Return the topology with `pairs` as its pair matrix, which `write` stores in a file beside topology.json."""
        fabric = self.fabric.model_copy(update={"matrix": MatrixFile(file=pairs.file_name, sha256=pairs.sha256)})
        made = self.model_copy(update={"fabric": fabric})
        made._pairs = pairs
        return made

    def write(self, path: Path) -> None:
        """Write the file of the pair matrix, if the topology has one, and then topology.json to `path`. Each file is
        written atomically, so topology.json never names a missing file.

        Raises:
            StorageError: a file cannot be written.
        """
        if self._pairs is not None:
            self._pairs.write(path.parent)
        super().write(path)

    @classmethod
    def read(cls, path: Path, *, owned: bool = False) -> Topology:
        """Return the topology in the file at `path`, after checking it, with the pair matrix if the file names one.

        Args:
            owned: require that topology.json and its folder belong to this user, as in a run folder.

        Raises:
            FileError: topology.json is missing, not JSON or has errors, or the file of the pair matrix is missing or
                has another hash.
            UntrustedError: with `owned`, topology.json or its folder belongs to somebody else, or others can write to
                it.
        """
        made = super().read(path, owned=owned)
        if made.fabric.matrix is not None:
            from hpctrain.records.topology.pair_matrix import read_pairs  # numpy is only for large clusters

            nodes = [node.id for node in made.nodes]
            made._pairs = read_pairs(path.with_name(made.fabric.matrix.file), made.fabric.matrix.sha256, nodes, path)
        return made

    def node(self, name: str) -> Node:
        """Return the node of this name.

        Raises:
            KeyError: the topology has no such node.
        """
        for node in self.nodes:
            if node.id == name:
                return node
        raise KeyError(name)

    def device(self, device_id: DeviceId) -> Device:
        """Return the device with this device id.

        Raises:
            KeyError: the topology has no such device.
        """
        for device in self.node(device_id.node).devices:
            if device.id == device_id.device:
                return device
        raise KeyError(device_id)

    def device_ids(self) -> list[DeviceId]:
        """Return the device ids of all devices, in file order."""
        return [DeviceId.of(node.id, device.id) for node in self.nodes for device in node.devices]

    def only(self, names: Iterable[str]) -> Topology:
        """Return the topology without nodes that are not in `names`, and without their links. The uplink of a cluster
        keeps its rate, so fewer members are less oversubscribed."""
        keep = set(names)
        links = [link for link in self.fabric.links if link.a in keep and link.b in keep]
        clusters = [cluster.only(keep) for cluster in self.fabric.clusters]
        broken = [pair for pair in self.fabric.broken if keep.issuperset(pair)]
        update = {"links": links, "broken": broken, "clusters": [c for c in clusters if c.members], "matrix": None}
        fabric = self.fabric.model_copy(update=update)
        nodes = [node for node in self.nodes if node.id in keep]
        exclude = [name for name in self.verdict.exclude if name in keep]
        verdict = self.verdict.model_copy(update={"exclude": exclude})
        made = self.model_copy(update={"nodes": nodes, "fabric": fabric, "verdict": verdict})
        made._pairs = None
        return made if self._pairs is None else made.with_pairs(self._pairs.only(keep))
