"""Bounds of a search's options: the least time that an option could take, and whether its layouts fit the memory."""

from __future__ import annotations

from functools import cache

from hpctrain.planner.bounds.closed_form import ClosedFormBound
from hpctrain.planner.bounds.knapsack import KnapsackBound
from hpctrain.planner.bounds.memory_feasibility import MemoryFeasibility
from hpctrain.planner.bounds.option import Option
from hpctrain.planner.cost.memory_options import shard_group_size
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import FEWEST_ACTIVATIONS, ScheduleSpec, Workload
from hpctrain.planner.devices.tensor_parallel_group import Placement
from hpctrain.planner.layout.column_placement import placements_of_mixtures
from hpctrain.planner.limits import SearchLimits
from hpctrain.planner.search.pool_placements import PoolPlacements
from hpctrain.records.plan.plan import ParallelDims


def can_shard(work: Workload, placement: Placement) -> bool:
    """Whether the placement has replicas to shard over; also True if no sharding is asked for."""
    if work.memory_options.zero == 0:
        return True
    shards = shard_group_size(placement, work.memory_options)
    # With degrees given by hand, `check_runnable` refuses a codec that cannot be sharded, and says why.
    return shards > 1 and (shards < len(placement) or work.fixed is not None or work.may_shard_gradients)


class OptionBounds:
    """Bounds for one pool of devices and one workload; caches its results."""

    def __init__(self, cost: CostModel, pool_placements: PoolPlacements, limits: SearchLimits) -> None:
        self.cost, self.pool_placements, self.limits = cost, pool_placements, limits
        self._memory = MemoryFeasibility(cost)
        self._closed_form = cache(lambda tp, size: ClosedFormBound(cost, pool_placements.counts(tp), size))
        self.knapsack = cache(self._knapsack)
        """Option -> its knapsack bound."""

    def work_s(self, dims: ParallelDims, micro_batch: int) -> float:
        """Seconds of a step that computation alone takes with any schedule: a weaker bound, by which degrees are
        sorted.
        """
        return self._closed_form(dims[2], micro_batch).work_s(dims)

    def step_s(self, option: Option) -> float:
        """Seconds of a step that no layout of the option beats, by the closed-form bound."""
        return self._closed_form(option.dims.tp, option.micro_batch).step_s(option)

    def placements_by(self, knapsack_bound: KnapsackBound, limit_s: float) -> list[Placement]:
        """Placements that by the knapsack bound may finish within `limit_s` seconds."""
        mixtures = knapsack_bound.mixtures_by(limit_s)
        if mixtures is None:
            return []
        units = self.pool_placements.units(knapsack_bound.tp)
        classes = [[unit for unit in units if self.cost.kind(unit) in c.kinds] for c in knapsack_bound.classes]
        return [made for made in placements_of_mixtures(classes, mixtures) if can_shard(self.cost.work, made)]

    def can_hold(self, option: Option, shards: int) -> bool:
        """Whether devices have memory for the model if `shards` replicas share a state."""
        return self._memory.can_hold(self.pool_placements.counts(option.dims.tp), option, shards)

    def may_fit(self, option: Option) -> bool:
        """False if no placement of the option has memory for the model."""
        return self.can_hold(option, self._most_shards(option.dims))

    def is_too_large(self, option: Option) -> bool:
        """Whether `may_fit` is already known to be False."""
        return self._memory.is_too_large(option, self._most_shards(option.dims))

    def any_may_fit(self, dims: ParallelDims, micro_batch: int) -> bool:
        """False if no schedule except a V-shaped one could have memory for the model; judged by
        `FEWEST_ACTIVATIONS`.
        """
        memory_options = self.cost.work.memory_options
        if memory_options.zero or memory_options.recompute != "none":
            return True  # with several stages a rank, less is gathered or recomputed at a time
        return self.may_fit(Option(dims, FEWEST_ACTIVATIONS, micro_batch))

    def any_feasible_within(self, dims: ParallelDims, micro_batch: int, limit_s: float) -> bool:
        """False if no schedule except a V-shaped one could finish within `limit_s` seconds, even with unlimited
        memory.
        """
        return self._knapsack(Option(dims, ScheduleSpec("1f1b"), micro_batch), waits=False).feasible_within(limit_s)

    def _knapsack(self, option: Option, waits: bool = True) -> KnapsackBound:
        counts, shards = self.pool_placements.counts(option.dims.tp), self._most_shards(option.dims)
        return KnapsackBound(self.cost, counts, option, shards, waits, self.limits)

    def _most_shards(self, dims: ParallelDims) -> int:
        """The largest number of replicas that share one state."""
        work = self.cost.work
        if work.memory_options.zero and work.memory_options.shard == "node":
            possible = (p for p in self.pool_placements.placements(dims) if can_shard(work, p))
            return max((shard_group_size(placement, work.memory_options) for placement in possible), default=1)
        return dims[1] if work.memory_options.zero else 1
