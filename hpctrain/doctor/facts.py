"""The facts that the doctor collects, without judgement. None and () mean that a part is missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.slurm.cluster import ClusterConfig, NodeInfo, Partition


@dataclass(frozen=True)
class SlurmFacts:
    """A cluster whose controller answers."""

    config: ClusterConfig
    partitions: tuple[Partition, ...]
    nodes: tuple[NodeInfo, ...]
    pyxis: bool
    """Whether srun can start containers itself (--container-image)."""


@dataclass(frozen=True)
class SlurmUnavailable:
    """No cluster that could be asked."""

    installed: bool
    """Whether Slurm's commands are on the path."""
    configured: bool
    """Whether the commands know a controller."""
    reason: str = ""
    """Error message of the commands."""


@dataclass(frozen=True)
class ContainerRuntime:
    """A program that starts containers."""

    name: str
    version: str | None
    """None: it is on the path but does not run."""


@dataclass(frozen=True)
class TorchFacts:
    """torch, as imported in a separate process."""

    version: str
    cuda_version: str | None
    """CUDA version of this build; None: a build for CPUs."""
    gloo: bool
    nccl_version: str | None
    devices: tuple[str, ...]
    """Names of the GPUs that torch can use here."""


@dataclass(frozen=True)
class TorchUnavailable:
    """Why torch is not available."""

    reason: str
    installed: bool


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver on this machine, according to nvidia-smi."""

    gpus: tuple[str, ...]
    version: str | None
    reason: str = ""
    """Message of nvidia-smi when it fails."""


@dataclass(frozen=True)
class Interface:
    """A network interface that is up and has an address."""

    name: str
    address: str
    bits_per_s: int | None
    """Speed of the interface; None if the driver does not report it, as in most virtual machines."""
    infiniband: bool


@dataclass(frozen=True)
class NetworkFacts:
    """Interfaces, and the one that collectives would use."""

    interfaces: tuple[Interface, ...]
    """Interfaces that are up, without loopback."""
    peer: str | None
    """The node to which a route was looked up; None: only processes on this machine communicate."""
    chosen: str | None
    reason: str = ""
    """Why no interface was chosen."""
    exported: Mapping[str, str] = field(default_factory=dict)
    """GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, if a person set them."""
    known: tuple[str, ...] = ()
    """Names of all interfaces, up or not."""


@dataclass(frozen=True)
class FolderTest:
    """A test of one operation in a folder. reason: what went wrong."""

    works: bool
    reason: str = ""


@dataclass(frozen=True)
class FolderFacts:
    """The folder that holds run folders."""

    path: Path
    kind: str
    """Type of the file system."""
    options: tuple[str, ...]
    free_bytes: int
    from_variable: bool
    """Whether HPCTRAIN_RUNS names the folder."""
    rename: FolderTest
    lock: FolderTest
    link: FolderTest


@dataclass(frozen=True)
class LocalDisk:
    """A folder that other nodes do not see."""

    path: Path
    kind: str
    free_bytes: int


@dataclass(frozen=True)
class MachineFacts:
    """All collected facts."""

    host: str
    slurm: SlurmFacts | SlurmUnavailable
    containers: tuple[ContainerRuntime, ...]
    torch: TorchFacts | TorchUnavailable
    driver: Driver | None
    network: NetworkFacts
    runs: FolderFacts
    local_disks: tuple[LocalDisk, ...]
