"""The records of `hpctrain doctor`: the facts that it collects, and the findings that it makes of them.

A fact of None or () is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hpctrain.base.errors import EXIT_DONE, EXIT_WARNINGS
from hpctrain.slurm.cluster import ClusterState


@dataclass(frozen=True)
class SlurmFacts(ClusterState):
    """Facts about a cluster whose Slurm controller answers: settings, partitions, nodes, and whether srun has pyxis."""

    pyxis: bool
    """Whether srun can start containers itself (--container-image), which the plugin pyxis adds."""


@dataclass(frozen=True)
class SlurmUnavailable:
    """The reason why no Slurm cluster could be asked."""

    installed: bool
    """Whether Slurm's commands are on the PATH."""
    configured: bool
    """Whether Slurm's commands are configured with a controller."""
    reason: str = ""
    """Error message of Slurm's commands; '' if they are not installed."""


@dataclass(frozen=True)
class TorchFacts:
    """Facts about the installed torch, which a separate process has imported."""

    version: str
    """torch's version."""
    cuda_version: str | None
    """CUDA version that torch was built for; None for a CPU build."""
    gloo: bool
    """Whether torch has gloo."""
    nccl_version: str | None
    """Version of torch's NCCL; None without NCCL."""
    devices: tuple[str, ...]
    """Names of the GPUs that torch can use on this machine."""
    hip_version: str | None = None
    """ROCm version that torch was built for; None for other builds."""


@dataclass(frozen=True)
class TorchUnavailable:
    """The reason why torch is not installed or cannot be imported."""

    reason: str
    installed: bool


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver on this machine and the names of the GPUs, as nvidia-smi reports them."""

    gpus: tuple[str, ...]
    version: str | None
    """Version of the driver; None if nvidia-smi fails or lists no GPU."""
    reason: str = ""
    """Error message of nvidia-smi; '' if it works."""


@dataclass(frozen=True)
class Interface:
    """A network interface that is up and has an address."""

    name: str
    address: str
    bits_per_s: int | None
    """Speed of the interface in bits per second; None if the driver does not report it, as in most virtual machines."""
    infiniband: bool
    """Whether it is an interface with IP over InfiniBand."""


@dataclass(frozen=True)
class NetworkFacts:
    """This machine's network interfaces, and the one that collectives would use (`chosen`)."""

    interfaces: tuple[Interface, ...]
    """Interfaces that are up and have an address, without loopback."""
    peer: str | None
    """The other node to which a route was looked up; None if no other node takes jobs, so that all processes run on
    this machine."""
    chosen: str | None
    reason: str = ""
    """Why no interface was chosen; '' if one was."""
    exported: Mapping[str, str] = field(default_factory=dict)
    """Values of the variables GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, by variable, where they are set in the
    environment."""
    known: tuple[str, ...] = ()
    """Names of all interfaces, up or not."""


@dataclass(frozen=True)
class FolderFacts:
    """Facts about the folder in which run folders are made."""

    path: Path
    kind: str
    """Type of the file system, such as ext4; '' if it is not known."""
    options: tuple[str, ...]
    """Mount options of the file system, such as 'rw' and 'relatime'."""
    free_bytes: int
    """Free bytes of the whole file system."""
    from_variable: bool
    """Whether the variable HPCTRAIN_RUNS names the folder."""
    rename: str
    """What went wrong when a file in the folder was replaced by another one; '' if nothing did."""
    lock: str
    """What went wrong when a run folder in the folder was locked; '' if nothing did."""
    link: str
    """What went wrong when a hard link was made in the folder; '' if nothing did."""


@dataclass(frozen=True)
class LocalDisk:
    """A folder for temporary files on a disk of this machine, which other nodes do not see."""

    path: Path
    kind: str
    """Type of the file system, such as ext4; '' if it is not known."""
    free_bytes: int
    """Free bytes of the whole file system."""


EnvironmentKind = Literal["venv", "conda", "pixi", "image", "system"]


@dataclass(frozen=True)
class StoredPart:
    """A part of the Python environment, and the file system that it lies on."""

    name: str
    """Name of the part in the doctor's finding."""
    path: Path
    kind: str
    """Type of the file system, such as nfs4; '' if it is not known."""


@dataclass(frozen=True)
class UnfitPackage:
    """A package whose installed version hpctrain does not accept."""

    name: str
    version: str | None
    """None if the package is not installed."""
    accepted: str
    """Versions that hpctrain accepts, such as '<1.6,>=1.5.2'."""
    needed: bool
    """Whether every run needs the package."""


@dataclass(frozen=True)
class EnvironmentFacts:
    """Facts about the Python that runs hpctrain."""

    kind: EnvironmentKind
    python: str
    """Version of Python, such as 3.11.7."""
    parts: tuple[StoredPart, ...]
    """The environment's folder, and what lies neither in it nor in /usr: the Python that it was made from, and
    hpctrain's source."""
    unfit: tuple[UnfitPackage, ...]


@dataclass(frozen=True)
class Quota:
    """What a user uses of a file system, and the limits: the soft ones, or the hard ones where there is no soft one."""

    used_bytes: int
    limit_bytes: int | None
    """None: no limit."""
    used_files: int
    limit_files: int | None
    """None: no limit."""


@dataclass(frozen=True)
class HomeFacts:
    """Facts about the home folder."""

    path: Path
    kind: str
    """Type of the file system, such as nfs4; '' if it is not known."""
    free_bytes: int | None
    """Free bytes of the whole file system; None if there is no such folder."""
    free_files: int | None
    """Number of files that the whole file system still takes; None if it has no such limit."""
    quota: Quota | None
    """The user's quota on the file system; None if the command `quota` reports none."""
    caches: tuple[str, ...]
    """Variables that would move the caches which lie in the home folder, such as HF_HOME."""


@dataclass(frozen=True)
class MachineFacts:
    """All facts that the doctor collects."""

    host: str
    slurm: SlurmFacts | SlurmUnavailable
    containers: Mapping[str, str | None]
    """Versions of the programs on the PATH that start containers, by program; None for one that does not run."""
    torch: TorchFacts | TorchUnavailable
    driver: Driver | None
    """None if there is no nvidia-smi."""
    network: NetworkFacts
    runs: FolderFacts
    local_disks: tuple[LocalDisk, ...]
    environment: EnvironmentFacts
    home: HomeFacts


Subject = Literal["Slurm", "partitions", "containers", "Python", "torch", "network", "files"]
Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class DoctorFinding:
    """One finding, as the doctor prints it."""

    subject: Subject
    """Part of the machine or the cluster under which the finding is printed."""
    name: str
    """Name of the setting, partition, program or folder."""
    level: Level
    """`ok`: nothing to do. `note`: a disadvantage, or something is missing. `problem`: a run would fail or stay
    slow."""
    value: str
    """Value of the setting; or the state of the partition, program or folder."""
    words: str = ""
    """What the value means for a run."""
    todo: str = ""
    """What the user should do; '' where there is nothing to do."""


def exit_code(findings: Sequence[DoctorFinding]) -> int:
    """Return the exit code of `hpctrain doctor`: 3 if a finding is a problem, else 0."""
    return EXIT_WARNINGS if any(finding.level == "problem" for finding in findings) else EXIT_DONE
