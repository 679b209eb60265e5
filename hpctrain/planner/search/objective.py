"""The objectives of a plan (step time, step time under disturbance, energy, cost) and its constraints, and the choice
among the fastest plans of several searches by objective and constraints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal, NamedTuple

import numpy as np

from hpctrain.base.errors import HpctrainError, InputError, RefusedError
from hpctrain.base.units import format_seconds
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.devices.pool import make_device_pool
from hpctrain.planner.devices.tensor_parallel_group import Placement, TensorParallelGroup
from hpctrain.planner.layout.layout import Layout
from hpctrain.planner.search.evaluate import best_of
from hpctrain.planner.search.neighbours import nearest_dims
from hpctrain.planner.search.space import SearchSpace
from hpctrain.planner.search.state import ChosenPlan
from hpctrain.planner.simulate.goodput import FailureModel, daly_goodput
from hpctrain.planner.simulate.jitter import LinkJitter, sample_step_times
from hpctrain.planner.simulate.predict import Prediction, predict
from hpctrain.records.plan.plan import ParallelDims
from hpctrain.records.plan.prediction import Rejected
from hpctrain.records.run.recovery import Recovery
from hpctrain.records.run.run import Run
from hpctrain.records.topology.link import LinkFigures
from hpctrain.records.topology.topology import Topology

Goal = Literal["time", "robust", "energy", "cost"]

SLOW_NODE_SPEED = 0.5
"""Speed of the slow node for which `robust` plans, as a factor of its measured speed; a throttled GPU or a shared CPU
may be that slow."""
JITTER_DRAWS = 100
"""Number of simulated steps from which the 95th percentile of the step time is taken."""
SEED = 0
"""Seed of the random delays. Every plan gets the same delays, so that chance does not decide between two plans."""
QUANTILE = 0.95


@dataclass(frozen=True)
class GoodputConstraint:
    """The least goodput that a plan must have under failures, and the figures on which goodput depends."""

    least: float
    """Least share of the time that must become training which is not lost again."""
    node_mtbf_s: float
    """Mean time between failures of one node, seconds."""
    recover_s: float
    """Seconds from a failure until training goes on."""
    checkpoint_every: int
    """Steps between two checkpoints."""


@dataclass(frozen=True)
class Objective:
    """The quantity that the planner minimises (`goal`), and the constraints that a plan must meet."""

    goal: Goal = "time"
    watts: Mapping[str, float] = field(default_factory=dict)
    """Power of a busy device in watts, by device type."""
    prices: Mapping[str, float] = field(default_factory=dict)
    """Price of a device for an hour, by device type; all in one currency."""
    usable: float | None = None
    """Largest share of a device's memory that a plan may fill; None: the planner's default."""
    goodput_constraint: GoodputConstraint | None = None

    @property
    def only_time(self) -> bool:
        """Whether step time alone decides, so that the search's winner is the plan."""
        return self.goal == "time" and self.goodput_constraint is None

    @property
    def fewer_nodes(self) -> bool:
        """Whether a plan that leaves nodes out may be better by this objective than the plan with the shortest step."""
        return self.goal in ("energy", "cost") or self.goodput_constraint is not None

    def rate(self, layout: Layout) -> float:
        """Return the joules that the layout's devices use in a second, or with the goal 'cost' their price for a
        second.

        Raises:
            InputError: the power or price of a device type is not known.
        """
        known = self.watts if self.goal == "energy" else self.prices
        types = [device.type for unit in layout.units() for device in unit.devices]
        missing = sorted(set(types) - set(known))
        if missing:
            what = "power of" if self.goal == "energy" else "price of"
            option = f"--power {missing[0]}=WATTS" if self.goal == "energy" else f"--price {missing[0]}=PER_HOUR"
            raise InputError(f"--objective {self.goal}: the {what} {', '.join(missing)} is not known; give {option}")
        return sum(known[name] for name in types) / (1.0 if self.goal == "energy" else 3600.0)


FASTEST_STEP = Objective()
"""The default objective: step time alone."""


def p95_step_s(cost: CostModel, layout: Layout, jitter: LinkJitter, nodes: int) -> float:
    """Return the 95th percentile of a step's seconds, with messages as late as measured and one node at half speed.

    Each of the `nodes` nodes is the slow one with the same probability; a slow node that the plan does not use does no
    harm. The layout stays, because the percentile stands for the time before the run is planned again.

    Args:
        nodes: number of nodes of the topology.
    """
    used = sorted(used_nodes(layout))
    rng = np.random.default_rng(SEED)
    count = _draws(jitter, len(used))
    # Each slow node gets its exact share of the draws, so that chance does not decide between two plans.
    weights: list[float] = []
    draws = []
    for node in used:
        fresh = CostModel(cost.work, cost.links, cost.constants)
        draws.append(sample_step_times(fresh, _with_slow(layout, node), jitter, count, rng))
        weights += [1 / nodes / len(draws[-1])] * len(draws[-1])
    unharmed = nodes - len(used)
    if unharmed > 0:
        draws.append(sample_step_times(cost, layout, jitter, count, rng))
        weights += [unharmed / nodes / len(draws[-1])] * len(draws[-1])
    values, chances = np.concatenate(draws), np.array(weights)
    order = np.argsort(values)
    reached = np.cumsum(chances[order])
    return float(values[order][np.searchsorted(reached, QUANTILE - 1e-9)])


def expected_goodput(goodput_constraint: GoodputConstraint, prediction: Prediction) -> float:
    """Return the plan's expected goodput if nodes fail as often as the constraint says."""
    cluster = FailureModel(
        nodes=len(used_nodes(prediction.layout)),
        node_mtbf_s=goodput_constraint.node_mtbf_s,
        stall_s=0.0,
        save_s=0.0,
        recover_s=goodput_constraint.recover_s,
    )
    return daly_goodput(cluster, goodput_constraint.checkpoint_every * prediction.total)


def used_nodes(layout: Layout) -> set[str]:
    """Return the names of the nodes of a layout's devices."""
    return {device.node for unit in layout.units() for device in unit.devices}


def _draws(jitter: LinkJitter, slow_nodes: int) -> int:
    """Return how often the step is simulated with random delays of messages, for each slow node; 1 without jitter,
    because all these steps then take equally long.

    Args:
        slow_nodes: number of nodes that are the slow one in turn.
    """
    return max(4, math.ceil(JITTER_DRAWS / slow_nodes)) if jitter else 1


def _with_slow(layout: Layout, node: str) -> Layout:
    @cache
    def slower(unit: TensorParallelGroup) -> TensorParallelGroup:
        if all(device.node != node for device in unit.devices):
            return unit
        return TensorParallelGroup(
            unit.index, tuple(d.slower(1 / SLOW_NODE_SPEED) if d.node == node else d for d in unit.devices)
        )

    return replace(layout, placement=Placement(tuple(slower(unit) for unit in row) for row in layout.placement))


PlanSearch = Callable[[SearchSpace], ChosenPlan]


class ScoredPlan(NamedTuple):
    """A candidate plan with its value by the objective; smaller is better."""

    prediction: Prediction
    value: float
    text: str
    """The value with its unit, as text."""


def other_spaces(objective: Objective, run: Run, topology: Topology, whole: SearchSpace) -> list[SearchSpace]:
    """Return further spaces whose fastest plans may be better by the objective than the fastest plan of all.

    robust: the space in which every message is as late as its 95th percentile. energy, cost or a least goodput: spaces
    with fewer nodes, the most efficient nodes first.

    Args:
        whole: the space of all usable nodes.
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
    """Return the plan that is best by the objective among the candidates of all spaces; its `rejected` lists the other
    candidates with the reason why they lost.

    Args:
        spaces: spaces in which plans are searched, the one of all nodes first. Errors of the search in the first space
            are raised; those of searches in other spaces are ignored.
        fastest: returns the fastest plan of a space.

    Raises:
        RefusedError: no plan fits the memory, or no candidate reaches the goodput that the objective requires.
        InputError: no layout is possible, or the power or the price of a device type is not known.
    """
    cost, constraint, jitter = spaces[0].cost, objective.goodput_constraint, LinkJitter(topology)
    predictions, first = _predictions(objective, spaces, fastest)
    scored: list[ScoredPlan] = []
    short_of_goodput: list[tuple[float, Prediction]] = []
    for prediction in predictions:
        if constraint and (goodput := expected_goodput(constraint, prediction)) < constraint.least:
            short_of_goodput.append((goodput, prediction))
            continue
        same_memory = cost.with_work(memory_options=prediction.layout.memory_options)
        scored.append(_scored(objective, same_memory, prediction, jitter, len(topology.nodes)))
    if constraint and not scored:
        raise _too_little_goodput(constraint, short_of_goodput)
    scored.sort(key=lambda plan: (plan.value, plan.prediction.total))
    best = scored[0]
    rejected = [*first.rejected, *_losers(objective, best, scored[1:])]
    for goodput, prediction in short_of_goodput:
        reason = f"its expected goodput is {goodput:.1%}, below what is asked"
        delta_s = prediction.total - best.prediction.total
        rejected.append(Rejected(change=_describe(prediction), delta_s=delta_s, reason=reason))
    notes = [*first.notes, _note(objective, best, len(predictions))]
    return first._replace(best=best.prediction, rejected=rejected[: spaces[0].limits.max_rejected], notes=notes)


def _scored(
    objective: Objective, cost: CostModel, prediction: Prediction, jitter: LinkJitter, nodes: int
) -> ScoredPlan:
    """Return a plan with its value by the objective.

    time: seconds of a step. robust: the 95th percentile of the step's seconds. energy: joules per token. cost: price of
    a million tokens. Energy and cost count the plan's devices as if they were busy throughout the step.

    Args:
        jitter: random delays of the links' messages, for the objective robust.
        nodes: number of nodes of the topology.
    """
    if objective.goal == "time":
        return ScoredPlan(prediction, prediction.total, format_seconds(prediction.total))
    if objective.goal == "robust":
        seconds = p95_step_s(cost, prediction.layout, jitter, nodes)
        return ScoredPlan(prediction, seconds, f"{format_seconds(seconds)} at p95")
    per_token = objective.rate(prediction.layout) * prediction.total / (cost.work.sequences * cost.work.seq_len)
    if objective.goal == "energy":
        return ScoredPlan(prediction, per_token, f"{per_token:.3g} J a token")
    return ScoredPlan(prediction, per_token * 1e6, f"{per_token * 1e6:.3g} a million tokens")


def _predictions(
    objective: Objective, spaces: Sequence[SearchSpace], fastest: PlanSearch
) -> tuple[list[Prediction], ChosenPlan]:
    """Return (predictions of the candidates of all spaces, the fastest plan of the first space).

    Each layout comes once. It is predicted with the topology as measured, even if it was found in the space in which
    every message is as late as its 95th percentile (objective robust).

    Args:
        fastest: returns the fastest plan of a space.
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
    """Return the best layout of each of the degrees with the smallest bounds, and the best layout of the chosen plan's
    degrees with each other micro-batch size. Degrees and sizes without a layout are left out."""
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
    """Return the topology with the alphas of each link (over TCP and over the training backend) raised by p95 − p50 of
    its latency; None if no alpha changes, as without measured latencies.
    """

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
    """Return the names of the space's nodes, sorted by FLOP/s per watt (objective energy), by FLOP/s per price (cost)
    or by FLOP/s (others), highest first.

    Args:
        whole: the space of all usable nodes.
    """
    known = {"energy": objective.watts, "cost": objective.prices}.get(objective.goal, {})

    def yield_of(node: str) -> float:
        devices = whole.pool.by_node()[node]
        price = sum(known.get(device.type, 0.0) for device in devices) or 1.0
        return sum(device.flops for device in devices) / price

    return sorted(whole.pool.by_node(), key=lambda node: -yield_of(node))


def _edges(nodes: Sequence[str], whole: SearchSpace) -> list[int]:
    """Return each number n such that the n-th node and the next one have devices of different types.

    Args:
        nodes: names of the nodes in the order in which plans take them.
        whole: the space of all usable nodes.
    """
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
        reason = f"{objective.goal} is {other.text} instead of {best.text}"
        losers.setdefault(change, Rejected(change=change, delta_s=delta, reason=reason))
    return list(losers.values())


def _note(objective: Objective, best: ScoredPlan, count: int) -> str:
    text = f"Chosen by {objective.goal} ({best.text}) among {count} fast plans; the bound is one for time."
    if objective.goal in ("energy", "cost"):
        text += " Devices count as if they worked throughout the step."
    if objective.goodput_constraint is not None:
        text += f" Plans below a goodput of {objective.goodput_constraint.least:.0%} were left out."
    return text


def _too_little_goodput(
    constraint: GoodputConstraint, short_of_goodput: Sequence[tuple[float, Prediction]]
) -> RefusedError:
    goodput, prediction = max(short_of_goodput, key=lambda pair: pair[0])
    return RefusedError(
        f"--min-goodput: no plan keeps {constraint.least:.4g}; the best, {_describe(prediction)}, has {goodput:.4g} "
        f"with checkpoints every {constraint.checkpoint_every} steps; lower checkpoint.every or the goodput"
    )
