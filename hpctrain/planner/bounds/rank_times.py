"""What the ranks of a pipeline take at least for a micro-batch, sums and update, by class of unit and blocks."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpctrain.planner.bounds.pipeline_passes import Passes
from hpctrain.planner.bounds.unit_class import UnitClass, unit_classes
from hpctrain.planner.bounds.unit_counts import Crowd
from hpctrain.planner.cost.all_reduce import copied_share
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import Order, Share
from hpctrain.planner.devices.links import number_sum_s
from hpctrain.planner.layout.degrees import Shape
from hpctrain.planner.simulate.overlap import early_share
from hpctrain.records.plan.compression import NoCompression
from hpctrain.schedule.generate import SPLIT_BACKWARD
from hpctrain.schedule.placement import stage_ranks

Values = NDArray[np.float64]

MOST_MIXTURES = 200
"""Kinds are told apart as far as their mixtures in a column are no more than that."""
MOST_CLASSES = 3


class Times(NamedTuple):
    """Seconds by [rank, class, blocks]."""

    forward: Values
    backward: Values
    both: Values
    """Forward and backward, as the schedule makes them."""
    sums: Values
    update: Values
    way: Values
    """[rank] -> before its first forward at least."""


class RankTimes:
    """Of one shape, schedule and micro-batch size.

    Args:
        shards: replicas that share a state, at most.
        waits: with what the order of actions makes ranks wait for; without, the times of 1f1b are a bound for every
            schedule in which the ends of the model lie on the first and the last rank.
    """

    def __init__(
        self, cost: CostModel, crowd: Crowd, shape: Shape, order: Order, size: int, shards: int = 1, waits: bool = True
    ) -> None:
        self.cost, self.crowd, self.order, self.size, self.shards = cost, crowd, order, size, shards
        self.waits = waits
        self.pp, self.dp, self.tp = shape
        self.count, self.layers = cost.work.rows // size, cost.work.spec.layers
        self.alike = cost.work.least_blocks == self.layers
        """Whether all blocks are of one size."""
        owner = stage_ranks(order.schedule, self.pp, self.pp * order.chunks)
        self.first, self.last = owner[0], owner[-1]
        self.classes, self.mixtures = _classes(cost, crowd, size, shards, self.dp)
        # Of all schedules that may be meant, the one whose passes are the shortest.
        self.passes = Passes(cost, crowd, self.pp, order if waits else Order("interleaved_zero_bubble"), size)
        crosses = self.pp * self.dp > crowd.most_in_a_node
        self.norm_s = number_sum_s(crowd.alpha, self.pp * self.dp * self.tp) if crosses else 0.0
        self.times = _times(self)
        self.first_sum_s = float(self.times.sums[self.first].min())
        self.inside = sum(units // self.dp for units in crowd.by_node)
        """Columns that lie within a node, at most."""
        self.apart = _times(self, apart=True) if 0 < self.inside < self.pp and self.dp > 1 else None
        """Times of those that do not, where there must be some and there may be others."""


def _times(of: RankTimes, apart: bool = False) -> Times:
    """Ranks that are neither first nor last are alike."""
    by_ends: dict[tuple[bool, bool], tuple[Values, ...]] = {}
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
    return Times(forward, backward, both, sums, update, np.array([0.0, *way[1:]]))


def _of_ends(of: RankTimes, first: bool, last: bool, apart: bool) -> tuple[Values, ...]:
    """[class, blocks] of each of `Times` but the way, for a rank with the model's first or last stage or none."""
    order, work, tp = of.order, of.cost.work, of.tp
    blocks = np.arange(of.layers + 1, dtype=float)
    timed = np.minimum(blocks, [work.mean_blocks(Share(number, first, last))[0] for number in range(of.layers + 1)])
    split = order.schedule in SPLIT_BACKWARD and not first
    numbers = work.parameters(Share(0, first, last), tp) + work.least_block_parameters(tp) * blocks
    rows = []
    for each in of.classes:
        forward, backward = (
            order.chunks * each.action + first * each.embedding[way] + last * each.head[way] + timed * each.block[way]
            for way in (0, 1)
        )
        # The first stage's backward is not cut, and it may hold all blocks of its rank.
        both = forward + backward + split * (order.chunks * each.action + blocks * each.split)
        update = each.update(blocks, first, last) + each.once + of.norm_s
        rows.append((forward, backward, both, _sums(of, each, numbers, backward, apart), update))
    return tuple(np.array(values) for values in zip(*rows, strict=True))


def _sums(of: RankTimes, each: UnitClass, numbers: Values, backward: Values, apart: bool) -> Values:
    """Seconds of a rank's gradient sums after its last backward, beside which some of them may pass; nothing where a
    codec may send less, or they stay within nodes."""
    work, dp = of.cost.work, of.dp
    if dp == 1 or not isinstance(work.codec, NoCompression) or (work.saving.zero and work.saving.shard == "node"):
        return np.zeros_like(numbers)
    size = numbers * work.framework.gradient_bytes
    alpha, beta = of.crowd.ring(dp, of.order.chunks, apart)
    if work.saving.zero:
        sent = work.gathered_bytes / work.framework.gradient_bytes + 1
        return (dp - 1) * sent * beta * size / dp
    buckets = np.maximum(1, np.ceil(size / work.framework.bucket_bytes))
    wire = 2 * (dp - 1) * (buckets * alpha + beta * size / dp)
    stages = of.pp * of.order.chunks
    early, copied = early_share(work, stages, of.tp), copied_share(work, stages, of.tp)
    return wire - np.minimum(early * wire, backward) + copied * numbers * each.copy


def _classes(
    cost: CostModel, crowd: Crowd, size: int, shards: int, dp: int
) -> tuple[list[UnitClass], NDArray[np.int64]]:
    """Kinds that are told apart, and [mixture, class] -> units of a column."""
    for most in range(MOST_CLASSES, 0, -1):
        classes = unit_classes(cost, crowd, size, shards, most)
        least = [min(each.number, dp) for each in classes]
        ways = [
            ways for ways in itertools.product(*(range(number, -1, -1) for number in least[:-1])) if sum(ways) <= dp
        ]
        mixtures = [(*few, dp - sum(few)) for few in ways if dp - sum(few) <= least[-1]]
        if len(mixtures) <= MOST_MIXTURES:
            break
    return classes, np.array(mixtures)
