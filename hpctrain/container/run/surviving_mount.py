"""Keep an image's file system alive when Slurm signals a job.

Without root, Apptainer mounts an image through a separate process, squashfuse_ll, which belongs to the job's step.
Slurm sends USR2 before the time limit, and TERM at a preemption, to every process of a step. squashfuse_ll would end,
and with it the processes in the image (SIGBUS), before they have saved a checkpoint. Apptainer finds squashfuse_ll by
the PATH. So a script of that name is put first on the PATH; it ignores these signals and then executes the real
program.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from hpctrain.base.atomic import storage_errors, write_text
from hpctrain.container.run.runtime import Which

PROGRAM = "squashfuse_ll"


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
