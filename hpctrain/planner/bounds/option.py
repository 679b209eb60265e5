"""An option of a search: degrees, schedule and micro-batch size."""

from __future__ import annotations

from typing import NamedTuple

from hpctrain.planner.cost.memory import RankRole
from hpctrain.planner.cost.workload import ScheduleSpec
from hpctrain.planner.layout.layout import Layout
from hpctrain.records.plan.plan import ParallelDims
from hpctrain.schedule.generate import SPLIT_BACKWARD_SCHEDULES


class Option(NamedTuple):
    """Degrees, schedule and micro-batch size: a bound holds for all layouts that share them."""

    dims: ParallelDims
    schedule_spec: ScheduleSpec
    micro_batch: int
    """Sequences of a micro-batch."""

    @classmethod
    def of(cls, layout: Layout) -> Option:
        """The option that a layout belongs to."""
        return cls(layout.dims, layout.schedule_spec, layout.micro_batch)

    @property
    def virtual_stages(self) -> int:
        return self.schedule_spec.virtual_stages

    @property
    def stages(self) -> int:
        """Stages of a pipeline."""
        return self.dims.pp * self.schedule_spec.virtual_stages

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule splits the backward into I and W."""
        return self.schedule_spec.name in SPLIT_BACKWARD_SCHEDULES

    def role(self, kind: str, rank: int, shards: int, micro_batches: int) -> RankRole:
        """The role of a device at pipeline rank `rank`, as the memory model needs it."""
        pp, dp, tp = self.dims
        return RankRole(
            kind, self.schedule_spec.name, pp, rank, self.stages, dp, tp, shards, self.micro_batch, micro_batches
        )
