"""From a run file and a topology to a plan: the one entry of this room."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Literal

from hpctrain.base.errors import HpctrainError, InputError, Refused
from hpctrain.base.units import format_count
from hpctrain.planner.bound import step_bound
from hpctrain.planner.cost import CostModel
from hpctrain.planner.fleet import Fleet, find_fleet
from hpctrain.planner.layout import Layout
from hpctrain.planner.neighbours import describe_excess, describe_shape, rejected_neighbours
from hpctrain.planner.paper import solve_as_paper
from hpctrain.planner.predict import Prediction
from hpctrain.planner.search import Search, Shape
from hpctrain.planner.workload import Workload, workload_of
from hpctrain.records.imported_spec import Spec
from hpctrain.records.plan import Plan, Predicted, Rejected, Replica, Stage
from hpctrain.records.run import Run
from hpctrain.records.topology import Topology
from hpctrain.schedule.generate import make_schedule
from hpctrain.schedule.runnable import check_runnable

Solver = Literal["exhaustive", "paper"]


def make_plan(
    run: Run, spec: Spec, topology: Topology, *, solver: Solver = "exhaustive", provisional: bool = False
) -> Plan:
    """Choose degrees, layers by stage, devices, micro-batches and schedule, and predict time and memory.

    Args:
        spec: the run's model with its vocabulary settled.
        solver: 'exhaustive' searches for the fastest plan by the cost model; 'paper' follows the paper's rules.
        provisional: mark the plan as made before the nodes are known.

    Raises:
        Refused: the model cannot fit, or no or too few devices are usable.
        InputError: the run file asks for what cannot be, or the topology lacks a figure.
    """
    work = workload_of(run, spec)
    fleet = find_fleet(run, topology)
    cost = CostModel(work, fleet.links)
    search = Search(work, fleet, cost)
    shapes = search.shapes()
    if not shapes:
        raise _no_shape(search)
    if solver == "paper":
        best, rejected, notes = _as_paper(cost, fleet, work)
    else:
        best, rejected, notes = _fastest(search, shapes)
    idle = len(fleet.workers) - len(best.layout.units()) * best.layout.tp
    if idle:
        notes.append(f"{idle} of {len(fleet.workers)} usable devices stay idle.")
    plan = _plan(
        best,
        run_sha256=run.sha256(),
        topology_sha256=topology.sha256(),
        provisional=provisional,
        solver=solver,
        predicted=Predicted(
            step_time_s=best.terms, memory_bytes=best.layout.memory(cost.memory), bound_s=step_bound(fleet, work)
        ),
        rejected=rejected,
        notes=[*fleet.notes, *notes],
    )
    check_runnable(plan, run)
    return plan


def _as_paper(cost: CostModel, fleet: Fleet, work: Workload) -> tuple[Prediction, list[Rejected], list[str]]:
    choice = solve_as_paper(cost, fleet, work)
    return choice.prediction, [], list(choice.notes)


def _fastest(search: Search, shapes: list[Shape]) -> tuple[Prediction, list[Rejected], list[str]]:
    best = search.best(shapes, search.work.micro_batch_sizes())
    if best is None:
        raise _nothing_fits(search, shapes)
    notes = [] if search.complete else ["There were too many orders of devices to try all; the likely ones were tried."]
    best = search.refine(best)
    return best, rejected_neighbours(search, best, shapes), notes


def _no_shape(search: Search) -> HpctrainError:
    """Degrees given by hand that cannot be: too many for the devices (refused), or not for this model (input)."""
    shape, reason = next(iter(search.impossible.items()))
    text = f"parallel: found {describe_shape(shape)}; {reason}"
    devices = len(search.fleet.workers)
    pp, dp, tp = shape
    if pp * dp * tp > devices:
        return Refused(f"{text}; lower a degree or add nodes")
    return InputError(f"{text}; lower a degree, or use parallel.mode auto")


def _nothing_fits(search: Search, shapes: list[Shape]) -> HpctrainError:
    work = search.work
    if not search.tightest:
        return InputError(
            f"parallel: no micro-batch that divides batch.global {work.rows} gives {describe_shape(shapes[0])} as many "
            f"micro-batches as schedule {', '.join(work.schedules(shapes[0][0]))} needs; change batch.global, a "
            "degree, parallel.micro_batch or parallel.schedule"
        )
    shape, excess = min(search.tightest.items(), key=lambda item: (item[1].ratio, item[0]))
    return Refused(
        f"the model ({format_count(work.spec.parameters())} parameters) cannot fit: with {describe_shape(shape)}, the "
        f"nearest to fitting, {describe_excess(excess)}; use more or larger devices, a smaller model or data.seq_len"
        + (", or parallel.mode auto" if work.fixed is not None else "")
    )


def _plan(best: Prediction, **known: object) -> Plan:
    layout = best.layout
    edges = [0, *accumulate(layout.blocks)]
    values = {
        "pp": layout.pp,
        "dp": layout.dp,
        "tp": layout.tp,
        "schedule": layout.schedule,
        "stages": [Stage(layers=(start, stop)) for start, stop in pairwise(edges)],
        "replicas": [_replica(layout, replica) for replica in range(layout.dp)],
        "ranks": [place for rank in range(layout.pp) for row in layout.cells for place in row[rank].places],
        "actions": {replica: _actions(layout, replica) for replica in range(layout.dp)},
    }
    return Plan.model_validate(values | known)


def _replica(layout: Layout, replica: int) -> Replica:
    count = layout.micro_batches[replica]
    return Replica(
        rows=layout.micro_batch * count,
        micro_batch=layout.micro_batch,
        micro_batches=count,
        devices=[list(layout.unit(replica, stage).places) for stage in range(len(layout.blocks))],
    )


def _actions(layout: Layout, replica: int) -> dict[int, list[str]]:
    table = make_schedule(layout.schedule, layout.pp, len(layout.blocks), layout.micro_batches[replica])
    return dict(enumerate(table.rows()))
