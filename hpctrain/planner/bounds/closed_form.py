"""What no layout of given degrees can beat, by the same cost model, without looking at a single layout.

For a replica of M micro-batches let x_r be a rank's seconds for one of them, and t_r those for its gradients' sum and
update afterwards. Every rank needs M·x_r + t_r; the last one starts and ends later by the part `way` of what the ranks
before it take. A rank of speed s_r does at most s_r·x_r of the model's work w, which gives the linear programs that are
solved here in closed form.
"""

from __future__ import annotations

from typing import NamedTuple

from hpctrain.planner.bounds.ideal import relative_speeds
from hpctrain.planner.bounds.pipeline_passes import Passes
from hpctrain.planner.bounds.unit_counts import Crowd
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import Order
from hpctrain.planner.layout.split_evenly import share_out
from hpctrain.planner.simulate.overlap import early_share
from hpctrain.records.plan.compression import NoCompression
from hpctrain.schedule.generate import SPLIT_BACKWARD
from hpctrain.schedule.placement import stage_ranks


class _Pace(NamedTuple):
    """Of the units of a crowd, for one micro-batch; sorted by speed, the fastest first."""

    speeds: list[float]
    counts: list[int]
    seconds: list[float]
    """The whole model on one unit."""
    work: float
    """Of the whole model: no unit of speed s does more than s a second."""
    action: float
    """The least speed times cost of starting an action."""
    split: float
    """What cutting the backward of all blocks adds on the reference."""
    split_ratio: float
    """The same, relative to the blocks themselves, on the unit where it is largest."""
    block: float
    """The least of one block."""
    ends: tuple[float, float]
    """The least of the embedding and of the head."""


class Bounds:
    """Bounds for one way of saving memory."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self._paces: dict[tuple[int, int], _Pace] = {}
        self._cuts: dict[tuple[int, int, int, Order], float] = {}

    def work_s(self, crowd: Crowd, pp: int, dp: int, size: int) -> float:
        """Seconds for the products alone, whatever the order: for sorting and early ends."""
        pace = self._pace(crowd, size)
        total, _, _ = _fastest(pace, pp * dp)
        return self.cost.work.rows // size * pace.work / total

    def step_s(self, crowd: Crowd, pp: int, dp: int, order: Order, size: int) -> float:
        """Seconds of a step that no layout of these degrees, this schedule and this micro-batch beats."""
        pace, count = self._pace(crowd, size), self.cost.work.rows // size
        total, _, fastest = _fastest(pace, pp * dp)
        most = -(-count // dp)
        start, per_parameter = self._tail(crowd, pp * order.chunks, dp)
        parameters = self.cost.work.spec.parameters() / crowd.tp
        work = pace.work + 2 * pp * order.chunks * pace.action
        split = order.schedule in SPLIT_BACKWARD
        if split and pp > 1:
            # The first stage's backward is not cut.
            work += pace.split
            total += dp * fastest * pace.split_ratio
        tail = min(pace.speeds) * dp * parameters * per_parameter
        found = (count * work + tail) / total
        found = max(found, most * self._largest_rank(crowd, pp, order, size))
        if pp == 1:
            found = max(found, self._whole_models(pace, count, dp, parameters * per_parameter))
        else:
            found = max(found, self._filled(crowd, pp, dp, order, size, work))
            found = max(found, Passes(self.cost, crowd, pp, order, size).step_s(most))
        return found + start

    def _filled(self, crowd: Crowd, pp: int, dp: int, order: Order, size: int, work: float) -> float:
        """With the time until the last rank starts."""
        pace, count = self._pace(crowd, size), self.cost.work.rows // size
        total, slowest, fastest = _fastest(pace, pp * dp)
        split = order.schedule in SPLIT_BACKWARD
        way, without = self._on_the_way(crowd, order, size)
        equal = len(pace.speeds) == 1
        if equal and not split:
            most = -(-count // dp)
            _, per_parameter = self._tail(crowd, pp * order.chunks, dp)
            tail = self.cost.work.spec.parameters() / crowd.tp * per_parameter
            return (most * work + tail * (1 - way / most)) / (pp - way * (pp - 1) / most)
        if split:
            total += dp * fastest * pace.split_ratio
        # Summed over replicas, with sum(1/M) >= dp²/count. Other units than the fastest could have a slower one last.
        late = way * (pp - 1) * dp * dp / count
        last = slowest if late <= 1 else min(pace.speeds)
        return (count * work - dp * fastest * way * without) / max(total - last * late, total / pp)

    def _pace(self, crowd: Crowd, size: int) -> _Pace:
        key = (crowd.tp, size)
        if key in self._paces:
            return self._paces[key]
        layers, least = self.cost.work.least_blocks, self.cost.work.least_share
        timed = [self.cost.parts(unit, size) for unit, _ in crowd.kinds]
        parts = [(layers * (sum(t.block) + sum(t.block_tp)), sum(t.embedding), sum(t.head)) for t in timed]
        speeds, whole = relative_speeds(parts)
        order = sorted(range(len(speeds)), key=lambda kind: -speeds[kind])
        actions = [2 * self.cost.constants[u.kind].action_ops * u.launch_s for u, _ in crowd.kinds]
        action = min(
            speed * self.cost.constants[unit.kind].action_ops * unit.launch_s
            for speed, (unit, _) in zip(speeds, crowd.kinds, strict=True)
        )
        blocks = [sum(t.block) + sum(t.block_tp) for t in timed]
        self._paces[key] = _Pace(
            [speeds[kind] for kind in order],
            [crowd.kinds[kind][1] for kind in order],
            [sum(parts[kind]) + actions[kind] for kind in order],
            whole,
            action,
            layers * min(s * t.block_split for s, t in zip(speeds, timed, strict=True)),
            max(t.block_split / block for t, block in zip(timed, blocks, strict=True)),
            least * min(blocks),
            (min(sum(t.embedding) for t in timed), min(sum(t.head) for t in timed)),
        )
        return self._paces[key]

    def _tail(self, crowd: Crowd, stages: int, dp: int) -> tuple[float, float]:
        """(seconds, seconds per parameter of a device) that follow a rank's last action at least."""
        work, saving = self.cost.work, self.cost.work.saving
        shards = dp if saving.zero and saving.shard == "all" else 1
        update = min(self.cost.constants[u.kind].optimizer_bytes / u.bytes_per_s for u, _ in crowd.kinds) / shards
        if dp == 1 or (saving.zero and saving.shard == "node"):
            return 0.0, 0.0 if saving.shard == "node" else update
        alpha, beta = crowd.ring(dp, 1)
        if not isinstance(work.codec, NoCompression):
            return 0.0, update  # a codec sends less, and some sum in fewer messages
        sent = work.gathered_bytes + work.framework.gradient_bytes if saving.zero else 2 * work.framework.gradient_bytes
        late = 1 - early_share(work, stages, crowd.tp)
        return late * 2 * (dp - 1) * alpha, update + late * sent * (dp - 1) / dp * beta

    def _on_the_way(self, crowd: Crowd, order: Order, size: int) -> tuple[float, float]:
        """Part of a rank's work that must be over before the next rank starts, or begins after it has ended; and the
        seconds of the model that are no such work.

        Where weights' backwards may wait they fill the end, so only forwards are on the way, and the embedding has
        none.
        """
        if order.schedule not in SPLIT_BACKWARD:
            return 1 / order.chunks, 0.0
        shares = []
        for unit, _ in crowd.kinds:
            parts = self.cost.parts(unit, size)
            forward, backward = (parts.block[way] + parts.block_tp[way] for way in (0, 1))
            shares.append(forward / (forward + backward + parts.block_split))
        embedding = max(sum(self.cost.parts(unit, size).embedding) for unit, _ in crowd.kinds)
        return min(shares) / order.chunks, embedding

    def _largest_rank(self, crowd: Crowd, pp: int, order: Order, size: int) -> float:
        """The least that the largest rank of any cut takes for one micro-batch: blocks come whole."""
        key = (crowd.tp, size, pp, order)
        if key not in self._cuts:
            pace, layers = self._pace(crowd, size), self.cost.work.spec.layers
            owner = stage_ranks(order.schedule, pp, pp * order.chunks)
            fixed = [pace.ends[0] * (rank == owner[0]) + pace.ends[1] * (rank == owner[-1]) for rank in range(pp)]
            counts = share_out(layers, lambda rank, n: fixed[rank] + n * pace.block, [0] * pp, [layers] * pp)
            assert counts is not None, "every rank may hold all blocks"
            self._cuts[key] = max(fixed[rank] + counts[rank] * pace.block for rank in range(pp))
        return self._cuts[key]

    def _whole_models(self, pace: _Pace, count: int, dp: int, tail: float) -> float:
        """Replicas of one unit each: micro-batches come whole."""
        seconds = sorted(s for s, n in zip(pace.seconds, pace.counts, strict=True) for _ in range(min(n, dp)))[:dp]
        if seconds[0] == seconds[-1]:
            return -(-count // dp) * seconds[0] + tail
        counts = share_out(count, lambda i, n: n * seconds[i], [1] * dp, [count] * dp)
        assert counts is not None, "there are at least as many micro-batches as replicas"
        return max(n * each for n, each in zip(counts, seconds, strict=True)) + tail


def _fastest(pace: _Pace, size: int) -> tuple[float, float, float]:
    """(sum of the speeds, the slowest, the fastest) of the `size` fastest units."""
    total, slowest, left = 0.0, pace.speeds[0], size
    for speed, count in zip(pace.speeds, pace.counts, strict=True):
        taken = min(count, left)
        if taken == 0:
            break
        total, slowest, left = total + taken * speed, speed, left - taken
    return total, slowest, pace.speeds[0]
