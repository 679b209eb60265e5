"""What a layout costs: its time by term from the simulated table, and a bound that needs no simulation."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from hpctrain.planner.cost import CostModel, StageTime
from hpctrain.planner.layout import Layout
from hpctrain.planner.simulate import Pace, simulate
from hpctrain.schedule.generate import make_schedule

TERMS = ("compute", "pipeline_bubble", "pipeline_send", "tensor_parallel", "data_parallel", "optimizer")
"""Terms of a step's time; they add up to 'total'."""


@dataclass(frozen=True, eq=False)
class Prediction:
    """A layout and its time."""

    layout: Layout
    terms: dict[str, float]
    """Seconds by term, with their sum as 'total'."""

    @property
    def total(self) -> float:
        return self.terms["total"]


def predict(cost: CostModel, layout: Layout) -> Prediction:
    """Simulate every replica's table, then the sums over replicas, then the update.

    The terms describe the replica that is done last: what its busiest pipeline rank computes, and what keeps the
    step from being just that.
    """
    paces = [_pace(cost, layout, replica) for replica in range(layout.dp)]
    runs = {}
    for pace, count in zip(paces, layout.micro_batches, strict=True):
        if (pace, count) not in runs:
            table = make_schedule(layout.schedule, layout.pp, len(layout.blocks), count)
            runs[pace, count] = simulate(table, pace)
    lines = [runs[key] for key in zip(paces, layout.micro_batches, strict=True)]
    last = max(range(layout.dp), key=lambda replica: lines[replica].makespan)
    pipeline, update = lines[last].makespan, _update(cost, layout)
    sums = _gradient_sums(cost, layout)
    ends = [max(line.rank_end(rank) for line in lines) + sums[rank] for rank in range(layout.pp)]

    table = make_schedule(layout.schedule, layout.pp, len(layout.blocks), layout.micro_batches[last])
    unhindered = simulate(table, paces[last].without_sends()).makespan if layout.pp > 1 else pipeline
    busiest = max(range(layout.pp), key=lines[last].busy)
    busy = lines[last].busy(busiest)
    shared = layout.micro_batches[last] * sum(
        stage.tensor_parallel for stage in _stage_times(cost, layout, last)[busiest :: layout.pp]
    )
    terms = {
        "compute": busy - shared,
        "pipeline_bubble": max(0.0, unhindered - busy),
        "pipeline_send": max(0.0, pipeline - unhindered),
        "tensor_parallel": shared,
        "data_parallel": max(ends) - pipeline,
        "optimizer": update,
    }
    return Prediction(layout, terms | {"total": sum(terms.values())})


def lower_bound(cost: CostModel, layout: Layout) -> float:
    """Seconds that no table of this layout beats: each rank's work, what must come before its first forward and after
    its last backward, the sums over replicas and the update."""
    sums, update, pp = _gradient_sums(cost, layout), _update(cost, layout), layout.pp
    bound = 0.0
    for replica, count in enumerate(layout.micro_batches):
        pace = _pace(cost, layout, replica)
        way_in = [0.0, *accumulate(pace.forward[s] + pace.send[s] for s in range(pp - 1))]
        way_out = [0.0, *accumulate(pace.backward[s] + pace.send_back[s] for s in range(pp - 1))]
        for rank in range(pp):
            busy = count * (sum(pace.forward[rank::pp]) + sum(pace.backward[rank::pp]))
            tail = max(sums[rank], way_out[rank] + sums[0])
            bound = max(bound, way_in[rank] + busy + tail)
    return bound + update


def _pace(cost: CostModel, layout: Layout, replica: int) -> Pace:
    times = _stage_times(cost, layout, replica)
    units = [layout.unit(replica, stage) for stage in range(len(times))]
    hops = list(pairwise(units))
    return Pace(
        forward=tuple(stage.forward for stage in times),
        backward=tuple(stage.backward for stage in times),
        send=tuple(cost.send(a, b, layout.micro_batch) for a, b in hops),
        send_back=tuple(cost.send(b, a, layout.micro_batch) for a, b in hops),
    )


def _stage_times(cost: CostModel, layout: Layout, replica: int) -> list[StageTime]:
    return [
        cost.stage(layout.unit(replica, stage), layout.micro_batch, share) for stage, share in enumerate(layout.shares)
    ]


def _gradient_sums(cost: CostModel, layout: Layout) -> list[float]:
    """Seconds by pipeline rank: each sums its gradients over the replicas when its last backward is done."""
    rings = [[layout.unit(replica, stage) for replica in range(layout.dp)] for stage in range(len(layout.blocks))]
    by_stage = cost.gradient_sums(rings, layout.shares)
    return [sum(by_stage[rank :: layout.pp]) for rank in range(layout.pp)]


def _update(cost: CostModel, layout: Layout) -> float:
    """The norm's sum and the slowest unit's optimizer."""
    slowest = 0.0
    for replica in layout.cells:
        for rank, unit in enumerate(replica):
            slowest = max(slowest, sum(cost.optimizer(unit, share) for share in layout.shares[rank :: layout.pp]))
    return cost.norm_sum(layout.units()) + slowest
