"""Commands of a run, inside its image if it has one, and the checks that are possible before anything starts."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from hpctrain.base.errors import InputError
from hpctrain.base.module_argv import PACKAGE, program
from hpctrain.container import entry
from hpctrain.records.run.run import Container, Run


def python_command(run: Run, module: str, flags: Sequence[str] = ()) -> list[str]:
    """Return the argv that starts a Python module as a process of the run: with the image's Python, or else with this
    one."""
    if run.container is None:
        return program(module, flags=flags)
    return program(module, entry.PYTHON, f"{entry.LIBRARY}/{PACKAGE.name}", flags)


def container_command(run: Run, folder: Path, command: Sequence[str], with_code: bool = False) -> list[str]:
    """Return the argv that runs `command` where the run's processes run: in the run's image, or on the machine. With
    pyxis it is `command` itself, because Slurm enters the image."""
    if run.container is None or run.container.runtime == "pyxis":
        return list(command)
    more = ["--with-code"] if with_code else []
    return [*program("hpctrain.node"), "enter", "--folder", str(folder), *more, "--", *command]


def task_command(run: Run, folder: Path, command: Sequence[str]) -> str:
    """Return the shell command of a step's task that runs `command` in the run's image, or on the machine if there is
    none."""
    if run.container is not None and run.container.runtime == "pyxis":
        return entry.pyxis_command(run.container, command)
    return shlex.join(container_command(run, folder, command))


def step_options(run: Run, folder: Path) -> str:
    """Return srun's options for a step in the image, with a trailing space; '' unless pyxis starts the image."""
    if run.container is None or run.container.runtime != "pyxis":
        return ""
    binds = entry.run_binds(run, folder, {})
    return shlex.join(entry.pyxis_options(run.container, binds)) + " "


def check_container(container: Container | None, local: bool, which: entry.Which) -> None:
    """Check that the image and the sources of its binds exist.

    Args:
        local: the run's processes start on this machine, so the program that starts images must be here too.

    Raises:
        InputError: the image, a bind or, for a local run, the program that starts it, does not exist.
    """
    if container is None:
        return
    entry.check_binds(container.binds)
    if container.runtime == "pyxis":
        if local:
            raise InputError("container.runtime: found pyxis; it is Slurm's: a local run takes auto")
        return
    image = Path(container.image)
    if not image.exists():
        raise InputError(
            f"container.image: {image}: there is no such file; build one with `hpctrain image build -o {image.name}`"
        )
    if local:  # a Slurm job may load the program by an environment module
        entry.find_runtime(container.runtime, which)
