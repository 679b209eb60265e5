"""Measured times of a model's layers, and a cost model that uses them in place of the roofline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.roofline import ModuleTimes
from hpctrain.planner.cost.workload import ModelPart, Workload
from hpctrain.planner.devices.constants import CostConstants, ForwardBackward
from hpctrain.planner.devices.links import Links
from hpctrain.planner.devices.tensor_parallel_group import TensorParallelGroup


@dataclass(frozen=True)
class LayerTimes:
    """Measured seconds of a block, the embedding and the head for one micro-batch, each as (forward, backward),
    including all-reduces of tensor parallelism."""

    block: ForwardBackward
    embedding: ForwardBackward
    head: ForwardBackward
    update: float
    """Seconds of the optimizer for one block."""


@dataclass(frozen=True)
class LayerProfile:
    """Measured layer times of one model on several kinds of devices."""

    times: Mapping[tuple[str, int, int], LayerTimes]
    """(device type, tp, micro-batch size) -> measured times."""

    def at(self, device_type: str, tp: int, micro_batch: int) -> LayerTimes | None:
        """Return the times for exactly this device type, tp and micro-batch size; None if they were not measured."""
        return self.times.get((device_type, tp, micro_batch))


class ProfiledCostModel(CostModel):
    """A cost model for one micro-batch size that uses measured layer times where the profile has them, else the
    roofline."""

    def __init__(
        self, work: Workload, links: Links, constants: Mapping[str, CostConstants], profile: LayerProfile,
        micro_batch: int,
    ) -> None:  # fmt: skip
        super().__init__(work, links, constants)
        self._profile = profile
        self._micro_batch = micro_batch

    def module_times(self, unit: TensorParallelGroup, micro_batch: int) -> ModuleTimes:
        """Return the measured times of a micro-batch, or the roofline's estimate if the profile has none. The time
        to split a backward pass is always the estimate, because it was not measured."""
        estimate = super().module_times(unit, micro_batch)
        times = self._profile.at(unit.devices[0].type, len(unit.devices), micro_batch)
        if times is None:
            return estimate
        return ModuleTimes(times.block, (0.0, 0.0), times.embedding, times.head, estimate.block_split)

    def optimizer_s(self, unit: TensorParallelGroup, share: ModelPart, shards: int = 1) -> float:
        """Return the measured seconds of the optimizer for a part of the model, or the roofline's estimate if the
        profile has none. Embedding and head count like one block each.

        Args:
            share: the part of the model that the group holds.
            shards: number of ranks over which the optimizer state is sharded.
        """
        times = self._profile.at(unit.devices[0].type, len(unit.devices), self._micro_batch)
        if times is None:
            return super().optimizer_s(unit, share, shards)
        return times.update * (share.blocks + share.first + share.last) / shards
