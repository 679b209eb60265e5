"""Lower bounds of the seconds of each pipeline rank, and of a pass of a micro-batch through all ranks and back."""

from __future__ import annotations

import itertools
from functools import cache
from typing import NamedTuple

import numpy as np

from hpctrain.planner.bounds.arrays import FloatArray
from hpctrain.planner.bounds.unit_counts import (
    UnitClass,
    UnitCounts,
    counts_all_reduce,
    hides_shard_collectives,
    late_shard_bytes,
    shard_bytes_per_micro_batch,
    unit_classes,
)
from hpctrain.planner.cost.collectives import begins_early, flat_copy_share, overlapped_share
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import ModelPart, ScheduleSpec
from hpctrain.planner.devices.links import scalar_all_reduce_s
from hpctrain.planner.layout.layout import Option
from hpctrain.planner.limits import DEFAULT_LIMITS, SearchLimits
from hpctrain.schedule.generate import V_SHAPED_SCHEDULES, stage_ranks


class RankSeconds(NamedTuple):
    """Seconds of each pipeline rank, by the class of its tensor-parallel group (`UnitClass`) and its number of blocks:
    arrays [rank, class, blocks].
    """

    forward: FloatArray
    """Forward of a micro-batch."""
    backward: FloatArray
    """Backward of a micro-batch, not split."""
    both: FloatArray
    """Forward and backward of a micro-batch, with split backwards if the schedule splits them."""
    sums: FloatArray
    """The all-reduce of the gradients over the replicas, less the part that may pass during the rank's actions."""
    late: FloatArray
    """The part of the all-reduce that comes after the rank's last backward, also if the rank waits before that."""
    update: FloatArray
    """The optimizer's update and the gradient norm, once a step."""


class RankTimes:
    """The least seconds that each pipeline rank of an option takes for a micro-batch, the all-reduce and the update.

    Args:
        shards: the largest number of replicas that share a state.
        waits: whether to count waits that follow from the order of actions. Without these waits, the times of 1f1b are
            lower bounds for every schedule whose first rank holds the first stage and whose last rank holds the last
            stage.
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
        self.first_sum_s = float(self.times.late[self.first].min())

    def _set_classes(self) -> None:
        """Set `classes`, the tensor-parallel groups classed by speed, and `mixtures`, [mixture, class] -> number of
        groups of the class in a column.

        A column is the tensor-parallel groups that all replicas have at one pipeline rank. A mixture is one way to
        choose how many groups of a column are of each class.
        """
        for most in range(self.limits.max_classes, 0, -1):
            classes = unit_classes(self.cost, self.unit_counts, self.option, self.shards, most)
            limits = [min(unit_class.number, self.dp) for unit_class in classes]
            firsts = itertools.product(*(range(number, -1, -1) for number in limits[:-1]))
            mixtures = [(*first, self.dp - sum(first)) for first in firsts if sum(first) <= self.dp]
            mixtures = [mixture for mixture in mixtures if mixture[-1] <= limits[-1]]
            if len(mixtures) <= self.limits.max_mixtures:
                break
        self.classes, self.mixtures = classes, np.array(mixtures)

    def _times(self) -> RankSeconds:
        """Return lower bounds of the seconds that each pipeline rank takes for a micro-batch, the all-reduce and the
        update. Pipeline ranks that hold neither end of the model have equal bounds.
        """
        of_ends = cache(self._of_ends)
        rows = [of_ends(rank == self.first, rank == self.last) for rank in range(self.pp)]
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

    def _of_ends(self, first: bool, last: bool) -> tuple[FloatArray, ...]:
        """Return the arrays of `RankSeconds` for one pipeline rank, in the order of the fields of `RankSeconds`: each
        [class of `classes`, number of blocks].

        Args:
            first: whether the rank holds the model's first stage.
            last: whether the rank holds the model's last stage.
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
            if (
                work.memory_options.zero >= 2
                and counts_all_reduce(work, self.dp)
                and hides_shard_collectives(work, c.kind)
            ):
                # A pass takes at least as long as the collectives beside it.
                _, beta = self.unit_counts.ring(self.dp)
                sent = (
                    (self.dp - 1) / self.dp * beta * each * parameters for each in shard_bytes_per_micro_batch(work)
                )
                longer = [np.maximum(each, sent_s) for each, sent_s in zip((forward, backward), sent, strict=True)]
                both = np.maximum(both, sum(longer))
                forward, backward = longer
            update = c.update(blocks, first, last) + c.once + self.norm_s
            rows.append((forward, backward, both, *self._sums(c, parameters, both - forward), update))
        return tuple(np.array(values) for values in zip(*rows, strict=True))

    def _sums(
        self, unit_class: UnitClass, parameters: FloatArray, backward: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Return two arrays [number of blocks], the fields `sums` and `late` of `RankSeconds` for a pipeline rank with
        this number of blocks.

        If the rank has several stages, and so early sums, at most 2·pp backwards of each stage lie after the first
        message of an all-reduce: 2·pp − 1 after the first stage's last backward, and this backward itself.

        Args:
            parameters: [number of blocks] -> parameters of the rank.
            backward: [number of blocks] -> seconds of the rank's backward for one micro-batch.
        """
        work, dp, stages = self.cost.work, self.dp, self.option.stages
        if not counts_all_reduce(work, dp):
            return np.zeros_like(parameters), np.zeros_like(parameters)
        size = parameters * work.framework.summed_bytes
        alpha, beta = self.unit_counts.ring(dp)
        if work.memory_options.zero:
            message_s = (dp - 1) / dp * max(beta, unit_class.sent_byte)
            late = np.zeros_like(parameters)
            collectives = (unit_class.gather, unit_class.scatter)
            for width, (byte_s, block_s) in zip(late_shard_bytes(work, unit_class.kind), collectives, strict=True):
                if width > 0:
                    late = late + width * parameters * (message_s + byte_s) + np.arange(len(parameters)) * block_s
            return late, late
        buckets = np.maximum(1, np.ceil(size / work.framework.bucket_bytes))
        sent_bytes = 2 * (dp - 1) * size / dp
        sending = sent_bytes * unit_class.sent_byte
        # Seconds of messages on which no CPU is at work; only these may pass while the rank computes.
        beside = np.maximum(0.0, 2 * (dp - 1) * buckets * alpha + beta * sent_bytes - sending)
        processor = sending + flat_copy_share(work, stages, self.tp) * parameters * unit_class.copy
        if self.option.virtual_stages > 1 and begins_early(work, stages):
            return np.maximum(0.0, beside - 2 * self.pp * backward) + processor, processor
        late = beside - np.minimum(overlapped_share(work, stages, self.tp) * beside, backward) + processor
        return late, late


class PipelinePasses:
    """Lower bounds of the seconds in which a micro-batch passes through the pipeline, for one option.

    Every part of the model counts as on the tensor-parallel group that is fastest at it. Messages between stages count
    as within a node, except for those that must leave a node because the largest nodes have no more groups.
    """

    def __init__(self, cost: CostModel, unit_counts: UnitCounts, option: Option) -> None:
        self.unit_counts, self.option = unit_counts, option
        self._any_s, self._between_s = _hops_s(cost, unit_counts, option.micro_batch)
        one_way = self.hops_s(option.dims.pp)
        if option.virtual_stages > 1:
            # A V-shaped schedule goes back from the last rank; other schedules wrap from the last rank to the first. A
            # circle through n nodes crosses between them n times.
            wrap = self._between_s if unit_counts.least_nodes(option.dims.pp) > 1 else self._any_s
            if option.schedule_spec.name in V_SHAPED_SCHEDULES:
                wrap = 0.0
            one_way = option.virtual_stages * one_way + (option.virtual_stages - 1) * wrap
        self.serial_s = self._between_s - unit_counts.alpha if unit_counts.least_nodes(option.dims.pp) > 1 else 0.0
        """Seconds between two messages of a replica on its slowest way from one pipeline rank to the next."""
        forward, backward = _whole_s(cost, unit_counts, option)
        self.forward_s = forward + one_way
        """Seconds until a micro-batch has passed all stages forward."""
        self.both_s = self.forward_s + backward + one_way
        """Seconds until a micro-batch's gradient is back at the first stage; with split backwards, without W."""

    def hops_s(self, ranks: int) -> float:
        """Return the least seconds of the `ranks` - 1 messages with which one micro-batch passes from the first to the
        last of `ranks` neighbouring pipeline ranks.
        """
        crossing = self.unit_counts.least_nodes(ranks) - 1
        return crossing * self._between_s + (ranks - 1 - crossing) * self._any_s

    def step_s(self, micro_batches: int) -> float:
        """Return the least seconds until a replica has done `micro_batches` micro-batches.

        With 1f1b the first rank holds at most `pp` micro-batches, so it starts another micro-batch only after the
        backward of an earlier one. With other schedules, only one micro-batch's way forward and back is counted. If a
        replica needs several nodes, the micro-batches' messages between two nodes also follow each other.
        """
        trips = -(-micro_batches // self.option.dims.pp) if self.option.schedule_spec.name == "1f1b" else 1
        return max(trips * self.both_s, self.both_s + (micro_batches - 1) * self.serial_s)


def warmup_forwards(option: Option) -> FloatArray:
    """Return [rank] -> the most forwards of the rank that can lie within one micro-batch's forward pass through all
    stages. The rank's first backward cannot start before this pass has ended.

    Forwards of all stages of the rank count, those of the pass itself included. With gpipe the number is 1: the rank's
    forwards of the other micro-batches come in addition to the pass.
    """
    pp, name = option.dims.pp, option.schedule_spec.name
    ranks = np.arange(pp, dtype=np.float64)
    if name == "gpipe":
        return np.ones(pp)
    if name in V_SHAPED_SCHEDULES:
        return 2 * pp - 1 - ranks
    return pp - ranks if option.virtual_stages == 1 else np.full(pp, 2.0 * pp - 1)


def _hops_s(cost: CostModel, unit_counts: UnitCounts, micro_batch: int) -> tuple[float, float]:
    """Return the least seconds of any message between stages, and the least seconds of one that leaves a node."""
    work = cost.work
    # During the search all stages have one message codec, which is used only between nodes.
    within = work.message_bytes(micro_batch, unit_counts.tp, "none")
    between = work.message_bytes(micro_batch, unit_counts.tp, work.messages_behind(0))
    crossing_s = unit_counts.alpha + unit_counts.message_beta * between
    if not unit_counts.within_nodes:
        return 0.0, crossing_s
    return min(crossing_s, *(alpha + beta * within for alpha, beta in unit_counts.inside)), crossing_s


def _whole_s(cost: CostModel, unit_counts: UnitCounts, option: Option) -> tuple[float, float]:
    """Return the least seconds of the whole model's forward for one micro-batch, and those of its backward.

    With split backwards, the backward counts only until the gradient is back at the first stage.
    """
    layers, stages = cost.work.least_blocks, option.stages
    timed = [
        (cost.module_times(unit, option.micro_batch), cost.constants[unit.kind], unit) for unit, _ in unit_counts.kinds
    ]
    action = min(constants.action_ops * unit.launch_s for _, constants, unit in timed)
    forward, backward = (
        layers * min(parts.block[direction] + parts.block_tp[direction] for parts, _, _ in timed)
        + min(parts.embedding[direction] for parts, _, _ in timed)
        + stages * action
        for direction in (0, 1)
    )
    head, head_back = (min(parts.head[direction] for parts, _, _ in timed) for direction in (0, 1))
    if option.splits_backward and stages > 1:
        # All stages but the first send gradients on before they do W.
        backs = [(parts.block[1] + parts.block_tp[1], parts, constants.inputs_share) for parts, constants, _ in timed]
        block = min(min(whole, share * (whole + parts.block_split)) for whole, parts, share in backs)
        share = min(share for _, _, share in backs)
        embedding = min(parts.embedding[1] for parts, _, _ in timed)
        return forward + head, layers * block + embedding + share * head_back + action * (1 + 2 * share * (stages - 1))
    return forward + head, backward + head_back
