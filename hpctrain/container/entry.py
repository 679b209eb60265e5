"""Start programs inside an image: the runtime, its argv and environment, and a mount that survives Slurm's signals.

Without root, Apptainer mounts an image through a separate process, squashfuse_ll, which belongs to the job's step.
Slurm sends USR2 before the time limit, and TERM at a preemption, to every process of a step. squashfuse_ll would end,
and with it the processes in the image (SIGBUS), before they have saved a checkpoint. Apptainer finds squashfuse_ll by
the PATH. So a script of that name is put first on the PATH; it ignores these signals and then executes the real
program.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Literal

from hpctrain.base.atomic import storage_errors, write_text
from hpctrain.base.errors import InputError
from hpctrain.base.system.kernel import kernel_text
from hpctrain.container.binds import LIBRARY, Bind
from hpctrain.records.run.run import Container

Name = Literal["apptainer", "singularity"]
NAMES: tuple[Name, ...] = ("apptainer", "singularity")
Which = Callable[[str], "str | None"]
_CAP_SYS_RESOURCE = 24
"""Number of CAP_SYS_RESOURCE in <linux/capability.h>."""
PYTHON = "python3"
"""Name of Python inside an image; the PATH of the image finds it."""
IMAGE_VARIABLE = "HPCTRAIN_IMAGE"
"""Environment variable that holds the image's path inside the image."""
PROGRAM = "squashfuse_ll"


@dataclass(frozen=True)
class Runtime:
    """Apptainer or SingularityCE; both take the options used here."""

    name: Name
    path: str

    @property
    def prefix(self) -> str:
        """Prefix of the variables that the runtime sets inside: APPTAINERENV_."""
        return f"{self.name.upper()}ENV_"


@dataclass(frozen=True)
class Host:
    """The facts that determine how an image is started on a machine."""

    is_root: bool
    may_raise_limits: bool
    """Whether the process has CAP_SYS_RESOURCE. Root without it (inside another container) needs a user namespace."""
    has_nvidia: bool
    """Whether the NVIDIA driver is loaded."""

    @property
    def needs_user_namespace(self) -> bool:
        """Whether to request a user namespace: true for root without CAP_SYS_RESOURCE. For other users the runtime
        decides."""
        return self.is_root and not self.may_raise_limits


def find_runtime(asked: str, which: Which) -> Runtime:
    """Return the named program; for `auto`, Apptainer if it is installed, else SingularityCE.

    Raises:
        InputError: no such program is on the path.
    """
    for name in NAMES:
        path = which(name) if asked in ("auto", name) else None
        if path is not None:
            return Runtime(name, path)
    wanted = "neither apptainer nor singularity" if asked == "auto" else f"no {asked}"
    raise InputError(f"container: {wanted} on the path; load its module first (in cluster.setup for a job)")


def this_host(status: Path = Path("/proc/self/status"), driver: Path = Path("/dev/nvidiactl")) -> Host:
    """Return the facts about the machine that this process runs on."""
    lines = (kernel_text(status) or "").splitlines()
    held = next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)
    return Host(os.getuid() == 0, bool(held >> _CAP_SYS_RESOURCE & 1), driver.exists())


def entry_command(
    runtime: Runtime, host: Host, container: Container, binds: Sequence[Bind], command: Sequence[str]
) -> list[str]:
    """Return the argv that runs `command` in the image, with /tmp, home and network of the machine."""
    argv = [runtime.path, "--silent", "exec"]
    argv += ["--userns"] if host.needs_user_namespace else []
    argv += ["--nv"] if container.nv == "yes" or (container.nv == "auto" and host.has_nvidia) else []
    for bind in binds:
        argv += ["--bind", bind.text()]
    return [*argv, container.image, *command]


def entry_environment(
    container: Container, environ: Mapping[str, str], prefix: str, code: Path | None = None
) -> dict[str, str]:
    """Return the environment for the runtime, which passes it on into the image; the variables set here override
    others.

    Variables that point to the machine's Python are removed, because the image has its own.

    Args:
        prefix: prefix of the variables that the runtime sets inside: APPTAINERENV_.
        code: a folder that comes first on the module path.
    """
    env = {name: value for name, value in environ.items() if name not in ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")}
    return env | {f"{prefix}{name}": value for name, value in variables(container, environ, code).items()}


def variables(container: Container, environ: Mapping[str, str], code: Path | None = None) -> dict[str, str]:
    """Return the variables that are set inside: the module path and those of the run file, with $NAME expanded.

    The home folder is visible inside. Python packages in it are ignored, because they belong to the machine's Python.
    """
    given = {name: Template(value).safe_substitute(environ) for name, value in container.env.items()}
    path = os.pathsep.join(filter(None, [str(code) if code else None, LIBRARY, given.get("PYTHONPATH")]))
    return {"PYTHONNOUSERSITE": "1", **given, IMAGE_VARIABLE: container.image, "PYTHONPATH": path}


def pyxis_options(container: Container, binds: Sequence[Bind]) -> list[str]:
    """Return srun's options that make pyxis start each task in the image."""
    mounts = ",".join(bind.text() for bind in binds)
    return [f"--container-image={container.image}", f"--container-mounts={mounts}", "--container-mount-home"]


def pyxis_command(container: Container, command: Sequence[str]) -> str:
    """Return the command of a step's task that pyxis starts in the image, for a shell, which expands $NAME."""
    pairs = variables(container, {})  # the shell expands $NAME; an empty environment leaves it alone
    words = [f"{name}={_expand_variables(value)}" for name, value in pairs.items()]
    return " ".join(["env", *words, shlex.join(command)])


def _expand_variables(value: str) -> str:
    """Return the value in double quotes, so that a shell expands $NAME and nothing else."""
    for plain, written in (("\\", "\\\\"), ('"', '\\"'), ("`", "\\`"), ("$(", "\\$(")):
        value = value.replace(plain, written)
    return f'"{value}"'


def with_surviving_mount(environ: Mapping[str, str], folder: Path, which: Which, alone: bool) -> dict[str, str]:
    """Return the environment with the script first on the PATH; unchanged if there is no squashfuse_ll.

    Args:
        folder: folder that only this node uses; created here.
        alone: the node does not run under Slurm, which would end the processes of a killed node; so
            squashfuse_ll ends with the process that started it.

    Raises:
        StorageError: the script cannot be written.
    """
    real = which(PROGRAM)
    if real is None:
        return dict(environ)
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    setpriv = which("setpriv") if alone else None
    words = [*([setpriv, "--pdeathsig", "KILL"] if setpriv else []), real]
    write_text(folder / PROGRAM, f"#!/bin/sh\ntrap '' HUP INT TERM USR1 USR2\nexec {shlex.join(words)} \"$@\"\n", 0o755)
    return {**environ, "PATH": os.pathsep.join(filter(None, [str(folder), environ.get("PATH")]))}
