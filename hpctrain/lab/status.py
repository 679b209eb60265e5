"""The state of a lab: nodes and jobs as Slurm sees them; for `lab status` also processes and links as the kernel sees
them."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from hpctrain.lab import network
from hpctrain.lab.daemons import daemon_pids, namespace_pids
from hpctrain.lab.layout import FABRIC, LabLayout
from hpctrain.lab.machine import Machine
from hpctrain.lab.network import Direction
from hpctrain.slurm.values import read_moment

_FIELD = re.compile(r"(\w+)=(\S*)")
_JOB_FORMAT = "%i|%j|%P|%T|%N|%r"
_UNHEALTHY = {"DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "UNKNOWN", "NOT_RESPONDING", "ERROR", "FUTURE"}


@dataclass(frozen=True)
class NodeState:
    """The state of a node as Slurm sees it."""

    name: str
    flags: tuple[str, ...]
    """Slurm's words for the state: first IDLE, ALLOCATED, MIXED, DOWN or the like, then flags such as DRAIN and
    NOT_RESPONDING."""
    started_s: float | None
    """Start time of the node's slurmd, in seconds since 1970; None before it has registered."""

    @property
    def healthy(self) -> bool:
        """Whether Slurm gives jobs to the node."""
        return bool(self.flags) and not _UNHEALTHY & set(self.flags)

    @property
    def text(self) -> str:
        """The state as sinfo writes it: 'idle', 'down*'."""
        words = [flag.lower() for flag in self.flags if flag != "NOT_RESPONDING"]
        return "+".join(words) + ("*" if "NOT_RESPONDING" in self.flags else "")


def scontrol(layout: LabLayout, *words: str) -> tuple[str, ...]:
    """Return the argv of an scontrol command for the lab, whatever SLURM_CONF says; its output has times in seconds
    since 1970.

    Args:
        words: arguments of scontrol.
    """
    return ("env", f"SLURM_CONF={layout.slurm_conf}", "SLURM_TIME_FORMAT=%s", layout.slurm.program("scontrol"), *words)


def squeue(layout: LabLayout) -> tuple[str, ...]:
    """Return the argv of squeue for the lab, whatever SLURM_CONF says; `parse_jobs` reads the output."""
    program = layout.slurm.program("squeue")
    return ("env", f"SLURM_CONF={layout.slurm_conf}", program, "--noheader", "--all", f"--format={_JOB_FORMAT}")


def parse_nodes(text: str) -> dict[str, NodeState]:
    """Return the state of each node by name, from the output of `scontrol show node --oneliner`."""
    states = {}
    for line in text.splitlines():
        fields = dict(_FIELD.findall(line))
        if "NodeName" not in fields:
            continue
        raw = fields.get("State", "").upper()
        # If a node does not answer, old versions of Slurm put an asterisk behind its state, new ones a flag.
        flags = tuple(word.rstrip("*") for word in raw.split("+")) + (("NOT_RESPONDING",) if "*" in raw else ())
        started = fields.get("SlurmdStartTime", "")
        name = fields["NodeName"]
        states[name] = NodeState(name, tuple(dict.fromkeys(flags)), read_moment(started))
    return states


def parse_jobs(text: str) -> list[dict[str, Any]]:
    """Return the jobs in the output of squeue, each with the keys id, name, partition, state, nodes and reason.

    All values are text as squeue prints it; `nodes` is a node set, such as node[0-3].

    Args:
        text: output of the command that `squeue` returns.
    """
    keys = ("id", "name", "partition", "state", "nodes", "reason")
    return [dict(zip(keys, line.split("|"), strict=True)) for line in text.splitlines() if line.count("|") == 5]


def node_states(machine: Machine, layout: LabLayout) -> dict[str, NodeState]:
    """Return the state of each node in Slurm, by name; {} if scontrol fails, as when the controller does not answer.

    Raises:
        CommandError: scontrol cannot be run, or does not end within 30 s.
    """
    done = machine.try_run(scontrol(layout, "show", "node", "--oneliner"))
    return parse_nodes(done.stdout) if done.code == 0 else {}


@dataclass(frozen=True)
class NodeStatus:
    """The present state of one node of the lab, in Slurm and in the kernel; `cut_from` are the nodes that cannot reach
    it, `processes` counts the processes in its namespace."""

    name: str
    address: str
    """IPv4 address in the lab's network."""
    switch: str
    """Name of the bridge to which the node is connected: its switch, or the root switch."""
    state: str | None
    """The node's state in Slurm; None if the controller does not answer."""
    processes: int
    link_up: bool
    """Whether the node's link is up, at the bridge's end."""
    out_bits_per_s: float | None
    """Rate to which the node's sending is limited, in bits per second; None: no limit."""
    in_bits_per_s: float | None
    """Rate to which the node's receiving is limited, in bits per second; None: no limit."""
    cut_from: list[str]
    cpu_share: float | None
    """CPU time that all processes of the node may use together, in cores; None: no limit."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, without those that are None."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class LabStatus:
    """The present state of the lab: whether its controller runs, its nodes and its jobs."""

    folder: str
    """Path of the lab's state folder."""
    slurm_conf: str
    """Path of the lab's slurm.conf."""
    controller: bool
    """Whether slurmctld runs."""
    nodes: tuple[NodeStatus, ...]
    jobs: list[dict[str, Any]]
    """The jobs in the queue, as `parse_jobs` returns them; [] if slurmctld does not run."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values; fields of a node that are None are left out."""
        return {**asdict(self), "nodes": [node.to_json() for node in self.nodes]}


def read_lab_status(machine: Machine, layout: LabLayout) -> LabStatus:
    """Return the present state of the lab, from the kernel and Slurm.

    Raises:
        CommandError: the network of the lab is gone, or a command did not end within 30 s.
    """
    controller = bool(daemon_pids(machine, layout.folder, "slurmctld"))
    states = node_states(machine, layout) if controller else {}
    links = network.parse_links(machine.run(("ip", "-n", FABRIC, "-j", "link", "show")).stdout)
    jobs = machine.try_run(squeue(layout)).stdout if controller else ""
    nodes = tuple(
        NodeStatus(
            name=name,
            address=layout.address(name),
            switch=layout.bridge(name),
            state=states[name].text if name in states else None,
            processes=len(namespace_pids(machine, layout.namespace(name))),
            link_up=links.get(layout.port(name), False),
            out_bits_per_s=_rate(machine, layout, name, "out"),
            in_bits_per_s=_rate(machine, layout, name, "in"),
            cut_from=network.parse_cuts(layout, machine.run(network.list_cuts_command(layout, name)).stdout),
            cpu_share=layout.spec.cpu_share_of(layout.node(name)),
        )
        for name in layout.names
    )
    return LabStatus(str(layout.folder), str(layout.slurm_conf), controller, nodes, parse_jobs(jobs))


def _rate(machine: Machine, layout: LabLayout, name: str, direction: Direction) -> float | None:
    return network.parse_rate(machine.run(network.list_rate_command(layout, name, direction)).stdout)
