"""The planner's one entry: makes a plan from a run file and a topology."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Literal, get_args

from hpctrain.base.errors import HpctrainError, InputError, RefusedError
from hpctrain.base.units import format_count
from hpctrain.planner.bounds.ideal import ideal_step_s
from hpctrain.planner.cost.memory_options import DEFAULT_MEMORY_OPTIONS, MemoryOptions
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import workload_of
from hpctrain.planner.devices.pool import make_device_pool
from hpctrain.planner.layout.layout import Layout, MemoryShortage
from hpctrain.planner.search.best_first import SearchResult, best_first_search
from hpctrain.planner.search.by_objective import ChosenPlan, choose, other_searches
from hpctrain.planner.search.codec_choice import CodecDecision, choose_codec, compression_may_gain, searched
from hpctrain.planner.search.exact import exhaustive_search
from hpctrain.planner.search.local_search import refine
from hpctrain.planner.search.message_codec_choice import choose_messages
from hpctrain.planner.search.neighbours import describe_memory_shortage, rejected_neighbours
from hpctrain.planner.search.objective import FASTEST_STEP, Objective
from hpctrain.planner.search.option_search import WHY_NO_SHARDING, Search
from hpctrain.planner.search.paper import solve_as_paper
from hpctrain.planner.search.seam import cut_at_seam
from hpctrain.planner.search.state_moves import minimise_moves, moves_between
from hpctrain.planner.search.warm_start import uses_one_codec, warm_started
from hpctrain.planner.simulate.predict import Prediction, predict
from hpctrain.records.model.imported_spec import Spec
from hpctrain.records.plan.codec import CodecSpec
from hpctrain.records.plan.compression import AutoCompression
from hpctrain.records.plan.parallel_dims import ParallelDims
from hpctrain.records.plan.plan import Plan, Predicted, Rejected, Replica, Stage, ZeroLevel
from hpctrain.records.plan.profile import CalibrationProfile
from hpctrain.records.plan.stage_messages import Messages
from hpctrain.records.run.run import Run
from hpctrain.records.topology.topology import Topology
from hpctrain.schedule.generate import make_schedule
from hpctrain.schedule.runnable import check_runnable

Solver = Literal["auto", "exact", "paper"]


def make_plan(
    run: Run,
    spec: Spec,
    topology: Topology,
    *,
    solver: Solver = "auto",
    objective: Objective = FASTEST_STEP,
    provisional: bool = False,
    previous: Plan | None = None,
    profile: CalibrationProfile | None = None,
    neighbours: bool = True,
) -> Plan:
    """Choose degrees, layers by stage, devices, micro-batches and schedule, and predict time and memory.

    Args:
        spec: the run's model with its vocabulary settled.
        solver: 'auto' searches for the fastest plan by the cost model; 'exact' tries every plan on a few devices;
            'paper' follows the paper's rules.
        objective: what the plan is chosen by, and constraints; the solver 'paper' ignores it.
        provisional: mark the plan as made before the nodes are known.
        previous: the plan that this one replaces. Equal nodes are exchanged so that little state moves, and the plan
            lists the moves.
        profile: factors on the cost model's constants from measured steps; None: the package's constants.
        neighbours: list similar plans with the reason why they lost; only if step time is the objective.

    Raises:
        RefusedError: the model cannot fit, no or too few devices are usable, or no plan keeps the constraints.
        InputError: the run file asks for something impossible, or the topology or the objective lacks a figure.
    """
    _check_previous(previous, spec)
    work, dropped = workload_of(run, spec)
    if objective.usable is not None:
        work = replace(work, usable=objective.usable)
    pool = make_device_pool(run, topology, profile)
    work = replace(work, framework=pool.framework)
    search = Search(work, pool, CostModel(work, pool.links, pool.constants))
    candidate_dims = search.candidate_dims()
    if not candidate_dims:
        raise _no_feasible_dims(search)
    if previous is not None and solver == "auto":
        search = warm_started(previous, search, candidate_dims, run if objective.only_time else None)
    bound_s = ideal_step_s(pool, work)
    if solver == "paper":
        best, rejected, notes = _as_paper(search)
        decision, by_codec = _decision(run, search.cost, best), work.codec
    else:
        find = partial(_search, find=exhaustive_search if solver == "exact" else best_first_search)
        if objective.only_time:
            winner, decision = _fastest(run, search, candidate_dims, find)
            rejected = [
                *winner.rejected,
                *(rejected_neighbours(winner.search, winner.best, candidate_dims) if neighbours else []),
            ]
        else:
            searches = [search, *other_searches(objective, run, topology, search)]
            winner = choose(objective, topology, searches, find)
            rejected, decision = winner.rejected, _decision(run, winner.search.cost, winner.best)
        best, notes, bound_s, by_codec = winner.best, winner.notes, winner.bound_s, winner.search.work.codec
    best, spec_of_sums = decision.prediction, decision.spec
    cost = search.cost.with_work(replace(work, memory_options=best.layout.memory_options, codec=spec_of_sums.codec))
    if previous is not None:
        # This comes before the message codecs are chosen, because they belong to the stages of one layout.
        best = minimise_moves(
            cost, best, previous, () if search.warm_start is None else search.warm_start.reused_layouts
        )
    by_codec_s = bool(spec_of_sums.compared)
    unsearched = isinstance(run.compression, AutoCompression) and not (
        spec_of_sums.codec.exact and by_codec == work.codec
    )
    if run.compression.messages == "auto":
        lossy = isinstance(run.compression, AutoCompression) and run.compression.lossy
        choice = choose_messages(cost, best.layout, lossy)
        cost, best = cost.with_work(replace(cost.work, messages=choice.messages)), choice.prediction
        unsearched |= any(messages != "none" for messages in choice.messages)
        if choice.reason is not None:
            notes, by_codec_s = [*notes, choice.reason], True
    best = cut_at_seam(cost, best)
    if unsearched:
        bound_s = ideal_step_s(pool, work)  # the search's bound holds only for the codecs that it searched with
    if by_codec_s and any(unit.codec_s is None for unit in best.layout.units()):
        notes.append("What compression takes was not measured on some devices; typical values stand in.")
    idle = len(pool.devices) - len(best.layout.units()) * best.layout.tp
    if idle:
        notes.append(f"{idle} of {len(pool.devices)} usable devices stay idle.")
    plan = _plan(
        best,
        cost,
        run_sha256=run.sha256(),
        topology_sha256=topology.sha256(),
        provisional=provisional,
        solver=solver,
        compression=[spec_of_sums],
        profile=profile,
        predicted=Predicted(step_time_s=best.terms, memory_bytes=best.layout.memory(cost.memory), bound_s=bound_s),
        rejected=rejected,
        notes=[*pool.notes, *dropped, *notes],
    )
    check_runnable(plan, run)
    return plan if previous is None else _with_moves(plan, previous)


def _check_previous(previous: Plan | None, spec: Spec) -> None:
    if previous is not None and previous.layers != spec.layers:
        raise InputError(
            f"previous plan: found {previous.layers} blocks, the run's model has {spec.layers}; give a plan of this run"
        )


def _decision(run: Run, cost: CostModel, best: Prediction) -> CodecDecision:
    """The codec of a layout's gradients: the run file's, or with mode auto the best one."""
    cost = cost.with_work(replace(cost.work, memory_options=best.layout.memory_options))
    if isinstance(run.compression, AutoCompression):
        return choose_codec(cost, best.layout, run.steps, run.compression.lossy)
    return CodecDecision(CodecSpec(codec=cost.work.codec), best, best.total)


def _fastest(
    run: Run,
    search: Search,
    candidate_dims: list[ParallelDims],
    find: Callable[[Search, list[ParallelDims]], ChosenPlan],
) -> tuple[ChosenPlan, CodecDecision]:
    """Return the fastest plan and its gradient codec.

    With mode auto, if exact sums leave devices waiting or idle, a search is also made for each codec of `searched`. The
    fastest placement for large gradients may have no replicas, and then no codec helps it.
    """
    winner = find(search, candidate_dims)
    decision = _decision(run, search.cost, winner.best)
    if search.warm_start is not None and uses_one_codec(search):
        return winner, decision
    idle = len(winner.best.layout.units()) * winner.best.layout.tp < len(search.pool.devices)
    if not isinstance(run.compression, AutoCompression) or not (idle or compression_may_gain(winner.best)):
        return winner, decision
    for codec, worth in searched(run.steps, run.compression.lossy):
        try:
            other = find(search.with_codec(codec), candidate_dims)
        except HpctrainError:
            continue  # the codec's state does not fit anywhere
        compressed = _decision(run, search.cost, other.best)
        if compressed.mean_step_s <= (1 - worth) * decision.mean_step_s:
            winner, decision = other, compressed
    return winner, decision


def _with_moves(plan: Plan, previous: Plan) -> Plan:
    moves, lost = moves_between(previous, plan)
    notes = list(plan.notes)
    if lost:
        text = ", ".join(map(str, lost))
        notes.append(f"No device that is left holds blocks {text}: their state comes from a checkpoint.")
    return plan.model_copy(update={"moves": moves, "notes": notes})


def _as_paper(search: Search) -> tuple[Prediction, list[Rejected], list[str]]:
    choice = solve_as_paper(search.cost, search.pool, search.work)
    if not search.can_shard(choice.prediction.layout.placement):
        raise InputError(f"parallel: {WHY_NO_SHARDING}")
    return choice.prediction, [], list(choice.notes)


def _search(
    plain: Search, candidate_dims: list[ParallelDims], find: Callable[[Search, list[ParallelDims]], SearchResult]
) -> ChosenPlan:
    """Return the fastest plan; one with memory options if no plan fits without them.

    Raises:
        RefusedError: no plan fits even with memory options.
        InputError: no layout is possible with the given degrees and batch.
    """
    found = find(plain, candidate_dims)
    if found.best is None:
        least = plain
        if plain.work.fixed is None:
            levels: tuple[ZeroLevel, ...] = get_args(ZeroLevel)[::-1] if plain.work.may_shard_gradients else (0,)
            frugal = (plain.with_memory_options(MemoryOptions(zero=zero, recompute="full")) for zero in levels)
            least = next((search for search in frugal if search.candidate_dims()), plain)
        raise _nothing_fits(least, least.candidate_dims())
    search = found.search
    notes: list[str] = []
    rejected: list[Rejected] = []
    if search is not plain:
        notes.append(f"Chosen to save memory: {found.best.layout.memory_options}.")
        rejected.append(_why_memory_options(plain, found.best.layout))
    if not search.complete:
        notes.append("There were too many orders of devices to try all; the likely ones were tried.")
    if not found.ended:
        notes.append("Options that could be faster by the bound were left when many others had not been.")
    best = predict(search.cost, refine(search.cost, found.best, search.can_shard).layout, whole=True)
    return ChosenPlan(search, best, rejected, notes, min(found.bound_s, best.total))


def _why_memory_options(plain: Search, layout: Layout) -> Rejected:
    """The rejected neighbour with the same degrees and no memory options."""
    lack = plain.shortage_at(layout.placement, layout.schedule_spec, layout.micro_batch)
    reason = "no placement of it fits" if lack is None else describe_memory_shortage(lack)
    return Rejected(change="zero 0 and recompute none", reason=f"with {layout.dims}, {reason}")


def _no_feasible_dims(search: Search) -> HpctrainError:
    """The error for impossible degrees: too many for the devices (refused), or not possible for this model (input)."""
    dims, reason = next(iter(search.impossible.items()))
    text = f"parallel: found {dims}; {reason}"
    devices = len(search.pool.devices)
    pp, dp, tp = dims
    if pp * dp * tp > devices:
        return RefusedError(f"{text}; lower a degree or add nodes")
    return InputError(f"{text}; lower a degree, or use parallel.mode auto")


def _nothing_fits(search: Search, candidate_dims: list[ParallelDims]) -> HpctrainError:
    work = search.work
    lack = _nearest(search, candidate_dims)
    if lack == WHY_NO_SHARDING:
        return InputError(f"parallel: {lack}")
    if isinstance(lack, str):
        return InputError(f"parallel: {lack}; change batch.global, a degree, parallel.micro_batch or parallel.schedule")
    dims, excess = lack
    how = f" and {work.memory_options}" if work.memory_options != DEFAULT_MEMORY_OPTIONS else ""
    return RefusedError(
        f"the model ({format_count(work.spec.parameters())} parameters) cannot fit: with {dims}{how}, "
        f"the nearest to fitting, {describe_memory_shortage(excess)}; use more or larger devices, a smaller model or "
        "data.seq_len"
        + (", or compression.mode bf16, which keeps nothing" if work.codec.has_state else "")
        + (", or parallel.mode auto" if work.fixed is not None else "")
    )


def _nearest(search: Search, candidate_dims: list[ParallelDims]) -> tuple[ParallelDims, MemoryShortage] | str:
    """The degrees that lack the least memory, with the shortage; a sentence if no degrees have a layout."""
    lacks = [(dims, search.shortage(dims)) for dims in candidate_dims]
    short = [(dims, lack) for dims, lack in lacks if isinstance(lack, MemoryShortage)]
    if short:
        return min(short, key=lambda item: (item[1].ratio, item[0]))
    return next(lack for _, lack in lacks if isinstance(lack, str))


def _plan(best: Prediction, cost: CostModel, **known: object) -> Plan:
    layout, memory_options = best.layout, best.layout.memory_options
    edges = [0, *accumulate(layout.blocks)]
    values = {
        "pp": layout.pp,
        "dp": layout.dp,
        "tp": layout.tp,
        "zero": memory_options.zero,
        "shard": layout.shards if 1 < layout.shards < layout.dp else None,
        "sequence_parallel": memory_options.sequence_parallel,
        "schedule": layout.schedule,
        "stages": [
            Stage(layers=edge, recompute=memory_options.recompute, messages=_messages(cost, layout, stage))
            for stage, edge in enumerate(pairwise(edges))
        ],
        "replicas": [_replica(layout, replica) for replica in range(layout.dp)],
        "ranks": [place for rank in range(layout.pp) for row in layout.placement for place in row[rank].device_ids],
        "actions": {replica: _actions(layout, replica) for replica in range(layout.dp)},
    }
    return Plan.model_validate(values | known)


def _messages(cost: CostModel, layout: Layout, stage: int) -> Messages:
    """The codec of the messages from a stage to the next; "none" if no message leaves a node."""
    if stage == len(layout.blocks) - 1:
        return "none"
    hops = [(layout.unit(replica, stage), layout.unit(replica, stage + 1)) for replica in range(layout.dp)]
    return next((way for way in (cost.messages(a, b, stage) for a, b in hops) if way != "none"), "none")


def _replica(layout: Layout, replica: int) -> Replica:
    count = layout.micro_batches[replica]
    return Replica(
        sequences=layout.micro_batch * count,
        micro_batch=layout.micro_batch,
        micro_batches=count,
        devices=[list(layout.unit(replica, stage).device_ids) for stage in range(len(layout.blocks))],
    )


def _actions(layout: Layout, replica: int) -> dict[int, list[str]]:
    table = make_schedule(layout.schedule, layout.pp, len(layout.blocks), layout.micro_batches[replica])
    return dict(enumerate(table.rows()))
