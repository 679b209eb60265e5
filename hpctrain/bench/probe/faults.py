"""`hpctrain bench probe --faults`: whether the probe names the fault of a lab node, for several faults, and reports
none on a lab without a fault."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hpctrain.base.errors import CommandError, InputError
from hpctrain.base.process import Process
from hpctrain.bench.probe.lab_probe import PROBE_S, ModifiedNode, probe_lab_nodes
from hpctrain.bench.record import machine_and_versions
from hpctrain.lab.config_files import find_cpu_control
from hpctrain.lab.faults import shaped
from hpctrain.lab.layout import LabLayout
from hpctrain.lab.machine import Machine
from hpctrain.lab.spec import rate_bits_per_s
from hpctrain.records.topology.topology import Topology

NODES = 4
VICTIM = 2
"""Index of the node that gets the fault; index 0 is the coordinator."""
CPU_SHARE = 0.1
"""CPU time of the throttled node, in cores. It is less than the node's fair share of the machine; otherwise the limit
has no effect."""
_GROUP = "hpctrain-bench-faults"
_RATE = "1gbit"
"""Rate of links whose rate the lab does not limit; a slow link gets a quarter of it."""

What = Literal["none", "rate", "direction", "interface", "hostname", "hang", "kill", "cpu"]


@dataclass(frozen=True)
class FaultCase:
    """A fault (`what`) that the bench gives to one lab node, and the code that the probe should report. `also` are
    further codes that the probe may report. `device` are the devices to measure, none for links only. The case `CLEAN`
    has no fault."""

    name: str
    what: What
    """Kind of the fault. rate: slow links. direction: slow sending. interface: reached over a second interface.
    hostname: resolves to loopback. hang: the probe's process is stopped by SIGSTOP. kill: it is killed. cpu: CPU limit.
    none: no fault.
    """
    code: str | None
    """The expected fault code; None if the case has no fault."""
    device: str = "none"
    also: tuple[str, ...] = ()
    """Further codes that the probe may report for the faulty node, because they are true of it too."""


CASES = (
    FaultCase("quarter-rate node", "rate", "SLOW_NODE"),
    FaultCase("one slow direction", "direction", "ASYMMETRIC"),
    FaultCase("wrong interface", "interface", "WRONG_INTERFACE"),
    FaultCase("loopback host name", "hostname", "LOOPBACK_HOSTNAME"),
    FaultCase("hung node", "hang", "UNREACHABLE"),
    FaultCase("dead node", "kill", "UNREACHABLE"),
    FaultCase("CPU-throttled node", "cpu", "THROTTLED", device="cpu", also=("SLOW_NODE", "ASYMMETRIC")),
)
CLEAN = FaultCase("clean", "none", None, device="cpu")


@dataclass(frozen=True)
class FaultRow:
    """Result of the probe with one fault: the expected code, the reported codes each with its node, and whether they
    are right."""

    case: str
    """Name of the case in `CASES`."""
    expected: str
    """The expected fault code."""
    reported: tuple[str, ...]
    """Each reported code as 'CODE node'; a code without a node stands alone."""
    right: bool
    seconds: float
    """Seconds of the probe."""


def judge(case: FaultCase, victim: str, topology: Topology) -> tuple[tuple[str, ...], bool]:
    """Return the codes that the probe reports, each as 'CODE node' (or 'CODE' for a fault of no node), and whether they
    are right.

    They are right if all name the node `victim`, the case's `code` is among them, and all others are in the case's
    `also`. For a case without a fault, only an empty list is right.
    """
    named = [
        (node.id, reason.code) for node in topology.nodes if node.health is not None for reason in node.health.reasons
    ]
    of_nodes = {code for _, code in named}
    whole = [("", fault.code) for fault in topology.verdict.faults if fault.code not in of_nodes]
    codes = list(dict.fromkeys(named + whole))
    texts = tuple(f"{code} {node}".strip() for node, code in codes)
    if case.code is None:
        return texts, not codes
    allowed = {(victim, code) for code in (case.code, *case.also)}
    return texts, (victim, case.code) in codes and set(codes) <= allowed


def measure_faults(machine: Machine, layout: LabLayout, clean: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Probe the lab once with each fault, then `clean` times without one; return the record of the bench.

    Args:
        progress: called with a line about each probe when it has ended.

    Raises:
        InputError: the lab has fewer than four nodes, or this machine cannot limit CPU time.
        CommandError: a command failed.
    """
    layout.require_nodes(NODES, "bench probe --faults")
    rows = []
    wrong: list[tuple[str, ...]] = []
    for case in (*CASES, *[CLEAN] * clean):
        topology, seconds = _run_case(machine, layout, layout.names[:NODES], case)
        texts, right = judge(case, layout.names[VICTIM], topology)
        progress(f"{case.name}: found {', '.join(texts) or 'nothing'}")
        if case.code is not None:
            rows.append(FaultRow(case.name, case.code, texts, right, seconds))
        elif not right:
            wrong.append(texts)
    record = machine_and_versions("probe-faults", {"clean": clean, "nodes": NODES})
    return record | {"rows": [asdict(row) for row in rows], "clean": {"runs": clean, "wrong": wrong}}


def _run_case(machine: Machine, layout: LabLayout, names: Sequence[str], case: FaultCase) -> tuple[Topology, float]:
    """Make one probe of the nodes `names` with the fault in place, and remove the fault. Return the topology and the
    seconds of the probe."""
    with contextlib.ExitStack() as undo:
        special = _make_faulty(machine, layout, names[VICTIM], case.what, undo)
        return probe_lab_nodes(machine, layout, names, case.device, special)


def _make_faulty(
    machine: Machine, layout: LabLayout, victim: str, what: What, undo: contextlib.ExitStack
) -> ModifiedNode:
    """Inject the fault into the node `victim`, and register the removal of the fault on `undo`. Return what the probe
    has to do differently on this node."""
    rate, namespace = layout.spec.rate_of(layout.node(victim)), layout.namespace(victim)
    if what in ("rate", "direction"):
        slow = f"{rate_bits_per_s(rate or _RATE) / 4 / 1e6:g}mbit"
        undo.enter_context(shaped(machine, layout, [victim], slow, ("in", "out") if what == "rate" else ("out",)))
    elif what == "interface":
        undo.callback(machine.try_run, ["ip", "-n", namespace, "link", "del", "eth1"])
        _add_interface(machine, namespace)
        return ModifiedNode(victim, addr=_second_address(machine, layout, victim))
    elif what == "hostname":
        return ModifiedNode(victim, hosts=_loopback_hosts(machine, victim))
    elif what in ("hang", "kill"):
        number = signal.SIGSTOP if what == "hang" else signal.SIGKILL
        return ModifiedNode(victim, stop=lambda folder, process: _stop_at_links(machine, folder, process, number))
    elif what == "cpu":
        group = _cpu_group(machine)
        # The kernel releases a group a moment after its last process has ended.
        undo.callback(machine.wait, lambda: _is_removed(group), 5.0)
        return ModifiedNode(victim, cpu_group=group)
    return ModifiedNode(victim)


def _is_removed(group: Path) -> bool:
    try:
        group.rmdir()
    except OSError:
        return not group.exists()
    return True


def _add_interface(machine: Machine, namespace: str) -> None:
    """Add a second network interface, as yet without an address, to a node's network namespace. When it gets an
    address, other nodes reach this address over the node's first interface, because Linux answers for it there too."""
    machine.run(["ip", "-n", namespace, "link", "add", "eth1", "type", "veth", "peer", "name", "eth1-peer"])
    for name in ("eth1", "eth1-peer"):
        machine.run(["ip", "-n", namespace, "link", "set", name, "up"])


def _cpu_group(machine: Machine) -> Path:
    """Return the folder of a new cgroup, which is limited to `CPU_SHARE` cores.

    Raises:
        InputError: this machine cannot limit CPU time.
    """
    control = find_cpu_control(machine.mounts.read_text())
    if control is None:
        raise InputError("bench probe --faults: this machine mounts no cgroup with a CPU controller")
    group = control.root / _GROUP
    group.mkdir(exist_ok=True)
    if control.version == 2:
        (control.root / "cgroup.subtree_control").write_text("+cpu")
    for file, text in control.limit_files(group, CPU_SHARE):
        file.write_text(text)
    return group


def _stop_at_links(machine: Machine, folder: Path, process: Process, number: signal.Signals) -> None:
    """Wait until the nodes of a probe measure links, then send a signal to the probe's process on one node.

    Args:
        folder: folder of the probe, with its progress file.
        process: the probe's process on the node.
        number: number of the signal.
    """

    def measuring() -> bool:
        try:
            return json.loads((folder / "progress.json").read_text())["phase"] == "links"
        except (OSError, ValueError):
            return False

    if not machine.wait(measuring, PROBE_S, pause_s=0.02):
        raise CommandError("bench probe: the nodes did not come to measuring")
    machine.processes.signal(process.pid, number)


def _second_address(machine: Machine, layout: LabLayout, name: str) -> str:
    """Set a free address of the lab's network on the node's second interface, and return this address."""
    first, _, last = layout.address(name).rpartition(".")
    taken = {layout.address(other) for other in layout.names}
    addr = next(free for host in range(254, 1, -1) if (free := f"{first}.{host}") not in taken and str(host) != last)
    machine.run(["ip", "-n", layout.namespace(name), "addr", "add", f"{addr}/32", "dev", "eth1"])
    return addr


def _loopback_hosts(machine: Machine, name: str) -> str:
    """Return the text of an /etc/hosts in which the node's name has the address 127.0.1.1, as many installers write
    it."""
    lines = [line for line in machine.hosts.read_text().splitlines() if name not in line.split()]
    return "\n".join([*lines, f"127.0.1.1 {name}", ""])
