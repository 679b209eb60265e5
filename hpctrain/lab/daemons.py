"""The lab's daemons munged, slurmctld and slurmd: how each is started, and which processes of this machine belong to
the lab."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hpctrain.base.errors import CommandError
from hpctrain.base.process import Process
from hpctrain.lab.config_files import CpuController
from hpctrain.lab.layout import LabLayout
from hpctrain.lab.machine import Machine

PROGRAMS = frozenset({"munged", "slurmctld", "slurmd"})
WRAPPER_PROGRAMS = frozenset({"nsenter", "unshare", "sh"})
"""Programs in front of slurmd in its argv: in one process, each executes the next one, and the last executes slurmd."""

NETNS = Path("/run/netns")

Daemon = tuple[Process, Path]
"""A daemon's process, and the file that holds its output."""

# $1: host name; $2: file through which to join the CPU group, or empty; the rest: the daemon's argv
_ENTER = 'hostname "$1" && if [ -n "$2" ]; then echo $$ >"$2" || exit; fi; shift 2; exec "$@"'
_LAST_LINES = 3
_SOCKET_WAIT_S = 10.0


def munged_argv(layout: LabLayout) -> tuple[str, ...]:
    """Return the argv of the lab's munged, whose key and socket differ from those of the machine's munged."""
    folder = layout.munge
    return (
        "munged", "--foreground", f"--socket={layout.munge_socket}", f"--key-file={folder / 'key'}",
        f"--log-file={folder / 'munged.log'}", f"--pid-file={folder / 'munged.pid'}",
        f"--seed-file={folder / 'seed'}",
    )  # fmt: skip


def slurmctld_argv(layout: LabLayout) -> tuple[str, ...]:
    """Return the argv of slurmctld, which runs on the host, outside the nodes' namespaces."""
    return (layout.slurm.program("slurmctld"), "-D", "-f", str(layout.slurm_conf))


def slurmd_argv(layout: LabLayout, name: str, control: CpuController | None) -> tuple[str, ...]:
    """Return the argv of a node's slurmd, in the node's network namespace and under the node's host name; if the lab's
    spec gives the node a CPU share, also in the node's cgroup.

    The argv begins with nsenter, because `ip netns exec` remounts /sys, after which slurmd finds no cgroups and ends.

    Args:
        control: this machine's `cpu` controller; None: without a cgroup.
    """
    shared = layout.spec.cpu_share_of(layout.node(name)) is not None and control is not None
    join = str(control.join_file(name)) if shared and control is not None else ""
    return (
        "nsenter", f"--net={NETNS / layout.namespace(name)}", "unshare", "--uts",
        "sh", "-c", _ENTER, "sh", name, join,
        layout.slurm.program("slurmd"), *layout.slurm.slurmd_options, "-D", "-f", str(layout.slurm_conf), "-N", name,
    )  # fmt: skip


def start_munged(machine: Machine, layout: LabLayout) -> None:
    """Start munged and wait for its socket, at most 10 s.

    Raises:
        CommandError: munged did not start, ended, or has no socket yet; the message has the end of its output.
    """
    process, log = _start(machine, layout, "munged", munged_argv(layout))
    machine.wait(lambda: layout.munge_socket.exists() or process.poll() is not None, _SOCKET_WAIT_S, pause_s=0.02)
    require_alive({"munged": (process, log)})
    if not layout.munge_socket.exists():
        where = f"its socket {layout.munge_socket} is missing {_SOCKET_WAIT_S:g} s after its start"
        raise CommandError(f"munged runs, but {where}: {_last_words(log)}; run `hpctrain lab up` again")


def start_slurmctld(machine: Machine, layout: LabLayout) -> Daemon:
    """Start slurmctld and return without waiting until it answers.

    Raises:
        CommandError: the program cannot be started.
    """
    return _start(machine, layout, "slurmctld", slurmctld_argv(layout))


def start_slurmd(machine: Machine, layout: LabLayout, name: str, control: CpuController | None) -> Daemon:
    """Start a node's slurmd and return without waiting until it registers with slurmctld.

    Args:
        control: this machine's `cpu` controller; None: without a cgroup.

    Raises:
        CommandError: the program cannot be started.
    """
    return _start(machine, layout, f"slurmd-{name}", slurmd_argv(layout, name, control))


def _start(machine: Machine, layout: LabLayout, name: str, argv: Sequence[str]) -> Daemon:
    log = layout.logs / f"{name}.out"
    return machine.runner.start(argv, log=log), log


def require_alive(daemons: dict[str, Daemon]) -> None:
    """Check that all daemons still run.

    Args:
        daemons: daemons by the name that an error gives them.

    Raises:
        CommandError: a daemon has ended; the message has the end of its output.
    """
    for name, (process, log) in daemons.items():
        code = process.poll()
        if code is not None:
            raise CommandError(f"{name} ended with {code}: {_last_words(log)}")


def _last_words(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").split("\n")
    except OSError:
        return "it wrote nothing"
    return " | ".join([line for line in lines if line.strip()][-_LAST_LINES:]) or "it wrote nothing"


def daemon_pids(machine: Machine, folder: Path, program: str | None = None) -> list[int]:
    """Return the ids of the processes whose argv is that of a daemon of a lab.

    Args:
        folder: the lab's state folder.
        program: munged, slurmctld or slurmd; None: any of them.
    """
    return [
        pid for pid, argv in machine.processes.commands() if pid != os.getpid() and _is_daemon(argv, folder, program)
    ]


def _is_daemon(argv: Sequence[str], folder: Path, program: str | None) -> bool:
    name = Path(argv[0]).name
    if program is not None and name != program:
        return False
    if name not in PROGRAMS and not (name in WRAPPER_PROGRAMS and any(Path(word).name == "slurmd" for word in argv)):
        return False
    conf, socket = str(folder / "slurm.conf"), f"--socket={folder / 'munge' / 'socket'}"
    return conf in argv or socket in argv


def namespace_pids(machine: Machine, namespace: str) -> list[int]:
    """Return the ids of all processes in a node's network namespace: slurmd, its job steps and their children; [] if
    there is no such namespace.

    Raises:
        CommandError: `ip` cannot be run.
    """
    done = machine.try_run(("ip", "netns", "pids", namespace))
    return [int(word) for word in done.stdout.split()] if done.code == 0 else []


def running_slurmd(machine: Machine, layout: LabLayout, name: str) -> list[int]:
    """Return the process ids of the node's slurmd; [] if it does not run."""
    return [
        pid
        for pid, argv in machine.processes.commands()
        if _is_daemon(argv, layout.folder, "slurmd") and list(argv[-2:]) == ["-N", name]
    ]
