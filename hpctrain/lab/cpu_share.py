"""CPU shares of the nodes through cgroup v1 or v2: the files to write, and their text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpctrain.lab.layout import CPU_GROUP, LabLayout

PERIOD_US = 100_000


@dataclass(frozen=True)
class CpuController:
    """The CPU controller of this machine: cgroup version and mount point."""

    version: int
    root: Path

    @property
    def group(self) -> Path:
        """The lab's CPU group, the parent of the nodes' groups."""
        return self.root / CPU_GROUP

    def node_group(self, name: str) -> Path:
        return self.group / name

    def join_file(self, name: str) -> Path:
        """Return the file to which a process writes its id to join the node's group."""
        return self.node_group(name) / "cgroup.procs"


def find_cpu_control(mounts: str) -> CpuController | None:
    """Return the machine's CPU controller; None if no cgroup file system with a CPU controller is mounted.

    Args:
        mounts: text of /proc/self/mounts.
    """
    rows = [line.split() for line in mounts.splitlines()]
    for _, folder, kind, options, *_ in rows:
        if kind == "cgroup" and "cpu" in options.split(","):
            return CpuController(1, Path(folder))
    for _, folder, kind, *_ in rows:
        if kind == "cgroup2" and "cpu" in _controllers(Path(folder)):
            return CpuController(2, Path(folder))
    return None


def _controllers(root: Path) -> list[str]:
    try:
        return (root / "cgroup.controllers").read_text().split()
    except OSError:
        return []


def share_folders(control: CpuController, layout: LabLayout) -> list[Path]:
    """Return the cgroup folders to make, parents first; [] if no node has a CPU share."""
    names = [name for name in layout.names if layout.spec.cpu_share_of(layout.node(name))]
    return [control.group, *(control.node_group(name) for name in names)] if names else []


def share_files(control: CpuController, layout: LabLayout) -> list[tuple[Path, str]]:
    """Return (file, text) pairs to write in order once the cgroup folders exist."""
    files: list[tuple[Path, str]] = []
    for node in layout.spec.nodes:
        share = layout.spec.cpu_share_of(node)
        if share is None:
            continue
        group, quota_us = control.node_group(node.name), round(share * PERIOD_US)
        if control.version == 1:
            files += [(group / "cpu.cfs_period_us", str(PERIOD_US)), (group / "cpu.cfs_quota_us", str(quota_us))]
        else:
            files += [(group / "cpu.max", f"{quota_us} {PERIOD_US}")]
    if files and control.version == 2:
        # The children of a cgroup get the CPU controller only if it is enabled here.
        files = [(folder / "cgroup.subtree_control", "+cpu") for folder in (control.root, control.group)] + files
    return files
