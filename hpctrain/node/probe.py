"""`python -m hpctrain.node probe`: the process of one node of a probe. The process of the first node writes
topology.json into the probe's folder.

The module also has what `hpctrain.node run` needs too: the options that name the node, and the check whether the parent
process has ended.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.base.atomic import write_json
from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import InputError
from hpctrain.base.process import SystemRunner
from hpctrain.base.system.core_sets import CoreSet, core_sets
from hpctrain.probe.measure.settings import (
    MODES,
    PARTIAL_FILE,
    ProbeSettings,
    default_mode,
    local_settings,
    with_shared_nodes,
)
from hpctrain.probe.pair_selection.switches import switches_of
from hpctrain.probe.protocol.run import ProbeNode, probe_nodes
from hpctrain.probe.system.host import routed_address
from hpctrain.records.format.node_name import expand_node_set
from hpctrain.records.topology.topology import Topology
from hpctrain.runs.locate import job_of_process


def main(argv: list[str]) -> int:
    """Take part in the probe as one node; return 0 once the probe is complete, whatever its verdict.

    Raises:
        InputError: as of `node_address`; the prior topology has errors; or, on the first node, its address is not one
            of this machine.
        StorageError: on the first node, the folder cannot be written.
        HpctrainError: on another node, the first node is dead or silent.
    """
    options = _parser().parse_args(argv)
    place = node_address(options)
    if options.parent is not None:
        threading.Thread(target=_exit_with_parent, args=(options.parent,), daemon=True).start()
    settings = _settings(options, len(place.nodes))
    progress_file = options.folder / "progress.json"

    def tell(phase: str, done: int, planned: int) -> None:
        write_json(progress_file, {"phase": phase, "done": done, "planned": planned})

    topology = probe_nodes(
        ProbeNode(
            place.node,
            place.addr,
            options.folder,
            settings,
            SystemRunner(),
            SystemClock(),
            place.core_sets(settings.cpu_devices),
        ),
        place.nodes,
        progress=tell,
        job_id=options.job_id or job_of_process(os.environ),
        keep=lambda measured: _write_topology(measured, options.folder),
        prior=switches_of(Topology.read(options.prior)) if options.prior is not None else None,
    )
    if topology is not None:
        topology.write(options.folder / "topology.json")
    return 0


def _write_topology(measured: Topology, folder: Path) -> None:
    """Write the topology as measured so far to the file PARTIAL_FILE in the probe's folder, and remove older files with
    pair measurements (pairs-*.npz)."""
    measured.write(folder / PARTIAL_FILE)
    named = measured.fabric.matrix
    for old in folder.glob("pairs-*.npz"):
        if named is None or old.name != named.file:
            old.unlink(missing_ok=True)


def _exit_with_parent(parent: int) -> None:
    """Wait until the process with id `parent`, which started this process, has ended; then end this process with exit
    code 1."""
    started_for = Parent(parent)
    while not started_for.is_gone():
        time.sleep(0.5)
    os._exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hpctrain.node probe", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="a folder that all nodes share")
    add_node_arguments(parser)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "none"], default="auto")
    parser.add_argument("--cpu-devices", type=int, default=1, help="devices of a node without GPUs")
    parser.add_argument("--mode", choices=MODES, help="default: by the number of nodes")
    parser.add_argument("--prior", type=Path, help="a topology that says which nodes share a switch")
    parser.add_argument("--shared", action="store_true", help="other jobs may run on the nodes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--job-id", help="Slurm job that measures")
    return parser


def _settings(options: argparse.Namespace, count: int) -> ProbeSettings:
    mode = options.mode or default_mode(count)
    if options.local:
        return replace(local_settings(count, options.device, options.seed), mode=mode, cpu_devices=options.cpu_devices)
    settings = ProbeSettings(seed=options.seed, device=options.device, mode=mode, cpu_devices=options.cpu_devices)
    return with_shared_nodes(settings) if options.shared else settings


LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class NodeAddress:
    """Name and address of the node on which this process runs, and the names of all nodes of its job step."""

    node: str
    nodes: tuple[str, ...]
    """All nodes, in the same order on each of them."""
    addr: str
    """Address at which the other nodes reach this node."""
    local: bool
    """Whether the node is a virtual node of this machine."""

    def core_sets(self, count: int) -> list[CoreSet]:
        """Return the core sets of the node's `count` CPU devices, as of `base.system.core_sets`; [] for one device,
        which has all CPUs."""
        if count < 2:
            return []
        return core_sets(count, self.nodes.index(self.node), len(self.nodes)) if self.local else core_sets(count)


def add_node_arguments(parser: argparse.ArgumentParser) -> None:
    """Add to the parser the options that name the node of this process, and the parent process with which it ends."""
    parser.add_argument("--node", help="name of this node; default: SLURMD_NODENAME")
    parser.add_argument("--nodes", help="all nodes, as a node set: 'n[01-16]'; default: SLURM_STEP_NODELIST")
    parser.add_argument("--local", action="store_true", help="a virtual node of this machine: loopback")
    parser.add_argument("--parent", type=int, help="process that this one ends with")
    parser.add_argument("--addr", help="address of this node; default: the one that leads to the others")


def node_address(options: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> NodeAddress:
    """Return the node of this process with its address, from the command line, else from Slurm's environment.

    Args:
        options: the parsed options of `add_node_arguments`.

    Raises:
        InputError: neither names the node and all nodes, the node is not among all nodes, or no address of this machine
            leads to another node.
    """
    node = options.node or environ.get("SLURMD_NODENAME")
    # A step may have fewer nodes than its allocation.
    folded = options.nodes or environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not node or not folded:
        raise InputError("--node and --nodes: give both, or start this inside a Slurm job step")
    try:
        nodes = tuple(expand_node_set(folded))
    except ValueError as error:
        raise InputError(f"--nodes: {error}; write it like n[0-2] or a,b") from None
    if node not in nodes:
        raise InputError(f"--node {node}: it is not one of {folded}")
    return NodeAddress(node, nodes, options.addr or _address(node, nodes, options.local), options.local)


def _address(me: str, nodes: tuple[str, ...], local: bool) -> str:
    others = [name for name in nodes if name != me]
    if local or not others:
        return LOOPBACK
    return routed_address(others[0])


class Parent:
    """The parent process, identified by its id and its start time, because ids are reused."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._started = _started(pid)

    def is_gone(self) -> bool:
        """Whether the parent process has ended, before this object was made or since."""
        return self._started is None or _started(self._pid) != self._started


def _started(pid: int) -> str | None:
    """Return the start time of a process in the kernel's clock ticks since boot, as text; None if the process has
    ended, even if its parent has not collected it yet."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The program's name, in parentheses, may contain anything.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]
