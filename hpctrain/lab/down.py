"""`lab down`: find everything that a lab made, by its names, and remove it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.atomic import storage_errors
from hpctrain.base.errors import CommandError
from hpctrain.lab.config_files import find_cpu_control, without_lab, write_hosts
from hpctrain.lab.daemons import daemon_pids, namespace_pids
from hpctrain.lab.layout import ALIAS, CONTROL, is_own_namespace, spec_file
from hpctrain.lab.machine import Machine


@dataclass(frozen=True)
class Leftovers:
    """The parts of labs that exist on this machine."""

    namespaces: tuple[str, ...]
    interface: bool
    daemons: tuple[int, ...]
    hosts: bool
    groups: tuple[Path, ...]
    """CPU groups, children first."""
    folders: tuple[Path, ...]
    """State folders that hold a lab."""
    searched: tuple[Path, ...] = ()
    """Folders that were searched: the requested one, and the one that the lab's interface on the host names."""

    def __bool__(self) -> bool:
        return bool(self.namespaces or self.interface or self.daemons or self.hosts or self.groups or self.folders)

    def summary(self) -> str:
        """Return the parts as one line of text."""
        counts = [(len(self.namespaces), "network namespace"), (len(self.daemons), "daemon")]
        words = [f"{count} {what}{'s' if count > 1 else ''}" for count, what in counts if count]
        words += [CONTROL] if self.interface else []
        words += ["lines in /etc/hosts"] if self.hosts else []
        words += ["CPU groups"] if self.groups else []
        return ", ".join([*words, *map(str, self.folders)])


def leftovers(machine: Machine, folder: Path) -> Leftovers:
    """Return the processes, namespaces, interfaces, CPU groups and folders on this machine whose names are a lab's."""
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
    """Return whether the host has a lab's network interface, and the state folder that the interface's alias names."""
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
    """Whether the lab in `folder` was built completely and its controller still runs."""
    return (folder / "ready").exists() and bool(daemon_pids(machine, folder, "slurmctld"))


def clear(machine: Machine, folder: Path) -> Leftovers:
    """Remove every lab of this machine, and return the parts that existed.

    Raises:
        CommandError: a part cannot be removed.
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
