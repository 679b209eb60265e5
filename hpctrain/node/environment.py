"""Records the software and devices of a node in environments.jsonl, refuses a node with another hpctrain than the
attempt began with, and describes what changed since the run's first attempt.

Everything is read from files of the kernel and of the installation, in milliseconds: NVML and torch are not loaded.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain import __version__
from hpctrain.base.atomic import append_line, write_text
from hpctrain.base.clock import Clock
from hpctrain.base.errors import FileError, RefusedError
from hpctrain.base.owned_files import read_owned
from hpctrain.base.process import Runner
from hpctrain.base.system.kernel import kernel_text
from hpctrain.launch.preflight.checks import VERSION_FILE, parse_driver_version
from hpctrain.records.history.provenance import (
    ENVIRONMENTS_FILE,
    REQUIREMENTS_FILE,
    NodeEnvironment,
    environment_changes,
    mixed_versions,
    read_environments,
)
from hpctrain.runs.environment import installed_packages, requirements_text, software_versions
from hpctrain.runs.folder import RunFolder

LIBRARY_FOLDERS = (
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/local/lib",
    "/usr/lib",
)
NETWORK_LIBRARIES = ("libibverbs.so.", "libfabric.so.", "libpsm2.so.", "libcxi.so.", "librccl-net.so", "libnccl-net.so")
"""Libraries of fast networks, by the start of their file names."""
_VERSION = re.compile(r"\d+(\.\d+)+$")


@dataclass(frozen=True)
class MachineFiles:
    """Files and folders that describe a machine."""

    driver: Path = VERSION_FILE
    """File in which NVIDIA's driver states its version."""
    gpus: Path = Path("/proc/driver/nvidia/gpus")
    """Folder of NVIDIA's driver with a folder for each GPU."""
    sysfs: Path = Path("/sys")
    """Folder where the kernel's file system sysfs is mounted."""


def check_same_version(folder: RunFolder, attempt: int, node: str) -> None:
    """Check that this node has the version of hpctrain with which the attempt began.

    Raises:
        RefusedError: this node has another version. Agents of two versions may not understand each other.
        FileError, UntrustedError: attempts.jsonl cannot be read or is untrusted.
    """
    line = next((line for line in folder.attempts() if line.get("attempt") == attempt), {})
    begun = line.get("hpctrain")
    if begun not in (None, __version__):
        raise RefusedError(
            f"{node} has hpctrain {__version__}, and attempt {attempt} began with {begun}: allowed is one version on "
            f"all nodes; install hpctrain {begun} on {node}, or leave {node} out (cluster.exclude: {node})"
        )


def record_environment(
    folder: Path, attempt: int, node: str, is_first: bool, runner: Runner, clock: Clock, environ: Mapping[str, str]
) -> None:
    """Append this node's line to environments.jsonl. The first node also lists its packages, and writes them as
    requirements.lock: into the run folder if that has none; into the attempt's log folder if the packages differ from
    those in the run folder's requirements.lock.

    Args:
        is_first: whether this is the attempt's first node.

    Raises:
        StorageError: the run folder cannot be written.
        FileError, UntrustedError, OSError: requirements.lock in the run folder is too large, is untrusted,
            or cannot be read.
    """
    packages = installed_packages()
    software = software_versions(packages, environ, runner if is_first else None)
    driver, gpus = gpu_facts()
    line = NodeEnvironment(
        attempt=attempt,
        node=node,
        time_s=clock.wall(),
        software=software,
        driver=driver,
        gpus=gpus,
        network=network_versions(environ),
        packages={package.name: package.version for package in packages} if is_first else None,
    )
    append_line(folder / ENVIRONMENTS_FILE, json.dumps(line.to_json(), allow_nan=False))
    if is_first:
        _write_requirements(folder, attempt, requirements_text(software, packages))


def _write_requirements(folder: Path, attempt: int, text: str) -> None:
    path = folder / REQUIREMENTS_FILE
    try:
        known = read_owned(path).decode("utf-8", "replace")
    except FileNotFoundError:
        write_text(path, text)
        return
    if known != text:
        write_text(folder / "logs" / str(attempt) / REQUIREMENTS_FILE, text)


def gpu_facts(files: MachineFiles = MachineFiles()) -> tuple[str | None, list[str]]:
    """Return the version of the GPU driver, None without one, and the model names of this machine's NVIDIA GPUs, each
    once. The driver may be AMD's. The model names of AMD's GPUs are in the topology, and cannot be read from `files`.
    """
    nvidia = kernel_text(files.driver)
    driver = parse_driver_version(nvidia) if nvidia else kernel_text(files.sysfs / "module/amdgpu/version")
    texts = [kernel_text(file) or "" for file in sorted(files.gpus.glob("*/information"))]
    models = [
        line.partition(":")[2].strip() for text in texts for line in text.splitlines() if line.startswith("Model")
    ]
    return driver, list(dict.fromkeys(filter(None, models)))


def network_versions(
    environ: Mapping[str, str], folders: Sequence[str] = LIBRARY_FOLDERS, files: MachineFiles = MachineFiles()
) -> dict[str, str]:
    """Return the version of each library of a fast network, by the name of its file, and the firmware of each
    InfiniBand or RoCE device, by the name of the device.

    Args:
        environ: variables of this process; the folders in LD_LIBRARY_PATH come first.
        folders: where libraries lie otherwise.
    """
    versions: dict[str, str] = {}
    for folder in [*filter(None, environ.get("LD_LIBRARY_PATH", "").split(":")), *folders]:
        with contextlib.suppress(OSError):
            for path in sorted(path for path in Path(folder).iterdir() if path.name.startswith(NETWORK_LIBRARIES)):
                if match := _VERSION.search(path.resolve().name):
                    versions.setdefault(path.name.partition(".so")[0], match[0])
    for device in sorted((files.sysfs / "class/infiniband").glob("*")):
        if (firmware := kernel_text(device / "fw_ver")) is not None:
            versions[device.name] = f"firmware {firmware}"
    return versions


def describe_changes(folder: Path, attempt: int) -> tuple[str, dict[str, list[str]]] | None:
    """Return what differs between an attempt and the run's first one, and between the attempt's nodes, as a sentence
    and as {"changed": texts, "mixed": texts}. None if nothing differs, or environments.jsonl cannot be read.

    Args:
        folder: the run folder.
        attempt: number of the attempt.

    Raises:
        UntrustedError: environments.jsonl or the run folder belongs to another user, or others can write to one of
            them.
    """
    try:
        lines = read_environments(folder)
    except FileError:
        return None
    changed, mixed = environment_changes(lines, attempt), mixed_versions(lines, attempt)
    first = min((line.attempt for line in lines), default=attempt)
    sentences = [f"changed since attempt {first}: {'; '.join(changed)}"] if changed else []
    sentences += [f"not the same on all nodes: {'; '.join(mixed)}"] if mixed else []
    return (". ".join(sentences), {"changed": changed, "mixed": mixed}) if sentences else None
