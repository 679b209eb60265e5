"""What the lab needs of a machine: root, Slurm's programs, and the right to make network namespaces."""

from __future__ import annotations

import shutil
from collections.abc import Callable

from hpctrain.base.errors import InputError, Refused
from hpctrain.lab.layout import FABRIC
from hpctrain.lab.machine import Machine

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "iproute2", "util-linux", "hostname")
"""Debian and Ubuntu packages that bring PROGRAMS."""
PROGRAMS = ("slurmctld", "slurmd", "scontrol", "squeue", "munged", "ip", "tc", "nsenter", "unshare", "hostname")

_INSTALL_TIMEOUT_S = 900.0
Which = Callable[[str], str | None]


def require_root(machine: Machine, verb: str) -> None:
    """The lab makes network namespaces and interfaces, which only root may.

    Raises:
        InputError: this user is not root.
    """
    if machine.uid() != 0:
        raise InputError(f"lab {verb}: needs root, this is user id {machine.uid()}; run it with sudo")


def missing_programs(which: Which = shutil.which) -> list[str]:
    """Programs that are not on the path."""
    return [program for program in PROGRAMS if which(program) is None]


def require_programs(which: Which = shutil.which) -> None:
    """All programs are there.

    Raises:
        InputError: some are not.
    """
    missing = missing_programs(which)
    if missing:
        raise InputError(
            f"not found on the path: {', '.join(missing)}; `hpctrain lab up --install` installs them "
            f"(Debian and Ubuntu: {' '.join(PACKAGES)})"
        )


def install(machine: Machine, which: Which = shutil.which) -> bool:
    """Install what is missing with apt-get; False when nothing was.

    Raises:
        InputError: there is no apt-get.
        Refused: apt-get failed.
    """
    if not missing_programs(which):
        return False
    if which("apt-get") is None:
        raise InputError(f"--install: there is no apt-get here; install {', '.join(missing_programs(which))} by hand")
    for words in (("update",), ("install", "-y", "--no-install-recommends", *PACKAGES)):
        argv = ("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", *words)
        done = machine.runner.run(argv, timeout_s=_INSTALL_TIMEOUT_S)
        if done.code != 0:
            last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no words"]
            raise Refused(f"apt-get {' '.join(words)}: ended with {done.code}: {last[0]}")
    require_programs(which)
    return True


def require_namespaces(machine: Machine) -> None:
    """Root may make network namespaces here (in a container without CAP_SYS_ADMIN it may not).

    Raises:
        Refused: the kernel or the container forbids it.
    """
    done = machine.try_run(("ip", "netns", "add", FABRIC))
    if done.code != 0:
        words = " ".join(done.stderr.split())
        raise Refused(
            f"cannot make a network namespace here: {words}; use a virtual machine, or a privileged container"
        )
    machine.run(("ip", "netns", "del", FABRIC))
