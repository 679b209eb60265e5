"""topology.json: what was measured of nodes, devices and links. A number that was not measured is absent."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from hpctrain.records.document import Document, Part

INTRA_NODE_LATENCY_S = 5e-6
"""Start-up cost assumed between two devices of one node when it was not measured: a kernel launch on each side."""


class Provenance(Part):
    """How the file came about."""

    version: str
    """Version of hpctrain."""
    created: str
    """UTC time."""
    transport: str
    """What carried the messages: tcp."""
    loopback: bool = False
    """True when the nodes are processes of one machine: the links are memory, not a network."""
    mode: str = "full"
    """full: every pair was measured. published: figures of data sheets and papers, nothing was measured."""
    seed: int | None = None
    """Orders the rounds of the probe."""
    notes: list[str] = []
    """Where figures that were not measured come from, and what a reader must know."""
    rounds_done: int = 0
    """Rounds of pairs that were measured."""
    rounds_planned: int = 0
    """Rounds that a full measurement has."""
    wall_s: float | None = None
    """How long the probe took."""
    job_id: str | None = None
    """Slurm job that measured."""


class DeviceType(Part):
    """A kind of device; most nodes share one."""

    kind: Literal["cpu", "cuda"]
    """What runs on it."""
    name: str
    """The vendor's name of it."""


class Device(Part):
    """One device of a node, as measured."""

    id: str
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
    """Median time of one tiny operation: what each operation costs however small it is."""


class Reason(Part):
    """Why a node got its verdict."""

    code: str
    """Short name: UNREACHABLE, SLOW_LINK, SLOW_DEVICE, PROBE_FAILED."""
    text: str
    """One sentence with the numbers."""


class Health(Part):
    """The verdict on a node."""

    verdict: Literal["ok", "degraded", "bad", "unknown"] = "unknown"
    """ok and degraded are used, bad is excluded, unknown was not measured."""
    reasons: list[Reason] = []
    """Why, where it is not ok."""


class Node(Part):
    """A node and its devices."""

    id: str
    """Slurm's name of the node, or local0, local1, … for virtual ones."""
    addr: str
    """Address the others reached it at."""
    iface: str | None = None
    """Network interface of that address."""
    host: str | None = None
    """Host name the machine gives itself."""
    devices: list[Device]
    """What computes on it."""
    intra_bytes_per_s: float | None = None
    """Bandwidth from one device of the node to another."""
    health: Health = Health()
    """Whether it should be used."""


class Latency(Part):
    """One-way latency of a small message: half the round trip."""

    min: float
    """The fastest, in seconds."""
    p50: float
    """The median, in seconds."""
    p95: float
    """95 of 100 are faster, in seconds."""


class LinkFigures(Part):
    """One direction between two nodes."""

    latency_s: Latency | None = None
    """Of a small message."""
    isolated_bytes_per_s: float | None = None
    """Bandwidth timed at the receiver, with `concurrency` pairs at work."""
    loaded_bytes_per_s: float | None = None
    """Bandwidth with every node at work at once."""
    concurrency: int | None = None
    """Pairs at work while the isolated figure was taken."""
    alpha_s: float | None = None
    """Start-up time of a message in the model t = alpha + beta·bytes."""
    beta_s_per_byte: float | None = None
    """Time per byte in that model."""
    n: int | None = None
    """Samples behind the bandwidth."""
    inferred: bool = False
    """True when taken from the class, not measured."""


class Link(Part):
    """A pair of nodes, both directions."""

    a: str
    """One node."""
    b: str
    """The other node."""
    class_: str | None = Field(default=None, alias="class")
    """Class of links it belongs to."""
    ab: LinkFigures
    """From a to b."""
    ba: LinkFigures
    """From b to a."""


class LinkClass(Part):
    """Links that behave alike; a pair without figures of its own has these."""

    id: str
    """Name that links refer to."""
    alpha_s: float
    """Start-up time of a message in the model t = alpha + beta·bytes."""
    beta_s_per_byte: float
    """Time per byte in that model."""
    pairs: int
    """How many measured pairs are behind it."""


class NodeCluster(Part):
    """Nodes behind one switch, found or told."""

    id: str
    """Name of the cluster."""
    level: int = 1
    """Height in the tree of switches; 1 is next to the nodes."""
    parent: str | None = None
    """Cluster that it lies in."""
    members: list[str]
    """Its nodes."""
    source: str = "measured"
    """measured, or who told."""


class Fabric(Part):
    """The network between nodes."""

    classes: list[LinkClass] = []
    """Kinds of links."""
    clusters: list[NodeCluster] = []
    """Groups of nodes that are near each other."""
    links: list[Link] = []
    """Measured pairs; a pair that is absent has the figures of its class."""


class Verdict(Part):
    """What the probe advises for the whole allocation."""

    status: Literal["go", "warn", "refuse"] = "go"
    """go, go with warnings, or do not run on these nodes."""
    exclude: list[str] = []
    """Nodes to leave out."""
    faults: list[Reason] = []
    """What was found wrong."""


class Topology(Document):
    """Nodes, devices and links as measured."""

    schema_kind: ClassVar[str] = "topology"

    provenance: Provenance
    """How the file came about."""
    device_types: dict[str, DeviceType]
    """Kinds of devices, by the name that devices refer to."""
    nodes: list[Node] = Field(min_length=1)
    """Every node that took part."""
    fabric: Fabric = Fabric()
    """The network between them."""
    verdict: Verdict = Verdict()
    """What the probe advises for the whole allocation."""

    @model_validator(mode="after")
    def _check(self) -> Topology:
        names = [node.id for node in self.nodes]
        if len(set(names)) != len(names):
            raise ValueError(f"nodes: a name is given twice: {sorted(n for n in set(names) if names.count(n) > 1)}")
        for node in self.nodes:
            for device in node.devices:
                if device.type not in self.device_types:
                    raise ValueError(f"node {node.id}: device type {device.type!r} is not in device_types")
        for link in self.fabric.links:
            for end in (link.a, link.b):
                if end not in names:
                    raise ValueError(f"fabric.links: {end!r} is not a node of this file")
        return self

    def node(self, name: str) -> Node:
        """The node of that name; KeyError when there is none."""
        for node in self.nodes:
            if node.id == name:
                return node
        raise KeyError(name)

    def device(self, place: str) -> Device:
        """The device at 'node:device'; KeyError when there is none."""
        node, _, name = place.partition(":")
        for device in self.node(node).devices:
            if device.id == name:
                return device
        raise KeyError(place)

    def places(self) -> list[str]:
        """Every device as 'node:device', in file order."""
        return [f"{node.id}:{device.id}" for node in self.nodes for device in node.devices]

    def only(self, names: Iterable[str]) -> Topology:
        """The same measurements for some of the nodes."""
        keep = set(names)
        links = [link for link in self.fabric.links if link.a in keep and link.b in keep]
        clusters = [
            cluster.model_copy(update={"members": [name for name in cluster.members if name in keep]})
            for cluster in self.fabric.clusters
        ]
        fabric = self.fabric.model_copy(update={"links": links, "clusters": [c for c in clusters if c.members]})
        nodes = [node for node in self.nodes if node.id in keep]
        exclude = [name for name in self.verdict.exclude if name in keep]
        verdict = self.verdict.model_copy(update={"exclude": exclude})
        return self.model_copy(update={"nodes": nodes, "fabric": fabric, "verdict": verdict})

    def link_cost(self) -> LinkCost:
        """A table that answers how long a message takes between two devices."""
        return LinkCost(self)


class LinkCost:
    """Time of a message between two devices, t = alpha + beta·bytes, from the link, else its class, else the mean."""

    def __init__(self, topology: Topology) -> None:
        self._costs: dict[tuple[str, str], tuple[float, float]] = {}
        classes = {entry.id: (entry.alpha_s, entry.beta_s_per_byte) for entry in topology.fabric.classes}
        for link in topology.fabric.links:
            for ends, figures in (((link.a, link.b), link.ab), ((link.b, link.a), link.ba)):
                if figures.alpha_s is not None and figures.beta_s_per_byte is not None:
                    self._costs[ends] = (figures.alpha_s, figures.beta_s_per_byte)
                elif link.class_ in classes:
                    self._costs[ends] = classes[link.class_]
        known = list(classes.values()) or list(self._costs.values())
        # The slowest class stands in for a pair nobody measured: a plan should not lean on an unknown link.
        self._default = max(known, key=lambda cost: cost[1]) if known else None
        speeds = [d.memory_bytes_per_s for n in topology.nodes for d in n.devices if d.memory_bytes_per_s]
        self._intra = (INTRA_NODE_LATENCY_S, 1.0 / min(speeds)) if speeds else (INTRA_NODE_LATENCY_S, 0.0)
        self._within = {
            node.id: (INTRA_NODE_LATENCY_S, 1.0 / node.intra_bytes_per_s)
            for node in topology.nodes
            if node.intra_bytes_per_s
        }

    def between(self, source: str, target: str) -> tuple[float, float]:
        """(alpha in seconds, beta in seconds per byte) from device `source` to device `target`, as 'node:device'.

        Raises:
            KeyError: the file has neither that link nor a class.
        """
        a, b = source.partition(":")[0], target.partition(":")[0]
        if a == b:
            return self._within.get(a, self._intra)
        cost = self._costs.get((a, b), self._default)
        if cost is None:
            raise KeyError(f"{a}-{b}")
        return cost

    def least(self) -> tuple[float, float]:
        """(alpha, beta) that no message between two nodes stays below; (0, 0) where nothing is known."""
        known = [*self._costs.values(), *([self._default] if self._default else [])]
        return min((a for a, _ in known), default=0.0), min((b for _, b in known), default=0.0)

    def seconds(self, source: str, target: str, size_bytes: float) -> float:
        """Time of one message of `size_bytes`."""
        alpha, beta = self.between(source, target)
        return alpha + beta * size_bytes

    def worst(self, places: Iterable[str]) -> tuple[float, float]:
        """The slowest alpha and beta among the devices, as a ring through them would meet."""
        pairs = [self.between(a, b) for a, b in itertools.permutations(places, 2)]
        if not pairs:
            return (0.0, 0.0)
        return (max(alpha for alpha, _ in pairs), max(beta for _, beta in pairs))
