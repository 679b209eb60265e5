"""Lower bounds of each pipeline rank's micro-batch, all-reduce and update, by class of unit and number of blocks."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpctrain.planner.bounds.pipeline_passes import PipelinePasses
from hpctrain.planner.bounds.unit_class import UnitClass, unit_classes
from hpctrain.planner.bounds.unit_counts import UnitCounts
from hpctrain.planner.cost.all_reduce import flat_copy_share
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import ModelPart, ScheduleSpec
from hpctrain.planner.devices.links import scalar_all_reduce_s
from hpctrain.planner.simulate.overlap import overlapped_share
from hpctrain.records.plan.parallel_dims import ParallelDims
from hpctrain.schedule.generate import SPLIT_BACKWARD_SCHEDULES
from hpctrain.schedule.placement import stage_ranks

FloatArray = NDArray[np.float64]

MAX_MIXTURES = 200
"""Limit of the mixtures of classes in a column; kinds are merged into fewer classes until it holds."""
MAX_CLASSES = 3


class RankSeconds(NamedTuple):
    """Seconds by [rank, class, blocks]."""

    forward: FloatArray
    backward: FloatArray
    both: FloatArray
    """Forward and backward, with split backwards if the schedule splits them."""
    sums: FloatArray
    update: FloatArray
    way: FloatArray
    """[rank] -> the least seconds before its first forward."""


class RankTimes:
    """Times for given degrees, schedule and micro-batch size.

    Args:
        shards: the most replicas that share a state.
        waits: whether to count waits from the order of actions. Without them, the times of 1f1b bound every schedule
            that has the ends of the model on the first and the last rank.
    """

    def __init__(
        self,
        cost: CostModel,
        unit_counts: UnitCounts,
        dims: ParallelDims,
        schedule_spec: ScheduleSpec,
        size: int,
        shards: int = 1,
        waits: bool = True,
    ) -> None:
        self.cost, self.unit_counts, self.schedule_spec, self.size, self.shards = (
            cost,
            unit_counts,
            schedule_spec,
            size,
            shards,
        )
        self.waits = waits
        self.pp, self.dp, self.tp = dims
        self.count, self.layers = cost.work.sequences // size, cost.work.spec.layers
        self.equal_blocks = cost.work.least_blocks == self.layers
        """Whether all blocks have one size."""
        owner = stage_ranks(schedule_spec.name, self.pp, self.pp * schedule_spec.virtual_stages)
        self.first, self.last = owner[0], owner[-1]
        self.classes, self.mixtures = _classes(cost, unit_counts, size, shards, self.dp)
        # Without waits the bound is for all schedules, so take the one with the shortest passes.
        self.passes = PipelinePasses(
            cost, unit_counts, self.pp, schedule_spec if waits else ScheduleSpec("interleaved_zero_bubble"), size
        )
        crosses = self.pp * self.dp > unit_counts.most_in_a_node
        self.norm_s = scalar_all_reduce_s(unit_counts.alpha, self.pp * self.dp * self.tp) if crosses else 0.0
        self.times = _times(self)
        self.first_sum_s = float(self.times.sums[self.first].min())
        self.inside = sum(units // self.dp for units in unit_counts.by_node)
        """The most columns that can lie within a node."""
        self.apart = _times(self, apart=True) if 0 < self.inside < self.pp and self.dp > 1 else None
        """Times of columns across nodes; None if all columns may lie within a node, or none can."""


def _times(of: RankTimes, apart: bool = False) -> RankSeconds:
    """The times of all ranks; ranks that hold neither end of the model are alike."""
    by_ends: dict[tuple[bool, bool], tuple[FloatArray, ...]] = {}
    rows = []
    for rank in range(of.pp):
        ends = (rank == of.first, rank == of.last)
        if ends not in by_ends:
            by_ends[ends] = _of_ends(of, *ends, apart)
        rows.append(by_ends[ends])
    forward, backward, both, sums, update = (np.array(values) for values in zip(*rows, strict=True))
    # Where a rank has several stages, these may hold a single block each.
    way = [
        min(
            rank * each.action + max(0, rank - 1) * each.block[0] + (of.first == 0) * each.embedding[0]
            for each in of.classes
        )
        for rank in range(of.pp)
    ]
    return RankSeconds(forward, backward, both, sums, update, np.array([0.0, *way[1:]]))


def _of_ends(of: RankTimes, first: bool, last: bool, apart: bool) -> tuple[FloatArray, ...]:
    """[class, blocks] arrays of `RankSeconds` except `way`, for a rank with the model's first or last stage or none."""
    schedule_spec, work, tp = of.schedule_spec, of.cost.work, of.tp
    blocks = np.arange(of.layers + 1, dtype=float)
    timed = np.minimum(blocks, [work.mean_blocks(ModelPart(number, first, last))[0] for number in range(of.layers + 1)])
    split = schedule_spec.name in SPLIT_BACKWARD_SCHEDULES and not first
    numbers = work.parameters(ModelPart(0, first, last), tp) + work.least_block_parameters(tp) * blocks
    rows = []
    for each in of.classes:
        forward, backward = (
            schedule_spec.virtual_stages * each.action
            + first * each.embedding[way]
            + last * each.head[way]
            + timed * each.block[way]
            for way in (0, 1)
        )
        # The first stage's backward is not split, and it may hold all blocks of its rank.
        both = forward + backward + split * (schedule_spec.virtual_stages * each.action + blocks * each.split)
        update = each.update(blocks, first, last) + each.once + of.norm_s
        rows.append((forward, backward, both, _sums(of, each, numbers, backward, apart), update))
    return tuple(np.array(values) for values in zip(*rows, strict=True))


def _sums(of: RankTimes, each: UnitClass, numbers: FloatArray, backward: FloatArray, apart: bool) -> FloatArray:
    """Seconds of a rank's all-reduce after its last backward, less what may overlap it; 0 with a codec, which may send
    less, and with sharding within nodes."""
    work, dp = of.cost.work, of.dp
    if dp == 1 or not work.codec.exact or (work.memory_options.zero and work.memory_options.shard == "node"):
        return np.zeros_like(numbers)
    size = numbers * work.framework.gradient_bytes
    alpha, beta = of.unit_counts.ring(dp, of.schedule_spec.virtual_stages, apart)
    if work.memory_options.zero:
        sent = work.gathered_bytes / work.framework.gradient_bytes + 1
        return (dp - 1) * sent * beta * size / dp
    buckets = np.maximum(1, np.ceil(size / work.framework.bucket_bytes))
    wire = 2 * (dp - 1) * (buckets * alpha + beta * size / dp)
    stages = of.pp * of.schedule_spec.virtual_stages
    early, copied = overlapped_share(work, stages, of.tp), flat_copy_share(work, stages, of.tp)
    return wire - np.minimum(early * wire, backward) + copied * numbers * each.copy


def _classes(
    cost: CostModel, unit_counts: UnitCounts, size: int, shards: int, dp: int
) -> tuple[list[UnitClass], NDArray[np.int64]]:
    """The classes of units, and [mixture, class] -> units of a column."""
    for most in range(MAX_CLASSES, 0, -1):
        classes = unit_classes(cost, unit_counts, size, shards, most)
        least = [min(each.number, dp) for each in classes]
        ways = [
            ways for ways in itertools.product(*(range(number, -1, -1) for number in least[:-1])) if sum(ways) <= dp
        ]
        mixtures = [(*few, dp - sum(few)) for few in ways if dp - sum(few) <= least[-1]]
        if len(mixtures) <= MAX_MIXTURES:
            break
    return classes, np.array(mixtures)
