"""Predicts the terms of a layout's step time by simulating its action table, and computes a lower bound of the step
time without simulation.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from hpctrain.base.units import format_seconds
from hpctrain.planner.cost.collectives import ShardCollectiveTimes
from hpctrain.planner.cost.model import CostModel, StageTime
from hpctrain.planner.devices.tensor_parallel_group import class_numbers
from hpctrain.planner.layout.layout import Layout
from hpctrain.planner.simulate.card_sharing import CardSharing
from hpctrain.planner.simulate.engine import StageDurations, Timeline, delayed_stage_ends, simulate, stage_ends
from hpctrain.planner.simulate.gradient_sums import (
    StageSum,
    after_rank_s,
    settle_sums,
    shard_collective_seconds,
    stage_sums,
)
from hpctrain.records.plan.gradient_codec import Messages
from hpctrain.schedule.generate import SPLIT_BACKWARD_SCHEDULES, make_schedule

STEP_TIME_TERMS = ("compute", "pipeline_bubble", "pipeline_send", "tensor_parallel", "data_parallel", "optimizer")
"""Terms of a step's time; they add up to 'total'."""


@dataclass(frozen=True, eq=False)
class Prediction:
    """A layout and its predicted step time in seconds, as a sum of terms."""

    layout: Layout
    terms: dict[str, float]
    """Term -> seconds; 'total' is the sum of all other terms."""
    late_sums: bool
    """Whether workers begin all sums of gradients after the pipeline, because steps are then shorter."""

    @property
    def total(self) -> float:
        return self.terms["total"]


@dataclass(frozen=True, eq=False)
class SimulatedStep:
    """A step simulated action by action, with a timeline for each replica, and with the all-reduces of gradients and
    the optimizer's update."""

    durations_by_replica: list[StageDurations]
    lines: list[Timeline]
    """[replica] -> timeline."""
    sums: list[float]
    """[pipeline rank] -> seconds from the rank's last backward in any replica until its gradients are all-reduced. They
    include the wait for network cards that replicas share between different stages, which no timeline shows."""
    sum_starts: list[float]
    """[pipeline rank] -> seconds from the start of the step until the all-reduce of the rank's first gradients begins,
    which may be before the rank's last backward."""
    delays: list[float]
    """[pipeline rank] -> seconds by which the rank's last action ends later because stage messages share cards with
    all-reduces."""
    update: float
    """Seconds of the gradient norm and the optimizer after all all-reduces."""

    @property
    def last(self) -> int:
        """Index of the replica whose pipeline ends last."""
        return max(range(len(self.lines)), key=lambda replica: self.lines[replica].makespan)

    @property
    def early_sums_s(self) -> float:
        """Seconds by which the all-reduces of the pipeline rank whose all-reduces end last begin before its last
        backward ends."""
        rank = max(range(len(self.sums)), key=self.all_reduced_at)
        return max(0.0, max(line.rank_end(rank) for line in self.lines) - self.sum_starts[rank])

    def all_reduced_at(self, rank: int) -> float:
        """Return the seconds from the start of the step until the all-reduce of a pipeline rank ends."""
        return max(line.rank_end(rank) for line in self.lines) + self.sums[rank]


def simulate_step(cost: CostModel, layout: Layout) -> SimulatedStep:
    """Return the simulated step of a layout: every replica's action table, the all-reduces over replicas, which may
    begin before the tables end, and the update.
    """
    sharded = shard_collective_seconds(cost, layout)
    runs = _runs(cost, layout, sharded)
    tables = [make_schedule(layout.schedule, layout.pp, len(layout.blocks), run.micro_batches) for run in runs]
    alone = [simulate(table, run.durations) for table, run in zip(tables, runs, strict=True)]
    beside: list[Timeline] = []

    def delayed_ends(number: int, sharing: CardSharing) -> tuple[float, ...]:
        beside.append(simulate(tables[number], runs[number].durations, sharing))
        return beside[-1].stage_ends()

    sums, ends_alone = stage_sums(cost, layout, sharded), [line.stage_ends() for line in alone]
    summed = settle_sums(cost, layout, sums, ends_alone, [run.replica for run in runs], delayed_ends)
    lines = beside if summed.share_cards else alone
    wait = max(0.0, _busiest_port_s(cost, layout) - max(line.makespan for line in lines))
    ends = [max(line.rank_end(rank) for line in lines) for rank in range(layout.pp)]
    kinds = class_numbers(_replica_kinds(cost, layout))
    places = [number if len(runs) > 1 else 0 for number in kinds]
    return SimulatedStep(
        [runs[place].durations for place in places],
        [lines[place] for place in places],
        [wait + by_rank.end_s - end for by_rank, end in zip(summed.ranks, ends, strict=True)],
        [wait + by_rank.start_s for by_rank in summed.ranks],
        [end - max(line.rank_end(rank) for line in alone) for rank, end in enumerate(ends)],
        _update(cost, layout),
    )


def predict(cost: CostModel, layout: Layout, whole: bool = False) -> Prediction:
    """Return the predicted step time: every replica's action table, the all-reduces over replicas, which may begin
    before the tables end, and the update.

    The result's `terms` describe the replica that ends last. `compute` is the computation of its busiest pipeline
    rank; the other terms are what the step takes beyond that.

    Args:
        whole: simulate long tables to their end (see `stage_ends`).
    """
    sharded = shard_collective_seconds(cost, layout)
    runs = _runs(cost, layout, sharded)
    alone = [_stage_ends(layout, run, whole) for run in runs]

    def delayed_ends(number: int, sharing: CardSharing) -> tuple[float, ...]:
        degrees = layout.pp, len(layout.blocks), runs[number].micro_batches
        return delayed_stage_ends(layout.schedule, *degrees, runs[number].durations, alone[number], sharing, whole)

    sums = stage_sums(cost, layout, sharded)
    summed = settle_sums(cost, layout, sums, alone, [run.replica for run in runs], delayed_ends)
    number = max(range(len(runs)), key=lambda number: max(summed.ends[number]))
    last, unhindered = runs[number], max(summed.ends[number])
    wait = max(0.0, _busiest_port_s(cost, layout) - unhindered)
    done, pipeline = wait + summed.end_s, wait + unhindered
    if layout.pp > 1:
        unhindered = max(_stage_ends(layout, last._replace(durations=last.durations.without_sends()), whole))
    busy, busiest = max((_busy(layout, last, rank), -rank) for rank in range(layout.pp))
    times, stages = _stage_times(cost, layout, last.replica), layout.stages_by_rank[-busiest]
    shared = last.micro_batches * sum(times[stage].tensor_parallel for stage in stages)
    sharding = last.micro_batches * sum(_collectives_s(cost, layout, sharded[stage], times[stage]) for stage in stages)
    terms = {
        "compute": busy - shared - sharding,
        "pipeline_bubble": max(0.0, unhindered - busy),
        "pipeline_send": max(0.0, pipeline - max(unhindered, busy)),
        "tensor_parallel": shared,
        "data_parallel": done - pipeline + sharding,
        "optimizer": _update(cost, layout),
    }
    return Prediction(layout, terms | {"total": sum(terms.values())}, summed.are_late)


def largest_increase(before: dict[str, float], after: dict[str, float]) -> str:
    """Return the term that grew the most, with its value before and after, as text.

    Args:
        before: term -> seconds, as in `Prediction.terms`.
        after: term -> seconds.
    """
    term = max(STEP_TIME_TERMS, key=lambda name: after[name] - before[name])
    return f"{term} is {format_seconds(after[term])} instead of {format_seconds(before[term])}"


class _ReplicaRun(NamedTuple):
    """The durations of all replicas that have equal devices, equal links between their stages and equally many
    micro-batches. `replica` is the number of one of them.
    """

    replica: int
    micro_batches: int
    durations: StageDurations


def _replica_kinds(cost: CostModel, layout: Layout) -> list[tuple[int, int]]:
    """Return [replica] -> (number of its link pattern, its number of micro-batches). Replicas with equal devices and
    equal links between their stages have the same link pattern."""
    return list(zip(cost.placement_links(layout.placement).link_patterns, layout.micro_batches, strict=True))


def _runs(cost: CostModel, layout: Layout, sharded: list[ShardCollectiveTimes]) -> list[_ReplicaRun]:
    """Return the durations of the replicas. Replicas with equal devices, equal links between their stages and equally
    many micro-batches share one entry.

    If collectives in every micro-batch synchronise the replicas, there is only one entry, with the slowest durations.

    Args:
        sharded: [stage] -> times of its ZeRO collectives.
    """
    examples = cost.placement_links(layout.placement).representatives
    runs = [
        _ReplicaRun(examples[pattern], count, _stage_durations(cost, layout, examples[pattern], sharded))
        for pattern, count in dict.fromkeys(_replica_kinds(cost, layout))
    ]
    if layout.memory_options.equal_micro_batches and len(runs) > 1:
        # Collectives in every micro-batch keep the replicas in step with the slowest.
        *seconds, _, _, _ = zip(*(run.durations for run in runs), strict=True)
        slowest = [tuple(map(max, zip(*by_run, strict=True))) for by_run in seconds]
        # All fields but `blocking`, `lanes` and `latency`.
        by_name: dict[str, Any] = dict(zip(StageDurations._fields, slowest, strict=False))
        return [runs[0]._replace(durations=runs[0].durations._replace(**by_name))]
    return runs


def _stage_ends(layout: Layout, run: _ReplicaRun, whole: bool) -> tuple[float, ...]:
    return stage_ends(layout.schedule, layout.pp, len(layout.blocks), run.micro_batches, run.durations, whole)


def _busy(layout: Layout, run: _ReplicaRun, rank: int) -> float:
    """Return the seconds of a step in which a pipeline rank runs its actions, including the tensor-parallel and ZeRO
    collectives within them.
    """
    durations = run.durations
    split = layout.schedule in SPLIT_BACKWARD_SCHEDULES
    return run.micro_batches * sum(
        durations.forward[stage]
        + (durations.inputs[stage] + durations.weights[stage] if split else durations.backward[stage])
        for stage in layout.stages_by_rank[rank]
    )


def lower_bound(cost: CostModel, layout: Layout) -> float:
    """Return a lower bound in seconds of the step time of a layout, for any action table.

    The bound counts each rank's work and its messages to other nodes, what must come before its first forward and after
    its last backward, the all-reduce over replicas and the update.
    """
    sharded = shard_collective_seconds(cost, layout)
    sums, bound = stage_sums(cost, layout, sharded), 0.0
    for run in _runs(cost, layout, sharded):
        busy = [_busy(layout, run, rank) for rank in range(layout.pp)]
        around = _around_ranks_s(layout, run.durations, sums, busy)
        bound = max(bound, *(map(sum, zip(around, busy, strict=True))))
        bound = max(bound, run.micro_batches * max(_lane_s(run.durations), default=0.0))
    return max(bound, _busiest_port_s(cost, layout)) + _update(cost, layout)


def least_around_ranks_s(cost: CostModel, layout: Layout) -> list[float]:
    """Return [pipeline rank] -> the least seconds of a step before the first action of the rank and after its last one,
    in any replica. They are a lower bound also for layouts on the same devices with more blocks in some stages.
    """
    sharded = shard_collective_seconds(cost, layout)
    sums, update = stage_sums(cost, layout, sharded), _update(cost, layout)
    # Other layouts may hide more of a rank's messages behind its computation.
    busy = [float("inf")] * layout.pp
    around = (_around_ranks_s(layout, run.durations, sums, busy) for run in _runs(cost, layout, sharded))
    return [min(seconds) + update for seconds in zip(*around, strict=True)]


def _around_ranks_s(layout: Layout, durations: StageDurations, sums: list[StageSum], busy: list[float]) -> list[float]:
    """Return [pipeline rank] -> lower bound in seconds of what comes before its first forward and after its last
    backward, except the update.

    Args:
        sums: [stage] -> its all-reduce.
        busy: [pipeline rank] -> the seconds that its actions take in a step.
    """
    pp, split = layout.pp, layout.schedule in SPLIT_BACKWARD_SCHEDULES
    way_in = [0.0, *accumulate(durations.forward[s] + durations.send[s] for s in range(pp - 1))]
    way_out = [0.0, *accumulate(durations.backward[s] + durations.send_back[s] for s in range(pp - 1))]
    held = [[sums[stage] for stage in stages] for stages in layout.stages_by_rank]
    after = [after_rank_s(stages) for stages in held]
    # The messages of a rank's stages may pass while the rank computes, but they take their time.
    own = [
        max(after[rank], sum(stage.wire_s + stage.late_s for stage in stages) - busy[rank])
        if len(stages) > 1 else after[rank]
        for rank, stages in enumerate(held)
    ]  # fmt: skip
    # With split backwards, a rank's last action may be a W, which no other rank waits for.
    return [way_in[rank] + (own[rank] if split else max(own[rank], way_out[rank] + after[0])) for rank in range(pp)]


def _busiest_port_s(cost: CostModel, layout: Layout) -> float:
    """Return the seconds in which the busiest network card or uplink carries all stage messages of a step in one
    direction. Replicas count as having as few micro-batches as any of them.

    Messages of different stages overlap in time only by chance, so they are not slowed down by each other. But no step
    is shorter than this.
    """
    if layout.pp == 1:
        return 0.0
    beta = cost.placement_links(layout.placement).busiest_port_beta(layout.rank_of_stage)
    codecs = {cost.work.messages_behind(stage) for stage in range(len(layout.blocks) - 1)}
    size = min(cost.work.message_bytes(layout.micro_batch, layout.tp, codec) for codec in codecs)
    return min(layout.micro_batches) * beta * size


def _lane_s(durations: StageDurations) -> list[float]:
    """Return the seconds of one micro-batch's messages in each lane, without their latencies."""
    lanes: dict[int, float] = {}
    messages = zip(durations.lane_of_message(), durations.by_message(), durations.latency_of_message(), strict=True)
    for lane, seconds, latency in messages:
        lanes[lane] = lanes.get(lane, 0.0) + seconds - latency
    return list(lanes.values())


def _stage_durations(
    cost: CostModel, layout: Layout, replica: int, sharded: list[ShardCollectiveTimes]
) -> StageDurations:
    times = _stage_times(cost, layout, replica)
    units = [layout.unit(replica, stage) for stage in range(len(times))]
    hops = list(pairwise(units))
    messages: list[Messages] = ["none"] * len(hops)
    passes = [(stage.forward, stage.backward, stage.inputs, stage.weights) for stage in times]
    if cost.work.messages != "none":
        messages = [cost.messages(a, b, stage) for stage, (a, b) in enumerate(hops)]
    if layout.shards > 1 or any(codec != "none" for codec in messages):
        # A stage decodes messages from one neighbour and encodes messages to the other, in both directions.
        coding = [
            sum(cost.message_cast_s(unit, layout.micro_batch, codec) for codec in pair)
            for unit, pair in zip(units, pairwise(["none", *messages, "none"]), strict=True)
        ]
        waits = [_waits(cost, layout, stage, stage_time) for stage, stage_time in zip(sharded, times, strict=True)]
        passes = [
            (f + (wait_f + coding_s), b + (wait_b + coding_s), i + (wait_i + coding_s), w + wait_w)
            for (f, b, i, w), (wait_f, wait_b, wait_i, wait_w), coding_s in zip(passes, waits, coding, strict=True)
        ]
    forward, backward, inputs, weights = zip(*passes, strict=True)
    ranks, links = list(pairwise(layout.rank_of_stage)), cost.placement_links(layout.placement)

    def message_s(source: int, target: int, codec: Messages) -> float:
        return cost.stage_message_s(layout.placement, replica, source, target, layout.micro_batch, codec)

    return StageDurations(
        forward,
        backward,
        tuple(message_s(a, b, codec) for (a, b), codec in zip(ranks, messages, strict=True)),
        tuple(message_s(b, a, codec) for (a, b), codec in zip(ranks, messages, strict=True)),
        inputs,
        weights,
        cost.work.framework.blocking_sends,
        links.lanes(replica, layout.rank_of_stage),
        tuple(
            0.0 if a == b else links.message_alpha_beta(replica, a, b)[0]
            for a, b in [*ranks, *((b, a) for a, b in ranks)]
        ),
    )


def _waits(
    cost: CostModel, layout: Layout, times: ShardCollectiveTimes, stage_time: StageTime
) -> tuple[float, float, float, float]:
    """Return the seconds that each pass of a micro-batch through a stage waits for the stage's ZeRO collectives:
    (forward, whole backward, I, W). On CUDA, collectives overlap the computation where the framework prefetches; on a
    CPU, reduce-scatters do.

    Args:
        times: seconds of the collectives of this stage.
        stage_time: seconds of the stage's passes without them.
    """
    prefetched = cost.work.framework.shard_prefetch and layout.placement[0][0].kind == "cuda"
    passes = (stage_time.forward, stage_time.backward, stage_time.inputs, stage_time.weights)
    return times.per_micro_batch(layout.memory_options.zero, passes, prefetched)


def _collectives_s(cost: CostModel, layout: Layout, times: ShardCollectiveTimes, stage_time: StageTime) -> float:
    """Return the seconds that a micro-batch's forward and backward pass through one stage wait for the stage's ZeRO
    collectives; arguments as in `_waits`."""
    forward, backward, inputs, weights = _waits(cost, layout, times, stage_time)
    return forward + (inputs + weights if layout.schedule in SPLIT_BACKWARD_SCHEDULES else backward)


def _stage_times(cost: CostModel, layout: Layout, replica: int) -> list[StageTime]:
    return [
        cost.stage(layout.unit(replica, stage), layout.micro_batch, share)
        for stage, share in enumerate(layout.model_parts)
    ]


def _update(cost: CostModel, layout: Layout) -> float:
    """Return the seconds of the all-reduce of the gradient norm, plus those of the optimizer's update on the slowest
    device.
    """
    slowest = 0.0
    for replica in layout.placement.representatives:
        for unit, stages in zip(layout.placement[replica], layout.stages_by_rank, strict=True):
            update = sum(cost.optimizer_s(unit, layout.model_parts[stage], layout.shards) for stage in stages)
            slowest = max(slowest, cost.step_overhead_s(unit) + update)
    return cost.norm_all_reduce_s(layout.placement) + slowest
