"""Checks before a job is queued: that its image works, and that the model fits into its nodes as last measured.

The check of the nodes also predicts how long the run takes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import FileError, InputError, RefusedError
from hpctrain.base.process import SystemRunner
from hpctrain.base.units import format_seconds
from hpctrain.container.check import ImageFinding, ImageStart, check_image, examine, host_environment
from hpctrain.container.entry import check_binds, find_runtime, parse_bind, program_binds, this_host
from hpctrain.jobs.data_sheet_time import PLAN_ERROR, data_sheet_step_s, data_sheet_text
from hpctrain.jobs.job_price import JobPrice
from hpctrain.jobs.wall_time import (
    BilledResources,
    TimeLimit,
    WallTime,
    duration_text,
    measured_start_up_s,
    time_limit_text,
)
from hpctrain.launch.preflight.checks import VERSION_FILE, local_driver_version, other_share
from hpctrain.launch.preflight.measured_steps import measured_step
from hpctrain.launch.preflight.prepare import PreparedRun, fewest_nodes
from hpctrain.planner import make_plan
from hpctrain.records.run.run import Container, Run
from hpctrain.records.topology.topology import Topology
from hpctrain.runs.file_system import file_system_of

LARGE_NODES = 8
"""Fewest nodes of a job whose image is checked before it is queued: the check takes seconds, and a failed start of a
large job wastes the wait in the queue."""


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
        InputError: the source of a bind does not exist.
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


@dataclass(frozen=True)
class JobForecast:
    """What is known of a job before it is queued."""

    lines: list[str]
    """For a person: the plan's degrees, the predicted times, and what the job is billed; or why they are not known."""
    time: WallTime | None = None
    """The predicted duration; None: not known."""
    billed: BilledResources | None = None
    """What is billed; None if the duration is not known."""


def check_provisional(
    prepared: PreparedRun,
    runs: Path,
    nodes: frozenset[str] | None,
    part: bool,
    limit: TimeLimit | None = None,
    price: JobPrice | None = None,
) -> list[str]:
    """Check by a provisional plan that the model fits on the job's nodes; return the forecast as lines to print.

    `forecast_job` describes the arguments and the errors.
    """
    return forecast_job(prepared, runs, nodes, part, limit, price).lines


def forecast_job(
    prepared: PreparedRun,
    runs: Path,
    nodes: frozenset[str] | None,
    part: bool,
    limit: TimeLimit | None,
    price: JobPrice | None,
) -> JobForecast:
    """Make a provisional plan for the job's nodes as last measured; return its degrees, the predicted times and what
    the job is billed.

    If the nodes or their figures are not known, the forecast's `lines` say that memory and speed were not checked, and
    the times are estimated from the data sheets of the GPUs that the job may get.

    Args:
        runs: folder of run folders, whose topologies hold the figures if the run was given no topology.
        nodes: nodes that the job may get; None: not known. A topology that the run was given is of the job's nodes
            anyway.
        part: whether the job has only a part of each node. Figures of the other kind, of whole nodes for a part or the
            other way round, are not used.
        limit: the job's time limit; None: not known.
        price: what the job is billed, and its kinds of GPUs; None: not known.

    Raises:
        RefusedError: the model does not fit on the smallest number of nodes that the job may get.
    """
    count = fewest_nodes(prepared.run)
    other = other_share(prepared.topology, part) if prepared.topology else []
    if other:
        again = "it is not used, and the nodes are measured again at the start"
        without = forecast_job(replace(prepared, topology=None), runs, nodes, part, limit, price)
        return replace(without, lines=[*(f"--topology: {words}: {again}" for words in other), *without.lines])
    if prepared.topology is None and nodes is None:
        why = "it is not known which nodes the job may get"
        return _without_topology(prepared, limit, price, why)
    known = (prepared.topology, None) if prepared.topology else last_known(runs, nodes or frozenset(), count, part)
    if known is None:
        why = f"no run has measured {count} of the nodes that the job may get"
        return _without_topology(prepared, limit, price, why)
    topology, folder = known
    names = _taken(topology)[:count]
    if len(names) < count:
        return JobForecast([f"{NOT_CHECKED} (only {len(names)} nodes of the topology given are of use)"])
    topology = topology.only(names)
    try:
        plan = prepared.plan or make_plan(prepared.run, prepared.spec, topology)
    except InputError as error:
        return JobForecast([f"{NOT_CHECKED} ({error})"])
    start_up_s = measured_start_up_s(folder) if folder else None
    measured = measured_step(runs, prepared.run, frozenset(names) if nodes is None else nodes, count, part)
    billed = _billed(topology, price)
    if plan.predicted is None and measured is None:
        words = f"the plan given ({plan.dims}) predicts no time: it is not known how long the run will take"
        return JobForecast([words])
    what = "the plan given" if prepared.plan else f"provisional plan on {len(topology.nodes)} nodes as last measured"
    lines = [f"{what}: {plan.dims}"]
    if plan.predicted is not None:
        step_s = plan.predicted.step_time_s["total"]
        fast, slow = PLAN_ERROR
        time = WallTime(step_s, prepared.run.steps, start_up_s, (fast * step_s, slow * step_s))
        lines = [f"{what}: {plan.dims}, {format_seconds(step_s)} a step predicted"]
    if measured is not None:
        time = WallTime(measured.median_s, prepared.run.steps, start_up_s, measured.range_s)
        lines.append(f"{format_seconds(measured.median_s)} a step measured in {measured.run}, which did the same work")
    return JobForecast([*lines, duration_text(time, billed), *_limit_words(prepared, time, limit)], time, billed)


def _without_topology(prepared: PreparedRun, limit: TimeLimit | None, price: JobPrice | None, why: str) -> JobForecast:
    """Return the times that data sheets let expect, or why nothing is known.

    Args:
        why: why no topology is known.
    """
    unchecked = f"{NOT_CHECKED} ({why})"
    if price is None:
        return JobForecast([unchecked])
    estimate = data_sheet_step_s(prepared.run, prepared.spec, price)
    if isinstance(estimate, str):
        return JobForecast([unchecked, f"how long the run takes is unknown until it is measured: {estimate}"])
    time = WallTime(estimate[0], prepared.run.steps, None, estimate[1])
    billed = BilledResources(price.nodes, price.gpus, price.units_per_h)
    lines = [unchecked, data_sheet_text(price), duration_text(time, billed), *_limit_words(prepared, time, limit)]
    return JobForecast(lines, time, billed)


def _limit_words(prepared: PreparedRun, time: WallTime, limit: TimeLimit | None) -> list[str]:
    return [] if limit is None else [time_limit_text(time, limit, prepared.run.cluster.save_notice_s)]


def _billed(topology: Topology, price: JobPrice | None) -> BilledResources:
    """Return what is billed: the resources in `price`, or all nodes and GPUs of the topology if `price` is None."""
    if price is not None:
        return BilledResources(price.nodes, price.gpus, price.units_per_h)
    kinds = [topology.device_types[device.type].kind for node in topology.nodes for device in node.devices]
    return BilledResources(len(topology.nodes), kinds.count("cuda"))


def last_known(runs: Path, nodes: frozenset[str], count: int, part: bool) -> tuple[Topology, Path] | None:
    """Return the newest topology of real nodes that has at least `count` of `nodes`, reduced to these nodes, and its
    run folder. Nodes that the topology's verdict excludes do not count. Nor do topologies of whole nodes for a job that
    has a part of each, or the other way round.

    None if no run has such a topology.

    Args:
        runs: folder of run folders.
        part: whether the job has only a part of each node.
    """
    for path in sorted(runs.glob("*/topology.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            topology = Topology.read(path)
        except FileError:
            continue
        names = [name for name in _taken(topology) if name in nodes]
        if not topology.provenance.loopback and not other_share(topology, part) and len(names) >= count:
            return topology.only(names), path.parent
    return None


def _taken(topology: Topology) -> list[str]:
    """Return the ids of the topology's nodes without those that its verdict excludes."""
    return [node.id for node in topology.nodes if node.id not in topology.verdict.exclude]
