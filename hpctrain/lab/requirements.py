"""What a lab requires of a machine: root, Slurm's and other programs, and permission to make network namespaces."""

from __future__ import annotations

import shutil
from collections.abc import Callable

from hpctrain.base.errors import InputError, RefusedError
from hpctrain.lab.layout import FABRIC, SlurmInstallation
from hpctrain.lab.machine import Machine

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "iproute2", "util-linux", "hostname")
"""Debian and Ubuntu packages that contain PROGRAMS."""
SLURM_PROGRAMS = ("slurmctld", "slurmd", "scontrol", "squeue")
MACHINE_PROGRAMS = ("munged", "ip", "tc", "nsenter", "unshare", "hostname")
PROGRAMS = (*SLURM_PROGRAMS, *MACHINE_PROGRAMS)

_INSTALL_TIMEOUT_S = 900.0
Which = Callable[[str], str | None]


def require_root(machine: Machine, verb: str) -> None:
    """Check that this user is root: only root may make network namespaces and interfaces.

    Args:
        verb: command of `hpctrain lab`, for the error.

    Raises:
        InputError: this user is not root.
    """
    if machine.uid() != 0:
        raise InputError(f"lab {verb}: needs root, this is user id {machine.uid()}; run it with sudo")


def missing_programs(slurm: SlurmInstallation, which: Which = shutil.which) -> list[str]:
    """Return the required programs that are not on the PATH. Slurm's are not required if the lab's Slurm has a prefix.

    Args:
        which: `shutil.which`, or a test's replacement.
    """
    wanted = PROGRAMS if slurm.prefix is None else MACHINE_PROGRAMS
    return [program for program in wanted if which(program) is None]


def require_programs(slurm: SlurmInstallation, which: Which = shutil.which) -> None:
    """Check that all programs that a lab needs exist.

    Args:
        which: `shutil.which`, or a test's replacement.

    Raises:
        InputError: programs are missing on the PATH, or in the Slurm that `slurm.prefix` of the spec names.
    """
    absent = slurm.missing()
    if absent:
        raise InputError(
            f"slurm.prefix: found '{slurm.prefix}', where there is no {absent[0]}; allowed: a folder with bin, sbin "
            f"and lib/slurm of a Slurm; `tools/install-slurm-next {slurm.prefix}` makes one on Debian"
        )
    missing = missing_programs(slurm, which)
    if missing:
        raise InputError(
            f"not found on the path: {', '.join(missing)}; `hpctrain lab up --install` installs them "
            f"(Debian and Ubuntu: {' '.join(PACKAGES)})"
        )


def install(machine: Machine, slurm: SlurmInstallation, which: Which = shutil.which) -> bool:
    """Install missing programs with apt-get; return whether any was missing.

    Args:
        which: `shutil.which`, or a test's replacement.

    Raises:
        InputError: there is no apt-get, or programs are missing afterwards too.
        RefusedError: apt-get failed.
        CommandError: apt-get took longer than 15 minutes.
    """
    missing = missing_programs(slurm, which)
    if not missing:
        return False
    if which("apt-get") is None:
        raise InputError(f"--install: there is no apt-get here; install {', '.join(missing)} by hand")
    for words in (("update",), ("install", "-y", "--no-install-recommends", *PACKAGES)):
        argv = ("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", *words)
        done = machine.runner.run(argv, timeout_s=_INSTALL_TIMEOUT_S)
        if done.code != 0:
            last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no words"]
            raise RefusedError(f"apt-get {' '.join(words)}: ended with {done.code}: {last[0]}")
    require_programs(slurm, which)
    return True


def require_namespaces(machine: Machine) -> None:
    """Check that root may make network namespaces here. In a container, root needs CAP_SYS_ADMIN for this.

    Raises:
        RefusedError: the kernel or the container forbids it.
        CommandError: `ip` cannot be run.
    """
    done = machine.try_run(("ip", "netns", "add", FABRIC))
    if done.code != 0:
        words = " ".join(done.stderr.split())
        raise RefusedError(
            f"cannot make a network namespace here: {words}; use a virtual machine, or a privileged container"
        )
    machine.run(("ip", "netns", "del", FABRIC))
