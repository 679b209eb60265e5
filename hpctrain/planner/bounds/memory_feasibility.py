"""Whether a pipeline has memory for all blocks of a model, with the best assignment of devices to ranks."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.planner.bounds.unit_counts import UnitCounts
from hpctrain.planner.cost.memory import RankRole
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import ScheduleSpec
from hpctrain.records.plan.parallel_dims import ParallelDims

INFEASIBLE_BLOCKS = 1e9
"""Blocks that count as missing if a device cannot even hold a rank without blocks."""


class MemoryFeasibility:
    """Memory feasibility of degrees for one workload; caches its results."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self._fitting: dict[tuple[int, int, int, int, ScheduleSpec], tuple[int, int]] = {}

    def can_hold(
        self, unit_counts: UnitCounts, dims: ParallelDims, shards: int, schedule_spec: ScheduleSpec, size: int
    ) -> bool:
        """Whether the pipeline ranks can hold all blocks with the best assignment of devices to ranks.

        Larger micro-batches never need less memory. So a size is checked only if it lies between one that fits and one
        that does not. The smallest size comes first: if it does not fit, none does.
        """
        pp, dp, tp = dims
        key = (pp, dp, tp, shards, schedule_spec)
        smallest = self.cost.work.micro_batch_sizes()[0]
        for each in (size,) if key in self._fitting else dict.fromkeys((smallest, size)):
            fitting, too_large = self._fitting.get(key, (0, self.cost.work.sequences + 1))
            if fitting < each < too_large:
                holds = self._holds(unit_counts, dims, shards, schedule_spec, each)
                self._fitting[key] = (each, too_large) if holds else (fitting, each)
        return size <= self._fitting[key][0]

    def is_too_large(self, dims: ParallelDims, shards: int, schedule_spec: ScheduleSpec, size: int) -> bool:
        """Whether `can_hold` is known to be False from earlier calls; computes nothing."""
        known = self._fitting.get((*dims, shards, schedule_spec))
        return known is not None and size >= known[1]

    def _holds(
        self, unit_counts: UnitCounts, dims: ParallelDims, shards: int, schedule_spec: ScheduleSpec, size: int
    ) -> bool:
        pp, dp, tp = dims
        # Some replica has at least this many micro-batches; with exactly as many it keeps the fewest activations.
        count = max(1, -(-(self.cost.work.sequences // size) // dp))
        kind, stages = unit_counts.kinds[0][0].kind, pp * schedule_spec.virtual_stages
        roles = [
            RankRole(kind, schedule_spec.name, pp, rank, stages, dp, tp, shards, size, count) for rank in range(pp)
        ]
        return self._max_blocks_held(unit_counts, roles) >= self.cost.work.spec.layers

    def _max_blocks_held(self, unit_counts: UnitCounts, roles: Sequence[RankRole]) -> float:
        """The most blocks that the pipeline ranks hold together; negative if a rank does not even fit without blocks.

        A rank holds as much as the smallest of its tensor-parallel groups over the replicas. So the number of ranks
        with large memories is limited by the large groups, of which each needs `dp`.
        """
        sizes: dict[float, int] = {}
        for unit, number in unit_counts.kinds:
            sizes[unit.memory_bytes] = sizes.get(unit.memory_bytes, 0) + number
        levels = sorted(sizes)
        most = sum(self._held(roles, levels[-1]))
        if len(levels) == 1 or most < self.cost.work.spec.layers:
            return most  # not enough even where all are as large as the largest
        room, units = 0.0, sum(sizes.values())
        below = [0.0] * len(roles)
        for level in levels:
            held = self._held(roles, level)
            ranks = min(len(roles), units // roles[0].dp)
            if level == levels[0] or ranks == len(roles):
                room = sum(held)
            else:
                room += sum(sorted((a - b for a, b in zip(held, below, strict=True)), reverse=True)[:ranks])
            below, units = held, units - sizes[level]
        return room

    def _held(self, roles: Sequence[RankRole], memory_bytes: float) -> list[float]:
        """[pipeline rank] -> the most blocks that fit into the memory."""
        held = (float(self.cost.memory.max_blocks(role, memory_bytes)) for role in roles)
        return [blocks if blocks >= 0 else -INFEASIBLE_BLOCKS for blocks in held]
