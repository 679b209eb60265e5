"""`lab up` and `lab down`: `bring_up` builds a lab and waits until every node has answered; `clear` removes a lab.

The parts of a lab are decided before anything is built, and found by their names when they are removed.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.atomic import storage_errors, write_bytes, write_text
from hpctrain.base.errors import CommandError, InputError, RefusedError
from hpctrain.lab import config_files, daemons
from hpctrain.lab.config_files import find_cpu_control, without_lab, write_hosts
from hpctrain.lab.daemons import daemon_pids, namespace_pids
from hpctrain.lab.layout import ALIAS, CONTROL, LabLayout, SlurmInstallation, is_own_namespace, load_layout, spec_file
from hpctrain.lab.machine import Machine
from hpctrain.lab.network import Command, build_commands
from hpctrain.lab.requirements import require_namespaces
from hpctrain.lab.status import node_states, scontrol

Tell = Callable[[str], None]

READY_TIMEOUT_S = 60.0
_KEY_BYTES = 128
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})", re.ASCII)


@dataclass(frozen=True)
class Blueprint:
    """All parts of a lab, decided before anything is built: texts of files, folders, cgroups, and commands in order."""

    layout: LabLayout
    control: config_files.CpuController | None
    """This machine's `cpu` controller; None without one."""
    hosts: str
    """The new text of /etc/hosts."""
    files: tuple[tuple[Path, str], ...]
    """(path, text) of each file to write."""
    folders: tuple[Path, ...]
    """Folders to make, parents first."""
    groups: tuple[Path, ...]
    """Folders of the cgroups that limit nodes to a CPU share, parents first."""
    group_files: tuple[tuple[Path, str], ...]
    """(path, text) of each cgroup file to write, in order."""
    commands: tuple[Command, ...]
    """Commands that build namespaces and links."""
    daemons: tuple[Command, ...]
    """Commands that start munged, slurmctld and each node's slurmd."""

    def lines(self) -> list[str]:
        """Return what building the lab would do, as shell lines: folders, files, lines of /etc/hosts, and commands."""
        lines = [f"mkdir -p {path}" for path in (*self.folders, *self.groups)]
        lines += [f"write {path} ({len(text)} bytes)" for path, text in self.files]
        lines += [f"echo {shlex.quote(text)} > {path}" for path, text in self.group_files]
        lines += [f"add to /etc/hosts: {self.layout.address(name)} {name}" for name in self.layout.names]
        return lines + [shlex.join(command) for command in (*self.commands, *self.daemons)]


def make_blueprint(machine: Machine, layout: LabLayout, version: tuple[int, int]) -> Blueprint:
    """Return all parts of a lab. /etc/hosts and the mounts are read; nothing is changed.

    Args:
        version: Slurm's version, such as (22, 5).

    Raises:
        InputError: another host has the name of a node.
        RefusedError: the spec has a CPU share, and this machine cannot limit CPU time.
    """
    control = config_files.find_cpu_control(machine.mounts.read_text())
    if control is None and any(layout.spec.cpu_share_of(node) for node in layout.spec.nodes):
        raise RefusedError("cpu_share: this machine mounts no cgroup with a CPU controller; remove the key")
    hostname = machine.hostname().partition(".")[0]
    return Blueprint(
        layout=layout,
        control=control,
        hosts=config_files.with_lab(machine.hosts.read_text(), layout),
        files=(
            (layout.slurm_conf, config_files.slurm_conf(layout, hostname)),
            (layout.folder / "cgroup.conf", config_files.cgroup_conf(version)),
            (layout.task_prolog, config_files.task_prolog(layout, machine.cores())),
        ),
        folders=layout.folders,
        groups=tuple(config_files.share_folders(control, layout)) if control else (),
        group_files=tuple(config_files.share_files(control, layout)) if control else (),
        commands=tuple(build_commands(layout)),
        daemons=(
            daemons.munged_argv(layout),
            daemons.slurmctld_argv(layout),
            *(daemons.slurmd_argv(layout, name, control) for name in layout.names),
        ),
    )


def slurm_version(machine: Machine, slurm: SlurmInstallation) -> tuple[int, int]:
    """Return the version of slurmd as (major, minor): (22, 5) for 22.05.

    Raises:
        CommandError: slurmd cannot be run, or prints no version.
    """
    words = machine.run((slurm.program("slurmd"), "-V")).stdout.split()
    version = _VERSION.match(words[-1]) if words else None
    if version is None:
        raise CommandError(f"slurmd -V: found {' '.join(words)!r}, expected 'slurm 22.05.8' or the like")
    return int(version[1]), int(version[2])


def _require_one_version(machine: Machine, layout: LabLayout) -> None:
    """Check that slurmd and scontrol have the same version.

    An earlier lab's `export PATH` can put a newer scontrol on the PATH, which cannot read the controller's answers.

    Raises:
        InputError: the versions differ.
    """
    major, minor = slurm_version(machine, layout.slurm)
    done = machine.try_run(scontrol(layout, "-V"))
    words = " ".join((done.stdout + done.stderr).split())
    if done.code != 0 or f" {major}.{minor:02d}." not in words:
        raise InputError(
            f"slurmd is of Slurm {major}.{minor:02d} and scontrol says '{words[:200]}'; correct PATH, so that they are "
            "of one version, or name the folder of one of them with --slurm"
        )


def bring_up(machine: Machine, layout: LabLayout, replace: bool = False, tell: Tell = lambda text: None) -> None:
    """Build a lab and wait until every node has answered.

    Leftovers of an earlier lab are removed first. After a failure, no part of the new lab remains.

    Args:
        replace: whether to take down a lab that is up.
        tell: called with a line at each phase.

    Raises:
        InputError: a lab is up already, the state folder holds other files, another host has the name of a node, or the
            PATH mixes two versions of Slurm.
        RefusedError: this machine forbids network namespaces, or cannot limit CPU time as the spec asks.
        CommandError: a command or a daemon failed.
        StorageError: a file or a folder cannot be written.
    """
    _require_room(machine, layout, replace)
    earlier = leftovers(machine, layout.folder)
    if earlier:
        tell(f"clearing what an earlier lab left: {earlier.summary()}")
        clear(machine, layout.folder)
    require_namespaces(machine)
    blueprint = make_blueprint(machine, layout, slurm_version(machine, layout.slurm))
    try:
        _build(machine, blueprint, tell)
    except BaseException:  # also on Ctrl-C: half a lab is useless
        clear(machine, layout.folder)
        raise


def _require_room(machine: Machine, layout: LabLayout, replace: bool) -> None:
    for folder in leftovers(machine, layout.folder).folders:
        if is_ready(machine, folder) and not replace:
            raise InputError(
                f"a lab is up in {folder}; use it ({'; '.join(load_layout(folder).exports)}), "
                "or take it down first: `hpctrain lab down`, or `lab up --replace`"
            )
    folder = layout.folder
    if folder.exists() and not layout.spec_file.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder}: holds something that is no lab's; choose another folder (HPCTRAIN_LAB)")


def _build(machine: Machine, blueprint: Blueprint, tell: Tell) -> None:
    layout = blueprint.layout
    _record(machine, blueprint)
    _require_one_version(machine, layout)
    tell(f"network: {len(layout.names)} nodes in {layout.spec.network}")
    machine.run_all(blueprint.commands)
    _limit_cpu(blueprint)
    tell(f"threads: {config_files.threads_words(layout, machine.cores())}")
    tell("daemons: munged, slurmctld, a slurmd for each node")
    daemons.start_munged(machine, layout)
    started = {"slurmctld": daemons.start_slurmctld(machine, layout)}
    for name in layout.names:
        started[f"slurmd of {name}"] = daemons.start_slurmd(machine, layout, name, blueprint.control)
    _wait_for_nodes(machine, layout, started)
    write_text(layout.ready_file, f"{machine.clock.wall():.3f}\n")


def _record(machine: Machine, blueprint: Blueprint) -> None:
    """Write the lab's files and /etc/hosts. The spec is written first: it marks the state folder as a lab's even if
    this function is interrupted afterwards."""
    layout = blueprint.layout
    with storage_errors(layout.folder):
        layout.folder.mkdir(parents=True, exist_ok=True)
        layout.folder.chmod(0o755)
    layout.spec.write(layout.spec_file)
    with storage_errors(layout.folder):
        for folder in blueprint.folders:
            folder.mkdir(exist_ok=True)
            folder.chmod(0o755)  # munged requires that only the owner can write here and all can reach its socket
    write_bytes(layout.munge / "key", machine.random_bytes(_KEY_BYTES), mode=0o600)
    for path, text in blueprint.files:
        write_text(path, text)
    with storage_errors(layout.task_prolog):
        layout.task_prolog.chmod(0o755)
    config_files.write_hosts(machine.hosts, blueprint.hosts)


def _limit_cpu(blueprint: Blueprint) -> None:
    for group in blueprint.groups:
        with storage_errors(group):
            group.mkdir(exist_ok=True)
    for path, text in blueprint.group_files:
        with storage_errors(path):
            path.write_text(text)


def _wait_for_nodes(machine: Machine, layout: LabLayout, started: dict[str, daemons.Daemon]) -> None:
    def all_healthy() -> bool:
        daemons.require_alive(started)
        states = node_states(machine, layout)
        return all(name in states and states[name].healthy for name in layout.names)

    if not machine.wait(all_healthy, READY_TIMEOUT_S, pause_s=0.2):
        states = {name: state.text for name, state in node_states(machine, layout).items()}
        raise CommandError(f"not all nodes answered within {READY_TIMEOUT_S:g} s; Slurm says {states or 'nothing'}")


@dataclass(frozen=True)
class Leftovers:
    """The parts of labs that exist on this machine, to be removed."""

    namespaces: tuple[str, ...]
    """Names of the network namespaces."""
    interface: bool
    """Whether the host has the lab's network interface."""
    daemons: tuple[int, ...]
    """Process ids of the daemons."""
    hosts: bool
    """Whether /etc/hosts has lines of a lab."""
    groups: tuple[Path, ...]
    """Cgroup folders of the nodes, and then that of the lab."""
    folders: tuple[Path, ...]
    """State folders that hold a lab."""
    searched: tuple[Path, ...] = ()
    """State folders that were searched: the requested one, and the one that the lab's interface on the host names."""

    def __bool__(self) -> bool:
        return bool(self.namespaces or self.interface or self.daemons or self.hosts or self.groups or self.folders)

    def summary(self) -> str:
        """Return the leftover parts as one line of text, such as '5 network namespaces, 6 daemons'."""
        counts = [(len(self.namespaces), "network namespace"), (len(self.daemons), "daemon")]
        words = [f"{count} {what}{'s' if count > 1 else ''}" for count, what in counts if count]
        words += [CONTROL] if self.interface else []
        words += ["lines in /etc/hosts"] if self.hosts else []
        words += ["CPU groups"] if self.groups else []
        return ", ".join([*words, *map(str, self.folders)])


def leftovers(machine: Machine, folder: Path) -> Leftovers:
    """Return the parts of all labs on this machine, found by their names.

    Args:
        folder: state folder to search, besides the one that the alias of a lab's network interface names.

    Raises:
        CommandError: the network namespaces cannot be listed.
    """
    interface, alias = _control(machine)
    candidates = dict.fromkeys([folder, *([alias] if alias else [])])
    listed = json.loads(machine.run(("ip", "-j", "netns", "list")).stdout or "[]")
    text = machine.hosts.read_text()
    return Leftovers(
        namespaces=tuple(entry["name"] for entry in listed if is_own_namespace(entry["name"])),
        interface=interface,
        daemons=tuple(pid for candidate in candidates for pid in daemon_pids(machine, candidate)),
        hosts=without_lab(text) != text,
        groups=tuple(_groups(machine)),
        folders=tuple(candidate for candidate in candidates if spec_file(candidate).exists()),
        searched=tuple(candidates),
    )


def _control(machine: Machine) -> tuple[bool, Path | None]:
    """Return whether this machine has a lab's network interface, and the state folder that the interface's alias names;
    None if it names none."""
    done = machine.try_run(("ip", "-j", "link", "show", "dev", CONTROL))
    if done.code != 0:
        return False, None
    alias = json.loads(done.stdout)[0].get("ifalias", "")
    return True, Path(alias.removeprefix(ALIAS)) if alias.startswith(f"{ALIAS}/") else None


def _groups(machine: Machine) -> list[Path]:
    control = find_cpu_control(machine.mounts.read_text())
    if control is None or not control.group.is_dir():
        return []
    return [*(path for path in sorted(control.group.iterdir()) if path.is_dir()), control.group]


def is_ready(machine: Machine, folder: Path) -> bool:
    """Return whether the lab with this state folder was built completely and its slurmctld still runs."""
    return (folder / "ready").exists() and bool(daemon_pids(machine, folder, "slurmctld"))


def clear(machine: Machine, folder: Path) -> Leftovers:
    """Remove every lab of this machine, and return the parts that existed.

    Args:
        folder: state folder to search, besides the one that the alias of a lab's network interface names.

    Raises:
        CommandError: a part cannot be removed.
        StorageError: /etc/hosts cannot be written, or a state folder cannot be removed.
    """
    existing = leftovers(machine, folder)
    # Kill the host's daemons first, so that slurmctld starts nothing anew.
    for state in existing.searched:
        machine.kill(lambda state=state: daemon_pids(machine, state))  # type: ignore[misc]
    for namespace in existing.namespaces:
        machine.kill(lambda namespace=namespace: namespace_pids(machine, namespace))  # type: ignore[misc]
    if existing.interface:
        machine.run(("ip", "link", "del", CONTROL))
    for namespace in existing.namespaces:
        machine.run(("ip", "netns", "del", namespace))
    if existing.hosts:
        write_hosts(machine.hosts, without_lab(machine.hosts.read_text()))
    _remove_groups(machine, existing.groups)
    for state in existing.folders:
        with storage_errors(state):
            shutil.rmtree(state)
    return existing


def _remove_groups(machine: Machine, groups: tuple[Path, ...]) -> None:
    def gone() -> bool:
        for group in groups:
            try:
                group.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                return False  # the kernel still counts the group's last process
        return True

    if not machine.wait(gone, timeout_s=5.0, pause_s=0.05):
        raise CommandError(f"{groups[-1]}: cannot be removed; end the processes listed in its cgroup.procs")
