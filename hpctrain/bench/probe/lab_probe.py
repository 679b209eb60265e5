"""`hpctrain bench probe`: runs the probe in the namespaces of a lab's nodes, as in a job but without Slurm.

By default, the bench compares the probe's bandwidth with iperf3's, on links of known rate. Both measure the same pair
of nodes in the same direction, in turns and without other traffic. The error is the median of the probe's measurements
minus the median of iperf3's, in percent of iperf3's median. With --times, the bench reports how long whole probes of
the lab take, and whether they measured every pair.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpctrain.base.errors import EXIT_DONE, EXIT_REFUSED, EXIT_WARNINGS, CommandError, InputError
from hpctrain.base.module_argv import program
from hpctrain.base.process import Process, end_process
from hpctrain.bench.record import make_record
from hpctrain.lab.config_files import find_cpu_control
from hpctrain.lab.daemons import NETNS
from hpctrain.lab.faults import shaped
from hpctrain.lab.layout import LabLayout
from hpctrain.lab.machine import Machine
from hpctrain.records.topology.link import LinkFigures
from hpctrain.records.topology.topology import Topology

PROBE_S = 180.0
"""Seconds that a probe of a lab may take; a probe that takes longer counts as hung."""
# $0: host name; $1: a file to mount over /etc/hosts, or empty; $2: the CPU group to enter, or empty
_ENTER = (
    'echo "$0" >/proc/sys/kernel/hostname && { [ -z "$1" ] || mount --bind "$1" /etc/hosts; } && '
    '{ [ -z "$2" ] || echo $$ >"$2"; } && shift 2 && exec "$@"'
)
JOB_NODES = 4
PORT = 5201
"""Default port of iperf3. It is free, because each node has a network namespace."""
CONNECT_S = 10.0


@dataclass(frozen=True)
class ModifiedNode:
    """What the bench does differently on one node of a probe: another address, other text in /etc/hosts, a cgroup, or a
    function that stops its process. None leaves a part unchanged: a node with a CPU share is in its cgroup."""

    node: str
    addr: str | None = None
    """Address that the node reports for itself; None for its address in the lab."""
    hosts: str | None = None
    """Text of the node's /etc/hosts."""
    cpu_group: Path | None = None
    """cgroup in which the node's processes run."""
    stop: Callable[[Path, Process], None] | None = None
    """Function that is called with the probe's folder and this node's process once all nodes are started. The bench
    does not wait for the process of a node that has such a function."""


def probe_lab_nodes(
    machine: Machine, layout: LabLayout, names: Sequence[str], device: str = "none", special: ModifiedNode | None = None
) -> tuple[Topology, float]:
    """Probe the nodes `names`; return the topology and the seconds that the probe took.

    Args:
        device: devices to measure: auto, cpu or cuda; none measures only links.
        special: what to do differently on one of the nodes.

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
                processes[name] = machine.runner.start([*_enter(machine, layout, odd, folder), *argv], log=log)
            stopped = special.node if special is not None and special.stop is not None else None
            if special is not None and special.stop is not None:
                special.stop(folder, processes[special.node])
            _wait(folder, {name: process for name, process in processes.items() if name != stopped})
        finally:
            for process in processes.values():
                end_process(process)
        return Topology.read(folder / "topology.json"), machine.clock.now() - began


def _enter(machine: Machine, layout: LabLayout, odd: ModifiedNode, folder: Path) -> list[str]:
    # `ip netns exec` would hide the CPU groups, so this is nsenter (lab/daemons.py).
    hosts, join = "", ""
    if odd.hosts is not None:
        file = folder / "hosts"
        file.write_text(odd.hosts)
        hosts = str(file)
    group = odd.cpu_group
    if group is None and layout.spec.cpu_share_of(layout.node(odd.node)) is not None:
        control = find_cpu_control(machine.mounts.read_text())
        group = None if control is None else control.node_group(odd.node)
    if group is not None:
        join = str(group / "cgroup.procs")
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
    """Duration of one whole probe in seconds, the number of pairs of nodes, how many of them were measured in both
    directions (`complete`), and the fault codes."""

    case: str
    """What was measured on which nodes, as text."""
    seconds: float
    """Seconds from the start of the command to its end."""
    pairs: int
    """Number of pairs that the probe's nodes form."""
    complete: int
    """Number of pairs with latency and bandwidth in both directions."""
    codes: tuple[str, ...]
    """Fault codes in the verdict, each once."""


def measure_times(machine: Machine, layout: LabLayout, progress: Callable[[str], None]) -> dict[str, Any]:
    """Probe four nodes with their devices as a Slurm job, then the links of all nodes of the lab without Slurm; return
    the record of the bench.

    Args:
        progress: called with a line about each of the two probes before it begins.

    Raises:
        InputError: the lab has fewer than four nodes.
        CommandError: a probe failed.
    """
    layout.require_nodes(JOB_NODES, "bench probe --times", advised=16)
    progress(f"{JOB_NODES} nodes as a job")
    rows = [time_row(f"{JOB_NODES} nodes as a job, with devices", *_job(machine, layout))]
    progress(f"every pair of {len(layout.names)} nodes")
    rows.append(time_row(f"{len(layout.names)} nodes, links alone", *probe_lab_nodes(machine, layout, layout.names)))
    return make_record("probe-times", rows, {})


def time_row(case: str, topology: Topology, seconds: float) -> TimeRow:
    """Return the row of one probe: from its topology and the seconds that it took."""
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


@dataclass(frozen=True)
class RateSettings:
    """Settings of the comparison with iperf3: link rates, number of repeats, and seconds of an iperf3 measurement."""

    rates: tuple[str, ...] = ("50mbit", "200mbit", "1gbit")
    """Rates that the links are shaped to, as tc writes them."""
    repeats: int = 3
    """Measurements of the probe and of iperf3 at each rate."""
    iperf3_s: int = 4
    """Seconds that iperf3 sends; iperf3 leaves the first second out of its result."""


@dataclass(frozen=True)
class RateRow:
    """Bandwidths of the probe (`ours`) and of iperf3 on links of one rate, as medians over the repeats; the probe's
    error and both spreads (largest minus smallest) are in percent. `cpu_contended` counts the repeats in which a CPU,
    and not the network, limited the probe's bandwidth."""

    case: str
    """Rate of the links, as tc writes it."""
    ours_bytes_per_s: float
    iperf3_bytes_per_s: float
    error_pct: float
    """Error of the probe in percent of iperf3's rate; below 0, the probe's rate is lower."""
    ours_spread_pct: float
    """Largest minus smallest of the probe's repeats, in percent of the median."""
    iperf3_spread_pct: float
    """Largest minus smallest of iperf3's repeats, in percent of their median."""
    cpu_contended: int
    """Number of repeats in which the probe reports that a CPU limited the bandwidth."""


def measure(
    machine: Machine, layout: LabLayout, settings: RateSettings, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Shape the links of the lab's first two nodes to each rate in turn, and measure with the probe and with iperf3.
    Then restore the links' rates, and return the record of the bench.

    Args:
        progress: called with the rate and the nodes before each rate.

    Raises:
        InputError: iperf3 is not installed, or the lab has only one node.
        CommandError: a command failed.
    """
    if shutil.which("iperf3") is None:
        raise InputError("bench probe: iperf3 is not on the path; install it (Debian and Ubuntu: iperf3)")
    if len(layout.names) < 2:
        raise InputError("bench probe: the lab has one node; start one with `hpctrain lab up --nodes 2 --replace`")
    pair = (layout.names[0], layout.names[1])
    rows = []
    for rate in settings.rates:
        progress(f"{rate}: {pair[0]} to {pair[1]}")
        with shaped(machine, layout, pair, rate):
            rows.append(_row(machine, layout, pair, rate, settings))
    return make_record("probe", rows, asdict(settings))


def compare_rates(case: str, ours: Sequence[LinkFigures], iperf3: Sequence[float]) -> RateRow:
    """Return the comparison at one link rate.

    Args:
        case: the link rate, as tc writes it.
        ours: figures of the probe, one for each repeat.
        iperf3: bytes per second of iperf3, one for each repeat.

    Raises:
        ValueError: one side has no figures.
    """
    rates = [figures.isolated_bytes_per_s for figures in ours if figures.isolated_bytes_per_s]
    if not rates or not iperf3:
        raise ValueError(f"{case}: nothing was measured")
    rate, theirs = statistics.median(rates), statistics.median(iperf3)
    return RateRow(
        case=case,
        ours_bytes_per_s=rate,
        iperf3_bytes_per_s=theirs,
        error_pct=100 * (rate / theirs - 1),
        ours_spread_pct=100 * (max(rates) - min(rates)) / rate,
        iperf3_spread_pct=100 * (max(iperf3) - min(iperf3)) / theirs,
        cpu_contended=sum(figures.cpu_contended is True for figures in ours),
    )


def _row(machine: Machine, layout: LabLayout, pair: tuple[str, str], rate: str, settings: RateSettings) -> RateRow:
    ours, theirs = [], []
    for _ in range(settings.repeats):
        ours.append(probe_lab_nodes(machine, layout, pair)[0].fabric.links[0].ab)
        theirs.append(_iperf3(machine, layout, pair, settings.iperf3_s))
    return compare_rates(rate, ours, theirs)


def _iperf3(machine: Machine, layout: LabLayout, pair: tuple[str, str], seconds: int) -> float:
    """Return the bytes per second that iperf3 on the second node of the pair receives from the first one in `seconds`.

    Raises:
        CommandError: iperf3 gave no rate.
    """
    source, target = pair
    addr = layout.address(target)
    listen = _inside(layout, target, ["iperf3", "-s", "-1", "-B", addr, "-p", str(PORT)])
    # The client receives the server's output as well, and stdout of the bench is for its record: drop the server's.
    server = machine.runner.start(listen, log=Path(os.devnull))
    words = ["iperf3", "-c", addr, "-p", str(PORT), "-t", str(seconds), "-O", "1", "-J"]
    client = _inside(layout, source, words)
    try:
        deadline = machine.clock.now() + CONNECT_S
        while (received := received_bytes_per_s((done := machine.try_run(client)).stdout)) is None:
            if machine.clock.now() >= deadline:
                message = " ".join((done.stderr or done.stdout).split())
                raise CommandError(f"bench probe: iperf3 from {source} to {target} gave no rate: {message}")
            machine.clock.sleep(0.2)  # the iperf3 server has not started yet
        return received
    finally:
        end_process(server)


def received_bytes_per_s(text: str) -> float | None:
    """Return the receiver's bytes per second in the output of `iperf3 -J`. None if the rate is missing, as after a
    failed connection, with which iperf3 may exit with code 0."""
    try:
        return float(json.loads(text)["end"]["sum_received"]["bits_per_second"]) / 8
    except (ValueError, KeyError, TypeError):
        return None


def _inside(layout: LabLayout, node: str, argv: Sequence[str]) -> list[str]:
    return ["ip", "netns", "exec", layout.namespace(node), *argv]
