"""What the doctor finds, before anybody judges it. None and () say that a part is not there."""

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
    """Whether srun starts containers by itself (--container-image)."""


@dataclass(frozen=True)
class SlurmUnavailable:
    """No cluster to ask."""

    installed: bool
    """Whether its commands are on the path."""
    configured: bool
    """Whether they know a controller."""
    reason: str = ""
    """What they say."""


@dataclass(frozen=True)
class ContainerRuntime:
    """A program that starts containers."""

    name: str
    version: str | None
    """None: it is on the path and does not run."""


@dataclass(frozen=True)
class TorchFacts:
    """torch as a process of its own finds it."""

    version: str
    cuda_version: str | None
    """The CUDA that this build is for; None: a build for CPUs."""
    gloo: bool
    nccl_version: str | None
    devices: tuple[str, ...]
    """Names of the GPUs that it can use here."""


@dataclass(frozen=True)
class TorchUnavailable:
    """Why there is none."""

    reason: str
    installed: bool


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver on this machine, by nvidia-smi."""

    gpus: tuple[str, ...]
    version: str | None
    reason: str = ""
    """What nvidia-smi says when it fails."""


@dataclass(frozen=True)
class Interface:
    """A network interface that is up and has an address."""

    name: str
    address: str
    bits_per_s: int | None
    """None where the driver does not tell, as in most virtual machines."""
    infiniband: bool


@dataclass(frozen=True)
class NetworkFacts:
    """Interfaces, and the one that collectives would use."""

    interfaces: tuple[Interface, ...]
    """Loopback is left out."""
    peer: str | None
    """The node that a way was looked for to; None: processes of this machine only."""
    chosen: str | None
    reason: str = ""
    """Why none is chosen."""
    exported: Mapping[str, str] = field(default_factory=dict)
    """GLOO_ and NCCL_SOCKET_IFNAME, where a person set them."""
    known: tuple[str, ...] = ()
    """Names of all interfaces, up or not."""


@dataclass(frozen=True)
class FolderTest:
    """Something that was done in a folder for real. reason: what went wrong."""

    works: bool
    reason: str = ""


@dataclass(frozen=True)
class FolderFacts:
    """Where run folders go."""

    path: Path
    kind: str
    """Type of the file system."""
    options: tuple[str, ...]
    free_bytes: int
    from_variable: bool
    """Whether HPCTRAIN_RUNS names it."""
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
    """Everything that was found."""

    host: str
    slurm: SlurmFacts | SlurmUnavailable
    containers: tuple[ContainerRuntime, ...]
    torch: TorchFacts | TorchUnavailable
    driver: Driver | None
    network: NetworkFacts
    runs: FolderFacts
    local_disks: tuple[LocalDisk, ...]
