"""From a run file and a topology to a plan: the one entry of this room."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Literal, get_args

from hpctrain.base.errors import HpctrainError, InputError, Refused
from hpctrain.base.units import format_count
from hpctrain.planner.bound import step_bound
from hpctrain.planner.choose import Found, choose, other_searches
from hpctrain.planner.compression import codecs
from hpctrain.planner.cost import CostModel
from hpctrain.planner.fleet import find_fleet
from hpctrain.planner.layout import Excess, Layout
from hpctrain.planner.neighbours import describe_excess, describe_shape, rejected_neighbours
from hpctrain.planner.objective import FASTEST, Objective
from hpctrain.planner.paper import solve_as_paper
from hpctrain.planner.predict import Prediction
from hpctrain.planner.saving import NO_SAVING, Saving
from hpctrain.planner.search import NO_SHARDS, Search, Shape
from hpctrain.planner.workload import workload_of
from hpctrain.records.imported_spec import Spec
from hpctrain.records.plan import Plan, Predicted, Recompute, Rejected, Replica, Stage, ZeroLevel
from hpctrain.records.run import Run
from hpctrain.records.topology import Topology
from hpctrain.schedule.generate import make_schedule
from hpctrain.schedule.runnable import check_runnable

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
Solver = Literal["exhaustive", "paper"]


def make_plan(
    run: Run,
    spec: Spec,
    topology: Topology,
    *,
    solver: Solver = "exhaustive",
    objective: Objective = FASTEST,
    provisional: bool = False,
) -> Plan:
    """Choose degrees, layers by stage, devices, micro-batches and schedule, and predict time and memory.

    Args:
        spec: the run's model with its vocabulary settled.
        solver: 'exhaustive' searches for the fastest plan by the cost model; 'paper' follows the paper's rules.
        objective: what the plan is chosen by, and constraints; the paper's rules know the fastest only.
        provisional: mark the plan as made before the nodes are known.

    Raises:
        Refused: the model cannot fit, no or too few devices are usable, or no plan keeps the constraints.
        InputError: the run file asks for what cannot be, or the topology or the objective lacks a figure.
    """
    work, dropped = workload_of(run, spec)
    if objective.usable is not None:
        work = replace(work, usable=objective.usable)
    fleet = find_fleet(run, topology)
    search = Search(work, fleet, CostModel(work, fleet.links))
    shapes = search.shapes()
    if not shapes:
        raise _no_shape(search)
    if solver == "paper":
        best, rejected, notes = _as_paper(search)
    elif objective.only_time:
        best, rejected, notes = _fastest(search, shapes)
    else:
        searches = [search, *other_searches(objective, run, topology, search)]
        best, rejected, notes = choose(objective, topology, searches, _search)
    cost = CostModel(replace(work, saving=best.layout.saving), fleet.links)
    idle = len(fleet.workers) - len(best.layout.units()) * best.layout.tp
    if idle:
        notes.append(f"{idle} of {len(fleet.workers)} usable devices stay idle.")
    plan = _plan(
        best,
        run_sha256=run.sha256(),
        topology_sha256=topology.sha256(),
        provisional=provisional,
        solver=solver,
        compression=codecs(run),
        predicted=Predicted(
            step_time_s=best.terms, memory_bytes=best.layout.memory(cost.memory), bound_s=step_bound(fleet, work)
        ),
        rejected=rejected,
        notes=[*fleet.notes, *dropped, *notes],
    )
    check_runnable(plan, run)
    return plan


def _as_paper(search: Search) -> tuple[Prediction, list[Rejected], list[str]]:
    choice = solve_as_paper(search.cost, search.fleet, search.work)
    if not search.can_shard(choice.prediction.layout.cells):
        raise InputError(f"parallel: {NO_SHARDS}")
    return choice.prediction, [], list(choice.notes)


def _fastest(search: Search, shapes: list[Shape]) -> tuple[Prediction, list[Rejected], list[str]]:
    search, best, rejected, notes = _search(search, shapes)
    return best, [*rejected, *rejected_neighbours(search, best, shapes)], notes


def _search(search: Search, shapes: list[Shape]) -> Found:
    """The fastest plan, by the search itself or by one that saves memory."""
    best = search.best(shapes, search.work.micro_batch_sizes())
    rejected: list[Rejected] = []
    notes: list[str] = []
    if best is None and search.work.fixed is None:
        search, best, rejected = _saving_memory(search, shapes)
        notes.append(f"Chosen to save memory: {best.layout.saving}.")
    if best is None:
        raise _nothing_fits(search, shapes)
    if not search.complete:
        notes.append("There were too many orders of devices to try all; the likely ones were tried.")
    return Found(search, search.refine(best), rejected, notes)


def _saving_memory(plain: Search, shapes: list[Shape]) -> tuple[Search, Prediction, list[Rejected]]:
    """The fastest of what fits when recomputation and sharding save memory, and why it is not done without.

    Raises:
        Refused: not even that fits.
    """
    search, best, least = plain, None, plain
    for zero in get_args(ZeroLevel):
        frugal = plain.saving(Saving(zero=zero, recompute="full"))
        if not frugal.shapes():
            continue  # no replicas to shard over
        least = frugal
        if not least.feasible(least.shapes()):
            continue  # nor does it fit with less recomputation
        for recompute in RECOMPUTE if zero else RECOMPUTE[1:]:
            other = plain.saving(Saving(zero=zero, recompute=recompute))
            found = other.best(other.shapes(), other.work.micro_batch_sizes(), best=best)
            if found is not best:
                search, best = other, found
    if best is None:
        raise _nothing_fits(least, least.shapes())
    lack = _nearest(plain, shapes)
    reason = lack if isinstance(lack, str) else f"with {describe_shape(lack[0])}, {describe_excess(lack[1])}"
    return search, best, [Rejected(change="zero 0 and recompute none", reason=reason)]


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
    lack = _nearest(search, shapes)
    if lack == NO_SHARDS:
        return InputError(f"parallel: {lack}")
    if isinstance(lack, str):
        return InputError(f"parallel: {lack}; change batch.global, a degree, parallel.micro_batch or parallel.schedule")
    shape, excess = lack
    how = f" and {work.saving}" if work.saving != NO_SAVING else ""
    return Refused(
        f"the model ({format_count(work.spec.parameters())} parameters) cannot fit: with {describe_shape(shape)}{how}, "
        f"the nearest to fitting, {describe_excess(excess)}; use more or larger devices, a smaller model or "
        "data.seq_len" + (", or parallel.mode auto" if work.fixed is not None else "")
    )


def _nearest(search: Search, shapes: list[Shape]) -> tuple[Shape, Excess] | str:
    """The shape that lacks the least memory; a sentence where no shape has a layout."""
    lacks = [(shape, search.shortage(shape)) for shape in shapes]
    short = [(shape, lack) for shape, lack in lacks if isinstance(lack, Excess)]
    if short:
        return min(short, key=lambda item: (item[1].ratio, item[0]))
    return next(lack for _, lack in lacks if isinstance(lack, str))


def _plan(best: Prediction, **known: object) -> Plan:
    layout = best.layout
    edges = [0, *accumulate(layout.blocks)]
    values = {
        "pp": layout.pp,
        "dp": layout.dp,
        "tp": layout.tp,
        "zero": layout.saving.zero,
        "shard": layout.shards if 1 < layout.shards < layout.dp else None,
        "sequence_parallel": layout.saving.sequence_parallel,
        "schedule": layout.schedule,
        "stages": [Stage(layers=edge, recompute=layout.saving.recompute) for edge in pairwise(edges)],
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
