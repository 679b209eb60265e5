"""What a layout costs: its time by term from the simulated table, and a bound that needs no simulation."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from hpctrain.base.units import format_seconds
from hpctrain.planner.cost import CostModel, StageTime
from hpctrain.planner.layout import Layout
from hpctrain.planner.shard_time import ShardTime, shard_times
from hpctrain.planner.simulate import Pace, Timeline, simulate
from hpctrain.planner.unit import Unit
from hpctrain.schedule.generate import SPLIT_BACKWARD, make_schedule

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


@dataclass(frozen=True, eq=False)
class SimulatedStep:
    """A step action by action, and what follows it."""

    paces: list[Pace]
    """By replica."""
    lines: list[Timeline]
    """By replica."""
    sums: list[float]
    """Seconds in which each pipeline rank sums its gradients over the replicas, when its last backward is done."""
    update: float
    """Seconds of the norm and the optimizer, when all sums are done."""
    sharded: list[ShardTime]
    """ZeRO's collectives by stage."""

    @property
    def last(self) -> int:
        """The replica whose pipeline is done last."""
        return max(range(len(self.lines)), key=lambda replica: self.lines[replica].makespan)

    def summed(self, rank: int) -> float:
        """When the sums of a pipeline rank are done."""
        return max(line.rank_end(rank) for line in self.lines) + self.sums[rank]


def simulate_step(cost: CostModel, layout: Layout) -> SimulatedStep:
    """Simulate every replica's table, then the sums over replicas, then the update."""
    sharded = _shard_times(cost, layout)
    paces = _paces(cost, layout, sharded)
    runs: dict[tuple[Pace, int], Timeline] = {}
    for pace, count in zip(paces, layout.micro_batches, strict=True):
        if (pace, count) not in runs:
            table = make_schedule(layout.schedule, layout.pp, len(layout.blocks), count)
            runs[pace, count] = simulate(table, pace)
    lines = [runs[key] for key in zip(paces, layout.micro_batches, strict=True)]
    return SimulatedStep(paces, lines, _gradient_sums(cost, layout, sharded), _update(cost, layout), sharded)


def predict(cost: CostModel, layout: Layout) -> Prediction:
    """The time of a step by term.

    The terms describe the replica that is done last: what its busiest pipeline rank computes, and what keeps the
    step from being just that.
    """
    step = simulate_step(cost, layout)
    last, lines = step.last, step.lines
    pipeline = lines[last].makespan
    ends = [step.summed(rank) for rank in range(layout.pp)]

    table = make_schedule(layout.schedule, layout.pp, len(layout.blocks), layout.micro_batches[last])
    unhindered = simulate(table, step.paces[last].without_sends()).makespan if layout.pp > 1 else pipeline
    busiest = max(range(layout.pp), key=lines[last].busy)
    busy = lines[last].busy(busiest)
    times, own = _stage_times(cost, layout, last), layout.stages_by_rank[busiest]
    shared = layout.micro_batches[last] * sum(times[stage].tensor_parallel for stage in own)
    sharding = layout.micro_batches[last] * sum(_waits(layout, step.sharded[stage]) for stage in own)
    terms = {
        "compute": busy - shared - sharding,
        "pipeline_bubble": max(0.0, unhindered - busy),
        "pipeline_send": max(0.0, pipeline - unhindered),
        "tensor_parallel": shared,
        "data_parallel": max(ends) - pipeline + sharding,
        "optimizer": step.update,
    }
    return Prediction(layout, terms | {"total": sum(terms.values())})


def blame(before: dict[str, float], after: dict[str, float]) -> str:
    """The term that grew the most, with both its values."""
    term = max(TERMS, key=lambda name: after[name] - before[name])
    return f"{term} is {format_seconds(after[term])} instead of {format_seconds(before[term])}"


def lower_bound(cost: CostModel, layout: Layout) -> float:
    """Seconds that no table of this layout beats: each rank's work, what must come before its first forward and after
    its last backward, the sums over replicas and the update."""
    sharded = _shard_times(cost, layout)
    sums, update, pp = _gradient_sums(cost, layout, sharded), _update(cost, layout), layout.pp
    split = layout.schedule in SPLIT_BACKWARD
    bound = 0.0
    for pace, count in zip(_paces(cost, layout, sharded), layout.micro_batches, strict=True):
        way_in = [0.0, *accumulate(pace.forward[s] + pace.send[s] for s in range(pp - 1))]
        way_out = [0.0, *accumulate(pace.backward[s] + pace.send_back[s] for s in range(pp - 1))]
        backward = [i + w for i, w in zip(pace.inputs, pace.weights, strict=True)] if split else pace.backward
        for rank, own in enumerate(layout.stages_by_rank):
            busy = count * sum(pace.forward[stage] + backward[stage] for stage in own)
            # Where weights' backwards may wait, a rank's last action may be one that nobody waits for.
            tail = sums[rank] if split else max(sums[rank], way_out[rank] + sums[0])
            bound = max(bound, way_in[rank] + busy + tail)
    return bound + update


def _paces(cost: CostModel, layout: Layout, sharded: list[ShardTime]) -> list[Pace]:
    """The pace of each replica."""
    paces = [_pace(cost, layout, replica, sharded) for replica in range(layout.dp)]
    if layout.saving.equal_counts and len(set(paces)) > 1:
        # Collectives in every micro-batch keep the replicas in step with the slowest.
        forward, backward, send, send_back, inputs, weights = (
            tuple(map(max, zip(*values, strict=True))) for values in zip(*map(_as_tuple, paces), strict=True)
        )
        slowest = Pace(forward, backward, send, send_back, inputs, weights, paces[0].blocking)
        paces = [slowest] * layout.dp
    return paces


def _as_tuple(pace: Pace) -> tuple[tuple[float, ...], ...]:
    return pace.forward, pace.backward, pace.send, pace.send_back, pace.inputs, pace.weights


def _pace(cost: CostModel, layout: Layout, replica: int, sharded: list[ShardTime]) -> Pace:
    times = _stage_times(cost, layout, replica)
    units = [layout.unit(replica, stage) for stage in range(len(times))]
    hops = list(pairwise(units))
    waits = [each.per_micro_batch(layout.saving.zero) for each in sharded]
    return Pace(
        forward=tuple(stage.forward + wait[0] for stage, wait in zip(times, waits, strict=True)),
        backward=tuple(stage.backward + wait[1] for stage, wait in zip(times, waits, strict=True)),
        send=tuple(cost.send(a, b, layout.micro_batch) for a, b in hops),
        send_back=tuple(cost.send(b, a, layout.micro_batch) for a, b in hops),
        inputs=tuple(stage.inputs + wait[2] for stage, wait in zip(times, waits, strict=True)),
        weights=tuple(stage.weights + wait[3] for stage, wait in zip(times, waits, strict=True)),
        blocking=cost.work.framework.blocking_sends,
    )


def _waits(layout: Layout, times: ShardTime) -> float:
    """Seconds of a stage's collectives in a micro-batch."""
    forward, backward, inputs, weights = times.per_micro_batch(layout.saving.zero)
    return forward + (inputs + weights if layout.schedule in SPLIT_BACKWARD else backward)


def _stage_times(cost: CostModel, layout: Layout, replica: int) -> list[StageTime]:
    return [
        cost.stage(layout.unit(replica, stage), layout.micro_batch, share) for stage, share in enumerate(layout.shares)
    ]


def _rings(layout: Layout) -> list[list[Unit]]:
    """[stage] -> the units of its replicas."""
    return [[layout.unit(replica, stage) for replica in range(layout.dp)] for stage in range(len(layout.blocks))]


def _shard_times(cost: CostModel, layout: Layout) -> list[ShardTime]:
    """ZeRO's collectives by stage."""
    if layout.shards == 1:
        return [ShardTime(0.0, 0.0, 0.0)] * len(layout.blocks)
    return shard_times(cost.links, cost.work, _rings(layout), layout.shares, layout.shards)


def _gradient_sums(cost: CostModel, layout: Layout, sharded: list[ShardTime]) -> list[float]:
    """Seconds by pipeline rank: each sums its gradients over the replicas when its last backward is done."""
    if layout.shards == 1:
        by_stage = cost.gradient_sums(_rings(layout), layout.shares)
    else:
        by_stage = [each.per_step(layout.saving.zero) for each in sharded]
    tied = cost.tied_sum(layout.unit(0, 0), layout.unit(0, len(layout.blocks) - 1))
    ends = (layout.owner[0], layout.owner[-1])
    return [
        sum(by_stage[stage] for stage in own) + tied * (rank in ends) for rank, own in enumerate(layout.stages_by_rank)
    ]


def _update(cost: CostModel, layout: Layout) -> float:
    """The norm's sum and the slowest unit's optimizer."""
    slowest = 0.0
    for replica in layout.cells:
        for unit, own in zip(replica, layout.stages_by_rank, strict=True):
            update = sum(cost.optimizer(unit, layout.shares[stage], layout.micro_batch, layout.shards) for stage in own)
            slowest = max(slowest, cost.once(unit) + update)
    return cost.norm_sum(layout.units()) + slowest
