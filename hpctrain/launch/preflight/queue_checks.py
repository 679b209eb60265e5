"""Checks before a job is queued: that its image works, and that the model fits into its nodes as last measured.

The check of the nodes also predicts how long the run takes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import FileError, InputError, RefusedError
from hpctrain.base.process import SystemRunner
from hpctrain.base.units import format_seconds
from hpctrain.container.check import ImageFinding, ImageStart, check_image, examine, host_environment
from hpctrain.container.entry import check_binds, find_runtime, parse_bind, program_binds, this_host
from hpctrain.jobs.wall_time import TimeLimit, WallTime, duration_text, measured_start_up_s, time_limit_text
from hpctrain.launch.preflight.checks import VERSION_FILE, local_driver_version
from hpctrain.launch.preflight.prepare import PreparedRun, fewest_nodes
from hpctrain.planner import make_plan
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.run import Container, Run
from hpctrain.records.topology.topology import Topology
from hpctrain.runs.file_system import file_system_of

LARGE_NODES = 8
"""Fewest nodes of a job whose image is checked before it is queued: the check takes seconds, a failed start of a large
job wastes the wait in the queue."""


NOT_CHECKED = "not checked before the job starts: memory and speed"


def examine_container(container: Container, environ: Mapping[str, str]) -> list[ImageFinding]:
    """Start an image on this machine and return every finding about it.

    Raises:
        InputError: no program here starts images, or the source of a bind does not exist.
        HpctrainError: the image cannot be started.
    """
    check_binds(container.binds)
    binds = [*program_binds(), *map(parse_bind, container.binds)]
    runtime = find_runtime(container.runtime, shutil.which)
    start = ImageStart(container, runtime, this_host(), binds, environ, shutil.which)
    driver = local_driver_version("here", VERSION_FILE).get("here")
    seen = examine(start, file_system_of(Path(container.image)), SystemRunner(), SystemClock())
    return check_image(host_environment(environ, driver), seen)


def check_before_queueing(run: Run) -> list[str]:
    """Check the image of a job of at least `LARGE_NODES` nodes; return remarks about the image as lines. Any other
    job, and one whose image pyxis starts, is not checked and gets [].

    Raises:
        RefusedError: a run in the image would fail.
        HpctrainError: the image cannot be started.
    """
    container = run.container
    if container is None or container.runtime == "pyxis" or run.cluster.node_range[0] < LARGE_NODES:
        return []
    try:
        find_runtime(container.runtime, shutil.which)
    except InputError:
        return ["container: nothing on this machine starts images, so the image was not looked into"]
    findings = examine_container(container, os.environ)
    wrong = [finding for finding in findings if finding.level == "problem"]
    if wrong:
        words = "; ".join(f"{finding.name}: {finding.value}: {finding.words}" for finding in wrong)
        raise RefusedError(f"container.image: {container.image}: {words}")
    notes = [f"container.image: {item.name}: {item.value}: {item.words}" for item in findings if item.level == "note"]
    return notes or [f"container.image: looked into {container.image}: nothing speaks against it"]


def check_provisional(
    prepared: PreparedRun, runs: Path, nodes: frozenset[str] | None, limit: TimeLimit | None = None
) -> list[str]:
    """Make a provisional plan for the job's nodes as last measured; return lines with its degrees and the predicted
    times.

    If the nodes or their figures are not known, the only line says that nothing was checked.

    Args:
        runs: folder of run folders, whose topologies hold the figures if the run was given no topology.
        nodes: nodes that the job may get; None: not known. A topology that the run was given is of the job's nodes
            anyway.
        limit: the job's time limit; None: not known.

    Raises:
        RefusedError: the model does not fit on the smallest number of nodes that the job may get.
    """
    count = fewest_nodes(prepared.run)
    if prepared.topology is None and nodes is None:
        return [f"{NOT_CHECKED} (it is not known which nodes the job may get)"]
    known = (prepared.topology, None) if prepared.topology else last_known(runs, nodes or frozenset(), count)
    if known is None:
        return [f"{NOT_CHECKED} (no run has measured {count} of the nodes that the job may get)"]
    topology, folder = known
    names = _taken(topology)[:count]
    if len(names) < count:
        return [f"{NOT_CHECKED} (only {len(names)} nodes of the topology given are of use)"]
    topology = topology.only(names)
    try:
        plan = prepared.plan or make_plan(prepared.run, prepared.spec, topology)
    except InputError as error:
        return [f"{NOT_CHECKED} ({error})"]
    return _words(prepared, plan, topology, measured_start_up_s(folder) if folder else None, limit)


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


def last_known(runs: Path, nodes: frozenset[str], count: int) -> tuple[Topology, Path] | None:
    """Return the newest topology of real nodes that has at least `count` of `nodes`, reduced to these nodes, and its
    run folder. Nodes that the topology's verdict excludes do not count.

    None if no run has such a topology.

    Args:
        runs: folder of run folders.
    """
    for path in sorted(runs.glob("*/topology.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            topology = Topology.read(path)
        except FileError:
            continue
        names = [name for name in _taken(topology) if name in nodes]
        if not topology.provenance.loopback and len(names) >= count:
            return topology.only(names), path.parent
    return None


def _taken(topology: Topology) -> list[str]:
    """Return the ids of the topology's nodes without those that its verdict excludes."""
    return [node.id for node in topology.nodes if node.id not in topology.verdict.exclude]
