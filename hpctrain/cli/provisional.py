"""Before a job is queued: whether the model can fit at all, by what is known of the nodes so far."""

from __future__ import annotations

from pathlib import Path

from hpctrain.base.errors import FileError, InputError
from hpctrain.base.units import format_seconds
from hpctrain.launch.training import Prepared, fewest_nodes
from hpctrain.planner import make_plan
from hpctrain.records.topology import Topology

NOT_CHECKED = "not checked before the job starts: memory and speed"


def check_provisional(prepared: Prepared, runs: Path, nodes: frozenset[str] | None) -> list[str]:
    """Plan for those of the job's nodes that were measured last; what came out, as lines for the person.

    Args:
        nodes: nodes that the job may get; None: not known. A topology that was given is of the job's nodes anyway.

    Raises:
        Refused: the model cannot fit on that many of those nodes.
    """
    count = fewest_nodes(prepared.run)
    topology = prepared.topology
    if topology is None and nodes is None:
        return [f"{NOT_CHECKED} (it is not known which nodes the job may get)"]
    if topology is None:
        topology = last_known(runs, nodes or frozenset(), count)
    if topology is None:
        return [f"{NOT_CHECKED} (no run has measured {count} of the nodes that the job may get)"]
    names = _taken(topology)[:count]
    if len(names) < count:
        return [f"{NOT_CHECKED} (only {len(names)} nodes of the topology given are of use)"]
    try:
        plan = make_plan(prepared.run, prepared.spec, topology.only(names), provisional=True)
    except InputError as error:
        return [f"{NOT_CHECKED} ({error})"]
    total = plan.predicted.step_time_s["total"] if plan.predicted else 0.0
    steps = prepared.run.steps
    return [
        f"provisional plan on {count} nodes as last measured: pp {plan.pp} × dp {plan.dp} × tp {plan.tp}, "
        f"{format_seconds(total)} a step, {format_seconds(total * steps)} in all"
    ]


def last_known(runs: Path, nodes: frozenset[str], count: int) -> Topology | None:
    """The newest topology among the runs that holds at least `count` of these nodes, and of it only them."""
    for path in sorted(runs.glob("*/topology.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            topology = Topology.read(path)
        except FileError:
            continue
        names = [name for name in _taken(topology) if name in nodes]
        if not topology.provenance.loopback and len(names) >= count:
            return topology.only(names)
    return None


def _taken(topology: Topology) -> list[str]:
    """Its nodes without those that its verdict excludes."""
    return [node.id for node in topology.nodes if node.id not in topology.verdict.exclude]
