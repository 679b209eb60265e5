"""The text of the lab's files: slurm.conf, cgroup.conf, the TaskProlog, lines of /etc/hosts, and cgroup files for the
nodes' CPU shares.

slurm.conf(5) and cgroup.conf(5) explain each key.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.atomic import rewrite_text, storage_errors
from hpctrain.base.errors import InputError, StorageError
from hpctrain.base.package_data import render_template
from hpctrain.lab.layout import CPU_GROUP, LabLayout

CONTROLLER_PORT = 16817
"""TCP port of the lab's slurmctld. It differs from Slurm's default 6817, because this machine may be part of a
cluster."""
NODE_PORT = 16818
_TEMPLATE = Path(__file__).with_name("slurm.conf.j2")
_SCRIPT = """\
#!/bin/sh
# {words}. A value of your own in the job's environment counts more.
[ -n "$OMP_NUM_THREADS" ] || echo "export OMP_NUM_THREADS={threads}"
"""
MARK = "# hpctrain-lab"
PERIOD_US = 20_000
"""Microseconds in which a node gets its share of a core. With the kernel's default, 0.1 s, a node waits so long for the
next period that pipelines of several nodes take twice as long as on slow processors."""


def slurm_conf(layout: LabLayout, hostname: str) -> str:
    """Return the text of slurm.conf.

    Args:
        hostname: this machine's short host name; slurmctld does not start under another name.
    """
    return render_template(
        _TEMPLATE,
        layout=layout,
        spec=layout.spec,
        slurm=layout.spec.slurm,
        hostname=hostname,
        controller_port=CONTROLLER_PORT,
        node_port=NODE_PORT,
    )


def cgroup_conf(version: tuple[int, int]) -> str:
    """Return the text of cgroup.conf, which keeps Slurm from using cgroups as far as its version allows, because all
    nodes of the lab share this machine's cgroups.

    Args:
        version: Slurm's version, such as (22, 5).
    """
    if version >= (24, 5):
        return "CgroupPlugin=disabled\n"
    return "CgroupPlugin=autodetect\nIgnoreSystemd=yes\n"


def threads_of(layout: LabLayout, cores: int) -> int:
    """Return the number of threads of a task: a node's equal share of this machine's cores, at least one.

    Args:
        cores: number of this machine's cores.
    """
    return max(1, cores // len(layout.names))


def threads_words(layout: LabLayout, cores: int) -> str:
    """Return a line about the threads of a task: 'OMP_NUM_THREADS=1 in each task: 4 nodes share 2 cores'.

    Args:
        cores: number of this machine's cores.
    """
    nodes, many = len(layout.names), "" if len(layout.names) == 1 else "s"
    share = "shares" if nodes == 1 else "share"
    return f"OMP_NUM_THREADS={threads_of(layout, cores)} in each task: {nodes} node{many} {share} {cores} cores"


def task_prolog(layout: LabLayout, cores: int) -> str:
    """Return the text of the TaskProlog: slurmd runs it before each task and puts its `export` lines into the task's
    environment.

    The nodes of a lab share this machine's cores, and each node sees all of them. Without the TaskProlog every worker
    would start as many threads as there are cores. Waiting threads spin, so steps would take many times as long.

    Args:
        cores: number of this machine's cores.
    """
    return _SCRIPT.format(words=threads_words(layout, cores), threads=threads_of(layout, cores))


def without_lab(text: str) -> str:
    """Return the text of /etc/hosts without the lines of any lab.

    Args:
        text: text of /etc/hosts.
    """
    return "".join(line for line in text.splitlines(keepends=True) if not line.rstrip().endswith(MARK))


def with_lab(text: str, layout: LabLayout) -> str:
    """Return the text of /etc/hosts with a line for each node of the lab; lines of an earlier lab are dropped.

    Args:
        text: present text of /etc/hosts.

    Raises:
        InputError: another host has the name of a node.
    """
    others = without_lab(text)
    taken = {name for line in others.splitlines() for name in line.partition("#")[0].split()[1:]}
    clash = [name for name in layout.names if name in taken]
    if clash:
        raise InputError(f"nodes: found '{clash[0]}', which /etc/hosts gives to another host; choose another name")
    if others and not others.endswith("\n"):
        others += "\n"
    return others + "".join(f"{layout.address(name)} {name} {MARK}\n" for name in layout.names)


def write_hosts(path: Path, text: str) -> None:
    """Replace /etc/hosts atomically, with owner and mode unchanged, because every user of the machine reads it.

    In a container, /etc/hosts is a mount and cannot be replaced; the text is then written into it.

    Raises:
        StorageError: the file cannot be written.
    """
    try:
        rewrite_text(path, text)
    except StorageError as error:
        if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EBUSY:
            raise
        with storage_errors(path):
            path.write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class CpuController:
    """The cgroup controller `cpu` of this machine, with which a lab limits the CPU time of its nodes."""

    version: int
    """Version of cgroups: 1 or 2."""
    root: Path
    """Folder where the cgroup file system with the controller is mounted."""

    @property
    def group(self) -> Path:
        """The lab's cgroup folder, the parent of the nodes' cgroups."""
        return self.root / CPU_GROUP

    def node_group(self, name: str) -> Path:
        return self.group / name

    def join_file(self, name: str) -> Path:
        """Return the file to which a process writes its id to join the cgroup of a node."""
        return self.node_group(name) / "cgroup.procs"

    def limit_files(self, group: Path, cores: float) -> list[tuple[Path, str]]:
        """Return the (file, text) pairs to write so that the cgroup `group` gets the time of at most `cores` cores."""
        quota_us = round(cores * PERIOD_US)
        if self.version == 1:
            return [(group / "cpu.cfs_period_us", str(PERIOD_US)), (group / "cpu.cfs_quota_us", str(quota_us))]
        return [(group / "cpu.max", f"{quota_us} {PERIOD_US}")]


def find_cpu_control(mounts: str) -> CpuController | None:
    """Return this machine's `cpu` controller; None if no cgroup file system with one is mounted.

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
    """Return the cgroup folders of the nodes with a CPU share, parents first; [] if no node has one."""
    names = [name for name in layout.names if layout.spec.cpu_share_of(layout.node(name))]
    return [control.group, *(control.node_group(name) for name in names)] if names else []


def share_files(control: CpuController, layout: LabLayout) -> list[tuple[Path, str]]:
    """Return the (file, text) pairs that give the nodes their CPU shares, to write in order once the cgroup folders
    exist."""
    files: list[tuple[Path, str]] = []
    for node in layout.spec.nodes:
        share = layout.spec.cpu_share_of(node)
        if share is not None:
            files += control.limit_files(control.node_group(node.name), share)
    if files and control.version == 2:
        # The children of a cgroup get the CPU controller only if it is enabled here.
        files = [(folder / "cgroup.subtree_control", "+cpu") for folder in (control.root, control.group)] + files
    return files
