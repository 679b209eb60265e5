"""Lower bound of the step time for given degrees, by the cost model that predicts layouts, but without a layout.

For a replica of M micro-batches let x_r be the seconds of rank r for one micro-batch, and t_r the seconds of its
all-reduce and update afterwards. Every rank needs M·x_r + t_r seconds. A rank also waits while each rank before it in
the pipeline computes a share of its own x: the actions of one micro-batch that come before the waiting rank's first
action or after its last one. With work as speed times seconds (`relative_speeds`), rank r of speed s_r does at most
s_r·x_r of w, the work of the whole model on one micro-batch. The least step time under these conditions is a linear
program; the code solves it in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hpctrain.base.collector import cached_method
from hpctrain.planner.bounds.rank_times import PipelinePasses
from hpctrain.planner.bounds.unit_counts import (
    UnitCounts,
    counts_all_reduce,
    late_shard_bytes,
    shard_bytes_per_micro_batch,
)
from hpctrain.planner.cost.collectives import begins_early, overlapped_share
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import ModelPart, ScheduleSpec, Workload
from hpctrain.planner.devices.constants import CostConstants
from hpctrain.planner.devices.pool import DevicePool, DeviceSpec
from hpctrain.planner.layout.layout import Option
from hpctrain.planner.layout.partition import split_evenly
from hpctrain.records.plan.plan import ParallelDims
from hpctrain.schedule.generate import stage_ranks

LARGEST_PIECES = ((1, False, False), (0, True, False), (0, False, True), (0, True, True))
"""(blocks, first, last) of the parts of a stage that ZeRO sends one by one; the largest of them counts."""


class ClosedFormBound:
    """Closed-form bounds for one workload, one size of tensor-parallel groups and one micro-batch size.

    Args:
        unit_counts: the tensor-parallel groups that the pool's devices form, all of one size.
        micro_batch: sequences of a micro-batch.
    """

    def __init__(self, cost: CostModel, unit_counts: UnitCounts, micro_batch: int) -> None:
        self.cost, self.unit_counts = cost, unit_counts
        self.count = cost.work.sequences // micro_batch
        """Micro-batches of a step, over all replicas."""
        units, layers = [unit for unit, _ in unit_counts.kinds], cost.work.least_blocks
        self.timed = [cost.module_times(unit, micro_batch) for unit in units]
        blocks = [sum(t.block) + sum(t.block_tp) for t in self.timed]
        parts = [(layers * block, sum(t.embedding), sum(t.head)) for t, block in zip(self.timed, blocks, strict=True)]
        speeds, self.work = relative_speeds(parts)
        """Work of the whole model for one micro-batch; a tensor-parallel group of speed s does at most s of it in a
        second.
        """
        action_ops = [cost.constants[unit.kind].action_ops for unit in units]
        self.action = min(s * ops * unit.launch_s for s, ops, unit in zip(speeds, action_ops, units, strict=True))
        """Work that starting an action amounts to: the smallest product of speed and cost over the kinds of devices."""
        self.split = layers * min(speed * t.block_split for speed, t in zip(speeds, self.timed, strict=True))
        """Work that splitting the backward of all blocks adds: the smallest value over the kinds of devices."""
        self.split_ratio = max(t.block_split / block for t, block in zip(self.timed, blocks, strict=True))
        """Seconds that splitting the backward adds to a block, divided by the block's seconds: the largest over the
        kinds of devices.
        """
        self.block_s = cost.work.least_share * min(blocks)
        """The least seconds of one block for one micro-batch, over the kinds of devices."""
        self.ends_s = min(sum(t.embedding) for t in self.timed), min(sum(t.head) for t in self.timed)
        """The least seconds of the embedding and of the head for one micro-batch, over the kinds of devices."""
        seconds = [sum(p) + 2 * ops * unit.launch_s for p, ops, unit in zip(parts, action_ops, units, strict=True)]
        counts = [count for _, count in unit_counts.kinds]
        self.kinds = sorted(zip(speeds, counts, seconds, strict=True), key=lambda kind: -kind[0])
        """One entry a kind of tensor-parallel group, the fastest first: (speed, number of groups, seconds of the whole
        model).
        """
        self.backward_s = self._most_backward_s()
        """(a, b) such that a rank with one stage on one device takes at most a + b·parameters seconds for the backward
        of a micro-batch."""

    def _most_backward_s(self) -> tuple[float, float]:
        work = self.cost.work
        if work.least_blocks != work.spec.layers:
            return 0.0, math.inf  # a stage may hold blocks that are slower than the mean
        sizes = [
            work.parameters(ModelPart(*part), 1) for part in ((0, True, False), (1, False, False), (0, False, True))
        ]
        launches = [self.cost.constants[unit.kind].action_ops * unit.launch_s for unit, _ in self.unit_counts.kinds]
        return max(launches), max(
            seconds / size
            for parts in self.timed
            for seconds, size in zip((parts.embedding[1], parts.block[1], parts.head[1]), sizes, strict=True)
        )

    def work_s(self, dims: ParallelDims) -> float:
        """Return a lower bound of the step time in seconds: what computation alone takes with any schedule.

        The bound is weaker than `step_s` and quick to compute; a search sorts degrees by it.
        """
        return self.count * self.work / self._fastest(dims[0] * dims[1])[0]

    def step_s(self, option: Option) -> float:
        """Return a lower bound in seconds of the step time of all layouts of the option."""
        pp, dp, tp = option.dims
        most = -(-self.count // dp)
        start, per_parameter = self._tail(option)
        parameters = self.cost.work.spec.parameters() / tp
        tail = parameters * per_parameter
        total, slowest = self._fastest(pp * dp)
        work = self.work + 2 * option.stages * self.action
        if option.splits_backward and pp > 1:
            work += self.split
            # The backward of the first stage is not split. The bound counts this as more speed.
            total += dp * self.kinds[0][0] * self.split_ratio
        update_work = self.kinds[-1][0] * dp * parameters * per_parameter
        bounds = [(self.count * work + update_work) / total, most * self._slowest_rank_s(pp, option.schedule_spec)]
        bounds.append(self._shard_collectives_s(option))
        if pp == 1:
            bounds.append(self._whole_models(dp, tail))
        else:
            bounds.append(self._filled(option, work, tail, total, slowest))
            bounds.append(PipelinePasses(self.cost, self.unit_counts, option).step_s(most))
        return max(bounds) + start

    def _fastest(self, size: int) -> tuple[float, float]:
        """Return the sum of the speeds of the `size` fastest tensor-parallel groups, and the slowest of these
        speeds. Speeds are relative, as `relative_speeds` returns them.
        """
        total, slowest = 0.0, self.kinds[0][0]
        for speed, count, _ in self.kinds:
            taken = min(count, size)
            if taken == 0:
                break
            total, slowest, size = total + taken * speed, speed, size - taken
        return total, slowest

    def _filled(self, option: Option, work: float, tail: float, total: float, slowest: float) -> float:
        """Return a lower bound of the step time in seconds that includes the fill time, the seconds until the last
        pipeline rank starts.

        Args:
            work: work of the model for one micro-batch, including what starting actions and splitting backwards add, in
                the unit of `self.work`.
            tail: seconds after a pipeline rank's last action if the rank holds the whole model.
            total: sum of the speeds of the pp·dp fastest tensor-parallel groups, in units of work per second.
            slowest: the slowest of these speeds.
        """
        pp, dp, _ = option.dims
        late_share, excluded = self._late_share(option)
        if len(self.kinds) == 1 and not option.splits_backward:
            most = -(-self.count // dp)
            return (most * work + tail * (1 - late_share / most)) / (pp - late_share * (pp - 1) / most)
        # Summed over replicas, with sum(1/M) >= dp²/count. A choice other than the fastest groups may end with a slower
        # one.
        late = late_share * (pp - 1) * dp * dp / self.count
        last = slowest if late <= 1 else self.kinds[-1][0]
        fastest = self.kinds[0][0]
        return (self.count * work - dp * fastest * late_share * excluded) / max(total - last * late, total / pp)

    def _tail(self, option: Option) -> tuple[float, float]:
        """Return (a, b) such that a pipeline rank takes at least a + b·parameters seconds after its last action.

        `parameters` is the number of parameters on each device of the pipeline rank.
        """
        work, dp, memory_options = self.cost.work, option.dims.dp, self.cost.work.memory_options
        shards = dp if memory_options.zero and memory_options.shard == "all" else 1
        units = [unit for unit, _ in self.unit_counts.kinds]
        update = (
            min(self.cost.constants[unit.kind].optimizer.touched_bytes / unit.bytes_per_s for unit in units) / shards
        )
        if not counts_all_reduce(work, dp):
            return 0.0, 0.0 if memory_options.shard == "node" else update
        alpha, beta = self.unit_counts.ring(dp)
        sent: tuple[float, ...] = (work.framework.summed_bytes,) * 2
        if memory_options.zero:
            sent = late_shard_bytes(work, units[0].kind)
        late = 1 - overlapped_share(work, option.stages, option.dims.tp)
        if begins_early(work, option.stages) and option.virtual_stages > 1:
            return 0.0, update  # a rank's other stages may hide the messages
        rounds = sum(size > 0 for size in sent)
        latencies = late * rounds * (dp - 1) * alpha
        messages = sum(sent) * (dp - 1) / dp * beta
        if late < 1 and option.stages > 1:
            # What passes during a rank's last backward is no longer than this backward.
            launch_s, most = self.backward_s
            return -launch_s, update + max(late * messages, messages - most)
        per_parameter = update + late * messages
        if memory_options.zero > 1:
            return latencies, per_parameter
        if memory_options.zero:
            largest: float = max(work.parameters(ModelPart(*part), option.dims.tp) for part in LARGEST_PIECES)
        else:
            largest = work.framework.bucket_bytes / work.framework.gradient_bytes
        # Each bucket or piece takes the latencies: there is at least one, and one for each `largest` parameters.
        if work.spec.parameters() / option.dims.tp / option.dims.pp < largest:
            return latencies, per_parameter
        return 0.0, per_parameter + latencies / largest

    def _shard_collectives_s(self, option: Option) -> float:
        """Return the least seconds that ZeRO's collectives beside the passes of micro-batches take in a step, on the
        pipeline rank with most parameters."""
        (pp, dp, tp), work = option.dims, self.cost.work
        if work.memory_options.zero < 2 or not counts_all_reduce(work, dp):
            return 0.0
        _, beta = self.unit_counts.ring(dp)
        sent = sum(shard_bytes_per_micro_batch(work)) * work.spec.parameters() / tp / pp
        return self.count // dp * (dp - 1) / dp * beta * sent

    def _late_share(self, option: Option) -> tuple[float, float]:
        """Return two figures: the share of a pipeline rank's work on one micro-batch that comes before the next
        pipeline rank starts or after the next pipeline rank ends, and the seconds of the micro-batch's work to which
        this share does not apply.

        With split backwards, a pipeline rank fills the time after the next one's end with W. Then the share counts
        forwards only, and the seconds are those of the embedding's forward and backward for one micro-batch on the
        slowest kind of group; otherwise the seconds are 0.
        """
        if not option.splits_backward:
            return 1 / option.virtual_stages, 0.0
        shares = []
        for parts in self.timed:
            forward, backward = (sum(seconds) for seconds in zip(parts.block, parts.block_tp, strict=True))
            shares.append(forward / (forward + backward + parts.block_split))
        return min(shares) / option.virtual_stages, max(sum(parts.embedding) for parts in self.timed)

    @cached_method
    def _slowest_rank_s(self, pp: int, schedule_spec: ScheduleSpec) -> float:
        """Return the least seconds of the slowest pipeline rank for one micro-batch, over all cuts of the model into
        whole blocks.
        """
        layers, ranks = self.cost.work.spec.layers, range(pp)
        owner = stage_ranks(schedule_spec.name, pp, pp * schedule_spec.virtual_stages)
        embedding, head = self.ends_s
        fixed = [embedding * (rank == owner[0]) + head * (rank == owner[-1]) for rank in ranks]

        def seconds(rank: int, blocks: int) -> float:
            return fixed[rank] + blocks * self.block_s

        counts = split_evenly(layers, seconds, [0] * pp, [layers] * pp)
        assert counts is not None, "every rank may hold all blocks"
        return max(map(seconds, ranks, counts))

    def _whole_models(self, dp: int, tail: float) -> float:
        """Return a lower bound of the step time, in seconds, for `dp` replicas of one tensor-parallel group each, which
        compute whole micro-batches.

        Args:
            tail: seconds of all-reduce and update after a group's last action.
        """
        seconds = sorted(s for _, count, s in self.kinds for _ in range(min(count, dp)))[:dp]
        if seconds[0] == seconds[-1]:
            return -(-self.count // dp) * seconds[0] + tail
        counts = split_evenly(self.count, lambda i, n: n * seconds[i], [1] * dp, [self.count] * dp)
        assert counts is not None, "there are at least as many micro-batches as replicas"
        return max(n * s for n, s in zip(counts, seconds, strict=True)) + tail


def ideal_step_s(pool: DevicePool, work: Workload) -> float:
    """Return a lower bound in seconds of the step time of all plans on the pool.

    The bound counts the seconds of matrix products, of reading and writing logits and the activations that are saved
    for the backward pass, and of the update. It leaves out launches, messages, bubbles, weight traffic and duplicated
    work, because some plan may avoid them.
    """
    parts = [_unavoidable(work, device, pool.constants[device.kind]) for device in pool.devices]
    speeds, whole = relative_speeds(parts)
    together = sum(speeds)
    # Device u, busy for compute and update, is not done before T. Weighted by speed over all devices:
    # T >= sum(w_u · busy_u) + sum(w_u · update_u), and every parameter is updated somewhere.
    lightest = min(
        speed / together * pool.constants[device.kind].optimizer.touched_bytes / device.bytes_per_s
        for speed, device in zip(speeds, pool.devices, strict=True)
    )
    return work.sequences * whole / together + work.spec.parameters() * lightest


def relative_speeds(parts: Sequence[Sequence[float]]) -> tuple[list[float], float]:
    """Return (the speed of each device relative to the first device, the work of all parts together). Work is speed
    times seconds.

    A device's speed is the first device's seconds for the first part, divided by its own seconds for that part. The
    work of a part is the smallest product of speed and seconds over the devices. So no device does more work in a
    second than its speed, whichever parts it computes.

    Args:
        parts: [device][part] -> seconds that the device takes for the part alone.
    """
    speeds = [parts[0][0] / seconds[0] for seconds in parts]
    by_part = zip(*parts, strict=True)
    return speeds, sum(min(speed * s for speed, s in zip(speeds, part, strict=True)) for part in by_part)


def _unavoidable(work: Workload, device: DeviceSpec, constants: CostConstants) -> tuple[float, float]:
    """Return the seconds per sequence that all blocks take on a device, and those that the head takes, each in the
    forward and backward pass together."""
    spec, seq_len = work.spec, work.seq_len
    head = spec.forward_flops(1, seq_len, spec.layers)
    blocks = spec.forward_flops(1, seq_len) - head
    activations = spec.layers * work.block_bytes(1, 1) * sum(constants.activation_passes)
    logits = spec.logits_bytes(1, seq_len) * sum(constants.logits_passes)
    blocks_s = 3 * blocks / constants.efficiency / device.flops + activations / device.bytes_per_s
    return blocks_s, 3 * head / device.flops + logits / device.bytes_per_s
