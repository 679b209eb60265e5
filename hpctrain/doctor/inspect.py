"""Collects the facts of `hpctrain doctor` about this machine, its cluster and its folders; what is missing is a fact
too.

Each file operation that a run relies on is tried once in the folder of run folders, with the code that a run uses.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import psutil

from hpctrain.base.atomic import write_text
from hpctrain.base.errors import CommandError, HpctrainError, InputError, StorageError
from hpctrain.base.process import WORKER, Runner
from hpctrain.base.system.kernel import kernel_text
from hpctrain.doctor.account import Which, inspect_environment, inspect_home
from hpctrain.doctor.facts import (
    Driver,
    FolderFacts,
    Interface,
    LocalDisk,
    MachineFacts,
    NetworkFacts,
    SlurmFacts,
    SlurmUnavailable,
    TorchFacts,
    TorchUnavailable,
)
from hpctrain.launch.local import local_environment
from hpctrain.probe.system.host import interface_of, routed_address
from hpctrain.report.status import lock_held
from hpctrain.runs.file_system import file_system_of, is_shared, mount_options
from hpctrain.runs.folder import lock_run_folder
from hpctrain.runs.locate import RUNS_VARIABLE
from hpctrain.slurm.cluster import NodeInfo
from hpctrain.slurm.commands import NotConfiguredError, Slurm

TORCH_TIMEOUT_S = 180.0
"""Most seconds that importing torch may take; from a busy shared file system it takes minutes."""
PROGRAM_TIMEOUT_S = 30.0
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_INFINIBAND = "32"
"""ARPHRD_INFINIBAND: the content of /sys/class/net/<name>/type of an interface with IP over InfiniBand."""


def collect_facts(runner: Runner, environ: Mapping[str, str], runs: Path, which: Which) -> MachineFacts:
    """Return all facts about this machine and its cluster. No setting is changed, and no file is left behind.

    Args:
        runs: folder in which run folders are made.
    """
    host = platform.node().partition(".")[0]
    slurm = inspect_slurm(runner, environ, which)
    nodes = slurm.nodes if isinstance(slurm, SlurmFacts) else []
    return MachineFacts(
        host=host,
        slurm=slurm,
        containers=inspect_containers(runner, which),
        torch=inspect_torch(runner),
        driver=inspect_driver(runner, which),
        network=inspect_network(nodes, host, environ),
        runs=inspect_runs_folder(runs, environ),
        local_disks=inspect_local_disks(environ),
        environment=inspect_environment(environ),
        home=inspect_home(runner, environ, which),
    )


def inspect_slurm(runner: Runner, environ: Mapping[str, str], which: Which) -> SlurmFacts | SlurmUnavailable:
    """Return the facts about the cluster, or the reason why it could not be asked."""
    if which("scontrol") is None:
        return SlurmUnavailable(installed=False, configured=False)
    slurm = Slurm(runner, environ)
    try:
        return SlurmFacts(**vars(slurm.state()), pyxis=_has_pyxis(slurm))
    except CommandError as error:
        return SlurmUnavailable(installed=True, configured=not isinstance(error, NotConfiguredError), reason=str(error))


def _has_pyxis(slurm: Slurm) -> bool:
    try:
        return slurm.srun_has("--container-image")
    except CommandError:
        return False  # without srun no step can be started, with or without pyxis


def inspect_containers(runner: Runner, which: Which) -> dict[str, str | None]:
    """Return the versions of Apptainer and Singularity by name, if they are on the PATH; None for one that does not
    run."""
    names = [name for name in ("apptainer", "singularity") if which(name) is not None]
    return {name: _first_line(runner, [name, "--version"]) for name in names}


def _first_line(runner: Runner, argv: Sequence[str]) -> str | None:
    try:
        done = runner.run(argv, timeout_s=PROGRAM_TIMEOUT_S)
    except CommandError:
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0].strip() if done.code == 0 and lines else None


def inspect_torch(runner: Runner) -> TorchFacts | TorchUnavailable:
    """Return facts about torch from a separate process, because importing torch takes seconds and may crash on a broken
    driver."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return TorchUnavailable("it is not installed beside hpctrain", installed=False)
    try:
        done = runner.run([*WORKER, "torch"], timeout_s=TORCH_TIMEOUT_S)
    except CommandError as error:
        return TorchUnavailable(f"{version} could not be asked: {error}", installed=True)
    if done.code != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.code} and no message"]
        return TorchUnavailable(f"{version} cannot be imported: {lines[-1].strip()}", installed=True)
    # Libraries may print lines while they are imported, so the result is the last line.
    state = json.loads(done.stdout.strip().splitlines()[-1])
    return TorchFacts(**{**state, "devices": tuple(state["devices"])})


def inspect_driver(runner: Runner, which: Which) -> Driver | None:
    """Return NVIDIA's driver, as nvidia-smi reports it; None if there is no nvidia-smi."""
    if which("nvidia-smi") is None:
        return None
    argv = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = runner.run(argv, timeout_s=PROGRAM_TIMEOUT_S)
    except CommandError as error:
        return Driver((), None, str(error))
    if done.code != 0:
        lines = (done.stdout + done.stderr).strip().splitlines() or [f"exit code {done.code} and no message"]
        return Driver((), None, lines[0])
    rows = [line.rpartition(",") for line in done.stdout.splitlines() if "," in line]
    return Driver(tuple(name.strip() for name, _, _ in rows), rows[0][2].strip() if rows else None)


def inspect_network(nodes: Sequence[NodeInfo], host: str, environ: Mapping[str, str]) -> NetworkFacts:
    """Return this machine's interfaces, and the one with a route to the other nodes, which an agent would choose too.

    Args:
        nodes: the cluster's nodes; [] without Slurm.
        host: name of this machine, which is not one of the other nodes.
    """
    peer = next((node for node in nodes if node.accepts_jobs and node.name != host), None)
    exported = {name: environ[name] for name in VARIABLES if environ.get(name)}
    interfaces, known = _interfaces(), tuple(psutil.net_if_addrs())
    if peer is None:
        chosen = local_environment(1, {})["GLOO_SOCKET_IFNAME"]
        return NetworkFacts(interfaces, None, chosen, exported=exported, known=known)
    try:
        chosen_interface, reason = interface_of(routed_address(peer.addr)), ""
    except InputError as error:
        # The rest of the message recommends an option of the probe, which the doctor does not have.
        chosen_interface, reason = None, str(error).partition(";")[0]
    return NetworkFacts(interfaces, peer.name, chosen_interface, reason, exported, known)


def _interfaces(sysfs: Path = Path("/sys/class/net")) -> tuple[Interface, ...]:
    stats, interfaces = psutil.net_if_stats(), []
    for name, entries in psutil.net_if_addrs().items():
        state = stats.get(name)
        addresses = [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        addresses = [address for address in addresses if not address.startswith("fe80:")]
        if state is None or not state.isup or not addresses or all(_is_loopback(address) for address in addresses):
            continue
        speed = state.speed * 10**6 if state.speed > 0 else None
        interfaces.append(Interface(name, addresses[0], speed, kernel_text(sysfs / name / "type") == _INFINIBAND))
    return tuple(interfaces)


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def inspect_runs_folder(runs: Path, environ: Mapping[str, str]) -> FolderFacts:
    """Return facts about the folder of run folders, and whether renaming, locking and linking work in it.

    The test uses a temporary folder, which is removed. A folder that does not exist is not made; its nearest existing
    parent is tested instead.
    """
    path = runs.expanduser().resolve()
    there = _nearest(path)
    rename, lock, link = _try_in(there) if not path.is_file() else ("it is a file, not a folder",) * 3
    return FolderFacts(
        path=path,
        kind=file_system_of(there),
        options=mount_options(there),
        free_bytes=shutil.disk_usage(there).free,
        from_variable=bool(environ.get(RUNS_VARIABLE)),
        rename=rename,
        lock=lock,
        link=link,
    )


def inspect_local_disks(environ: Mapping[str, str]) -> tuple[LocalDisk, ...]:
    """Return the folders $TMPDIR, /tmp, /scratch and /dev/shm that exist, without those on a shared file system."""
    places = dict.fromkeys(Path(place) for place in (environ.get("TMPDIR") or "/tmp", "/tmp", "/scratch", "/dev/shm"))
    disks = [
        LocalDisk(place, file_system_of(place), shutil.disk_usage(place).free) for place in places if place.is_dir()
    ]
    return tuple(disk for disk in disks if not is_shared(disk.kind))


def _nearest(path: Path) -> Path:
    while True:
        with contextlib.suppress(PermissionError):  # the parent folder may not be readable
            if path.is_dir():
                return path
        path = path.parent


def _try_in(folder: Path) -> tuple[str, str, str]:
    """Return what went wrong in the tests of rename, lock and hard link in `folder`, in this order; '' where nothing
    did."""
    try:
        scratch = Path(tempfile.mkdtemp(prefix=".hpctrain-doctor-", dir=folder))
    except OSError as error:
        return (f"nothing can be written there: {error.strerror or error}",) * 3
    try:
        return _tried(_rename, scratch), _tried(_lock, scratch), _tried(_link, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _tried(trial: Callable[[Path], str], folder: Path) -> str:
    try:
        return trial(folder)
    except OSError as error:
        return error.strerror or str(error)
    except StorageError as error:
        # The message of the StorageError names a temporary file that no longer exists; its cause does not.
        cause = error.__cause__
        return (cause.strerror if isinstance(cause, OSError) else None) or str(error)
    except HpctrainError as error:
        return str(error)


def _rename(folder: Path) -> str:
    """Replace a file in `folder` by another one; return what went wrong, or '' if nothing did."""
    path = folder / "file"
    for text in ("first", "second"):
        write_text(path, text)
    return "" if path.read_text() == "second" else "the old file is still there after it was replaced"


def _lock(folder: Path) -> str:
    """Lock `folder` as a run folder, ask whether it is locked, release it, and ask again. Return which of the two
    answers was wrong, as words; '' if both were right."""
    with lock_run_folder(folder):
        held = lock_held(folder)
    if not held:
        return "a lock that is held looks free"
    return "a lock that was given back looks held" if lock_held(folder) else ""


def _link(folder: Path) -> str:
    """Check that a hard link in `folder` cannot be made under a name that exists; return what went wrong, or ''."""
    (folder / "proposal").write_text("")
    os.link(folder / "proposal", folder / "decided")
    try:
        os.link(folder / "proposal", folder / "decided")
    except FileExistsError:
        return ""
    return "a name can be taken twice"
