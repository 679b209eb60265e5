"""Starts programs inside an image: runtime, argv, environment, binds, and a mount that survives Slurm's signals.

Without root, Apptainer mounts an image through a separate process, squashfuse_ll, which belongs to the job's step.
Slurm sends USR2 before the time limit, and TERM at a preemption, to every process of a step. squashfuse_ll would end,
and with it the processes in the image (SIGBUS), before they have saved a checkpoint. Apptainer finds squashfuse_ll by
the PATH. So a script named squashfuse_ll is put first on the PATH; the script ignores these signals and then executes
the real program.
"""

from __future__ import annotations

import os
import shlex
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Literal

import hpctrain
from hpctrain.base.atomic import storage_errors, write_text
from hpctrain.base.errors import InputError
from hpctrain.base.system.kernel import kernel_text
from hpctrain.records.run.run import Container, Run

Name = Literal["apptainer", "singularity"]
NAMES: tuple[Name, ...] = ("apptainer", "singularity")
Which = Callable[[str], "str | None"]
_CAP_SYS_RESOURCE = 24
"""Number of CAP_SYS_RESOURCE in <linux/capability.h>."""
PYTHON = "python3"
"""Name of the Python inside an image; it is looked up on the PATH inside."""
IMAGE_VARIABLE = "HPCTRAIN_IMAGE"
"""Environment variable that tells a process inside an image the image's path."""
PROGRAM = "squashfuse_ll"
LIBRARY = "/opt/hpctrain/lib"
"""Folder inside the image, on Python's module path, with the code of the hpctrain that submits. So a new version of
hpctrain needs no new image."""
ENVIRONMENT = "/opt/hpctrain/environment"
"""Folder inside the image at which the packages of the submitting hpctrain are bound. Only images with environment
`bind` import from it."""
_ALWAYS_MOUNTED = (Path("/tmp"), Path("/var/tmp"))
_TEMPORARY = ("SLURM_TMPDIR", "TMPDIR")


@dataclass(frozen=True)
class Runtime:
    """A program that starts images: Apptainer or SingularityCE. Both take the same options."""

    name: Name
    path: str

    @property
    def prefix(self) -> str:
        """Prefix of the variables that the runtime sets inside an image without the prefix: APPTAINERENV_ or
        SINGULARITYENV_."""
        return f"{self.name.upper()}ENV_"


@dataclass(frozen=True)
class Host:
    """The facts about a machine that determine how an image is started on it."""

    is_root: bool
    may_raise_limits: bool
    """Whether the process has CAP_SYS_RESOURCE. Root without it (inside another container) needs a user namespace."""
    has_nvidia: bool
    """Whether the NVIDIA driver is loaded."""

    @property
    def needs_user_namespace(self) -> bool:
        """Whether to start an image in a user namespace: True for root without CAP_SYS_RESOURCE. For other users the
        runtime decides."""
        return self.is_root and not self.may_raise_limits


def find_runtime(asked: str, which: Which) -> Runtime:
    """Return the program that starts images.

    Args:
        asked: apptainer, singularity, or auto: Apptainer if it is installed, else SingularityCE.

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
    """Return the facts about this machine and process.

    Args:
        status: file with the capabilities of the process.
        driver: device file that exists if the NVIDIA driver is loaded.
    """
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
    """Return the environment with which the runtime is started, and which it passes on into the image.

    Variables that point to the machine's Python are removed, because the image has its own.

    Args:
        environ: environment of this process; the variables that `variables` returns override it inside the image.
        prefix: prefix of the variables that the runtime sets inside, such as APPTAINERENV_.
        code: folder that comes first on the module path.
    """
    env = {name: value for name, value in environ.items() if name not in ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")}
    return env | {f"{prefix}{name}": value for name, value in variables(container, environ, code).items()}


def variables(container: Container, environ: Mapping[str, str], code: Path | None = None) -> dict[str, str]:
    """Return the variables to set inside the image: the module path, and `container.env` of the run file with $NAME
    expanded.

    Python packages in the home folder, which is visible inside, are ignored: they belong to the machine's Python.

    Args:
        environ: values of $NAME.
        code: folder that comes first on the module path.
    """
    given = {name: Template(value).safe_substitute(environ) for name, value in container.env.items()}
    path = os.pathsep.join(filter(None, [str(code) if code else None, LIBRARY, given.get("PYTHONPATH")]))
    return {"PYTHONNOUSERSITE": "1", **given, IMAGE_VARIABLE: container.image, "PYTHONPATH": path}


def pyxis_options(container: Container, binds: Sequence[Bind]) -> list[str]:
    """Return srun's options that make pyxis start each task in the image."""
    mounts = ",".join(bind.text() for bind in binds)
    return [f"--container-image={container.image}", f"--container-mounts={mounts}", "--container-mount-home"]


def pyxis_command(container: Container, command: Sequence[str]) -> str:
    """Return a shell command that sets the image's variables and runs `command`, for a task that pyxis starts in the
    image.

    The shell expands $NAME in the values of the variables.
    """
    pairs = variables(container, {})  # the shell expands $NAME; an empty environment leaves it alone
    words = [f"{name}={_expand_variables(value)}" for name, value in pairs.items()]
    return " ".join(["env", *words, shlex.join(command)])


def _expand_variables(value: str) -> str:
    """Return the value in double quotes, so that a shell expands $NAME and nothing else."""
    for plain, written in (("\\", "\\\\"), ('"', '\\"'), ("`", "\\`"), ("$(", "\\$(")):
        value = value.replace(plain, written)
    return f'"{value}"'


def with_surviving_mount(environ: Mapping[str, str], folder: Path, which: Which, alone: bool) -> dict[str, str]:
    """Return the environment with a script named squashfuse_ll first on the PATH, which starts the program
    squashfuse_ll; the environment is unchanged if this machine lacks the program.

    The script ignores Slurm's signals, so that the image stays mounted until the processes in it have saved.

    Args:
        folder: folder for the script, which only this node uses; made here.
        which: `shutil.which`, or a test's replacement.
        alone: whether the node runs without Slurm, which would end the processes of a killed node. If so, squashfuse_ll
            ends with the process that started it.

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


@dataclass(frozen=True)
class Bind:
    """A file or folder of the machine that is visible in an image (bind mount), and its path inside the image."""

    source: str
    target: str
    read_only: bool = False

    def text(self) -> str:
        """Return SOURCE:TARGET[:ro], as Apptainer, SingularityCE and pyxis read it."""
        return f"{self.source}:{self.target}" + (":ro" if self.read_only else "")


def parse_bind(text: str) -> Bind:
    """Return the bind written as SOURCE[:TARGET[:ro|rw]].

    Raises:
        InputError: the text is not of this form.
    """
    parts = text.split(":")
    source, target = parts[0], parts[1] if len(parts) > 1 else parts[0]
    mode = parts[2] if len(parts) > 2 else "rw"
    if len(parts) > 3 or mode not in ("ro", "rw") or "," in text:
        raise InputError(f"container.binds: found {text!r}; write SOURCE[:TARGET[:ro]], without commas")
    if not source.startswith("/") or not target.startswith("/"):
        raise InputError(f"container.binds: found {text!r}; both paths start at /")
    return Bind(source, target, mode == "ro")


def check_binds(binds: Iterable[str]) -> None:
    """Check that the sources of the run file's binds exist; otherwise only the job would report a missing one.

    Args:
        binds: texts of `container.binds`.

    Raises:
        InputError: a bind is badly written, or its source does not exist.
    """
    for text in binds:
        bind = parse_bind(text)
        if not os.path.lexists(bind.source):
            raise InputError(
                f"container.binds: {bind.source}: there is no such file or folder; make it, or leave it out"
            )


def program_binds() -> list[Bind]:
    """Return the binds of hpctrain's own code and of the folder in which this Python's packages are installed
    (site-packages)."""
    package = Path(hpctrain.__file__).resolve().parent
    packages = Path(sysconfig.get_path("purelib"))
    return [
        Bind(str(package), f"{LIBRARY}/{package.name}", read_only=True),
        Bind(str(packages), ENVIRONMENT, read_only=True),
    ]


def run_binds(run: Run, folder: Path, environ: Mapping[str, str]) -> list[Bind]:
    """Return all binds that a run needs. Files and folders of the run have equal paths inside and outside. A bind of
    the run file replaces any other bind of the same target.

    Args:
        folder: the run folder, absolute.
        environ: environment of the node, which names its temporary folders.

    Raises:
        InputError: a path cannot be passed to a container runtime.
    """
    data = run.data
    files = [*data.train_folders, *data.valid_folders, *filter(None, [data.tokenizer, run.model.hf, run.secrets_file])]
    binds = program_binds() + [bind for path in files for bind in _same(Path(path), read_only=True)]
    binds += _same(folder)
    for path in _temporary(run, environ):
        binds += _same(path)
    binds += [parse_bind(text) for text in (run.container.binds if run.container else [])]
    for bind in binds:
        if "," in bind.text() or ":" in bind.source + bind.target:
            raise InputError(f"container: {bind.source}: a path with a comma or colon cannot be bound; rename it")
    return list({bind.target: bind for bind in binds}.values())


def _same(path: Path, read_only: bool = False) -> list[Bind]:
    """Return binds that make `path` visible under the same path; if it contains a symbolic link, also the link's
    target."""
    real = path.resolve()
    return [Bind(str(item), str(item), read_only) for item in dict.fromkeys((real, path))]


def _temporary(run: Run, environ: Mapping[str, str]) -> list[Path]:
    """Return the folders of this node that exist and are named by variables such as TMPDIR or by `data.stage_folder`,
    without those that the runtime mounts by default."""
    named = [environ.get(name) for name in _TEMPORARY]
    named += [Template(run.data.stage_folder).safe_substitute(environ) if run.data.stage_folder else None]
    paths = [Path(name) for name in named if name and name.startswith("/")]
    return [
        path
        for path in dict.fromkeys(paths)
        if path.is_dir() and not any(path == seen or seen in path.parents for seen in _ALWAYS_MOUNTED)
    ]
