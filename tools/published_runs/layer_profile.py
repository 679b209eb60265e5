"""Measured times of a model's layers; where they exist they replace the roofline."""

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
    """Seconds (forward, backward) of one micro-batch, including tensor-parallel all-reduces."""

    block: ForwardBackward
    embedding: ForwardBackward
    head: ForwardBackward
    update: float
    """Seconds of the optimizer for one block."""


@dataclass(frozen=True)
class LayerProfile:
    """Measured layer times of one model."""

    times: Mapping[tuple[str, int, int], LayerTimes]
    """(device type, tp, micro-batch) -> its times."""

    def at(self, device_type: str, tp: int, micro_batch: int) -> LayerTimes | None:
        """Return the times for exactly this device type, tp and micro-batch size; None if they were not measured."""
        return self.times.get((device_type, tp, micro_batch))


class ProfiledCostModel(CostModel):
    """A cost model for one size of micro-batch that takes measured times of layers where a profile has them."""

    def __init__(
        self, work: Workload, links: Links, constants: Mapping[str, CostConstants], profile: LayerProfile,
        micro_batch: int,
    ) -> None:  # fmt: skip
        super().__init__(work, links, constants)
        self._profile = profile
        self._micro_batch = micro_batch

    def module_times(self, unit: TensorParallelGroup, micro_batch: int) -> ModuleTimes:
        """Return the measured times of a micro-batch; for a part that was not measured separately, the roofline's
        estimate."""
        estimate = super().module_times(unit, micro_batch)
        times = self._profile.at(unit.devices[0].type, len(unit.devices), micro_batch)
        if times is None:
            return estimate
        return ModuleTimes(times.block, (0.0, 0.0), times.embedding, times.head, estimate.block_split)

    def optimizer_s(self, unit: TensorParallelGroup, share: ModelPart, shards: int = 1) -> float:
        """Return the measured time; the ends were measured together with the blocks, each about as long."""
        times = self._profile.at(unit.devices[0].type, len(unit.devices), self._micro_batch)
        if times is None:
            return super().optimizer_s(unit, share, shards)
        return times.update * (share.blocks + share.first + share.last) / shards
