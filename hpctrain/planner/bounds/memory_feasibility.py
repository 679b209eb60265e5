"""Bounds by memory: whether devices can hold all blocks of a model, and how many micro-batches fit beside a rank's
blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from hpctrain.planner.bounds.arrays import FloatArray
from hpctrain.planner.bounds.unit_counts import UnitCounts
from hpctrain.planner.cost.memory import MemoryModel, RankRole
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import ScheduleSpec
from hpctrain.planner.layout.layout import Option
from hpctrain.records.plan.plan import ParallelDims

INFEASIBLE_BLOCKS = 1e9
"""Number of blocks that counts as missing if a device cannot even hold a rank without blocks."""


class MemoryFeasibility:
    """Answers, for one workload, whether devices have memory for the model with given degrees; caches its results."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self._fitting: dict[tuple[ParallelDims, ScheduleSpec, int], tuple[int, int]] = {}

    def can_hold(self, unit_counts: UnitCounts, option: Option, shards: int) -> bool:
        """Return whether the pipeline ranks can hold all blocks with the best assignment of devices to ranks.

        Larger micro-batches never need less memory. So a micro-batch size is checked only if earlier calls leave the
        answer open: if it lies between a size that fits and one that does not. The first call checks the smallest size,
        too: if it does not fit, no size does.

        Args:
            unit_counts: the available tensor-parallel groups.
            shards: replicas that share a state; 1 if each holds a whole state.
        """
        key = (option.dims, option.schedule_spec, shards)
        smallest = self.cost.work.micro_batch_sizes()[0]
        for size in (option.micro_batch,) if key in self._fitting else dict.fromkeys((smallest, option.micro_batch)):
            fitting, too_large = self._fitting.get(key, (0, self.cost.work.sequences + 1))
            if fitting < size < too_large:
                holds = self._holds(unit_counts, option._replace(micro_batch=size), shards)
                self._fitting[key] = (size, too_large) if holds else (fitting, size)
        return option.micro_batch <= self._fitting[key][0]

    def is_too_large(self, option: Option, shards: int) -> bool:
        """Return whether `can_hold` is known to be False from earlier calls. Nothing is computed.

        Args:
            shards: replicas that share a state; 1 if each holds a whole state.
        """
        known = self._fitting.get((option.dims, option.schedule_spec, shards))
        return known is not None and option.micro_batch >= known[1]

    def _holds(self, unit_counts: UnitCounts, option: Option, shards: int) -> bool:
        # Some replica has at least this many micro-batches; with exactly this number it keeps the fewest activations.
        count = max(1, -(-(self.cost.work.sequences // option.micro_batch) // option.dims.dp))
        kind = unit_counts.kinds[0][0].kind
        roles = [option.role(kind, rank, shards, count) for rank in range(option.dims.pp)]
        return self._max_blocks_held(unit_counts, roles) >= self.cost.work.spec.layers

    def _max_blocks_held(self, unit_counts: UnitCounts, roles: Sequence[RankRole]) -> float:
        """Return the most blocks that all pipeline ranks of a replica hold together; negative if a pipeline rank does
        not even fit without blocks.

        At each pipeline rank, every one of the `dp` replicas has a tensor-parallel group with the same blocks: at most
        as many as fit into the group with the least memory. So if n groups have at least a given memory, at most
        n / `dp` pipeline ranks can use so much memory.

        Args:
            unit_counts: the available tensor-parallel groups.
            roles: for each pipeline rank, what decides its memory besides the number of its blocks.
        """
        sizes: Counter[float] = Counter()
        for unit, number in unit_counts.kinds:
            sizes[unit.memory_bytes] += number
        levels = sorted(sizes)
        most = sum(self._held(roles, levels[-1]))
        if len(levels) == 1 or most < self.cost.work.spec.layers:
            return most  # not enough even if all groups are as large as the largest
        total, units = 0.0, sum(sizes.values())
        below = [0.0] * len(roles)
        for level in levels:
            blocks = self._held(roles, level)
            ranks = min(len(roles), units // roles[0].dp)
            if level == levels[0] or ranks == len(roles):
                total = sum(blocks)
            else:
                total += sum(sorted((a - b for a, b in zip(blocks, below, strict=True)), reverse=True)[:ranks])
            below, units = blocks, units - sizes[level]
        return total

    def _held(self, roles: Sequence[RankRole], memory_bytes: float) -> list[float]:
        """Return [pipeline rank] -> the most blocks that fit into `memory_bytes`; `-INFEASIBLE_BLOCKS` if the rank does
        not fit even without blocks.

        Args:
            roles: for each pipeline rank, what decides its memory besides the number of its blocks.
        """
        most = [self.cost.memory.max_blocks(role, memory_bytes) for role in roles]
        return [float(blocks) if blocks >= 0 else -INFEASIBLE_BLOCKS for blocks in most]


def micro_batches_held(memory: MemoryModel, role: RankRole, memory_bytes: float, most: int) -> FloatArray:
    """Return [number of blocks, from 0] -> an upper bound of the number of micro-batches that fit into `memory_bytes`
    in addition to these blocks; infinite if `most` micro-batches fit.

    Args:
        role: the rank's role; its field `micro_batches` is ignored.
        most: largest number of micro-batches that is checked.
    """
    steps = [1]
    while steps[-1] < most:
        steps.append(min(2 * steps[-1], most))
    fitting = np.zeros(memory.work.spec.layers + 1)
    for number, following in zip_longest(steps, steps[1:]):
        most_blocks = _most_held(memory, role._replace(micro_batches=number), memory_bytes)
        # Between two sizes that were checked, a number of blocks counts as if it fitted.
        fitting[: most_blocks + 1] = np.inf if following is None else following - 1
    return fitting


def _most_held(memory: MemoryModel, role: RankRole, memory_bytes: float) -> int:
    """Return the most blocks that a rank can hold in the usable share of `memory_bytes`, with the split over its stages
    that takes the least memory; -1 if not even a rank without blocks fits."""
    if role.stages == role.pp:
        return memory.max_blocks(role, memory_bytes)
    usable = memory.work.usable * memory_bytes
    numbers = range(memory.work.spec.layers + 1)
    return bisect_left(numbers, True, key=lambda blocks: _least_need(memory, role, blocks) > usable) - 1


def _least_need(memory: MemoryModel, role: RankRole, blocks: int) -> float:
    """Return the least bytes that a device of a pipeline rank with two stages needs for `blocks` blocks, over all
    divisions of the blocks between the two stages.

    Bytes are convex in the number of blocks of the first stage, so a bisection finds the least.
    """

    def need(first: int) -> float:
        return memory.need(role, (first, blocks - first))

    return need(bisect_left(range(blocks), True, key=lambda first: need(first) <= need(first + 1)))
