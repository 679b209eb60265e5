"""`python -m hpctrain.node enter`: replaces its process by a command, inside the run's image if the run has one.

The command `enter` runs on each node, outside the image, because the node's GPU driver, temporary folders and container
runtime decide how the image starts.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path

from hpctrain.base.process import SystemRunner
from hpctrain.container import entry
from hpctrain.container.entry import run_binds
from hpctrain.records.run.run import run_of
from hpctrain.runs.code_copy import CODE_FOLDER
from hpctrain.runs.folder import check_trusted

IMAGE_TOOLS_FOLDER = "image-tools"
"""Folder in a run folder with a subfolder for each node. Its scripts come first on the PATH of the container runtime,
and replace programs of the runtime."""


def main(argv: list[str]) -> int:
    """Replace this process by the command in `argv`; return only by raising an error.

    Raises:
        InputError: the run folder belongs to another user, others can write to it, its run.yaml has errors, no
            container runtime is on this node's PATH, or a path cannot be bound into the image.
        StorageError: the run folder cannot be written.
        CommandError: the command or the container runtime cannot be started.
    """
    parser = argparse.ArgumentParser(prog="hpctrain.node enter")
    parser.add_argument("--folder", type=Path, required=True, help="the run folder")
    parser.add_argument("--with-code", action="store_true", help="the run's copy of the user's code can be imported")
    parser.add_argument("command", nargs="+", help="the command, after --")
    options = parser.parse_args(argv)
    check_trusted(options.folder)
    folder, command = options.folder, options.command
    argv, env = command_in_container(folder, command, os.environ, entry.this_host(), shutil.which, options.with_code)
    SystemRunner().replace_process(argv, env)


def command_in_container(
    folder: Path, command: list[str], environ: Mapping[str, str], host: entry.Host, which: entry.Which, with_code: bool
) -> tuple[list[str], dict[str, str]]:
    """Return the argv and the environment that run a command on this node, in the image of the run in `folder` if it
    has one.

    Args:
        environ: variables of this process.
        host: what this machine has that the image's start depends on.
        which: returns the path of a program by name, or None.
        with_code: whether the command can import the run's copy of your code.

    Raises:
        InputError: run.yaml has errors or is untrusted, no container runtime is on this node's PATH, or a
            path cannot be bound into the image.
        StorageError: the run folder cannot be written.
    """
    run = run_of(folder)
    if run.container is None:
        return command, dict(environ)
    runtime = entry.find_runtime(run.container.runtime, which)
    argv = entry.entry_command(runtime, host, run.container, run_binds(run, folder, environ), command)
    code = folder / CODE_FOLDER if with_code and (folder / CODE_FOLDER).is_dir() else None
    env = entry.entry_environment(run.container, environ, runtime.prefix, code)
    # Slurm ends all processes of a killed node; without Slurm nobody does.
    alone = "SLURM_JOB_ID" not in environ
    return argv, entry.with_surviving_mount(env, folder / IMAGE_TOOLS_FOLDER / platform.node(), which, alone)
