"""Probe virtual nodes: start processes on this machine and watch them until they have written the topology."""

from __future__ import annotations

from pathlib import Path

from hpctrain.base.clock import Clock
from hpctrain.base.process import Process, Runner, end_process
from hpctrain.launch.local import LocalNodes, local_nodes
from hpctrain.launch.probe.progress import (
    DEFAULTS,
    FINAL_WAIT_S,
    ProbeRequest,
    Progress,
    no_progress,
    raise_probe_error,
    watch_probe,
)
from hpctrain.records.topology.topology import Topology


def probe_local(
    count: int, folder: Path, runner: Runner, clock: Clock, request: ProbeRequest = DEFAULTS,
    progress: Progress = no_progress,
) -> Topology:  # fmt: skip
    """Probe `count` virtual nodes of this machine; return the topology.

    Args:
        folder: an empty folder for the probe's files and logs; the caller removes it.

    Raises:
        HpctrainError: the first node ended without a topology, or hangs; the message has its last line.
    """
    nodes = local_nodes(count)
    local = LocalNodes(folder, nodes, runner)
    processes: dict[str, Process] = {}
    try:
        for node in nodes:
            processes[node] = local.start("probe", node, folder / f"{node}.log", request.options)
        watch_probe(processes[nodes[0]], folder, clock, progress)
        raise_probe_error(processes[nodes[0]], folder / f"{nodes[0]}.log")
        deadline = clock.now() + FINAL_WAIT_S
        for process in processes.values():
            process.wait(max(0.0, deadline - clock.now()))
    finally:
        for process in processes.values():
            end_process(process)
    return Topology.read(folder / "topology.json", owned=True)
