"""The command and the environment that start a program inside an image. Pure: argv and environment out."""

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
"""Python inside an image, looked up on the image's own path."""
IMAGE_VARIABLE = "HPCTRAIN_IMAGE"
"""Set inside: the image's path."""


def entry_command(
    runtime: Runtime, host: Host, container: Container, binds: Sequence[Bind], command: Sequence[str]
) -> list[str]:
    """The argv that runs `command` in the image, with its own /tmp, home and network those of the machine."""
    argv = [runtime.path, "--silent", "exec"]
    argv += ["--userns"] if host.needs_user_namespace else []
    argv += ["--nv"] if container.nv == "yes" or (container.nv == "auto" and host.has_nvidia) else []
    for bind in binds:
        argv += ["--bind", bind.text()]
    return [*argv, container.image, *command]


def entry_environment(
    container: Container, environ: Mapping[str, str], prefix: str, code: Path | None = None
) -> dict[str, str]:
    """What the runtime starts with. It hands on all it has, and what is set here comes last inside.

    The Python of the machine says nothing about the one in the image: its paths are taken out.

    Args:
        prefix: how the names of variables begin that the runtime sets inside: APPTAINERENV_.
        code: a folder that comes first on the module path.
    """
    env = {name: value for name, value in environ.items() if name not in ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")}
    return env | {f"{prefix}{name}": value for name, value in variables(container, environ, code).items()}


def variables(container: Container, environ: Mapping[str, str], code: Path | None = None) -> dict[str, str]:
    """The variables that are set inside: hpctrain on the module path, then those of the run file, with $NAME filled in.

    Packages in the person's home, which is seen inside, belong to the Python outside.
    """
    own = {name: Template(value).safe_substitute(environ) for name, value in container.env.items()}
    path = os.pathsep.join(filter(None, [str(code) if code else None, LIBRARY, own.get("PYTHONPATH")]))
    return {"PYTHONNOUSERSITE": "1", **own, IMAGE_VARIABLE: container.image, "PYTHONPATH": path}


def pyxis_options(container: Container, binds: Sequence[Bind]) -> list[str]:
    """srun's options that make pyxis start each task in the image."""
    mounts = ",".join(bind.text() for bind in binds)
    return [f"--container-image={container.image}", f"--container-mounts={mounts}", "--container-mount-home"]


def pyxis_command(container: Container, command: Sequence[str]) -> str:
    """The task of a step that pyxis starts in the image, for a shell, which fills in $NAME."""
    pairs = variables(container, {})  # nothing is filled in from no environment: the shell does it
    words = [f"{name}={_expand_variables(value)}" for name, value in pairs.items()]
    return " ".join(["env", *words, shlex.join(command)])


def _expand_variables(value: str) -> str:
    """In double quotes, where a shell fills in $NAME and does nothing else."""
    for found, written in (("\\", "\\\\"), ('"', '\\"'), ("`", "\\`"), ("$(", "\\$(")):
        value = value.replace(found, written)
    return f'"{value}"'
