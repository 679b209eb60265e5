"""Lower bound of the step time for given degrees, by the same cost model, without any layout.

For a replica of M micro-batches let x_r be a rank's seconds for one of them, and t_r those of its all-reduce and update
afterwards. Every rank needs M·x_r + t_r. The last rank starts and ends later by a share of the time of the ranks before
it. A rank of speed s_r does at most s_r·x_r of the model's work w. This gives linear programs, which are solved here in
closed form. A "unit" is a tensor-parallel group.
"""

from __future__ import annotations

from typing import NamedTuple

from hpctrain.planner.bounds.ideal import relative_speeds
from hpctrain.planner.bounds.option import Option
from hpctrain.planner.bounds.pipeline_passes import PipelinePasses
from hpctrain.planner.bounds.unit_counts import UnitCounts, counts_all_reduce
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import ScheduleSpec
from hpctrain.planner.layout.degrees import ParallelDims
from hpctrain.planner.layout.split_evenly import split_evenly
from hpctrain.planner.simulate.overlap import overlapped_share
from hpctrain.schedule.placement import stage_ranks


class _GroupSpeeds(NamedTuple):
    """Speeds and times of the kinds of units for one micro-batch, the fastest kind first."""

    speeds: list[float]
    counts: list[int]
    seconds: list[float]
    """Seconds of the whole model on one unit, by kind."""
    work: float
    """Work of the whole model; a unit of speed s does at most s of it in a second."""
    action: float
    """Work that starting an action amounts to: the smallest product of speed and cost over the kinds."""
    split: float
    """Work that splitting the backward of all blocks adds: the smallest over the kinds."""
    split_ratio: float
    """The largest ratio of the seconds that splitting adds to the seconds of a block, over the kinds."""
    block: float
    """The least seconds of one block."""
    ends: tuple[float, float]
    """The least seconds of the embedding and of the head."""

    def fastest(self, option: Option) -> tuple[float, float, float]:
        """(sum of the speeds, the slowest, the fastest) of the fastest units, as many as the option uses.

        The first stage's backward is not split. The sum counts that as more speed.
        """
        total, slowest, missing = 0.0, self.speeds[0], option.pp * option.dp
        for speed, count in zip(self.speeds, self.counts, strict=True):
            taken = min(count, missing)
            if taken == 0:
                break
            total, slowest, missing = total + taken * speed, speed, missing - taken
        if option.splits_backward and option.pp > 1:
            total += option.dp * self.speeds[0] * self.split_ratio
        return total, slowest, self.speeds[0]


class ClosedFormBound:
    """Bounds for one workload, whose memory options are fixed."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self._group_speeds_of: dict[tuple[int, int], _GroupSpeeds] = {}
        self._largest_rank_s: dict[tuple[int, int, int, ScheduleSpec], float] = {}

    def work_s(self, unit_counts: UnitCounts, dims: ParallelDims, micro_batch: int) -> float:
        """Seconds of the computation alone, for any schedule: a weaker bound to sort degrees by."""
        group_speeds = self._group_speeds(unit_counts, micro_batch)
        total, _, _ = group_speeds.fastest(Option(dims, ScheduleSpec("1f1b"), micro_batch))
        return self.cost.work.sequences // micro_batch * group_speeds.work / total

    def step_s(self, unit_counts: UnitCounts, option: Option) -> float:
        """Seconds of a step that no layout of the option beats."""
        pp, dp, tp = option.dims
        group_speeds, count = self._group_speeds(unit_counts, option.micro_batch), self._count(option)
        total, _, _ = group_speeds.fastest(option)
        most = -(-count // dp)
        start, per_parameter = self._tail(unit_counts, option)
        parameters = self.cost.work.spec.parameters() / tp
        work = group_speeds.work + 2 * option.stages * group_speeds.action
        if option.splits_backward and pp > 1:
            work += group_speeds.split
        tail = min(group_speeds.speeds) * dp * parameters * per_parameter
        bounds = [(count * work + tail) / total, most * self._largest_rank(unit_counts, option)]
        if pp == 1:
            bounds.append(_whole_models(group_speeds, count, dp, parameters * per_parameter))
        else:
            bounds.append(self._filled(unit_counts, option, work, parameters * per_parameter))
            bounds.append(PipelinePasses(self.cost, unit_counts, option).step_s(most))
        return max(bounds) + start

    def _count(self, option: Option) -> int:
        """Micro-batches of a step, over all replicas."""
        return self.cost.work.sequences // option.micro_batch

    def _filled(self, unit_counts: UnitCounts, option: Option, work: float, tail: float) -> float:
        """Bound that includes the fill time: seconds until the last rank starts.

        Args:
            tail: seconds after a rank's last action if it holds the whole model.
        """
        pp, dp, _ = option.dims
        group_speeds, count = self._group_speeds(unit_counts, option.micro_batch), self._count(option)
        total, slowest, fastest = group_speeds.fastest(option)
        late_share, excluded = self._late_share(unit_counts, option)
        if len(group_speeds.speeds) == 1 and not option.splits_backward:
            most = -(-count // dp)
            return (most * work + tail * (1 - late_share / most)) / (pp - late_share * (pp - 1) / most)
        # Summed over replicas, with sum(1/M) >= dp²/count. A choice other than the fastest units may end with a slower.
        late = late_share * (pp - 1) * dp * dp / count
        last = slowest if late <= 1 else min(group_speeds.speeds)
        return (count * work - dp * fastest * late_share * excluded) / max(total - last * late, total / pp)

    def _group_speeds(self, unit_counts: UnitCounts, micro_batch: int) -> _GroupSpeeds:
        key = (unit_counts.tp, micro_batch)
        if key in self._group_speeds_of:
            return self._group_speeds_of[key]
        layers, least = self.cost.work.least_blocks, self.cost.work.least_share
        units = [unit for unit, _ in unit_counts.kinds]
        timed = [self.cost.module_times(unit, micro_batch) for unit in units]
        blocks = [sum(t.block) + sum(t.block_tp) for t in timed]
        parts = [(layers * block, sum(t.embedding), sum(t.head)) for t, block in zip(timed, blocks, strict=True)]
        speeds, work = relative_speeds(parts)
        by_speed = sorted(range(len(speeds)), key=lambda kind: -speeds[kind])
        action_ops = [self.cost.constants[unit.kind].action_ops for unit in units]
        self._group_speeds_of[key] = _GroupSpeeds(
            [speeds[kind] for kind in by_speed],
            [unit_counts.kinds[kind][1] for kind in by_speed],
            [sum(parts[kind]) + 2 * action_ops[kind] * units[kind].launch_s for kind in by_speed],
            work,
            min(speed * ops * unit.launch_s for speed, ops, unit in zip(speeds, action_ops, units, strict=True)),
            layers * min(speed * t.block_split for speed, t in zip(speeds, timed, strict=True)),
            max(t.block_split / block for t, block in zip(timed, blocks, strict=True)),
            least * min(blocks),
            (min(sum(t.embedding) for t in timed), min(sum(t.head) for t in timed)),
        )
        return self._group_speeds_of[key]

    def _tail(self, unit_counts: UnitCounts, option: Option) -> tuple[float, float]:
        """Lower bound of what follows a rank's last action: (seconds, seconds per parameter of a device)."""
        work, dp, memory_options = self.cost.work, option.dp, self.cost.work.memory_options
        shards = dp if memory_options.zero and memory_options.shard == "all" else 1
        update = min(self.cost.constants[u.kind].optimizer_bytes / u.bytes_per_s for u, _ in unit_counts.kinds) / shards
        if not counts_all_reduce(work, dp):
            return 0.0, 0.0 if memory_options.shard == "node" else update
        alpha, beta = unit_counts.ring(dp, 1)
        gradient_bytes = work.framework.gradient_bytes
        sent = work.gathered_bytes + gradient_bytes if memory_options.zero else 2 * gradient_bytes
        late = 1 - overlapped_share(work, option.stages, unit_counts.tp)
        return late * 2 * (dp - 1) * alpha, update + late * sent * (dp - 1) / dp * beta

    def _late_share(self, unit_counts: UnitCounts, option: Option) -> tuple[float, float]:
        """Return the share of a rank's work that comes before the next rank starts or after it ends, and the seconds
        of the model that such work excludes.

        With split backwards, W fills the end. Then only forwards count, and the embedding is excluded.
        """
        if not option.splits_backward:
            return 1 / option.virtual_stages, 0.0
        timed = [self.cost.module_times(unit, option.micro_batch) for unit, _ in unit_counts.kinds]
        shares = []
        for parts in timed:
            forward, backward = (sum(seconds) for seconds in zip(parts.block, parts.block_tp, strict=True))
            shares.append(forward / (forward + backward + parts.block_split))
        return min(shares) / option.virtual_stages, max(sum(parts.embedding) for parts in timed)

    def _largest_rank(self, unit_counts: UnitCounts, option: Option) -> float:
        """The least seconds that the slowest rank of any cut takes for one micro-batch; blocks are not divided."""
        key = (unit_counts.tp, option.micro_batch, option.pp, option.schedule_spec)
        if key not in self._largest_rank_s:
            group_speeds, layers = self._group_speeds(unit_counts, option.micro_batch), self.cost.work.spec.layers
            owner, ranks = stage_ranks(option.schedule_spec.name, option.pp, option.stages), range(option.pp)
            embedding, head = group_speeds.ends
            fixed = [embedding * (rank == owner[0]) + head * (rank == owner[-1]) for rank in ranks]

            def seconds(rank: int, blocks: int) -> float:
                return fixed[rank] + blocks * group_speeds.block

            counts = split_evenly(layers, seconds, [0] * option.pp, [layers] * option.pp)
            assert counts is not None, "every rank may hold all blocks"
            self._largest_rank_s[key] = max(map(seconds, ranks, counts))
        return self._largest_rank_s[key]


def _whole_models(group_speeds: _GroupSpeeds, count: int, dp: int, tail: float) -> float:
    """Bound in seconds for replicas of one unit each; micro-batches are not divided."""
    seconds = sorted(
        s for s, n in zip(group_speeds.seconds, group_speeds.counts, strict=True) for _ in range(min(n, dp))
    )[:dp]
    if seconds[0] == seconds[-1]:
        return -(-count // dp) * seconds[0] + tail
    counts = split_evenly(count, lambda i, n: n * seconds[i], [1] * dp, [count] * dp)
    assert counts is not None, "there are at least as many micro-batches as replicas"
    return max(n * s for n, s in zip(counts, seconds, strict=True)) + tail
