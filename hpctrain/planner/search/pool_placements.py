"""The tensor-parallel groups of a pool and their likely placements, which all searches of the pool share."""

from __future__ import annotations

from hpctrain.planner.bounds.unit_counts import UnitCounts
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.devices.pool import DevicePool
from hpctrain.planner.devices.tensor_parallel_group import (
    Placement,
    TensorParallelGroup,
    interchangeable_classes,
    make_tensor_parallel_groups,
)
from hpctrain.planner.layout.placement import placements
from hpctrain.records.plan.parallel_dims import ParallelDims


class PoolPlacements:
    """Groups and placements of one pool, cached; they do not depend on memory options or codecs.

    Args:
        max_compared_units: up to this many groups, links are compared pair by pair.
    """

    def __init__(self, pool: DevicePool, cost: CostModel, max_compared_units: int) -> None:
        self.pool, self.cost, self.max_compared_units = pool, cost, max_compared_units
        self.complete = True
        """False if some orders of devices were left out."""
        self._units: dict[int, list[TensorParallelGroup]] = {}
        self._counts: dict[int, UnitCounts] = {}
        self._placements: dict[ParallelDims, list[Placement]] = {}

    def units(self, tp: int) -> list[TensorParallelGroup]:
        """The tensor-parallel groups of that size."""
        if tp not in self._units:
            self._units[tp] = make_tensor_parallel_groups(self.pool, tp)
        return self._units[tp]

    def counts(self, tp: int) -> UnitCounts:
        """The tensor-parallel groups of that size, counted by kind."""
        if tp not in self._counts:
            self._counts[tp] = UnitCounts(self.cost, self.units(tp))
        return self._counts[tp]

    def placements(self, dims: ParallelDims) -> list[Placement]:
        """The likely placements of these degrees."""
        if dims not in self._placements:
            pp, dp, tp = dims
            units = self.units(tp)
            classes = list(range(len(units)))
            if len(units) <= self.max_compared_units:
                classes = interchangeable_classes(units, self.pool.links, self.cost.work.stage_boundary_bytes(1))
            self._placements[dims], complete = placements(
                units, classes, pp, dp, lambda a, b: self.cost.send_s(a, b, 1)
            )
            self.complete = self.complete and complete
        return self._placements[dims]
