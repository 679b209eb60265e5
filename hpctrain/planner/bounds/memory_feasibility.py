"""Whether a pipeline's ranks have room for all blocks of a model, with units shared out as well as can be."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.planner.bounds.unit_counts import UnitCounts
from hpctrain.planner.cost.memory import RankRole
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import ScheduleSpec
from hpctrain.planner.layout.degrees import ParallelDims

INFEASIBLE_BLOCKS = 1e9
"""Blocks that are missing where a device cannot even hold what stands beside them."""


class MemoryFeasibility:
    """For one way of saving memory; remembers what it worked out."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self._fitting: dict[tuple[int, int, int, int, ScheduleSpec], tuple[int, int]] = {}

    def can_hold(
        self, unit_counts: UnitCounts, dims: ParallelDims, shards: int, schedule_spec: ScheduleSpec, size: int
    ) -> bool:
        """Whether the pipeline ranks have room for all blocks with the devices shared out as well as can be.

        Larger micro-batches need no less memory, so a size is looked at only between one that fits and one that does
        not, and the smallest comes first: mostly it says no for all.
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
        """Whether `can_hold` was already found to say no, without working anything out."""
        known = self._fitting.get((*dims, shards, schedule_spec))
        return known is not None and size >= known[1]

    def _holds(
        self, unit_counts: UnitCounts, dims: ParallelDims, shards: int, schedule_spec: ScheduleSpec, size: int
    ) -> bool:
        pp, dp, tp = dims
        # Some replica has at least this many micro-batches, and keeps the fewest activations with just as many.
        count = max(1, -(-(self.cost.work.sequences // size) // dp))
        kind, stages = unit_counts.kinds[0][0].kind, pp * schedule_spec.virtual_stages
        roles = [
            RankRole(kind, schedule_spec.name, pp, rank, stages, dp, tp, shards, size, count) for rank in range(pp)
        ]
        return self._max_blocks_held(unit_counts, roles) >= self.cost.work.spec.layers

    def _max_blocks_held(self, unit_counts: UnitCounts, roles: Sequence[RankRole]) -> float:
        """Blocks that the pipeline ranks hold at most; below nothing where one of them holds not even none.

        A rank holds what the smallest of its replicas' units holds, so no more ranks have large memories than there
        are large units for all their replicas.
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
        """[pipeline rank] -> blocks that so much memory holds at most."""
        held = (float(self.cost.memory.max_blocks(role, memory_bytes)) for role in roles)
        return [blocks if blocks >= 0 else -INFEASIBLE_BLOCKS for blocks in held]
