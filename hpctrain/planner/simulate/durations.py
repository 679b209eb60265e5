"""The durations of a layout's actions and messages, replica by replica."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from hpctrain.planner.cost.model import CostModel, StageTime
from hpctrain.planner.cost.shard_collectives import ShardCollectiveTimes
from hpctrain.planner.layout.layout import Layout
from hpctrain.planner.simulate.engine import StageDurations
from hpctrain.records.plan.gradient_codec import Messages
from hpctrain.schedule.generate import SPLIT_BACKWARD_SCHEDULES


class ReplicaRun(NamedTuple):
    """The durations of all replicas that have equal devices, equal links between their stages and equally many
    micro-batches. `replica` is the number of one of them.
    """

    replica: int
    micro_batches: int
    durations: StageDurations

    def busy_s(self, layout: Layout) -> list[float]:
        """Return [pipeline rank] -> the seconds of a step in which it runs its actions, including the tensor-parallel
        and ZeRO collectives within them.
        """
        forward, backward, *_ = self.durations
        if layout.schedule in SPLIT_BACKWARD_SCHEDULES:
            backward = tuple(map(sum, zip(self.durations.inputs, self.durations.weights, strict=True)))
        return [
            self.micro_batches * sum([forward[stage] + backward[stage] for stage in stages])
            for stages in layout.stages_by_rank
        ]


def replica_kinds(cost: CostModel, layout: Layout) -> list[tuple[int, int]]:
    """Return [replica] -> (number of its link pattern, its number of micro-batches). Replicas with equal devices and
    equal links between their stages have the same link pattern."""
    return list(zip(cost.placement_links(layout.placement).link_patterns, layout.micro_batches, strict=True))


def replica_runs(
    cost: CostModel,
    layout: Layout,
    sharded: Sequence[ShardCollectiveTimes],
    known: dict[int, StageDurations] | None = None,
) -> list[ReplicaRun]:
    """Return the durations of the replicas. Replicas with equal devices, equal links between their stages and equally
    many micro-batches share one entry.

    If collectives in every micro-batch synchronise the replicas, there is only one entry, with the slowest durations.

    Args:
        sharded: [stage] -> times of its ZeRO collectives.
        known: replica -> its durations, if they are known already; gets those that are computed. None: none are known.
    """
    examples = cost.placement_links(layout.placement).representatives
    known = {} if known is None else known
    runs = [
        ReplicaRun(examples[pattern], count, replica_durations(cost, layout, examples[pattern], sharded, known))
        for pattern, count in dict.fromkeys(replica_kinds(cost, layout))
    ]
    if layout.memory_options.equal_micro_batches and len(runs) > 1:
        # Collectives in every micro-batch keep the replicas in step with the slowest.
        *seconds, _, _, _ = zip(*(run.durations for run in runs), strict=True)
        slowest = [tuple(map(max, zip(*by_run, strict=True))) for by_run in seconds]
        # All fields but `blocking`, `lanes` and `latency`.
        by_name: dict[str, Any] = dict(zip(StageDurations._fields, slowest, strict=False))
        return [runs[0]._replace(durations=runs[0].durations._replace(**by_name))]
    return runs


def replica_durations(
    cost: CostModel,
    layout: Layout,
    replica: int,
    sharded: Sequence[ShardCollectiveTimes],
    known: dict[int, StageDurations],
) -> StageDurations:
    """Return the durations of one replica; arguments as in `replica_runs`."""
    if replica not in known:
        known[replica] = _stage_durations(cost, layout, replica, sharded)
    return known[replica]


def stage_times(cost: CostModel, layout: Layout, replica: int) -> list[StageTime]:
    """Return [stage] -> the times of its passes in a replica, without ZeRO collectives and codecs of messages."""
    row = layout.placement[replica]
    return [
        cost.stage(row[rank], layout.micro_batch, share)
        for rank, share in zip(layout.rank_of_stage, layout.model_parts, strict=True)
    ]


def collectives_s(cost: CostModel, layout: Layout, times: ShardCollectiveTimes, stage_time: StageTime) -> float:
    """Return the seconds that a micro-batch's forward and backward pass through one stage wait for the stage's ZeRO
    collectives; arguments as in `_waits`."""
    forward, backward, inputs, weights = _waits(cost, layout, times, stage_time)
    return forward + (inputs + weights if layout.schedule in SPLIT_BACKWARD_SCHEDULES else backward)


def lane_seconds(durations: StageDurations) -> list[float]:
    """Return the seconds of one micro-batch's messages in each lane, without their latencies."""
    lanes: dict[int, float] = {}
    messages = zip(durations.lane_of_message(), durations.by_message(), durations.latency_of_message(), strict=True)
    for lane, seconds, latency in messages:
        lanes[lane] = lanes.get(lane, 0.0) + seconds - latency
    return list(lanes.values())


def _stage_durations(
    cost: CostModel, layout: Layout, replica: int, sharded: Sequence[ShardCollectiveTimes]
) -> StageDurations:
    times, work = stage_times(cost, layout, replica), cost.work
    messages: list[Messages] = ["none"] * (len(times) - 1)
    passes = [(stage.forward, stage.backward, stage.inputs, stage.weights) for stage in times]
    units = [layout.unit(replica, stage) for stage in range(len(times))]
    if work.messages != "none":
        messages = [cost.messages(a, b, stage) for stage, (a, b) in enumerate(pairwise(units))]
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
    links = cost.placement_links(layout.placement)
    costs = links.message_costs(replica, layout.rank_of_stage)
    sizes = {codec: work.message_bytes(layout.micro_batch, layout.tp, codec) for codec in set(messages)}
    sent = [alpha + beta * sizes[codec] for (alpha, beta), codec in zip(costs, [*messages, *messages], strict=True)]
    return StageDurations(
        forward,
        backward,
        tuple(sent[: len(messages)]),
        tuple(sent[len(messages) :]),
        inputs,
        weights,
        work.framework.blocking_sends,
        links.lanes(replica, layout.rank_of_stage),
        tuple([alpha for alpha, _ in costs]),
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
