"""Check before a job is queued, from the last measured figures of its nodes, that the model fits and how long the run
takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.errors import FileError, InputError
from hpctrain.base.units import format_seconds
from hpctrain.jobs.wall_time import TimeLimit, WallTime, duration_text, measured_start_up_s, time_limit_text
from hpctrain.launch.preflight.prepare import PreparedRun, fewest_nodes
from hpctrain.planner import make_plan
from hpctrain.records.plan.plan import Plan
from hpctrain.records.topology.topology import Topology

NOT_CHECKED = "not checked before the job starts: memory and speed"


@dataclass(frozen=True)
class MeasuredNodes:
    """Nodes and their measured figures."""

    topology: Topology
    folder: Path | None
    """Folder of the run that measured them; None: the topology was given as a file."""


def check_provisional(
    prepared: PreparedRun, runs: Path, nodes: frozenset[str] | None, limit: TimeLimit | None = None
) -> list[str]:
    """Make a provisional plan for the job's nodes as last measured; return lines with its degrees and the predicted
    times.

    Args:
        nodes: nodes that the job may get; None: not known. A topology that was given is of the job's nodes
            anyway.
        limit: the job's time limit; None: not known.

    Raises:
        RefusedError: the model does not fit on the smallest number of nodes that the job may get.
    """
    count = fewest_nodes(prepared.run)
    if prepared.topology is None and nodes is None:
        return [f"{NOT_CHECKED} (it is not known which nodes the job may get)"]
    known = (
        MeasuredNodes(prepared.topology, None) if prepared.topology else last_known(runs, nodes or frozenset(), count)
    )
    if known is None:
        return [f"{NOT_CHECKED} (no run has measured {count} of the nodes that the job may get)"]
    names = _taken(known.topology)[:count]
    if len(names) < count:
        return [f"{NOT_CHECKED} (only {len(names)} nodes of the topology given are of use)"]
    topology = known.topology.only(names)
    try:
        plan = prepared.plan or make_plan(prepared.run, prepared.spec, topology)
    except InputError as error:
        return [f"{NOT_CHECKED} ({error})"]
    return _words(prepared, plan, topology, measured_start_up_s(known.folder) if known.folder else None, limit)


def _words(
    prepared: PreparedRun, plan: Plan, topology: Topology, start_up_s: float | None, limit: TimeLimit | None
) -> list[str]:
    if plan.predicted is None:
        return [f"the plan given ({plan.dims}) predicts no time: it is not known how long the run will take"]
    step_s = plan.predicted.step_time_s["total"]
    time = WallTime(step_s, prepared.run.steps, start_up_s)
    what = "the plan given" if prepared.plan else f"provisional plan on {len(topology.nodes)} nodes as last measured"
    lines = [f"{what}: {plan.dims}, {format_seconds(step_s)} a step predicted", duration_text(time, topology)]
    return lines if limit is None else [*lines, time_limit_text(time, limit, prepared.run.cluster.save_notice_s)]


def last_known(runs: Path, nodes: frozenset[str], count: int) -> MeasuredNodes | None:
    """Return the newest topology of a run that measured at least `count` of `nodes`, reduced to these nodes; None if no
    run did."""
    for path in sorted(runs.glob("*/topology.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            topology = Topology.read(path)
        except FileError:
            continue
        names = [name for name in _taken(topology) if name in nodes]
        if not topology.provenance.loopback and len(names) >= count:
            return MeasuredNodes(topology.only(names), path.parent)
    return None


def _taken(topology: Topology) -> list[str]:
    """Return the topology's nodes without those that its verdict excludes."""
    return [node.id for node in topology.nodes if node.id not in topology.verdict.exclude]
