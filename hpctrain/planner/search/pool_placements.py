"""Tensor-parallel groups of a pool and their likely placements, which all searches of the pool share."""

from __future__ import annotations

from functools import cache, partial

from hpctrain.planner.bounds.unit_counts import UnitCounts
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.devices.pool import DevicePool
from hpctrain.planner.devices.tensor_parallel_group import (
    Placement,
    interchangeable_classes,
    make_tensor_parallel_groups,
)
from hpctrain.planner.layout.placement import placements
from hpctrain.records.plan.plan import ParallelDims


class PoolPlacements:
    """Groups and placements of one pool, cached. They do not depend on memory options or codecs.

    Args:
        max_compared_units: largest number of groups whose links are compared pair by pair.
    """

    def __init__(self, pool: DevicePool, cost: CostModel, max_compared_units: int) -> None:
        self.pool, self.cost, self.max_compared_units = pool, cost, max_compared_units
        self.complete = True
        """False if some orders of devices were left out."""
        self.units = cache(partial(make_tensor_parallel_groups, pool))
        """tp -> the tensor-parallel groups of that size."""
        self.counts = cache(lambda tp: UnitCounts(cost, self.units(tp)))
        """tp -> the tensor-parallel groups of that size, counted by kind."""
        self.placements = cache(self._likely_placements)
        """Degrees -> their likely placements."""

    def _likely_placements(self, dims: ParallelDims) -> list[Placement]:
        units = self.units(dims.tp)
        classes = list(range(len(units)))
        if len(units) <= self.max_compared_units:
            classes = interchangeable_classes(units, self.pool.links, self.cost.work.stage_boundary_bytes(1))
        likely, complete = placements(units, classes, dims.pp, dims.dp, lambda a, b: self.cost.send_s(a, b, 1))
        self.complete = self.complete and complete
        return likely
