"""`lab status`: the current state of the lab, read from the kernel and from Slurm."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hpctrain.lab.daemons import daemon_pids, namespace_pids
from hpctrain.lab.layout import FABRIC, LabLayout
from hpctrain.lab.machine import Machine
from hpctrain.lab.network import (
    Direction,
    list_cuts_command,
    list_rate_command,
    parse_cuts,
    parse_links,
    parse_rate,
)
from hpctrain.lab.slurm_state import node_states, parse_jobs, squeue


@dataclass(frozen=True)
class NodeStatus:
    """The current state of one node of the lab."""

    name: str
    address: str
    switch: str
    state: str | None
    """The node's state in Slurm; None if the controller does not answer."""
    processes: int
    link_up: bool
    out_bits_per_s: float | None
    in_bits_per_s: float | None
    cut_from: tuple[str, ...]
    cpu_share: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, without those that are None."""
        values = {**asdict(self), "cut_from": list(self.cut_from)}
        return {key: value for key, value in values.items() if value is not None}


@dataclass(frozen=True)
class LabStatus:
    """The current state of the lab."""

    folder: str
    slurm_conf: str
    controller: bool
    nodes: tuple[NodeStatus, ...]
    jobs: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {**asdict(self), "nodes": [node.to_json() for node in self.nodes], "jobs": list(self.jobs)}


def read_lab_status(machine: Machine, layout: LabLayout) -> LabStatus:
    """Return the current state of the lab, from the kernel and Slurm.

    Raises:
        CommandError: the network of the lab is gone.
    """
    controller = bool(daemon_pids(machine, layout.folder, "slurmctld"))
    states = node_states(machine, layout) if controller else {}
    links = parse_links(machine.run(("ip", "-n", FABRIC, "-j", "link", "show")).stdout)
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
            cut_from=tuple(parse_cuts(layout, machine.run(list_cuts_command(layout, name)).stdout)),
            cpu_share=layout.spec.cpu_share_of(layout.node(name)),
        )
        for name in layout.names
    )
    return LabStatus(str(layout.folder), str(layout.slurm_conf), controller, nodes, tuple(parse_jobs(jobs)))


def _rate(machine: Machine, layout: LabLayout, name: str, direction: Direction) -> float | None:
    return parse_rate(machine.run(list_rate_command(layout, name, direction)).stdout)
