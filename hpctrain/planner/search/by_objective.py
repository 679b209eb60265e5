"""Choice of a plan by an objective other than step time, among the fastest plans of several searches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hpctrain.base.errors import HpctrainError, InputError, RefusedError
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.devices.pool import make_device_pool
from hpctrain.planner.search.neighbours import MAX_OTHER_DIMS, OTHER_DIMS_PATIENCE, nearest_dims
from hpctrain.planner.search.objective import Objective, Score, goodput_shortfall, scorer
from hpctrain.planner.search.option_search import Search
from hpctrain.planner.simulate.predict import Prediction, predict
from hpctrain.records.plan.parallel_dims import ParallelDims
from hpctrain.records.plan.plan import Rejected
from hpctrain.records.run.run import Recovery, Run
from hpctrain.records.topology.link import LinkFigures
from hpctrain.records.topology.topology import Topology

MAX_REJECTED = 12
"""Rejected candidates that the plan lists."""


class ChosenPlan(NamedTuple):
    """The chosen plan of a search, with rejected candidates and notes for the person."""

    search: Search
    best: Prediction
    rejected: list[Rejected]
    notes: list[str]
    bound_s: float
    """Seconds that none of the plans in the search space beats."""


PlanSearch = Callable[[Search, list[ParallelDims]], ChosenPlan]


@dataclass(frozen=True, eq=False)
class ScoredPlan:
    """A candidate with its value by the objective."""

    prediction: Prediction
    score: Score


def other_searches(objective: Objective, run: Run, topology: Topology, whole: Search) -> list[Search]:
    """Further searches whose winners may be better by the objective than the fastest plan.

    robust: with every message as late as its 95th percentile. energy, cost or a least goodput: on fewer nodes, the most
    efficient ones first.
    """
    late = _with_late_messages(topology) if objective.goal == "robust" else None
    searches = [] if late is None else [_search(run, late, whole)]
    if not objective.fewer_nodes:
        return searches
    nodes = _by_yield(objective, whole)
    least = run.recovery.min_nodes
    counts = {2**power for power in range(len(nodes).bit_length())} | set(_edges(nodes, whole))
    fewer = [nodes[:count] for count in sorted(counts) if least <= count < len(nodes)]
    return searches + [_search(run, topology.only(names), whole) for names in fewer]


def choose(objective: Objective, topology: Topology, searches: Sequence[Search], fastest: PlanSearch) -> ChosenPlan:
    """Choose the best of all candidates by the objective; list the others with the reason why they lost.

    Args:
        searches: the search over all nodes first. Its errors are raised; errors of the others are ignored.

    Raises:
        RefusedError: nothing fits, or no candidate keeps the least goodput.
    """
    score = scorer(objective, topology)
    cost = searches[0].cost
    found, first = _predictions(objective, searches, fastest)
    kept, falls = [], []
    for prediction in found:
        goodput = (
            goodput_shortfall(objective.goodput_constraint, prediction)
            if objective.goodput_constraint is not None
            else None
        )
        if goodput is not None:
            falls.append((goodput, prediction))
            continue
        own = cost.with_work(replace(cost.work, memory_options=prediction.layout.memory_options))
        kept.append(ScoredPlan(prediction, score(own, prediction)))
    if not kept:
        raise _too_little_goodput(objective, falls)
    kept.sort(key=lambda each: (each.score.value, each.prediction.total))
    best = kept[0]
    rejected = [*first.rejected, *_losers(objective, best, kept[1:])]
    rejected += [_fell(best.prediction, goodput, prediction) for goodput, prediction in falls]
    notes = [*first.notes, _note(objective, best, len(found))]
    return first._replace(best=best.prediction, rejected=rejected[:MAX_REJECTED], notes=notes)


def _predictions(
    objective: Objective, searches: Sequence[Search], fastest: PlanSearch
) -> tuple[list[Prediction], ChosenPlan]:
    """The candidates of all searches and the result of the first search.

    Each layout comes once, and is predicted with the measured topology, without late messages.
    """
    predictions: dict[object, Prediction] = {}
    first: ChosenPlan | None = None
    for number, search in enumerate(searches):
        candidate_dims = search.candidate_dims()
        try:
            if not candidate_dims:
                continue
            found = fastest(search, candidate_dims)
        except HpctrainError:
            if number == 0:
                raise
            continue
        first = first or found
        several = number == 0 or objective.goal == "robust"
        for prediction in [found.best, *(_others(found, candidate_dims) if several else [])]:
            layout = prediction.layout
            work = replace(searches[0].work, memory_options=layout.memory_options)
            device_ids = tuple(unit.device_ids for row in layout.placement for unit in row)
            key = (device_ids, layout.dims, layout.schedule, layout.micro_batch, layout.micro_batches, layout.blocks)
            if key not in predictions:
                predictions[key] = predict(searches[0].cost.with_work(work), layout, whole=True)
    assert first is not None, "the first search found something, or it raised"
    return list(predictions.values()), first


def _others(found: ChosenPlan, candidate_dims: list[ParallelDims]) -> list[Prediction]:
    """The best plans of other degrees, and of the winner's degrees with other micro-batch sizes."""
    search, best = found.search, found.best.layout
    sizes = search.work.micro_batch_sizes()
    others = [
        search.best([dims], sizes, OTHER_DIMS_PATIENCE)
        for dims in nearest_dims(search, candidate_dims)[: MAX_OTHER_DIMS + 1]
    ]
    others += [search.best([best.dims], [size]) for size in sizes if size != best.micro_batch]
    return [other for other in others if other is not None]


def _search(run: Run, topology: Topology, whole: Search) -> Search:
    # Spares were already left out of the nodes that the whole search uses.
    used = set(whole.pool.by_node())
    rest = topology.only([node.id for node in topology.nodes if node.id in used])
    pool = make_device_pool(run.model_copy(update={"recovery": Recovery()}), rest, whole.pool.profile)
    return Search(whole.work, pool, CostModel(whole.work, pool.links, pool.constants))


def _with_late_messages(topology: Topology) -> Topology | None:
    """The topology with each link's 95th percentile as its start-up time; None if no spread was measured."""

    def late(figures: LinkFigures) -> LinkFigures:
        if figures.latency_s is None:
            return figures
        extra_s = figures.latency_s.p95 - figures.latency_s.p50
        backend = {
            name: each.model_copy(update={"alpha_s": each.alpha_s + extra_s}) for name, each in figures.backend.items()
        }
        alpha_s = None if figures.alpha_s is None else figures.alpha_s + extra_s
        return figures.model_copy(update={"alpha_s": alpha_s, "backend": backend})

    links = [link.model_copy(update={"ab": late(link.ab), "ba": late(link.ba)}) for link in topology.fabric.links]
    if links == topology.fabric.links:
        return None
    return topology.model_copy(update={"fabric": topology.fabric.model_copy(update={"links": links})})


def _by_yield(objective: Objective, whole: Search) -> list[str]:
    """The search's nodes, sorted by FLOP/s per watt or per price, highest first; without such figures by FLOP/s."""
    known = {"energy": objective.watts, "cost": objective.prices}.get(objective.goal, {})

    def taken(node: str) -> float:
        devices = whole.pool.by_node()[node]
        price = sum(known.get(device.type, 0.0) for device in devices) or 1.0
        return -sum(device.flops for device in devices) / price

    return sorted(whole.pool.by_node(), key=taken)


def _edges(nodes: Sequence[str], whole: Search) -> list[int]:
    """The counts of leading nodes after which another kind of node begins."""
    by_node = whole.pool.by_node()
    kinds = [tuple(device.type for device in by_node[node]) for node in nodes]
    return [count for count in range(1, len(nodes)) if kinds[count] != kinds[count - 1]]


def _describe(prediction: Prediction) -> str:
    layout = prediction.layout
    nodes = len({device.node for unit in layout.units() for device in unit.devices})
    return f"{layout.dims}, {layout.schedule}, micro-batch {layout.micro_batch}, {nodes} nodes"


def _losers(objective: Objective, best: ScoredPlan, others: Sequence[ScoredPlan]) -> list[Rejected]:
    told: dict[str, Rejected] = {}
    for other in others:
        change = _describe(other.prediction)
        if change == _describe(best.prediction):
            change += ", other devices or shares"
        delta = other.prediction.total - best.prediction.total
        reason = f"{objective.goal} is {other.score.text} instead of {best.score.text}"
        told.setdefault(change, Rejected(change=change, delta_s=delta, reason=reason))
    return list(told.values())


def _fell(best: Prediction, goodput: float, prediction: Prediction) -> Rejected:
    reason = f"its expected goodput is {goodput:.1%}, below what is asked"
    return Rejected(change=_describe(prediction), delta_s=prediction.total - best.total, reason=reason)


def _note(objective: Objective, best: ScoredPlan, count: int) -> str:
    text = f"Chosen by {objective.goal} ({best.score.text}) among {count} fast plans; the bound is one for time."
    if objective.goal in ("energy", "cost"):
        text += " Devices count as if they worked throughout the step."
    if objective.goodput_constraint is not None:
        text += f" Plans below a goodput of {objective.goodput_constraint.least:.0%} were left out."
    return text


def _too_little_goodput(objective: Objective, falls: Sequence[tuple[float, Prediction]]) -> HpctrainError:
    if objective.goodput_constraint is None or not falls:
        return InputError("no plan was found to choose from")
    goodput, prediction = max(falls, key=lambda each: each[0])
    return RefusedError(
        f"--min-goodput: no plan keeps {objective.goodput_constraint.least:.0%}; the best, {_describe(prediction)}, "
        f"has {goodput:.1%} with checkpoints every {objective.goodput_constraint.checkpoint_every} steps; lower "
        "checkpoint.every or the goodput"
    )
