"""Objectives that a plan is chosen by (step time, step time under disturbance, energy, cost) and constraints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

import numpy as np

from hpctrain.base.errors import InputError
from hpctrain.base.units import format_seconds
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.devices.pool import DeviceSpec
from hpctrain.planner.devices.tensor_parallel_group import Placement, TensorParallelGroup
from hpctrain.planner.layout.layout import Layout
from hpctrain.planner.simulate.goodput import FailureModel, daly_goodput
from hpctrain.planner.simulate.jitter import LinkJitter, sample_step_times
from hpctrain.planner.simulate.predict import Prediction
from hpctrain.records.topology.topology import Topology

Goal = Literal["time", "robust", "energy", "cost"]

SLOW_NODE_SPEED = 0.5
"""Speed of the slow node that `robust` plans for, as a factor of its measured speed: a throttled GPU, a shared CPU."""
JITTER_DRAWS = 100
"""Number of simulated steps from which the 95th percentile is taken."""
SEED = 0
"""Seed of the random numbers; every plan gets the same ones."""
QUANTILE = 0.95


@dataclass(frozen=True)
class GoodputConstraint:
    """The least goodput that a plan must have under failures, and the figures that goodput depends on."""

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
    """What the planner minimises among the plans that meet the constraints."""

    goal: Goal = "time"
    watts: Mapping[str, float] = field(default_factory=dict)
    """Power of a busy device in watts, by device type."""
    prices: Mapping[str, float] = field(default_factory=dict)
    """Price of a device for an hour, by device type; in any currency, the same for all."""
    usable: float | None = None
    """Largest share of a device's memory that a plan may fill; None: the planner's default."""
    goodput_constraint: GoodputConstraint | None = None

    @property
    def only_time(self) -> bool:
        """Whether step time alone decides, so that the search's winner is the plan."""
        return self.goal == "time" and self.goodput_constraint is None

    @property
    def fewer_nodes(self) -> bool:
        """Whether a plan that leaves nodes out may be better than the fastest one."""
        return self.goal in ("energy", "cost") or self.goodput_constraint is not None

    def rate(self, layout: Layout) -> float:
        """Joules or currency that the layout's devices use in a second.

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


@dataclass(frozen=True)
class Score:
    """A plan's value by the objective; smaller is better."""

    value: float
    text: str
    """The value with its unit, as text."""


Scorer = Callable[[CostModel, Prediction], Score]


def scorer(objective: Objective, topology: Topology) -> Scorer:
    """Return the function that gives a plan its value by the objective.

    time: seconds of a step. robust: the 95th percentile of the step's seconds. energy: joules per token. cost: price of
    a million tokens. Energy and cost count the plan's devices as if they were busy throughout the step.
    """
    jitter = LinkJitter(topology)

    def score(cost: CostModel, prediction: Prediction) -> Score:
        if objective.goal == "time":
            return Score(prediction.total, format_seconds(prediction.total))
        if objective.goal == "robust":
            seconds = p95_step_s(cost, prediction.layout, jitter, len(topology.nodes))
            return Score(seconds, f"{format_seconds(seconds)} at p95")
        tokens = cost.work.sequences * cost.work.seq_len
        per_token = objective.rate(prediction.layout) * prediction.total / tokens
        if objective.goal == "energy":
            return Score(per_token, f"{per_token:.3g} J a token")
        return Score(per_token * 1e6, f"{per_token * 1e6:.3g} a million tokens")

    return score


def p95_step_s(cost: CostModel, layout: Layout, jitter: LinkJitter, nodes: int) -> float:
    """Return the 95th percentile of a step's seconds, with messages as late as measured and one node at half speed.

    Each of the `nodes` nodes is the slow one with the same probability; a slow node that the plan does not use does no
    harm. The layout stays: this is the time before the run is planned again.
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


def goodput_shortfall(goodput_constraint: GoodputConstraint | None, prediction: Prediction) -> float | None:
    """Return the plan's expected goodput if it is below the constraint; None if it is not, or if there is no
    constraint.
    """
    if goodput_constraint is None:
        return None
    cluster = FailureModel(
        nodes=len(used_nodes(prediction.layout)),
        node_mtbf_s=goodput_constraint.node_mtbf_s,
        stall_s=0.0,
        save_s=0.0,
        recover_s=goodput_constraint.recover_s,
    )
    reached = daly_goodput(cluster, goodput_constraint.checkpoint_every * prediction.total)
    return None if reached >= goodput_constraint.least else reached


def used_nodes(layout: Layout) -> set[str]:
    """The nodes of a layout's devices."""
    return {device.node for unit in layout.units() for device in unit.devices}


def _draws(jitter: LinkJitter, slow_nodes: int) -> int:
    """Number of draws for each slow node; 1 without jitter, because all draws are then equal."""
    return max(4, math.ceil(JITTER_DRAWS / slow_nodes)) if jitter else 1


def _with_slow(layout: Layout, node: str) -> Layout:
    @cache
    def slower(unit: TensorParallelGroup) -> TensorParallelGroup:
        if all(device.node != node for device in unit.devices):
            return unit
        return TensorParallelGroup(unit.index, tuple(_slowed(d) if d.node == node else d for d in unit.devices))

    return replace(layout, placement=Placement(tuple(slower(unit) for unit in row) for row in layout.placement))


def _slowed(device: DeviceSpec) -> DeviceSpec:
    return replace(
        device,
        flops=device.flops * SLOW_NODE_SPEED,
        bytes_per_s=device.bytes_per_s * SLOW_NODE_SPEED,
        launch_s=device.launch_s / SLOW_NODE_SPEED,
    )
