"""The program that starts images on this machine, and the facts about the machine that its options depend on."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpctrain.base.errors import InputError
from hpctrain.base.system.kernel import kernel_text

Name = Literal["apptainer", "singularity"]
NAMES: tuple[Name, ...] = ("apptainer", "singularity")
Which = Callable[[str], "str | None"]
_CAP_SYS_RESOURCE = 24
"""Number of CAP_SYS_RESOURCE in <linux/capability.h>."""


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
