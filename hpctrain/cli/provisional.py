"""Before a job is queued: whether the model can fit at all, by what is known of the nodes so far."""

from __future__ import annotations

from pathlib import Path

from hpctrain.base.errors import FileError, InputError
from hpctrain.base.units import format_seconds
from hpctrain.launch.training import Prepared, fewest_nodes
from hpctrain.planner import make_plan
from hpctrain.records.topology import Topology


def check_provisional(prepared: Prepared, runs: Path) -> list[str]:
    """Plan for the nodes that were measured last; what came out, as lines for the person.

    Raises:
        Refused: the model cannot fit on that many of those nodes.
    """
    topology = prepared.topology or last_known(runs)
    if topology is None:
        return ["not checked before the job starts: memory and speed (no nodes were measured yet)"]
    count = fewest_nodes(prepared.run)
    names = [node.id for node in topology.nodes if node.id not in topology.verdict.exclude][:count]
    if len(names) < count:
        return [f"not checked before the job starts: memory and speed (only {len(names)} nodes were measured so far)"]
    try:
        plan = make_plan(prepared.run, prepared.spec, topology.only(names), provisional=True)
    except InputError as error:
        return [f"not checked before the job starts: memory and speed ({error})"]
    total = plan.predicted.step_time_s["total"] if plan.predicted else 0.0
    steps = prepared.run.steps
    return [
        f"provisional plan on {count} nodes as last measured: pp {plan.pp} × dp {plan.dp} × tp {plan.tp}, "
        f"{format_seconds(total)} a step, {format_seconds(total * steps)} in all"
    ]


def last_known(runs: Path) -> Topology | None:
    """The newest topology of real nodes among the runs."""
    for path in sorted(runs.glob("*/topology.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            topology = Topology.read(path)
        except FileError:
            continue
        if not topology.provenance.loopback:
            return topology
    return None
