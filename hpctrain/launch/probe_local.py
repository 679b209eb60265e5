"""A probe of virtual nodes: start them as processes of this machine, watch them, read the topology they write."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from hpctrain.base.clock import Clock
from hpctrain.base.errors import HpctrainError
from hpctrain.base.process import Process, Runner
from hpctrain.launch.local import local_nodes, start_local_node
from hpctrain.records.topology import Topology

POLL_S = 0.1
STALL_S = 90.0
"""A probe that gets no further in this time is given up: its first node, which watches the others, must hang."""
LEAVE_S = 3.0
"""How long the nodes may take to leave after the first one has written the file."""

Progress = Callable[[str, int, int], None]
"""Told of (phase, done, planned) when it changes; the phases are join, links and devices."""


def probe_local(
    count: int,
    folder: Path,
    runner: Runner,
    clock: Clock,
    device: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> Topology:
    """Probe `count` virtual nodes of this machine.

    Args:
        folder: an empty folder for the probe's files and logs; the caller removes it.
        device: auto, cpu, cuda, or none for the links alone.

    Raises:
        HpctrainError: the first node ended without a topology, or hangs; the message has its last line.
    """
    nodes = local_nodes(count)
    processes: dict[str, Process] = {}
    try:
        for node in nodes:
            extra = ["--device", device, "--seed", str(seed)]
            log = folder / f"{node}.log"
            processes[node] = start_local_node("probe", folder, node, nodes, runner, log, extra)
        _watch(processes[nodes[0]], folder, clock, progress or _quiet)
        _raise_for(processes[nodes[0]], folder / f"{nodes[0]}.log")
        _wait_all(list(processes.values()), clock)
    finally:
        _kill_all(list(processes.values()))
    return Topology.read(folder / "topology.json")


def _watch(first: Process, folder: Path, clock: Clock, progress: Progress) -> None:
    seen: tuple[str, int, int] | None = None
    since = clock.now()
    while first.poll() is None:
        if clock.now() - since > STALL_S:
            raise HpctrainError(f"probe: the first node got no further in {STALL_S:g} s (last: {seen}); try again")
        now = _progress(folder)
        if now is not None and now != seen:
            progress(*now)
            seen, since = now, clock.now()
        clock.sleep(POLL_S)


def _progress(folder: Path) -> tuple[str, int, int] | None:
    try:
        value = json.loads((folder / "progress.json").read_text())
    except (OSError, ValueError):
        return None  # not written yet
    return str(value["phase"]), int(value["done"]), int(value["planned"])


def _raise_for(first: Process, log: Path) -> None:
    code = first.poll()
    if code == 0:
        return
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    last = lines[-1] if lines else "it printed nothing"
    raise HpctrainError(f"probe: the first node ended with code {code}: {last}")


def _wait_all(processes: Sequence[Process], clock: Clock) -> None:
    deadline = clock.now() + LEAVE_S
    for process in processes:
        process.wait(max(0.0, deadline - clock.now()))


def _kill_all(processes: Sequence[Process]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()


def _quiet(phase: str, done: int, planned: int) -> None:
    """Progress that nobody watches."""
