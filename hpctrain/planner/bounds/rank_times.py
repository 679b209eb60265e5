"""Lower bounds of the seconds of each pipeline rank's micro-batch, all-reduce and update.

They depend on the class of tensor-parallel groups and on the number of blocks.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from hpctrain.planner.bounds.arrays import FloatArray
from hpctrain.planner.bounds.option import Option
from hpctrain.planner.bounds.pipeline_passes import PipelinePasses
from hpctrain.planner.bounds.unit_counts import UnitClass, UnitCounts, counts_all_reduce, unit_classes
from hpctrain.planner.cost.all_reduce import flat_copy_share
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import ModelPart, ScheduleSpec
from hpctrain.planner.devices.links import scalar_all_reduce_s
from hpctrain.planner.limits import DEFAULT_LIMITS, SearchLimits
from hpctrain.planner.simulate.overlap import overlapped_share
from hpctrain.schedule.generate import stage_ranks


class RankSeconds(NamedTuple):
    """Arrays [rank, class, blocks] of seconds."""

    forward: FloatArray
    backward: FloatArray
    both: FloatArray
    """Forward and backward of a micro-batch, with split backwards if the schedule splits them."""
    sums: FloatArray
    update: FloatArray


class RankTimes:
    """Least seconds of the ranks of an option.

    Args:
        shards: the largest number of replicas that share a state.
        waits: whether to count waits from the order of actions. Without them, the times of 1f1b bound every schedule
            whose first and last rank hold the ends of the model.
    """

    def __init__(
        self,
        cost: CostModel,
        unit_counts: UnitCounts,
        option: Option,
        shards: int = 1,
        waits: bool = True,
        limits: SearchLimits = DEFAULT_LIMITS,
    ) -> None:
        self.cost, self.unit_counts, self.option, self.shards = cost, unit_counts, option, shards
        self.waits, self.limits = waits, limits
        self.pp, self.dp, self.tp = option.dims
        self.count, self.layers = cost.work.sequences // option.micro_batch, cost.work.spec.layers
        owner = stage_ranks(option.schedule_spec.name, self.pp, option.stages)
        self.first, self.last = owner[0], owner[-1]
        self._set_classes()
        # Without waits the bound is for all schedules, so take the one with the shortest passes.
        shortest = option if waits else option._replace(schedule_spec=ScheduleSpec("interleaved_zero_bubble"))
        self.passes = PipelinePasses(cost, unit_counts, shortest)
        crosses = self.pp * self.dp > unit_counts.most_in_a_node
        self.norm_s = scalar_all_reduce_s(unit_counts.alpha, self.pp * self.dp * self.tp) if crosses else 0.0
        self.times = self._times()
        self.fill = self._fill()
        """[rank] -> the least seconds before the rank's first forward."""
        self.first_sum_s = float(self.times.sums[self.first].min())
        self.inside = sum(units // self.dp for units in unit_counts.by_node)
        """The largest number of columns (the replicas of one pipeline rank) that can lie within a node."""
        self.apart = self._times(apart=True) if 0 < self.inside < self.pp and self.dp > 1 else None
        """Times of columns across nodes; None if all columns may lie within a node, or none can."""

    def _set_classes(self) -> None:
        """Set the classes of tensor-parallel groups, and [mixture, class] -> groups of this class in a column."""
        for most in range(self.limits.max_classes, 0, -1):
            classes = unit_classes(self.cost, self.unit_counts, self.option, self.shards, most)
            limits = [min(unit_class.number, self.dp) for unit_class in classes]
            firsts = itertools.product(*(range(number, -1, -1) for number in limits[:-1]))
            mixtures = [(*first, self.dp - sum(first)) for first in firsts if sum(first) <= self.dp]
            mixtures = [mixture for mixture in mixtures if mixture[-1] <= limits[-1]]
            if len(mixtures) <= self.limits.max_mixtures:
                break
        self.classes, self.mixtures = classes, np.array(mixtures)

    def _times(self, apart: bool = False) -> RankSeconds:
        """The least seconds of all ranks; ranks that hold neither end of the model have equal times."""
        by_ends: dict[tuple[bool, bool], tuple[FloatArray, ...]] = {}
        rows = []
        for rank in range(self.pp):
            ends = (rank == self.first, rank == self.last)
            if ends not in by_ends:
                by_ends[ends] = self._of_ends(*ends, apart)
            rows.append(by_ends[ends])
        return RankSeconds(*(np.array(values) for values in zip(*rows, strict=True)))

    def _fill(self) -> FloatArray:
        # If a rank has several stages, a stage may hold a single block.
        seconds = [
            min(
                rank * c.action + max(0, rank - 1) * c.block[0] + (self.first == 0) * c.embedding[0]
                for c in self.classes
            )
            for rank in range(1, self.pp)
        ]
        return np.array([0.0, *seconds])

    def _of_ends(self, first: bool, last: bool, apart: bool) -> tuple[FloatArray, ...]:
        """The [class, blocks] arrays of `RankSeconds` for a rank that holds the model's first stage, its last stage or
        neither.
        """
        work, virtual_stages = self.cost.work, self.option.virtual_stages
        numbers = range(self.layers + 1)
        blocks = np.arange(self.layers + 1, dtype=float)
        timed = np.minimum(blocks, [work.mean_blocks(ModelPart(number, first, last))[0] for number in numbers])
        parameters = work.parameters(ModelPart(0, first, last), self.tp) + work.least_block_parameters(self.tp) * blocks
        # The first stage's backward is not split, and it may hold all blocks of its rank.
        split = self.option.splits_backward and not first
        rows = []
        for c in self.classes:
            forward, backward = (
                virtual_stages * c.action + first * embedding + last * head + timed * block
                for embedding, head, block in zip(c.embedding, c.head, c.block, strict=True)
            )
            both = forward + backward + split * (virtual_stages * c.action + blocks * c.split)
            update = c.update(blocks, first, last) + c.once + self.norm_s
            rows.append((forward, backward, both, self._sums(c, parameters, backward, apart), update))
        return tuple(np.array(values) for values in zip(*rows, strict=True))

    def _sums(self, unit_class: UnitClass, parameters: FloatArray, backward: FloatArray, apart: bool) -> FloatArray:
        """Seconds of a rank's all-reduce after its last backward, less the part that may overlap the backward."""
        work, dp, stages = self.cost.work, self.dp, self.option.stages
        if not counts_all_reduce(work, dp):
            return np.zeros_like(parameters)
        size = parameters * work.framework.gradient_bytes
        alpha, beta = self.unit_counts.ring(dp, self.option.virtual_stages, apart)
        if work.memory_options.zero:
            sent = work.gathered_bytes / work.framework.gradient_bytes + 1
            return (dp - 1) * sent * beta * size / dp
        buckets = np.maximum(1, np.ceil(size / work.framework.bucket_bytes))
        wire = 2 * (dp - 1) * (buckets * alpha + beta * size / dp)
        early, copied = overlapped_share(work, stages, self.tp), flat_copy_share(work, stages, self.tp)
        return wire - np.minimum(early * wire, backward) + copied * parameters * unit_class.copy
