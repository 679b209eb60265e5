"""Choice of a plan by an objective other than step time, among the fastest plans of several searches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hpctrain.base.errors import HpctrainError, InputError, RefusedError
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.devices.pool import make_device_pool
from hpctrain.planner.search.evaluate import best_of
from hpctrain.planner.search.neighbours import nearest_dims
from hpctrain.planner.search.objective import Objective, Score, goodput_shortfall, scorer, used_nodes
from hpctrain.planner.search.space import SearchSpace
from hpctrain.planner.search.state import ChosenPlan
from hpctrain.planner.simulate.predict import Prediction, predict
from hpctrain.records.plan.plan import ParallelDims, Rejected
from hpctrain.records.run.run import Recovery, Run
from hpctrain.records.topology.link import LinkFigures
from hpctrain.records.topology.topology import Topology

PlanSearch = Callable[[SearchSpace], ChosenPlan]


class ScoredPlan(NamedTuple):
    """A candidate with its value by the objective."""

    prediction: Prediction
    score: Score


def other_spaces(objective: Objective, run: Run, topology: Topology, whole: SearchSpace) -> list[SearchSpace]:
    """Further spaces whose fastest plans may be better by the objective than the fastest plan of all.

    robust: the space in which every message is as late as its 95th percentile. energy, cost or a least goodput: spaces
    with fewer nodes, the most efficient nodes first.
    """
    late = _with_late_messages(topology) if objective.goal == "robust" else None
    spaces = [] if late is None else [_space(run, late, whole)]
    if not objective.fewer_nodes:
        return spaces
    nodes = _by_yield(objective, whole)
    least = run.recovery.min_nodes
    counts = {2**power for power in range(len(nodes).bit_length())} | set(_edges(nodes, whole))
    fewer = [nodes[:count] for count in sorted(counts) if least <= count < len(nodes)]
    return spaces + [_space(run, topology.only(names), whole) for names in fewer]


def choose(objective: Objective, topology: Topology, spaces: Sequence[SearchSpace], fastest: PlanSearch) -> ChosenPlan:
    """Choose the best of all candidates by the objective; list the others with the reason why they lost.

    Args:
        spaces: the space of all nodes comes first. Its errors are raised; errors of the others are ignored.

    Raises:
        RefusedError: no plan fits the memory, or no candidate has the least goodput.
    """
    score = scorer(objective, topology)
    cost = spaces[0].cost
    predictions, first = _predictions(objective, spaces, fastest)
    scored: list[ScoredPlan] = []
    short_of_goodput: list[tuple[float, Prediction]] = []
    for prediction in predictions:
        goodput = goodput_shortfall(objective.goodput_constraint, prediction)
        if goodput is not None:
            short_of_goodput.append((goodput, prediction))
            continue
        same_memory = cost.with_work(memory_options=prediction.layout.memory_options)
        scored.append(ScoredPlan(prediction, score(same_memory, prediction)))
    if not scored:
        raise _too_little_goodput(objective, short_of_goodput)
    scored.sort(key=lambda plan: (plan.score.value, plan.prediction.total))
    best = scored[0]
    rejected = [*first.rejected, *_losers(objective, best, scored[1:])]
    for goodput, prediction in short_of_goodput:
        reason = f"its expected goodput is {goodput:.1%}, below what is asked"
        delta_s = prediction.total - best.prediction.total
        rejected.append(Rejected(change=_describe(prediction), delta_s=delta_s, reason=reason))
    notes = [*first.notes, _note(objective, best, len(predictions))]
    return first._replace(best=best.prediction, rejected=rejected[: spaces[0].limits.max_rejected], notes=notes)


def _predictions(
    objective: Objective, spaces: Sequence[SearchSpace], fastest: PlanSearch
) -> tuple[list[Prediction], ChosenPlan]:
    """Return the candidates of all spaces and the fastest plan of the first space.

    Each layout comes once. It is predicted with the measured topology, without late messages.
    """
    predictions: dict[object, Prediction] = {}
    chosen: list[ChosenPlan] = []
    whole = spaces[0]
    for space in spaces:
        try:
            chosen.append(fastest(space))
        except HpctrainError:
            if space is whole:
                raise
            continue
        several = space is whole or objective.goal == "robust"
        others = _others(chosen[-1], space.candidate_dims) if several else []
        for layout in (prediction.layout for prediction in (chosen[-1].best, *others)):
            device_ids = tuple(unit.device_ids for row in layout.placement for unit in row)
            key = (device_ids, layout.dims, layout.schedule, layout.micro_batch, layout.micro_batches, layout.blocks)
            if key not in predictions:
                cost = whole.cost.with_work(memory_options=layout.memory_options)
                predictions[key] = predict(cost, layout, whole=True)
    return list(predictions.values()), chosen[0]


def _others(chosen: ChosenPlan, candidate_dims: Sequence[ParallelDims]) -> list[Prediction]:
    """Return the best plans of other degrees, and of the winner's degrees with other micro-batch sizes."""
    space, best, limits = chosen.space, chosen.best.layout, chosen.space.limits
    others = [
        best_of(space, space.options([dims]), limits.other_dims_patience)
        for dims in nearest_dims(space, candidate_dims)[: limits.max_other_dims + 1]
    ]
    sizes = (size for size in space.work.micro_batch_sizes() if size != best.micro_batch)
    others += [best_of(space, space.options([best.dims], [size])) for size in sizes]
    return [other for other in others if other is not None]


def _space(run: Run, topology: Topology, whole: SearchSpace) -> SearchSpace:
    # Spares were already left out of the nodes that the whole space uses.
    used = set(whole.pool.by_node())
    nodes = topology.only([node.id for node in topology.nodes if node.id in used])
    pool = make_device_pool(run.model_copy(update={"recovery": Recovery()}), nodes, whole.pool.profile)
    return SearchSpace(pool, CostModel(whole.work, pool.links, pool.constants), whole.limits)


def _with_late_messages(topology: Topology) -> Topology | None:
    """Return the topology with each link's 95th percentile as its alpha; None if no percentiles were measured."""

    def late(figures: LinkFigures) -> LinkFigures:
        if figures.latency_s is None:
            return figures
        extra_s = figures.latency_s.p95 - figures.latency_s.p50
        backend = {
            name: cost.model_copy(update={"alpha_s": cost.alpha_s + extra_s}) for name, cost in figures.backend.items()
        }
        alpha_s = None if figures.alpha_s is None else figures.alpha_s + extra_s
        return figures.model_copy(update={"alpha_s": alpha_s, "backend": backend})

    links = [link.model_copy(update={"ab": late(link.ab), "ba": late(link.ba)}) for link in topology.fabric.links]
    if links == topology.fabric.links:
        return None
    return topology.model_copy(update={"fabric": topology.fabric.model_copy(update={"links": links})})


def _by_yield(objective: Objective, whole: SearchSpace) -> list[str]:
    """The space's nodes by FLOP/s per watt or per price, highest first; without these figures by FLOP/s."""
    known = {"energy": objective.watts, "cost": objective.prices}.get(objective.goal, {})

    def yield_of(node: str) -> float:
        devices = whole.pool.by_node()[node]
        price = sum(known.get(device.type, 0.0) for device in devices) or 1.0
        return sum(device.flops for device in devices) / price

    return sorted(whole.pool.by_node(), key=lambda node: -yield_of(node))


def _edges(nodes: Sequence[str], whole: SearchSpace) -> list[int]:
    """The numbers of leading nodes at which the kind of node changes."""
    by_node = whole.pool.by_node()
    kinds = [tuple(device.type for device in by_node[node]) for node in nodes]
    return [count for count in range(1, len(nodes)) if kinds[count] != kinds[count - 1]]


def _describe(prediction: Prediction) -> str:
    layout = prediction.layout
    nodes = len(used_nodes(layout))
    return f"{layout.dims}, {layout.schedule}, micro-batch {layout.micro_batch}, {nodes} nodes"


def _losers(objective: Objective, best: ScoredPlan, others: Sequence[ScoredPlan]) -> list[Rejected]:
    losers: dict[str, Rejected] = {}
    for other in others:
        change = _describe(other.prediction)
        if change == _describe(best.prediction):
            change += ", other devices or shares"
        delta = other.prediction.total - best.prediction.total
        reason = f"{objective.goal} is {other.score.text} instead of {best.score.text}"
        losers.setdefault(change, Rejected(change=change, delta_s=delta, reason=reason))
    return list(losers.values())


def _note(objective: Objective, best: ScoredPlan, count: int) -> str:
    text = f"Chosen by {objective.goal} ({best.score.text}) among {count} fast plans; the bound is one for time."
    if objective.goal in ("energy", "cost"):
        text += " Devices count as if they worked throughout the step."
    if objective.goodput_constraint is not None:
        text += f" Plans below a goodput of {objective.goodput_constraint.least:.0%} were left out."
    return text


def _too_little_goodput(objective: Objective, short: Sequence[tuple[float, Prediction]]) -> HpctrainError:
    if objective.goodput_constraint is None or not short:
        return InputError("no plan was found to choose from")
    goodput, prediction = max(short, key=lambda pair: pair[0])
    return RefusedError(
        f"--min-goodput: no plan keeps {objective.goodput_constraint.least:.0%}; the best, {_describe(prediction)}, "
        f"has {goodput:.1%} with checkpoints every {objective.goodput_constraint.checkpoint_every} steps; lower "
        "checkpoint.every or the goodput"
    )
