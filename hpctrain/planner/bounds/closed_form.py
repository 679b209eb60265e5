"""Lower bound of the step time for given degrees, by the same cost model, without any layout.

For a replica of M micro-batches let x_r be a rank's seconds for one of them, and t_r those of its all-reduce and update
afterwards. Every rank needs M·x_r + t_r. The last rank starts and ends later by the share `way` of the time of the
ranks before it. A rank of speed s_r does at most s_r·x_r of the model's work w. This gives linear programs, which are
solved here in closed form. A "unit" is a tensor-parallel group.
"""

from __future__ import annotations

from typing import NamedTuple

from hpctrain.planner.bounds.ideal import relative_speeds
from hpctrain.planner.bounds.pipeline_passes import PipelinePasses
from hpctrain.planner.bounds.unit_counts import UnitCounts
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import ScheduleSpec
from hpctrain.planner.layout.split_evenly import split_evenly
from hpctrain.planner.simulate.overlap import overlapped_share
from hpctrain.schedule.generate import SPLIT_BACKWARD_SCHEDULES
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


class ClosedFormBound:
    """Bounds for one workload, whose memory options are fixed."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self._group_speeds_of: dict[tuple[int, int], _GroupSpeeds] = {}
        self._cuts: dict[tuple[int, int, int, ScheduleSpec], float] = {}

    def work_s(self, unit_counts: UnitCounts, pp: int, dp: int, size: int) -> float:
        """Seconds of the computation alone, for any schedule: a weaker bound to sort degrees by."""
        group_speeds = self._group_speeds(unit_counts, size)
        total, _, _ = _fastest(group_speeds, pp * dp)
        return self.cost.work.sequences // size * group_speeds.work / total

    def step_s(self, unit_counts: UnitCounts, pp: int, dp: int, schedule_spec: ScheduleSpec, size: int) -> float:
        """Seconds of a step that no layout of these degrees, this schedule and this micro-batch size beats."""
        group_speeds, count = self._group_speeds(unit_counts, size), self.cost.work.sequences // size
        total, _, fastest = _fastest(group_speeds, pp * dp)
        most = -(-count // dp)
        start, per_parameter = self._tail(unit_counts, pp * schedule_spec.virtual_stages, dp)
        parameters = self.cost.work.spec.parameters() / unit_counts.tp
        work = group_speeds.work + 2 * pp * schedule_spec.virtual_stages * group_speeds.action
        split = schedule_spec.name in SPLIT_BACKWARD_SCHEDULES
        if split and pp > 1:
            # The first stage's backward is not split.
            work += group_speeds.split
            total += dp * fastest * group_speeds.split_ratio
        tail = min(group_speeds.speeds) * dp * parameters * per_parameter
        found = (count * work + tail) / total
        found = max(found, most * self._largest_rank(unit_counts, pp, schedule_spec, size))
        if pp == 1:
            found = max(found, self._whole_models(group_speeds, count, dp, parameters * per_parameter))
        else:
            found = max(found, self._filled(unit_counts, pp, dp, schedule_spec, size, work))
            found = max(found, PipelinePasses(self.cost, unit_counts, pp, schedule_spec, size).step_s(most))
        return found + start

    def _filled(
        self, unit_counts: UnitCounts, pp: int, dp: int, schedule_spec: ScheduleSpec, size: int, work: float
    ) -> float:
        """Bound that includes the fill time: seconds until the last rank starts."""
        group_speeds, count = self._group_speeds(unit_counts, size), self.cost.work.sequences // size
        total, slowest, fastest = _fastest(group_speeds, pp * dp)
        split = schedule_spec.name in SPLIT_BACKWARD_SCHEDULES
        way, without = self._on_the_way(unit_counts, schedule_spec, size)
        equal = len(group_speeds.speeds) == 1
        if equal and not split:
            most = -(-count // dp)
            _, per_parameter = self._tail(unit_counts, pp * schedule_spec.virtual_stages, dp)
            tail = self.cost.work.spec.parameters() / unit_counts.tp * per_parameter
            return (most * work + tail * (1 - way / most)) / (pp - way * (pp - 1) / most)
        if split:
            total += dp * fastest * group_speeds.split_ratio
        # Summed over replicas, with sum(1/M) >= dp²/count. A choice other than the fastest units may end with a slower.
        late = way * (pp - 1) * dp * dp / count
        last = slowest if late <= 1 else min(group_speeds.speeds)
        return (count * work - dp * fastest * way * without) / max(total - last * late, total / pp)

    def _group_speeds(self, unit_counts: UnitCounts, size: int) -> _GroupSpeeds:
        key = (unit_counts.tp, size)
        if key in self._group_speeds_of:
            return self._group_speeds_of[key]
        layers, least = self.cost.work.least_blocks, self.cost.work.least_share
        timed = [self.cost.module_times(unit, size) for unit, _ in unit_counts.kinds]
        parts = [(layers * (sum(t.block) + sum(t.block_tp)), sum(t.embedding), sum(t.head)) for t in timed]
        speeds, whole = relative_speeds(parts)
        by_speed = sorted(range(len(speeds)), key=lambda kind: -speeds[kind])
        actions = [2 * self.cost.constants[u.kind].action_ops * u.launch_s for u, _ in unit_counts.kinds]
        action = min(
            speed * self.cost.constants[unit.kind].action_ops * unit.launch_s
            for speed, (unit, _) in zip(speeds, unit_counts.kinds, strict=True)
        )
        blocks = [sum(t.block) + sum(t.block_tp) for t in timed]
        self._group_speeds_of[key] = _GroupSpeeds(
            [speeds[kind] for kind in by_speed],
            [unit_counts.kinds[kind][1] for kind in by_speed],
            [sum(parts[kind]) + actions[kind] for kind in by_speed],
            whole,
            action,
            layers * min(s * t.block_split for s, t in zip(speeds, timed, strict=True)),
            max(t.block_split / block for t, block in zip(timed, blocks, strict=True)),
            least * min(blocks),
            (min(sum(t.embedding) for t in timed), min(sum(t.head) for t in timed)),
        )
        return self._group_speeds_of[key]

    def _tail(self, unit_counts: UnitCounts, stages: int, dp: int) -> tuple[float, float]:
        """Lower bound of what follows a rank's last action: (seconds, seconds per parameter of a device)."""
        work, memory_options = self.cost.work, self.cost.work.memory_options
        shards = dp if memory_options.zero and memory_options.shard == "all" else 1
        update = min(self.cost.constants[u.kind].optimizer_bytes / u.bytes_per_s for u, _ in unit_counts.kinds) / shards
        if dp == 1 or (memory_options.zero and memory_options.shard == "node"):
            return 0.0, 0.0 if memory_options.shard == "node" else update
        alpha, beta = unit_counts.ring(dp, 1)
        if not work.codec.exact:
            return 0.0, update  # a codec sends fewer bytes, and some need fewer messages
        sent = (
            work.gathered_bytes + work.framework.gradient_bytes
            if memory_options.zero
            else 2 * work.framework.gradient_bytes
        )
        late = 1 - overlapped_share(work, stages, unit_counts.tp)
        return late * 2 * (dp - 1) * alpha, update + late * sent * (dp - 1) / dp * beta

    def _on_the_way(self, unit_counts: UnitCounts, schedule_spec: ScheduleSpec, size: int) -> tuple[float, float]:
        """Return the share of a rank's work that comes before the next rank starts or after it ends, and the seconds
        of the model that such work excludes.

        With split backwards, W fills the end. Then only forwards count, and the embedding is excluded.
        """
        if schedule_spec.name not in SPLIT_BACKWARD_SCHEDULES:
            return 1 / schedule_spec.virtual_stages, 0.0
        shares = []
        for unit, _ in unit_counts.kinds:
            parts = self.cost.module_times(unit, size)
            forward, backward = (parts.block[way] + parts.block_tp[way] for way in (0, 1))
            shares.append(forward / (forward + backward + parts.block_split))
        embedding = max(sum(self.cost.module_times(unit, size).embedding) for unit, _ in unit_counts.kinds)
        return min(shares) / schedule_spec.virtual_stages, embedding

    def _largest_rank(self, unit_counts: UnitCounts, pp: int, schedule_spec: ScheduleSpec, size: int) -> float:
        """The least seconds that the slowest rank of any cut takes for one micro-batch; blocks are not divided."""
        key = (unit_counts.tp, size, pp, schedule_spec)
        if key not in self._cuts:
            group_speeds, layers = self._group_speeds(unit_counts, size), self.cost.work.spec.layers
            owner = stage_ranks(schedule_spec.name, pp, pp * schedule_spec.virtual_stages)
            fixed = [
                group_speeds.ends[0] * (rank == owner[0]) + group_speeds.ends[1] * (rank == owner[-1])
                for rank in range(pp)
            ]
            counts = split_evenly(layers, lambda rank, n: fixed[rank] + n * group_speeds.block, [0] * pp, [layers] * pp)
            assert counts is not None, "every rank may hold all blocks"
            self._cuts[key] = max(fixed[rank] + counts[rank] * group_speeds.block for rank in range(pp))
        return self._cuts[key]

    def _whole_models(self, group_speeds: _GroupSpeeds, count: int, dp: int, tail: float) -> float:
        """Bound in seconds for replicas of one unit each; micro-batches are not divided."""
        seconds = sorted(
            s for s, n in zip(group_speeds.seconds, group_speeds.counts, strict=True) for _ in range(min(n, dp))
        )[:dp]
        if seconds[0] == seconds[-1]:
            return -(-count // dp) * seconds[0] + tail
        counts = split_evenly(count, lambda i, n: n * seconds[i], [1] * dp, [count] * dp)
        assert counts is not None, "there are at least as many micro-batches as replicas"
        return max(n * each for n, each in zip(counts, seconds, strict=True)) + tail


def _fastest(group_speeds: _GroupSpeeds, size: int) -> tuple[float, float, float]:
    """(sum of the speeds, the slowest, the fastest) of the `size` fastest units."""
    total, slowest, left = 0.0, group_speeds.speeds[0], size
    for speed, count in zip(group_speeds.speeds, group_speeds.counts, strict=True):
        taken = min(count, left)
        if taken == 0:
            break
        total, slowest, left = total + taken * speed, speed, left - taken
    return total, slowest, group_speeds.speeds[0]
