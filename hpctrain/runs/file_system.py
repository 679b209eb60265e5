"""Checks the file system that run folders lie on: whether every node sees it, and whether checkpoints will fit."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from pathlib import Path

import psutil

from hpctrain.base.errors import InputError
from hpctrain.base.system.disk_space import free_bytes, nearest_existing
from hpctrain.base.units import format_bytes
from hpctrain.records.model.imported_spec import Spec
from hpctrain.records.plan.compression import AutoCompression
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.run import Run

IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
"""Types of file systems in memory, which no other node can see."""
SHARED = (
    "nfs", "lustre", "gpfs", "mmfs", "beegfs", "fhgfs", "ceph", "cifs", "smb", "glusterfs", "panfs", "wekafs", "pvfs2",
    "orangefs", "afs", "gfs2", "ocfs2", "9p", "virtiofs", "autofs", "cvfs", "daos", "dvs", "fuse.",
)  # fmt: skip
"""Prefixes of the types of network and parallel file systems. Other types usually belong to one machine."""
NOT_SHARED = ("fuse.fuse-overlayfs",)
"""Types that begin with a prefix in `SHARED` although they belong to one machine."""


def check_shared(runs: Path, nodes: Iterable[str]) -> list[str]:
    """Return a warning, as lines, if run folders would probably lie on this machine's own disk, where other nodes
    cannot see them; else [].

    Args:
        runs: folder in which run folders are made.
        nodes: names of the cluster's nodes.

    Raises:
        InputError: the folder is on a file system in this machine's memory.
    """
    kind = file_system_of(runs.resolve())
    if kind in IN_MEMORY:
        raise InputError(
            f"{runs.resolve()}: is on {kind}, which only this machine sees; run folders must lie on a file system that "
            "all nodes share: set HPCTRAIN_RUNS"
        )
    here = platform.node().partition(".")[0]
    elsewhere = any(name.partition(".")[0] != here for name in nodes)
    if not elsewhere or is_shared(kind):
        return []
    return [
        f"{runs.resolve()}: is on {kind or 'a file system of unknown type'}, as a rule one machine's own disk; a node "
        "that does not see it ends the job without a log: set HPCTRAIN_RUNS to a folder that all nodes share"
    ]


def file_system_of(path: Path) -> str:
    """Return the type of the file system that holds `path` or its nearest existing parent, such as nfs4; '' if
    unknown."""
    return _mount_of(path)[0]


def mount_options(path: Path) -> tuple[str, ...]:
    """Return the mount options of the file system that holds `path` or its nearest existing parent, such as ('rw',
    'relatime', 'local_lock=none'); ('',) if they are unknown."""
    return tuple(_mount_of(path)[1].split(","))


def device_of(path: Path) -> str:
    """Return the device of the file system that holds `path` or its nearest existing parent, such as /dev/sda1 or
    server:/home; '' if unknown."""
    return _mount_of(path)[2]


def is_shared(kind: str) -> bool:
    """Return whether file systems of type `kind`, such as nfs4, are usually visible to all nodes."""
    return kind.startswith(SHARED) and kind not in NOT_SHARED


def _mount_of(path: Path) -> tuple[str, str, str]:
    """Return type, options and device of the mount that holds `path` or its nearest existing parent; empty texts if
    unknown."""
    path = nearest_existing(path)
    mounts = sorted(psutil.disk_partitions(all=True), key=lambda mount: len(mount.mountpoint), reverse=True)
    for mount in mounts:
        if path == Path(mount.mountpoint) or Path(mount.mountpoint) in path.parents:
            return str(mount.fstype), str(mount.opts), str(mount.device)
    return "", "", ""


STATE_BYTES = 12
"""Bytes of each parameter in a checkpoint: the weight and AdamW's two moments, 4 bytes each."""


def checkpoint_space_warning(run: Run, spec: Spec, runs: Path, plan: Plan | None) -> list[str]:
    """Return a warning, as lines, if the disk has too little free space for the run's checkpoints, or if its free space
    cannot be read; else [].

    While a checkpoint is written, the `checkpoint.keep` older ones still exist, so there must be space for one more.

    Args:
        runs: the folder that run folders go to; it may not exist yet.
        plan: the plan, if known; each of its shard groups (without sharding, each of its replicas) saves its own
            compression state.
    """
    one, most = _checkpoint_bytes(run, spec, plan), run.checkpoint.keep + 1
    try:
        free = free_bytes(runs.resolve())
    except OSError as error:
        return [f"not checked before submitting: the room in {runs.resolve()} ({error.strerror})"]
    if free >= most * one:
        return []
    return [
        f"{runs.resolve()}: {format_bytes(free)} are free; {most} checkpoints of {format_bytes(one)} will need more, "
        "and one that does not fit is skipped: free some space, lower checkpoint.keep, or set HPCTRAIN_RUNS"
    ]


def _checkpoint_bytes(run: Run, spec: Spec, plan: Plan | None) -> float:
    """Return the predicted bytes of one checkpoint. The compression state counts once for each shard group of the plan
    (without sharding, for each replica), or once if there is no plan."""
    copies = 1 if plan is None else plan.dp // plan.shards
    codec = run.compression if plan is None else plan.codec
    codec_state = 0.0
    if not isinstance(codec, AutoCompression) and (plan is None or copies > 1):
        codec_state = copies * codec.state_bytes(spec.dim)
    return (STATE_BYTES + codec_state) * spec.parameters()
