"""Explains a plan by others.

`extra_neighbours` makes plans near a given plan that the search did not compare with it, such as one more stage or one
node fewer. `idle_devices` compares a plan that leaves devices idle with one that uses all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpctrain.base.errors import HpctrainError
from hpctrain.planner.cost.memory_options import memory_options_of_plan
from hpctrain.planner.limits import DEFAULT_LIMITS
from hpctrain.planner.make import PlanRequest, make_plan, search_space_of
from hpctrain.planner.search.evaluate import best_of
from hpctrain.planner.search.neighbours import nearest_dims, shortage
from hpctrain.planner.search.objective import Objective
from hpctrain.planner.simulate.predict import largest_increase
from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.model.imported_spec import Spec
from hpctrain.records.plan.plan import ParallelDims, Plan
from hpctrain.records.plan.prediction import Rejected
from hpctrain.records.run.run import AutoParallel, FixedParallel, Run
from hpctrain.records.topology.topology import Topology


def extra_neighbours(
    run: Run, spec: Spec, topology: Topology, plan: Plan, usable: float | None = None
) -> list[Rejected]:
    """Return how a plan compares with plans near it: with one stage more or less, with twice or half the tensor
    parallelism, and without one node.

    Each compared plan is the fastest one with its degrees or on its nodes, by a search of its own. Degrees that
    `plan.rejected` lists already are left out.

    Args:
        run: the run file of the plan.
        topology: all nodes that the plan could use.
        plan: the plan to explain, with its predicted time.
        usable: largest share of a device's memory that a plan may fill; None: the planner's default.
    """

    request = PlanRequest(objective=Objective(usable=usable))

    def compared(change: str, how: str, other: Run, nodes: Topology) -> Rejected:
        try:
            other_plan = make_plan(other, spec, nodes, request, profile=plan.profile)
        except HpctrainError as error:
            return Rejected(change=change, reason=str(error))
        return _compared(change, how, plan, other_plan)

    neighbours = []
    for words, dims in _degrees(plan, topology):
        change = str(dims)
        if all(entry.change != change for entry in plan.rejected):
            fixed = FixedParallel(mode="fixed", **dims._asdict())
            other = run.model_copy(update={"parallel": fixed})
            neighbours.append(compared(f"{words} ({change})", "parallel.mode fixed", other, topology))
    anyhow = run.model_copy(update={"parallel": AutoParallel()})
    for node in _representative_nodes(plan, topology):
        others = topology.only([other.id for other in topology.nodes if other.id != node])
        neighbours.append(compared(f"without {node}", f"--forbid {node}", anyhow, others))
    return neighbours


@dataclass(frozen=True)
class IdleDevices:
    """The usable devices that a plan leaves idle, and the fastest plan found that uses all usable devices."""

    device_ids: tuple[DeviceId, ...]
    """The idle devices."""
    usable: int
    """Number of usable devices, idle or not."""
    all_used: Rejected
    """The fastest plan found on all usable devices, compared with the plan that leaves some idle; without `delta_s` if
    none can run."""


def idle_devices(
    run: Run, spec: Spec, topology: Topology, plan: Plan, usable: float | None = None
) -> IdleDevices | None:
    """Return the devices that a plan leaves idle, and how the fastest plan found on all devices compares with it; None
    if the plan uses all usable devices.

    The compared plan has the codec and the memory options of `plan`. Degrees that the run file gives do not apply to
    it.

    Args:
        run: the run file of the plan.
        topology: all nodes that the plan could use.
        plan: the plan to explain, with its predicted time.
        usable: largest share of a device's memory that a plan may fill; None: the planner's default.

    Raises:
        RefusedError: no device is usable.
        InputError: the topology lacks a figure.
    """
    request = PlanRequest(objective=Objective(usable=usable))
    free = run.model_copy(update={"parallel": AutoParallel()})
    space, _ = search_space_of(free, spec, topology, request, plan.profile)
    used = set(plan.ranks)
    idle = tuple(device.device_id for device in space.pool.devices if device.device_id not in used)
    if not idle:
        return None
    devices = len(space.pool.devices)
    space = space.with_work(codec=plan.codec, memory_options=memory_options_of_plan(plan))
    full = nearest_dims(space, [dims for dims in space.candidate_dims if math.prod(dims) == devices])
    patience = request.limits.other_dims_patience
    predictions = [best_of(space, space.options([dims]), patience) for dims in full[: request.limits.max_other_dims]]
    fastest = min(
        (prediction for prediction in predictions if prediction), key=lambda prediction: prediction.total, default=None
    )
    if fastest is None:
        reasons = [lack for dims in full if (lack := shortage(space, dims))]
        reasons += [reason for dims, reason in space.impossible.items() if math.prod(dims) == devices]
        reason = str(reasons[0]) if reasons else "no degrees use all of them"
        return IdleDevices(idle, devices, Rejected(change=f"all {devices} devices", reason=reason))
    before = plan.predicted.step_time_s if plan.predicted else fastest.terms
    compared = Rejected(
        change=str(fastest.layout.dims),
        delta_s=fastest.total - before["total"],
        reason=largest_increase(before, fastest.terms),
    )
    return IdleDevices(idle, devices, compared)


def _degrees(plan: Plan, topology: Topology) -> list[tuple[str, ParallelDims]]:
    devices = len(topology.device_ids())
    wanted = [
        ("1 more stage", plan.pp + 1, plan.tp),
        ("1 stage fewer", plan.pp - 1, plan.tp),
        ("tp twice as large", plan.pp, 2 * plan.tp),
        ("tp half as large", plan.pp, plan.tp // 2),
    ]
    return [(words, ParallelDims(pp, max(1, devices // (pp * tp)), tp)) for words, pp, tp in wanted if pp and tp]


def _representative_nodes(plan: Plan, topology: Topology) -> list[str]:
    """Return the nodes that are left out, one at a time, to explain the plan.

    Nodes whose devices have equal types and speeds are of one kind. The list has one node of each kind that the plan
    uses: of the plan's nodes of this kind, the last one in the topology. The slowest kind comes first, and at most
    `SearchLimits.max_removed_nodes` nodes are listed. The list is empty if the topology has one node.
    """
    last: dict[tuple[tuple[str, float], ...], str] = {}
    for node in topology.nodes:
        if node.id in plan.nodes:
            last[tuple((device.type, max(device.flops.values(), default=0.0)) for device in node.devices)] = node.id
    if len(topology.nodes) == 1:
        return []
    by_speed = sorted(last, key=lambda devices: sum(flops for _, flops in devices))
    return [last[devices] for devices in by_speed][: DEFAULT_LIMITS.max_removed_nodes]


def _compared(change: str, how: str, plan: Plan, other: Plan) -> Rejected:
    """Return another plan as a rejected neighbour of `plan`.

    Args:
        change: the change that leads to the other plan, in words.
        how: the setting with which the planner makes the other plan.
    """
    if plan.predicted is None or other.predicted is None:
        return Rejected(change=change, reason="nobody predicted the plan")
    before, after = plan.predicted.step_time_s, other.predicted.step_time_s
    delta = after["total"] - before["total"]
    if delta > 0:
        reason = largest_increase(before, after)
    elif delta > -1e-6 * before["total"]:
        reason = "no slower"
    else:
        reason = f"faster; a search tries only likely plans, and one by hand none: use {how}"
    return Rejected(change=change, delta_s=delta, reason=reason)
