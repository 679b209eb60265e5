"""The options of a node process: the node that it runs on, from the command line or from Slurm's environment inside a
job step, and the process that it ends with."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.errors import InputError
from hpctrain.probe.system.host import routed_address
from hpctrain.records.format.node_name import expand_node_set

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class NodeAddress:
    """Name and address of the node that this process runs on, and all nodes of its job."""

    node: str
    nodes: tuple[str, ...]
    """All nodes, in the same order on each of them."""
    addr: str
    """Address at which the other nodes reach this node."""
    local: bool
    """Whether it is a virtual node of this machine."""


def add_node_arguments(parser: argparse.ArgumentParser) -> None:
    """Add to the parser the options that say which node this process runs on."""
    parser.add_argument("--node", help="name of this node; default: SLURMD_NODENAME")
    parser.add_argument("--nodes", help="all nodes, as a node set: 'n[01-16]'; default: SLURM_STEP_NODELIST")
    parser.add_argument("--local", action="store_true", help="a virtual node of this machine: loopback")
    parser.add_argument("--parent", type=int, help="process that this one ends with")
    parser.add_argument("--addr", help="address of this node; default: the one that leads to the others")


def node_address(options: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> NodeAddress:
    """Return the address that options and environment give.

    Raises:
        InputError: neither gives it, or the node is not among the nodes.
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
        """Whether the process has ended, before this object was made or since."""
        return self._started is None or _started(self._pid) != self._started


def _started(pid: int) -> str | None:
    """Return the start time of a process, in the kernel's ticks; None if there is none, or only a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The program's name, in parentheses, may contain anything.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]
