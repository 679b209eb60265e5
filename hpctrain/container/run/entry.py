"""The argv and the environment that start a program inside an image. Pure."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from hpctrain.container.run.binds import LIBRARY, Bind
from hpctrain.container.run.runtime import Host, Runtime
from hpctrain.records.run.run import Container

PYTHON = "python3"
"""Name of Python inside an image; the PATH of the image finds it."""
IMAGE_VARIABLE = "HPCTRAIN_IMAGE"
"""Environment variable that holds the image's path inside the image."""


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
