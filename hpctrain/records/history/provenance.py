"""What a run was made with: provenance.json and requirements.lock, written when the run folder is made, and
environments.jsonl, to which each node of each attempt adds a line. Also compares the environments of two attempts.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from packaging.version import InvalidVersion, Version
from pydantic import Field

from hpctrain.records.format.document import Document, Part
from hpctrain.records.format.input_file import read_jsonl
from hpctrain.records.format.node_name import NODE_NAME, compress_node_set

PROVENANCE_FILE = "provenance.json"
REQUIREMENTS_FILE = "requirements.lock"
"""Installed packages in the form that `pip install -r` reads."""
ENVIRONMENTS_FILE = "environments.jsonl"


class InstalledPackage(Part):
    """A package that is installed in the Python environment, with its origin as pip recorded it (PEP 610)."""

    name: str = Field(max_length=256, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")
    """Name of the package."""
    version: str = Field(max_length=256, pattern=r"^[A-Za-z0-9.+!_-]+$")
    """Version of the package."""
    url: str | None = Field(default=None, max_length=4096, pattern=r"^[a-z][a-z0-9+.-]*://[!-~]+$")
    """Where pip installed the package from, without passwords, and without user names except for ssh; absent for a
    package of an index."""
    editable: bool | None = None
    """Whether the package is installed from a folder that may change at any time (`pip install -e`); absent
    otherwise."""
    vcs: Literal["git", "hg", "svn", "bzr"] | None = None
    """Version control system from which pip took the package's source; absent for another source."""
    commit: str | None = Field(default=None, max_length=64, pattern=r"^[0-9a-f]+$")
    """Commit or revision of the package's source, where pip recorded one."""
    subdirectory: str | None = Field(default=None, max_length=1024, pattern=r"^[A-Za-z0-9._+~/-]+$")
    """Folder of the package within its source; absent for the top folder."""
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """Hash of the file that pip installed, where pip recorded one."""

    def requirement(self) -> str:
        """Return the line of a requirements file that installs the package again."""
        version = f"{self.name}{'==' if _is_version(self.version) else '==='}{self.version}"
        if self.url is None:
            return version
        fragments = [f"{name}={value}" for name in ("sha256", "subdirectory") if (value := getattr(self, name))]
        url = self.url + (f"@{self.commit}" if self.commit else "") + ("#" + "&".join(fragments) if fragments else "")
        if self.editable:
            return f"-e {shlex.quote(url)}  # {version}"
        vcs = f"{self.vcs or 'git'}+" if self.commit else ""
        return f"{self.name} @ {vcs}{url}"


def _is_version(text: str) -> bool:
    """Return whether pip takes this version after `==`. Old packages have versions of other forms, such as 2004d, which
    pip takes after `===`."""
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


class SoftwareVersions(Part):
    """Versions of the software of one Python environment on one machine. What is not known is absent."""

    hpctrain: str
    """Version of hpctrain."""
    hpctrain_commit: str | None = None
    """Git commit of hpctrain's source, if it is installed from a git checkout; with '+changes' if files differ from
    it."""
    python: str
    """Version of Python."""
    torch: str | None = None
    """Version of torch."""
    cuda: str | None = None
    """CUDA version that torch was built for."""
    rocm: str | None = None
    """ROCm version that torch was built for."""
    nccl: str | None = None
    """Version of the package of NCCL that torch loads."""
    os: str | None = None
    """Name and version of the operating system, inside the image if the run has one."""
    glibc: str | None = None
    """Version of the C library."""
    kernel: str | None = None
    """Release of the kernel."""
    modules: list[str] = []
    """Loaded environment modules (LOADEDMODULES)."""


class CodeState(Part):
    """Git state of the user's code when it was copied."""

    commit: str
    """Git commit."""
    dirty: bool
    """Whether files had changes that were not committed."""


class ImageIdentity(Part):
    """The container image of a run. A field is None if it could not be read."""

    path: str
    """Path or name of the image."""
    id: str | None = None
    """The id that the build of a .sif file wrote into its header; another build has another id. None for an image of
    another format."""
    size_bytes: int | None = None
    """Size of the file in bytes."""
    modified_s: float | None = None
    """When the file was last changed, seconds since 1970."""
    labels: dict[str, str] = {}
    """Labels of the image."""


class RunProvenance(Document):
    """provenance.json of a run folder: what `submit` or `train` ran with when it made the folder. Of the environment's
    variables it holds only LOADEDMODULES."""

    schema_kind: ClassVar[str] = "run_provenance"

    created: str
    """When the file was made, in UTC."""
    software: SoftwareVersions
    slurm: str | None = None
    """Version of Slurm's commands; absent for a run that is no Slurm job, or if it cannot be read."""
    code: CodeState | None = None
    """State of the folder `code` of the run file; absent without one, or outside of git."""
    image: ImageIdentity | None = None
    """The container image; absent without one."""
    packages: list[InstalledPackage]
    """Every package of the environment, by name."""


class NodeEnvironment(Document):
    """A line of environments.jsonl: the software and devices of one node in one attempt."""

    schema_kind: ClassVar[str] = "node_environment"

    attempt: int = Field(ge=0)
    """Number of the attempt."""
    node: str = Field(pattern=NODE_NAME)
    """Name of the node."""
    time_s: float
    """When the line was written, seconds since 1970."""
    software: SoftwareVersions
    driver: str | None = None
    """Version of the GPU driver; absent without one."""
    gpus: list[str] = []
    """Models of the node's NVIDIA GPUs, each once."""
    network: dict[str, str] = {}
    """Version of each library and device of the fast network, such as libibverbs or mlx5_0."""
    packages: dict[str, str] | None = None
    """Version of every installed package; only in the line of the attempt's first node."""

    def values(self) -> dict[str, str]:
        """Return what is compared between attempts, without packages: a name, such as 'torch' or 'driver', -> the value
        as text. Unknown values are left out.
        """
        software = self.software
        lists = {"GPUs": self.gpus, "modules": software.modules}
        network = [f"{name} {version}" for name, version in sorted(self.network.items())]
        texts = {
            "hpctrain": software.hpctrain, "hpctrain's commit": software.hpctrain_commit, "Python": software.python,
            "torch": software.torch, "torch's CUDA": software.cuda, "torch's ROCm": software.rocm,
            "NCCL": software.nccl, "driver": self.driver, "kernel": software.kernel, "system": software.os,
            "glibc": software.glibc,
        }  # fmt: skip
        listed = {name: ", ".join(values) for name, values in (lists | {"network": network}).items() if values}
        return {name: value for name, value in texts.items() if value is not None} | listed


def read_environments(folder: Path) -> list[NodeEnvironment]:
    """Return the lines of environments.jsonl in a run folder, in file order; [] without the file.

    Raises:
        FileError: the file cannot be read, or a line is invalid.
        UntrustedError: the file or its folder belongs to somebody else, or others can write to it.
    """
    path = folder / ENVIRONMENTS_FILE
    return [NodeEnvironment.from_json(value, str(path)) for value in read_jsonl(path)]


MOST_PACKAGES_NAMED = 5
"""Most packages of another version that a text about an attempt names; it counts the others."""
SAME_ON_ALL_NODES = ("hpctrain", "Python", "torch", "torch's CUDA", "torch's ROCm", "NCCL")
"""What has to be the same on all nodes of an attempt for its collectives to work."""


def environment_changes(lines: Sequence[NodeEnvironment], attempt: int) -> list[str]:
    """Return what differs between the environments of an attempt and of the run's first attempt, each difference as
    text: 'torch 2.7.1 → 2.8.0', 'driver 535.1 → 550.2 on n[3-4]'. A value that any node of the first attempt had is no
    difference, because an attempt may get other nodes of the same cluster.

    Args:
        lines: lines of environments.jsonl.
        attempt: number of the attempt.
    """
    first = min((line.attempt for line in lines), default=attempt)
    if first == attempt:
        return []
    before, after = _of_attempt(lines, first), _of_attempt(lines, attempt)
    known = _nodes_by_value(before)
    changes = []
    for name, nodes_by_value in _nodes_by_value(after).items():
        for value, nodes in nodes_by_value.items():
            if name in known and value not in known[name]:
                where = "" if len(nodes) == len({line.node for line in after}) else f" on {compress_node_set(nodes)}"
                changes.append(f"{name} {' or '.join(known[name])} → {value}{where}")
    return changes + _package_changes(_packages(before), _packages(after))


def mixed_versions(lines: Sequence[NodeEnvironment], attempt: int) -> list[str]:
    """Return which software of `SAME_ON_ALL_NODES` differs between the nodes of an attempt, each as text: 'torch 2.7.1
    on n1, 2.8.0 on n[2-4]'.

    Args:
        lines: lines of environments.jsonl.
        attempt: number of the attempt.
    """
    counts = {name: len(values) for name, values in _nodes_by_value(_of_attempt(lines, attempt)).items()}
    texts = attempt_values(lines, attempt)
    return [f"{name} {texts[name]}" for name in SAME_ON_ALL_NODES if counts.get(name, 0) > 1]


def attempt_values(lines: Sequence[NodeEnvironment], attempt: int) -> dict[str, str]:
    """Return name of a compared value (as from `NodeEnvironment.values`) -> its value on the nodes of an attempt, as
    text. If nodes differ, the text has each value with its nodes.
    """
    by_name = _nodes_by_value(_of_attempt(lines, attempt))
    return {
        name: next(iter(values))
        if len(values) == 1
        else ", ".join(f"{value} on {compress_node_set(nodes)}" for value, nodes in values.items())
        for name, values in by_name.items()
    }


def _nodes_by_value(lines: Sequence[NodeEnvironment]) -> dict[str, dict[str, list[str]]]:
    """Return name of a compared value (as from `NodeEnvironment.values`) -> value -> nodes with that value. A later
    line of a node replaces an earlier one.
    """
    newest = {line.node: line for line in lines}
    nodes: dict[str, dict[str, list[str]]] = {}
    for line in newest.values():
        for name, value in line.values().items():
            nodes.setdefault(name, {}).setdefault(value, []).append(line.node)
    return nodes


def _of_attempt(lines: Sequence[NodeEnvironment], attempt: int) -> list[NodeEnvironment]:
    return [line for line in lines if line.attempt == attempt]


def _packages(lines: Sequence[NodeEnvironment]) -> Mapping[str, str] | None:
    return next((line.packages for line in lines if line.packages is not None), None)


_COMPARED_BY_NAME = re.compile(r"^(hpctrain|torch|nvidia[-_.]nccl[-_.].*)$")
"""Packages whose versions are compared as fields of `SoftwareVersions`."""


def _package_changes(before: Mapping[str, str] | None, after: Mapping[str, str] | None) -> list[str]:
    if before is None or after is None:
        return []
    names = [name for name in sorted(before.keys() | after.keys()) if not _COMPARED_BY_NAME.match(name)]
    changed = [
        f"{name} {before.get(name, 'not installed')} → {after.get(name, 'not installed')}"
        for name in names
        if before.get(name) != after.get(name)
    ]
    more = len(changed) - MOST_PACKAGES_NAMED
    return changed[:MOST_PACKAGES_NAMED] + ([f"{more} more packages"] if more > 0 else [])
