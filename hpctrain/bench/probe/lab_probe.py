"""Run the probe's node processes in the namespaces of a lab's nodes, as in a job but without Slurm.

`hpctrain bench probe --times` reports the duration of whole probes of a lab, and whether they measured every pair.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.base.errors import EXIT_DONE, EXIT_REFUSED, EXIT_WARNINGS, CommandError, InputError
from hpctrain.base.module_argv import program
from hpctrain.base.process import Process, end_process
from hpctrain.bench.record import make_record
from hpctrain.lab.daemons import NETNS
from hpctrain.lab.layout import LabLayout
from hpctrain.lab.machine import Machine
from hpctrain.records.topology.topology import Topology

PROBE_S = 180.0
"""Seconds that a probe of a lab may take; a probe that takes longer counts as hung."""
# $0: host name; $1: a file to mount over /etc/hosts, or empty; $2: the CPU group to enter, or empty
_ENTER = (
    'echo "$0" >/proc/sys/kernel/hostname && { [ -z "$1" ] || mount --bind "$1" /etc/hosts; } && '
    '{ [ -z "$2" ] || echo $$ >"$2"; } && shift 2 && exec "$@"'
)
JOB_NODES = 4


@dataclass(frozen=True)
class ModifiedNode:
    """Changes that make one node differ from the others; None leaves a part unchanged."""

    node: str
    addr: str | None = None
    """Address that the node reports for itself."""
    hosts: str | None = None
    """Text of the node's /etc/hosts."""
    cpu_group: Path | None = None
    """CPU group that the node's processes run in."""
    stop: Callable[[Path, Process], None] | None = None
    """Function that is called with the probe's folder and this node's process once all nodes are started; None: no
    call. The probe does not wait for a node that has one."""


def probe_lab_nodes(
    machine: Machine, layout: LabLayout, names: Sequence[str], device: str = "none", special: ModifiedNode | None = None
) -> tuple[Topology, float]:
    """Return the topology that these nodes measure, and the seconds that the probe took.

    Raises:
        CommandError: a node's process failed.
    """
    with tempfile.TemporaryDirectory(prefix="hpctrain-bench-") as text:
        folder = Path(text)
        processes: dict[str, Process] = {}
        began = machine.clock.now()
        try:
            for name in names:
                odd = special if special is not None and special.node == name else ModifiedNode(name)
                argv = [*program("hpctrain.node"), "probe", "--folder", text, "--device", device]
                argv += ["--node", name, "--nodes", ",".join(names), "--addr", odd.addr or layout.address(name)]
                log = folder / f"{name}.log"
                processes[name] = machine.runner.start([*_enter(layout, odd, folder), *argv], log=log)
            stopped = special.node if special is not None and special.stop is not None else None
            if special is not None and special.stop is not None:
                special.stop(folder, processes[special.node])
            _wait(folder, {name: process for name, process in processes.items() if name != stopped})
        finally:
            for process in processes.values():
                end_process(process)
        return Topology.read(folder / "topology.json"), machine.clock.now() - began


def _enter(layout: LabLayout, odd: ModifiedNode, folder: Path) -> list[str]:
    # `ip netns exec` would hide the CPU groups, so this is nsenter (lab/daemons.py).
    hosts, join = "", ""
    if odd.hosts is not None:
        file = folder / "hosts"
        file.write_text(odd.hosts)
        hosts = str(file)
    if odd.cpu_group is not None:
        join = str(odd.cpu_group / "cgroup.procs")
    namespace = NETNS / layout.namespace(odd.node)
    return ["nsenter", f"--net={namespace}", "unshare", "--uts", "--mount", "sh", "-c", _ENTER, odd.node, hosts, join]


def _wait(folder: Path, processes: dict[str, Process]) -> None:
    for name, process in processes.items():
        if (end := process.wait(PROBE_S)) != 0:
            log = folder / f"{name}.log"
            lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
            how = f"did not end within {PROBE_S:g} s" if end is None else f"ended with {end}"
            raise CommandError(f"bench probe: {name} {how}; {lines[-1] if lines else 'nothing said'}")


@dataclass(frozen=True)
class TimeRow:
    """Result of one whole probe."""

    case: str
    seconds: float
    """Seconds from the start of the command to its end."""
    pairs: int
    """Number of pairs of nodes."""
    complete: int
    """Pairs with latency and bandwidth in both directions."""
    codes: tuple[str, ...]
    """Fault codes in the verdict."""


def measure_times(machine: Machine, layout: LabLayout, progress: Callable[[str], None]) -> dict[str, Any]:
    """Probe four nodes with their devices as a Slurm job, then the links of all nodes of the lab; return the bench's
    record.

    Raises:
        InputError: the lab has fewer than four nodes.
        CommandError: a probe failed.
    """
    if len(layout.names) < JOB_NODES:
        raise InputError(
            f"bench probe --times: the lab has {len(layout.names)} nodes and {JOB_NODES} are needed; "
            "start one with `hpctrain lab up --nodes 16 --replace`"
        )
    progress(f"{JOB_NODES} nodes as a job")
    rows = [time_row(f"{JOB_NODES} nodes as a job, with devices", *_job(machine, layout))]
    progress(f"every pair of {len(layout.names)} nodes")
    rows.append(time_row(f"{len(layout.names)} nodes, links alone", *probe_lab_nodes(machine, layout, layout.names)))
    return make_record("probe-times", rows, {})


def time_row(case: str, topology: Topology, seconds: float) -> TimeRow:
    """Return the row of one probe."""
    nodes = len(topology.nodes)
    complete = sum(
        all(side.latency_s is not None and side.isolated_bytes_per_s is not None for side in (link.ab, link.ba))
        for link in topology.fabric.links
    )
    codes = tuple(sorted({fault.code for fault in topology.verdict.faults}))
    return TimeRow(case, seconds, nodes * (nodes - 1) // 2, complete, codes)


def _job(machine: Machine, layout: LabLayout) -> tuple[Topology, float]:
    with tempfile.TemporaryDirectory(prefix="hpctrain-bench-", dir=Path.cwd()) as folder:
        output = Path(folder) / "topology.json"
        argv = [*program("hpctrain"), "probe", "-N", str(JOB_NODES), "--device", "cpu", "-o", str(output)]
        began = machine.clock.now()
        done = machine.runner.run(argv, PROBE_S, dict(os.environ) | {"SLURM_CONF": str(layout.slurm_conf)})
        seconds = machine.clock.now() - began
        if done.code not in (EXIT_DONE, EXIT_WARNINGS, EXIT_REFUSED) or not output.exists():
            message = " ".join((done.stderr or done.stdout).split())[-300:]
            raise CommandError(f"bench probe: `hpctrain probe -N {JOB_NODES}` ended with {done.code}: {message}")
        return Topology.read(output), seconds
