"""A probe of virtual nodes: processes of this machine are started and watched until they have written the topology."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpctrain.base.clock import Clock
from hpctrain.base.process import Process, Runner, end_process
from hpctrain.launch.local import LocalNodes, local_nodes
from hpctrain.launch.probe.progress import FINAL_WAIT_S, Progress, no_progress, raise_probe_error, watch_probe
from hpctrain.records.topology.topology import Topology


def probe_local(
    count: int,
    folder: Path,
    runner: Runner,
    clock: Clock,
    device: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
    mode: str = "full",
) -> Topology:
    """Probe `count` virtual nodes of this machine; return the topology.

    Args:
        folder: an empty folder for the probe's files and logs; the caller removes it.
        device: auto, cpu, cuda, or none for the links alone.
        mode: health, full or sampled.

    Raises:
        HpctrainError: the first node ended without a topology, or hangs; the message has its last line.
    """
    nodes = local_nodes(count)
    local = LocalNodes(folder, nodes, runner)
    processes: dict[str, Process] = {}
    try:
        for node in nodes:
            extra = ["--device", device, "--seed", str(seed), "--mode", mode]
            processes[node] = local.start("probe", node, folder / f"{node}.log", extra)
        watch_probe(processes[nodes[0]], folder, clock, progress or no_progress)
        raise_probe_error(processes[nodes[0]], folder / f"{nodes[0]}.log")
        _wait_all(list(processes.values()), clock)
    finally:
        for process in processes.values():
            end_process(process)
    return Topology.read(folder / "topology.json", owned=True)


def _wait_all(processes: Sequence[Process], clock: Clock) -> None:
    deadline = clock.now() + FINAL_WAIT_S
    for process in processes:
        process.wait(max(0.0, deadline - clock.now()))
