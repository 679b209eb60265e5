"""Command lines of a run's processes, inside the run's container image if it has one, and a check that image and binds
exist."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from hpctrain.base.errors import InputError
from hpctrain.base.module_argv import PACKAGE, program
from hpctrain.container import entry
from hpctrain.records.run.run import Container, Run

TRACKER_LOG = "tracking.txt"
"""Name of the file, among the logs of an attempt, with what `hpctrain track` prints."""


def python_command(run: Run, module: str, flags: Sequence[str] = ()) -> list[str]:
    """Return the argv that runs a Python module with the Python of the run's image, or without an image with the Python
    of this process. The module's own arguments follow the argv.

    Args:
        flags: options of Python itself.
    """
    if run.container is None:
        return program(module, flags=flags)
    return program(module, entry.PYTHON, f"{entry.LIBRARY}/{PACKAGE.name}", flags)


def container_command(run: Run, folder: Path, command: Sequence[str], with_code: bool = False) -> list[str]:
    """Return the argv that runs `command` in the run's image, or on the machine if the run has no image.

    With pyxis (Slurm's plugin for images) it is `command` itself, because Slurm enters the image.

    Args:
        folder: the run folder.
        with_code: whether `command` can import the run's copy of your code.
    """
    if run.container is None or run.container.runtime == "pyxis":
        return list(command)
    more = ["--with-code"] if with_code else []
    return [*program("hpctrain.node"), "enter", "--folder", str(folder), *more, "--", *command]


def tracker_command(folder: Path) -> list[str]:
    """Return the argv that writes the metrics of the run in `folder` into its trackers until the run is over. It runs
    with the Python of this process, outside the run's image, so the image needs no packages of trackers."""
    return [*program("hpctrain"), "track", str(folder), "--follow"]


def task_command(run: Run, folder: Path, command: Sequence[str]) -> str:
    """Return the shell command with which a task of a job step runs `command`: in the run's image, or on the machine if
    the run has no image."""
    if run.container is not None and run.container.runtime == "pyxis":
        return entry.pyxis_command(run.container, command)
    return shlex.join(container_command(run, folder, command))


def step_options(run: Run, folder: Path) -> str:
    """Return srun's options for a job step in the run's image, with a trailing space; '' unless pyxis (Slurm's plugin
    for images) starts the image.

    Raises:
        InputError: a path cannot be passed to a container runtime.
    """
    if run.container is None or run.container.runtime != "pyxis":
        return ""
    binds = entry.run_binds(run, folder, {})
    return shlex.join(entry.pyxis_options(run.container, binds)) + " "


def check_container(container: Container | None, local: bool, which: entry.Which) -> None:
    """Check that the image and the sources of its binds exist. With the runtime pyxis, the image is not checked.

    Args:
        container: the section `container` of the run file; None: the run has no image, and nothing is checked.
        local: whether the run's processes start on this machine; the program that starts images must then exist here.
        which: returns the path of a program by name, or None, as shutil.which does.

    Raises:
        InputError: the image or the source of a bind does not exist; or a local run needs pyxis, or a program that does
            not exist on this machine.
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
