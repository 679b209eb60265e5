"""Makes topologies from other tools' files; nothing in them is measured. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpctrain import __version__
from hpctrain.base.clock import utc_text
from hpctrain.records.topology.topology import Fabric, Node, NodeCluster, Provenance, Topology
from hpctrain.topology.formats.nccl import node_of_dump
from hpctrain.topology.formats.slurm import clusters_of_conf, clusters_of_yaml


def from_nccl(text: str, source: str, nodes: Sequence[str], wall: float) -> Topology:
    """Return a topology in which each of `nodes` has the GPUs, network cards and links of an NCCL dump of one node.

    Args:
        source: names the file in errors and in the notes.
        wall: seconds since 1970, for the provenance.

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
    return Topology(provenance=_provenance("nccl", notes, wall), device_types=types, nodes=alike)


def from_slurm(text: str, source: str, wall: float) -> Topology:
    """Return the nodes and switches of a topology.conf, or of a topology.yaml; the suffix of `source` decides.

    Raises:
        FileError: the file has errors; all are listed with their lines.
    """
    read = clusters_of_yaml if source.endswith((".yaml", ".yml")) else clusters_of_conf
    clusters = read(text, source)
    notes = [
        f"Nothing in this file was measured: the switches are those of Slurm's {Path(source).name}, as it was given.",
        "Devices and links are absent: run `hpctrain probe`.",
    ]
    nodes = [Node(id=name, addr=name, devices=[]) for name in _names(clusters)]
    fabric = Fabric(clusters=clusters)
    return Topology(provenance=_provenance("slurm", notes, wall), device_types={}, nodes=nodes, fabric=fabric)


def _names(clusters: Sequence[NodeCluster]) -> list[str]:
    return list(dict.fromkeys(name for cluster in clusters if cluster.level == 1 for name in cluster.members))


def _provenance(transport: str, notes: list[str], wall: float) -> Provenance:
    return Provenance(version=__version__, created=utc_text(wall), transport=transport, mode="prior", notes=notes)
