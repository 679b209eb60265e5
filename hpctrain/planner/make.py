"""Makes a plan from a run file and a topology (`make_plan`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpctrain.base.collector import collector_paused
from hpctrain.base.errors import HpctrainError, InputError
from hpctrain.planner.bounds.closed_form import ideal_step_s
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import workload_of
from hpctrain.planner.devices.pool import make_device_pool
from hpctrain.planner.layout.layout import Layout
from hpctrain.planner.layout.plan_conversion import level_specs, plan_of_layout
from hpctrain.planner.limits import DEFAULT_LIMITS, SearchLimits
from hpctrain.planner.search.activation_formats import choose_activation_formats
from hpctrain.planner.search.codec_choice import (
    MIN_GAIN,
    CodecDecision,
    choose_codec,
    compression_may_gain,
    searched,
    searched_node_sums,
)
from hpctrain.planner.search.evaluate import cut_at_seam
from hpctrain.planner.search.neighbours import rejected_neighbours
from hpctrain.planner.search.node_sums import choose_node_sums
from hpctrain.planner.search.objective import FASTEST_STEP, Objective, PlanSearch, choose, other_spaces
from hpctrain.planner.search.replacement import minimise_moves, moves_between, uses_one_codec, warm_started
from hpctrain.planner.search.solve import Solver, solve
from hpctrain.planner.search.space import SearchSpace
from hpctrain.planner.search.state import ChosenPlan
from hpctrain.planner.simulate.predict import Prediction, predict
from hpctrain.records.history.layer_figures import LayerFigures
from hpctrain.records.model.imported_spec import Spec
from hpctrain.records.plan.codec_spec import CodecSpec
from hpctrain.records.plan.compression import AutoCompression
from hpctrain.records.plan.plan import Plan
from hpctrain.records.plan.prediction import Predicted
from hpctrain.records.plan.profile import CalibrationProfile
from hpctrain.records.run.run import Run
from hpctrain.records.topology.topology import Topology
from hpctrain.schedule.runnable import check_runnable


@dataclass(frozen=True)
class PlanRequest:
    """The solver and the objective of a plan, and how much is searched."""

    solver: Solver = "auto"
    """'auto' searches for the fastest plan by the cost model; 'exact' tries every plan on a few devices; 'paper'
    follows the paper's rules."""
    objective: Objective = FASTEST_STEP
    """What the plan minimises, and its constraints. The solver 'paper' heeds only `usable`, the share of memory."""
    neighbours: bool = True
    """Whether the plan lists similar plans with the reason why they lost. The list is made only if the objective is
    step time and the solver is not 'paper'.
    """
    limits: SearchLimits = DEFAULT_LIMITS
    """How many options, placements and changes the search tries."""
    layers: tuple[LayerFigures, ...] = ()
    """What was measured of the run's layers, over all ranks, for the choice of a codec; empty: nothing."""


DEFAULT_REQUEST = PlanRequest()


@collector_paused()
def make_plan(
    run: Run,
    spec: Spec,
    topology: Topology,
    request: PlanRequest = DEFAULT_REQUEST,
    *,
    previous: Plan | None = None,
    profile: CalibrationProfile | None = None,
) -> Plan:
    """Return the plan that the request asks for: degrees, blocks of each stage, devices, micro-batches and schedule,
    with predicted time and memory.

    Args:
        spec: the run's model with a known vocabulary size.
        previous: the plan that the new plan replaces. Nodes with equal devices are exchanged so that little state
            moves, and the new plan lists the moves.
        profile: factors on the cost model's constants from measured steps; None: the package's constants.

    Raises:
        RefusedError: the model cannot fit, no or too few devices are usable, or no plan keeps the constraints of the
            request's objective.
        InputError: the run file asks for something impossible, or for more than the solver can try; the topology or the
            objective lacks a figure; or `previous` is a plan of another model.
    """
    if previous is not None and previous.layers != spec.layers:
        raise InputError(
            f"previous plan: found {previous.layers} blocks, the run's model has {spec.layers}; give a plan of this run"
        )
    plain, notes = search_space_of(run, spec, topology, request, profile)
    space = plain
    if previous is not None and request.solver == "auto":
        space = warm_started(previous, plain, run if request.objective.only_time else None)
    chosen, decision = _choose(run, topology, space, request)
    best, codec = decision.prediction, decision.spec.codec
    cost = plain.cost.with_work(memory_options=best.layout.memory_options, codec=codec, intra_node=decision.intra_node)
    if previous is not None:
        # This comes before the formats of activations are chosen, because they belong to the stages of one layout.
        reused = () if space.warm_start is None else space.warm_start.reused_layouts
        best = minimise_moves(cost, best, previous, reused, request.limits.max_move_slowdown)
    cost, best, why_formats = choose_activation_formats(run, cost, best)
    best = cut_at_seam(cost, best, request.limits.max_seam_slowdown)
    holds = _bound_holds(run, plain, chosen, cost)
    bound_s = chosen.bound_s if holds else ideal_step_s(plain.pool, plain.work)
    compared = bool(decision.spec.compared or why_formats)
    plan = plan_of_layout(
        best.layout,
        cost,
        run_sha256=run.sha256(),
        topology_sha256=topology.sha256(),
        solver=request.solver,
        compression=level_specs(decision.spec, decision.intra_node, best.layout),
        profile=profile,
        predicted=Predicted(step_time_s=best.terms, memory_bytes=best.layout.memory(cost.memory), bound_s=bound_s),
        rejected=chosen.rejected,
        notes=[*notes, *chosen.notes, *why_formats, *_device_notes(plain, best.layout, compared)],
    )
    check_runnable(plan, run)
    return plan if previous is None else _with_moves(plan, previous)


def search_space_of(
    run: Run, spec: Spec, topology: Topology, request: PlanRequest, profile: CalibrationProfile | None
) -> tuple[SearchSpace, list[str]]:
    """Return the space of the run's options, and notes on unused devices and on keys of the run file that
    do not apply.
    """
    work, dropped = workload_of(run, spec)
    if request.objective.usable is not None:
        work = replace(work, usable=request.objective.usable)
    pool = make_device_pool(run, topology, profile)
    work = replace(work, framework=pool.framework)
    space = SearchSpace(pool, CostModel(work, pool.links, pool.constants), request.limits)
    return space, [*pool.notes, *dropped]


def _choose(run: Run, topology: Topology, space: SearchSpace, request: PlanRequest) -> tuple[ChosenPlan, CodecDecision]:
    """Return the best plan by the request's objective, and its gradient codec."""

    def find(space: SearchSpace) -> ChosenPlan:
        return solve(space, request.solver)

    if request.solver == "paper":
        chosen = find(space)
    elif request.objective.only_time:
        chosen, decision = _fastest(run, space, find, request.layers)
        if request.neighbours:
            neighbours = rejected_neighbours(chosen.space, chosen.best, space.candidate_dims)
            chosen = chosen._replace(rejected=[*chosen.rejected, *neighbours])
        return chosen, decision
    else:
        spaces = [space, *other_spaces(request.objective, run, topology, space)]
        chosen = choose(request.objective, topology, spaces, find)
    return chosen, _decision(run, chosen.space.cost, chosen.best, request.layers)


def _fastest(
    run: Run, space: SearchSpace, find: PlanSearch, layers: Sequence[LayerFigures]
) -> tuple[ChosenPlan, CodecDecision]:  # fmt: skip
    """Return the fastest plan and its gradient codec.

    With `compression.mode: auto`, the first search is one with exact sums. If its plan leaves devices waiting or idle,
    each codec that the function `searched` returns gets a search of its own: the fastest placement with exact sums may
    have no replicas, and then no codec helps that placement. A search with a warm start may be the only one
    (`uses_one_codec`).

    Args:
        find: returns the fastest plan of a space.
        layers: as in `PlanRequest`.
    """
    winner = find(space)
    decision = _decision(run, space.cost, winner.best, layers)
    if not isinstance(run.compression, AutoCompression) or (space.warm_start is not None and uses_one_codec(space)):
        return winner, decision
    if not (_idle_devices(space, winner.best.layout) or compression_may_gain(winner.best)):
        return winner, decision
    in_nodes = searched_node_sums(run.compression)
    for codec, worth in searched(run.steps, run.compression.loss_limit):
        try:
            other = find(space.with_work(codec=codec, intra_node=in_nodes))
        except HpctrainError:
            continue  # the codec's state does not fit anywhere
        compressed = _decision(run, space.cost, other.best, layers)
        if compressed.mean_step_s <= (1 - worth) * decision.mean_step_s:
            winner, decision = other, compressed
    return winner, decision


def _decision(run: Run, cost: CostModel, best: Prediction, layers: Sequence[LayerFigures]) -> CodecDecision:
    """Return the codec of a layout's gradients and the predicted step with this codec.

    The codec is that of the run file, or with mode auto the best one for the layout.

    Args:
        best: the layout with its predicted step, by which the search chose it.
        layers: as in `PlanRequest`.
    """
    cost = cost.with_work(memory_options=best.layout.memory_options)
    if isinstance(run.compression, AutoCompression):
        return choose_codec(cost, best.layout, run.steps, run.compression.loss_limit, layers, run.compression.node_sums)
    if run.compression.node_sums == "auto":
        cost = choose_node_sums(cost, best.layout, "auto", MIN_GAIN)
        best = predict(cost, best.layout, whole=True)
    return CodecDecision(CodecSpec(codec=cost.work.codec), best, best.total, cost.work.intra_node)


def _bound_holds(run: Run, plain: SearchSpace, chosen: ChosenPlan, cost: CostModel) -> bool:
    """Return whether the search's lower bound holds for the plan. The bound holds only for the codecs with which the
    search was made.

    Args:
        plain: the space with the codecs of the run file.
        cost: the cost model with the codecs of the plan.
    """
    exact = cost.work.codec.exact and chosen.space.work.codec == plain.work.codec
    asked, chosen_work = plain.work, cost.work
    if (chosen_work.intra_node, chosen_work.tensor_parallel_sums) != (asked.intra_node, asked.tensor_parallel_sums):
        return False
    same_messages = cost.work.messages == plain.work.messages or set(cost.work.messages) == {"none"}
    return same_messages and (exact or not isinstance(run.compression, AutoCompression))


def _idle_devices(space: SearchSpace, layout: Layout) -> int:
    return len(space.pool.devices) - len(layout.units()) * layout.tp


def _device_notes(space: SearchSpace, layout: Layout, compared: bool) -> list[str]:
    """Return notes on idle devices and, if codecs were compared, on devices whose codecs were not measured."""
    notes = []
    if compared and any(unit.codec_s is None for unit in layout.units()):
        notes.append("What compression takes was not measured on some devices; typical values stand in.")
    if idle := _idle_devices(space, layout):
        notes.append(f"{idle} of {len(space.pool.devices)} usable devices stay idle.")
    return notes


def _with_moves(plan: Plan, previous: Plan) -> Plan:
    moves, lost = moves_between(previous, plan)
    notes = list(plan.notes)
    if lost:
        text = ", ".join(map(str, lost))
        notes.append(f"No device that is left holds blocks {text}: their state comes from a checkpoint.")
    return plan.model_copy(update={"moves": moves, "notes": notes})
