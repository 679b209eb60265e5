"""The tensor-parallel groups of one size, counted by kind: bounds then take as long for ten thousand as for ten."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import Workload
from hpctrain.planner.devices.tensor_parallel_group import TensorParallelGroup
from hpctrain.records.plan.compression import NoCompression


class UnitCounts:
    """The tensor-parallel groups ("units") of one size, counted by kind, with the least figures of their links."""

    def __init__(self, cost: CostModel, units: Sequence[TensorParallelGroup]) -> None:
        counts = Counter(cost.kind(unit) for unit in units)
        first = {cost.kind(unit): unit for unit in reversed(units)}
        self.kinds = [(first[kind], count) for kind, count in counts.items()]
        """(the first unit of the kind, units of the kind)"""
        self.tp = len(units[0].devices) if units else 1
        self.total = len(units)
        self.within_nodes = all(len({device.node for device in unit.devices}) == 1 for unit, _ in self.kinds)
        self.by_node = sorted(Counter(unit.devices[0].node for unit in units).values(), reverse=True)
        self.most_in_a_node = max(self.by_node, default=0)
        within = [cost.links.between(unit.device_ids[0], unit.device_ids[0])[1] for unit, _ in self.kinds]
        self.within_beta = min(within, default=0.0)
        device_ids = {unit.devices[0].node: unit.device_ids[0] for unit in units}
        self.inside = {cost.links.between(device_id, device_id) for device_id in device_ids.values()}
        """The distinct (alpha, beta) within the nodes."""
        self.alpha, self.between_beta = cost.links.least()

    def least_nodes(self, size: int) -> int:
        """The fewest nodes that hold `size` units."""
        return 1 + bisect_left(list(accumulate(self.by_node)), size)

    def ring(self, size: int, chunks: int, apart: bool = False) -> tuple[float, float]:
        """The least (alpha, beta) of a hop of a ring through `size` units, each of which sums `chunks` stages.

        Args:
            apart: whether the units lie in several nodes.
        """
        if size <= self.most_in_a_node and not apart:
            return 0.0, min(self.between_beta, self.within_beta) if self.between_beta else 0.0
        return self.alpha, self.between_beta * chunks * (self.tp if self.within_nodes else 1)


def counts_all_reduce(work: Workload, dp: int) -> bool:
    """Whether bounds count the all-reduce: not with a codec, which may send less, nor with sharding within nodes."""
    sharded_in_nodes = work.memory_options.zero and work.memory_options.shard == "node"
    return dp > 1 and isinstance(work.codec, NoCompression) and not sharded_in_nodes
