"""Makes plans near a given plan that the search did not compare with it, such as one more stage or one node fewer."""

from __future__ import annotations

from hpctrain.base.errors import HpctrainError
from hpctrain.planner.limits import DEFAULT_LIMITS
from hpctrain.planner.make import PlanRequest, make_plan
from hpctrain.planner.search.objective import Objective
from hpctrain.planner.simulate.predict import largest_increase
from hpctrain.records.model.imported_spec import Spec
from hpctrain.records.plan.plan import ParallelDims, Plan, Rejected
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

    def compared(change: str, other: Run, nodes: Topology) -> Rejected:
        try:
            other_plan = make_plan(other, spec, nodes, request, profile=plan.profile)
        except HpctrainError as error:
            return Rejected(change=change, reason=str(error))
        return _compared(change, plan, other_plan)

    neighbours = []
    for words, dims in _degrees(plan, topology):
        change = str(dims)
        if all(entry.change != change for entry in plan.rejected):
            fixed = FixedParallel(mode="fixed", **dims._asdict())
            neighbours.append(compared(f"{words} ({change})", run.model_copy(update={"parallel": fixed}), topology))
    anyhow = run.model_copy(update={"parallel": AutoParallel()})
    for node in _representative_nodes(plan, topology):
        others = topology.only([other.id for other in topology.nodes if other.id != node])
        neighbours.append(compared(f"without {node}", anyhow, others))
    return neighbours


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

    Nodes with equal devices are of one kind. Of each kind, the last node that the plan uses is listed, the slowest kind
    first. The list is empty if the topology has one node.
    """
    last: dict[tuple[tuple[str, float], ...], str] = {}
    for node in topology.nodes:
        if node.id in plan.nodes:
            last[tuple((device.type, max(device.flops.values(), default=0.0)) for device in node.devices)] = node.id
    if len(topology.nodes) == 1:
        return []
    by_speed = sorted(last, key=lambda devices: sum(flops for _, flops in devices))
    return [last[devices] for devices in by_speed][: DEFAULT_LIMITS.max_removed_nodes]


def _compared(change: str, plan: Plan, other: Plan) -> Rejected:
    if plan.predicted is None or other.predicted is None:
        return Rejected(change=change, reason="nobody predicted the plan")
    before, after = plan.predicted.step_time_s, other.predicted.step_time_s
    delta = after["total"] - before["total"]
    reason = (
        largest_increase(before, after) if delta > 0 else "no slower; the plan was not chosen by time alone, or by hand"
    )
    return Rejected(change=change, delta_s=delta, reason=reason)
