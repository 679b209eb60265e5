"""Distributes blocks over pipeline ranks, and micro-batches over replicas, for given devices."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from hpctrain.base.even_parts import even_parts
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import ScheduleSpec
from hpctrain.planner.devices.tensor_parallel_group import Placement, TensorParallelGroup
from hpctrain.planner.layout.layout import Layout, Option
from hpctrain.schedule.runnable import WHY_NOT_PER_MICRO_BATCH, reduces_each_micro_batch


def why_no_layout(cost: CostModel, option: Option) -> str | None:
    """Return why the option has no layout, whatever the devices' memory; None if it has one."""
    (_, dp, _), micro_batch, stages = option.dims, option.micro_batch, option.stages
    total, layers = cost.work.sequences // micro_batch, cost.work.spec.layers
    if total < dp:
        made = f"{total} micro-batch{'es' * (total > 1)} of {micro_batch}"
        return f"batch.global {cost.work.sequences} makes {made}, too few for {dp} replicas"
    if layers < stages:
        return f"the model's {layers} blocks are too few for the {stages} stages of schedule {option.schedule_spec}"
    if reason := cost.work.spec.pipeline_error(stages):
        return reason
    memory_options = cost.work.memory_options
    if memory_options.equal_micro_batches and total % dp:
        return (
            f"{total} micro-batches of {micro_batch} do not go evenly into {dp} replicas, as zero "
            f"{memory_options.zero} needs, which sums gradients after each"
        )
    if memory_options.shard == "all" and reduces_each_micro_batch(
        cost.work.codec, memory_options.zero, -(-total // dp)
    ):
        return (
            f"{-(-total // dp)} micro-batches with compression {cost.work.codec.mode} and zero {memory_options.zero}: "
            f"{WHY_NOT_PER_MICRO_BATCH}"
        )
    return None


def fit_layout(cost: CostModel, placement: Placement, schedule_spec: ScheduleSpec, micro_batch: int) -> Layout:
    """Return the layout with blocks and micro-batches distributed by speed, within each device's memory if possible.

    The cut makes the longest time of a pipeline rank, over the ranks of all replicas and each with its replica's
    micro-batches, as short as possible. Micro-batches go to replicas by the speed of the replica's slowest rank. Cut
    and division of the micro-batches are computed alternately. If the returned layout exceeds a device's memory (see
    `Layout.memory_shortage`), no cut fits. Call this function only if `why_no_layout` returns None for the option.
    """
    dp, memory_options = len(placement), cost.work.memory_options
    total, layers = cost.work.sequences // micro_batch, cost.work.spec.layers
    speeds = _by_replica(
        placement, lambda row: 1.0 if memory_options.equal_micro_batches
        else sum(1 / cost.module_times(unit, micro_batch).whole_model(layers) for unit in row),
    )  # fmt: skip
    counts = _micro_batches(total, [1 / speed for speed in speeds])
    best: Layout | None = None
    fastest = math.inf
    for _ in range(3):
        layout = _cut(cost, _without_blocks(cost, placement, schedule_spec, micro_batch, counts))
        if dp == 1 or memory_options.equal_micro_batches:
            return layout
        slowest = _slowest_by_replica(cost, layout)
        reached = max(count * seconds for count, seconds in zip(counts, slowest, strict=True))
        if reached >= fastest:
            break
        best, fastest = layout, reached
        counts = _micro_batches(total, slowest)
        if tuple(counts) == layout.micro_batches:
            break
    assert best is not None, "the first layout is better than none"
    return best


def has_room(cost: CostModel, placement: Placement, schedule_spec: ScheduleSpec, micro_batch: int) -> bool:
    """Return whether the pipeline ranks of a placement together have memory for all blocks, with equally many
    micro-batches in all replicas."""
    counts = even_parts(cost.work.sequences // micro_batch, len(placement))
    most = _without_blocks(cost, placement, schedule_spec, micro_batch, counts).max_blocks(cost.memory)
    return min(most) >= 0 and sum(most) >= cost.work.spec.layers


def _without_blocks(
    cost: CostModel, placement: Placement, schedule_spec: ScheduleSpec, micro_batch: int, micro_batches: Sequence[int]
) -> Layout:
    """Return a layout whose blocks are not distributed yet.

    Args:
        micro_batches: [replica] -> number of micro-batches.
    """
    nothing = (0,) * (len(placement[0]) * schedule_spec.virtual_stages)
    return Layout(placement, schedule_spec.name, micro_batch, tuple(micro_batches), nothing, cost.work.memory_options)


def with_micro_batches_by_speed(cost: CostModel, layout: Layout) -> Layout:
    """Return the layout with its micro-batches distributed anew over the replicas, by the speed of each replica's
    slowest rank. With one replica, or where replicas must have equal numbers, the layout is returned as it is."""
    if layout.dp == 1 or cost.work.memory_options.equal_micro_batches:
        return layout
    counts = _micro_batches(sum(layout.micro_batches), _slowest_by_replica(cost, layout))
    return replace(layout, micro_batches=tuple(counts))


def _by_replica(placement: Placement, value: Callable[[tuple[TensorParallelGroup, ...]], float]) -> list[float]:
    """Return [replica] -> a value that depends only on the figures of the replica's devices, computed once for replicas
    with equal figures.

    Args:
        value: value of a replica, given as its tensor-parallel groups by pipeline rank.
    """
    values = [value(placement[replica]) for replica in placement.representatives]
    return [values[number] for number in placement.replica_classes]


def _micro_batches(total: int, seconds: Sequence[float]) -> list[int]:
    """Return [replica] -> number of micro-batches, such that the slowest replica takes as little time as possible.

    Args:
        total: micro-batches of a step over all replicas.
        seconds: [replica] -> seconds of its slowest pipeline rank for one micro-batch.
    """
    replicas = len(seconds)
    if min(seconds) == max(seconds):
        return list(even_parts(total, replicas))
    # What all replicas do in the time that would be needed if micro-batches could be divided needs no heap.
    shared_s = total / sum(1 / each for each in seconds)
    least = [max(1, int((1 - 1e-9) * shared_s / each)) for each in seconds]
    if sum(least) > total:
        least = [1] * replicas
    counts = split_evenly(total, lambda i, n: n * seconds[i], least, [total] * replicas)
    assert counts is not None, "the caller gives at least one micro-batch for each replica"
    return counts


def _cut(cost: CostModel, layout: Layout) -> Layout:
    """Return the layout with the model's blocks distributed anew over its pipeline ranks, so that the slowest rank
    computes for the least time. The ranks' memory limits their blocks, unless the model then does not fit."""
    layers, pp, chunks = cost.work.spec.layers, layout.pp, layout.schedule_spec.virtual_stages
    times = [_rank_seconds(cost, layout, rank) for rank in range(pp)]

    def seconds(rank: int, count: int) -> float:
        return max([fixed + count * per_block for fixed, per_block in times[rank]])

    # Only the first and the last stage may have no block: they hold the embedding and the head.
    ends = (0, len(layout.blocks) - 1)
    least = [0 if set(stages) <= set(ends) else chunks for stages in layout.stages_by_rank]
    most = layout.max_blocks(cost.memory)
    counts = split_evenly(layers, seconds, least, most) or split_evenly(layers, seconds, least, [layers] * pp)
    assert counts is not None, "the caller gives at least one block for each stage"
    shared = [iter(_by_stage(cost, layout, rank, count)) for rank, count in enumerate(counts)]
    return replace(layout, blocks=tuple(next(shared[rank]) for rank in layout.rank_of_stage))


def _by_stage(cost: CostModel, layout: Layout, rank: int, blocks: int) -> Sequence[int]:
    """Return [stage of a pipeline rank] -> its number of blocks, such that the slowest stage takes as little time as
    possible: the stage with the head gets fewer."""
    stages, last = layout.stages_by_rank[rank], len(layout.blocks) - 1
    if len(stages) == 1:
        return [blocks]
    parts = cost.module_times(layout.placement[0][rank], layout.micro_batch)
    per_block = parts.stage_s(1, first=False, last=False)
    fixed = [parts.stage_s(0, first=stage == 0, last=stage == last) for stage in stages]
    least = [0 if stage in (0, last) else 1 for stage in stages]
    counts = split_evenly(blocks, lambda index, n: fixed[index] + n * per_block, least, [blocks] * len(stages))
    assert counts is not None, "the caller gives enough blocks"
    return counts


def _rank_seconds(cost: CostModel, layout: Layout, rank: int) -> list[tuple[float, float]]:
    """Return the pairs (seconds without blocks, seconds per block) of a step on the pipeline rank `rank` of those
    replicas that may be the slowest: the one with the largest seconds per block, and those with more seconds without
    blocks.
    """
    seconds = []
    for replica in layout.distinct_replicas:
        count = layout.micro_batches[replica]
        parts = cost.module_times(layout.placement[replica][rank], layout.micro_batch)
        fixed = parts.stage_s(0, first=rank == layout.rank_of_stage[0], last=rank == layout.rank_of_stage[-1])
        seconds.append((count * fixed, count * parts.stage_s(1, first=False, last=False)))
    steepest = max(seconds, key=lambda pair: (pair[1], pair[0]))
    return [steepest, *(pair for pair in seconds if pair[0] > steepest[0])]


def _slowest_by_replica(cost: CostModel, layout: Layout) -> list[float]:
    """Return [replica] -> seconds that its slowest pipeline rank computes for the forward and backward pass of one
    micro-batch."""

    def slowest(row: tuple[TensorParallelGroup, ...]) -> float:
        times = [0.0] * layout.pp
        for rank, share in zip(layout.rank_of_stage, layout.model_parts, strict=True):
            times[rank] += cost.stage(row[rank], layout.micro_batch, share).both
        return max(times)

    return _by_replica(layout.placement, slowest)


def split_evenly(
    total: int, seconds: Callable[[int, int], float], least: Sequence[int], most: Sequence[int]
) -> list[int] | None:
    """Return how to distribute `total` equal pieces over receivers so that the largest time is as small as possible.

    Each piece goes to the receiver that would then have the smallest time. This is exact if times grow with the count
    (exchange argument): a receiver with more pieces than in an optimal distribution got its last piece when it still
    stayed within the optimal time.

    Args:
        seconds: seconds(i, n), the time of receiver i with n pieces; must not fall as n grows.
        least: the fewest pieces of each receiver.
        most: the most pieces of each receiver.

    Returns:
        The number of pieces of each receiver, or None if the limits cannot be met.
    """
    counts = list(least)
    if sum(least) > total or sum(most) < total or any(a > b for a, b in zip(least, most, strict=True)):
        return None
    heap = [(seconds(index, count + 1), index) for index, count in enumerate(counts) if count < most[index]]
    heapq.heapify(heap)
    for _ in range(total - sum(counts)):
        _, index = heapq.heappop(heap)
        counts[index] += 1
        if counts[index] < most[index]:
            heapq.heappush(heap, (seconds(index, counts[index] + 1), index))
    return counts
