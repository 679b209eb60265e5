"""`hpctrain bench probe --times`: duration of whole probes of a lab, and whether they measured every pair."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.base.errors import EXIT_DONE, EXIT_REFUSED, EXIT_WARNINGS, CommandError, InputError
from hpctrain.base.module_argv import program
from hpctrain.bench.probe.lab_probe import PROBE_S, probe_lab_nodes
from hpctrain.bench.record import make_record
from hpctrain.lab.layout import LabLayout
from hpctrain.lab.machine import Machine
from hpctrain.records.topology.topology import Topology

JOB_NODES = 4


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
