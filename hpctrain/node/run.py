"""`python -m hpctrain.node run`: one node of one attempt: probe if needed, then the agent until the run ends."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import time
from collections.abc import Callable
from pathlib import Path

from ClusterShell.NodeSet import NodeSet

from hpctrain.agent.agent import Agent, Place
from hpctrain.agent.decide import Settings
from hpctrain.agent.group import WorkerGroup, incarnation_of
from hpctrain.agent.journal import Journal
from hpctrain.agent.peers import Peers
from hpctrain.agent.store import GenerationStore
from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import HpctrainError, InputError
from hpctrain.base.process import SystemRunner
from hpctrain.node.planning import GenerationMaker
from hpctrain.probe.resident import probe_nodes
from hpctrain.probe.settings import ProbeSettings, local_settings
from hpctrain.records.run import Run, read_run
from hpctrain.records.topology import Topology

PROBE_WAIT_S = 300.0
"""How long the other nodes wait for the first one to write the topology."""


def main(argv: list[str]) -> int:
    """Probe, plan and train as one node; the exit code of the run comes back."""
    options = _parse(argv)
    folder: Path = options.folder
    nodes = tuple(NodeSet(options.nodes))
    if options.node not in nodes:
        raise InputError(f"--node {options.node}: it is not one of {options.nodes}")
    run = read_run(folder / "run.yaml")
    addr = "127.0.0.1" if options.local else _address()
    stop = _StopRequest(parent=os.getppid() if options.local else None)
    journal = Journal(folder / "events.jsonl", options.node, options.attempt, SystemClock())
    place = Place(options.node, nodes, addr, incarnation_of(platform.node(), time.time()), options.attempt, folder)
    first = options.node == nodes[0]
    if first:
        journal.write("attempt_started", -1, f"attempt {options.attempt} on {len(nodes)} nodes", nodes=list(nodes))
    _ensure_topology(place, run, journal, options.local)
    return _agent(place, run, journal, stop).run()


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hpctrain.node run")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--nodes", required=True, help="all nodes, folded: local[0-3]")
    parser.add_argument("--attempt", type=int, default=0)
    parser.add_argument("--local", action="store_true", help="a virtual node: loopback, ends with its parent")
    return parser.parse_args(argv)


class _StopRequest:
    """Whether somebody wants this node to save and leave: SIGTERM, or the supervisor of a local run is gone."""

    def __init__(self, parent: int | None) -> None:
        self._parent = parent
        self._asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def __call__(self) -> bool:
        return self._asked or (self._parent is not None and os.getppid() != self._parent)

    def _ask(self, *_: object) -> None:
        self._asked = True


def _ensure_topology(place: Place, run: Run, journal: Journal, local: bool) -> None:
    """Probe unless the run folder already holds a topology of these nodes."""
    path = place.folder / "topology.json"
    if not path.exists():
        device = run.cluster.device
        settings = local_settings(len(place.nodes), device) if local else ProbeSettings(device=device)
        topology = probe_nodes(
            place.folder, place.node, place.nodes, place.addr, SystemRunner(), SystemClock(), settings
        )
        if topology is not None:
            topology.write(path)
            journal.write(
                "probed",
                -1,
                f"{len(topology.nodes)} nodes, verdict {topology.verdict.status}",
                status=topology.verdict.status,
                exclude=topology.verdict.exclude,
                seconds=topology.provenance.wall_s,
            )
    deadline = time.monotonic() + PROBE_WAIT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise HpctrainError(f"{path}: the first node did not write it within {PROBE_WAIT_S:g} s")
        time.sleep(0.05)
    Topology.read(path)


def _agent(place: Place, run: Run, journal: Journal, stop: Callable[[], bool]) -> Agent:
    key = (place.folder / "key").read_text().strip()
    maker = GenerationMaker(place.folder, run, journal)
    logs = place.folder / "logs" / str(place.attempt)
    recovery = run.recovery
    return Agent(
        place=place,
        settings=Settings(
            min_nodes=recovery.min_nodes,
            retries=recovery.retries,
            heartbeat_timeout_s=recovery.heartbeat_timeout_s,
            progress_timeout_s=recovery.progress_timeout_s,
        ),
        peers=Peers(place.folder / "agents", place.node, place.nodes, place.addr, key),
        store=GenerationStore(place.folder / "generations"),
        group=WorkerGroup(place.folder, logs, place.node, SystemRunner(), os.environ),
        journal=journal,
        clock=SystemClock(),
        make_generation=maker,
        newest_checkpoint=maker.newest_checkpoint,
        stop_wanted=stop,
    )


def _address() -> str:
    """Address of this node's host name; agents of other nodes dial it."""
    import socket  # only off loopback

    return socket.gethostbyname(platform.node())
