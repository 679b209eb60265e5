"""Options of a search, and layouts.

An option is a choice of degrees, schedule and micro-batch size. A layout is all that a plan states, without its
predicted time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import le
from typing import NamedTuple

from hpctrain.base.units import format_bytes
from hpctrain.planner.cost.memory import MemoryModel, RankRole
from hpctrain.planner.cost.memory_options import DEFAULT_MEMORY_OPTIONS, MemoryOptions, shard_group_size
from hpctrain.planner.cost.workload import ModelPart, ScheduleSpec
from hpctrain.planner.devices.placement_links import level_replicas
from hpctrain.planner.devices.tensor_parallel_group import Placement, TensorParallelGroup, first_of_each
from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.plan.plan import ParallelDims
from hpctrain.schedule.generate import SPLIT_BACKWARD_SCHEDULES, stage_ranks, stages_by_rank


class Option(NamedTuple):
    """Degrees, schedule and micro-batch size; a lower bound of an option holds for all its layouts."""

    dims: ParallelDims
    schedule_spec: ScheduleSpec
    micro_batch: int
    """Sequences of a micro-batch."""

    @property
    def virtual_stages(self) -> int:
        return self.schedule_spec.virtual_stages

    @property
    def stages(self) -> int:
        """Number of stages of the pipeline."""
        return self.dims.pp * self.schedule_spec.virtual_stages

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule splits the backward into I and W."""
        return self.schedule_spec.name in SPLIT_BACKWARD_SCHEDULES

    def role(self, kind: str, rank: int, shards: int, micro_batches: int) -> RankRole:
        """Return what decides the memory of a device at pipeline rank `rank`, besides the number of its blocks.

        Args:
            kind: kind of device, cpu or cuda.
            shards: replicas that share a state; 1 if each holds a whole state.
            micro_batches: number of micro-batches of the device's replica.
        """
        pp, dp, tp = self.dims
        return RankRole(
            kind, self.schedule_spec.name, pp, rank, self.stages, dp, tp, shards, self.micro_batch, micro_batches
        )


@dataclass(frozen=True, eq=False)
class Layout:
    """Which tensor-parallel group computes which blocks of how many micro-batches, in what order."""

    placement: Placement
    schedule: str
    """Name of the schedule, as '1f1b'."""
    micro_batch: int
    """Sequences of a micro-batch."""
    micro_batches: tuple[int, ...]
    """[replica] -> number of micro-batches."""
    blocks: tuple[int, ...]
    """[stage] -> number of blocks; the schedule decides which pipeline rank holds a stage."""
    memory_options: MemoryOptions = DEFAULT_MEMORY_OPTIONS

    @property
    def pp(self) -> int:
        return len(self.placement[0])

    @property
    def dp(self) -> int:
        return len(self.placement)

    @property
    def tp(self) -> int:
        return len(self.placement[0][0].devices)

    @property
    def dims(self) -> ParallelDims:
        return ParallelDims(self.pp, self.dp, self.tp)

    @property
    def schedule_spec(self) -> ScheduleSpec:
        """The schedule with its number of stages on each pipeline rank."""
        return ScheduleSpec(self.schedule, len(self.blocks) // self.pp)

    @cached_property
    def option(self) -> Option:
        """The option that the layout belongs to."""
        return Option(self.dims, self.schedule_spec, self.micro_batch)

    @cached_property
    def rank_of_stage(self) -> tuple[int, ...]:
        """[stage] -> its pipeline rank."""
        return stage_ranks(self.schedule, self.pp, len(self.blocks))

    @cached_property
    def stages_by_rank(self) -> tuple[tuple[int, ...], ...]:
        return stages_by_rank(self.schedule, self.pp, len(self.blocks))

    @cached_property
    def shards(self) -> int:
        """Number of consecutive replicas that share a state; 1 if each holds a whole state."""
        return shard_group_size(self.placement, self.memory_options)

    @cached_property
    def level_replicas(self) -> int:
        """Number of consecutive replicas that share a node, if gradients can be summed within nodes and then between
        them; else 1."""
        per_node = level_replicas(self.placement)
        return per_node if self.shards in (1, per_node, self.dp) else 1

    @cached_property
    def model_parts(self) -> tuple[ModelPart, ...]:
        """[stage] -> the part of the model that it holds."""
        last = len(self.blocks) - 1
        return tuple(ModelPart(count, index == 0, index == last) for index, count in enumerate(self.blocks))

    def units(self) -> list[TensorParallelGroup]:
        """Return all tensor-parallel groups, sorted by replica, then by pipeline rank."""
        return [unit for replica in self.placement for unit in replica]

    def unit(self, replica: int, stage: int) -> TensorParallelGroup:
        return self.placement[replica][self.rank_of_stage[stage]]

    def role(self, replica: int, rank: int) -> RankRole:
        """Return what decides the memory of the devices at a pipeline rank of a replica, besides the number of their
        blocks."""
        return self.option.role(self.placement[replica][rank].kind, rank, self.shards, self.micro_batches[replica])

    def memory(self, model: MemoryModel) -> dict[DeviceId, float]:
        """Return device id -> peak bytes of the device."""
        peaks = {}
        for replica, row in enumerate(self.placement):
            for rank, unit in enumerate(row):
                peaks.update(dict.fromkeys(unit.device_ids, self._need(model, replica, rank)))
        return peaks

    def max_blocks(self, model: MemoryModel) -> list[int]:
        """Return [pipeline rank] -> the most blocks that it can hold in every replica; -1 if not even a rank without
        blocks fits. The blocks of the layout do not count.
        """
        tables: dict[tuple[float, int], list[int]] = {}
        by_replica = []
        for replica in self.distinct_replicas:
            row, count = self.placement[replica], self.micro_batches[replica]
            for memory_bytes in {unit.memory_bytes for unit in row}:
                if (memory_bytes, count) not in tables:
                    tables[memory_bytes, count] = model.max_blocks_by_rank(self.role(replica, 0), memory_bytes)
            by_replica.append([tables[unit.memory_bytes, count][rank] for rank, unit in enumerate(row)])
        return by_replica[0] if len(by_replica) == 1 else list(map(min, *by_replica))

    def memory_shortage(self, model: MemoryModel) -> MemoryShortage | None:
        """Return the device whose need exceeds its usable memory by the largest ratio; None if everything fits."""
        # One stage a rank fits if its blocks do, and that is known for many layouts at once.
        if len(self.blocks) == self.pp and all(map(le, self.blocks, self.max_blocks(model))):
            return None
        usable, worst = model.work.usable, None
        for replica in self.distinct_replicas:
            for rank, unit in enumerate(self.placement[replica]):
                need = self._need(model, replica, rank)
                if need <= usable * unit.memory_bytes:
                    continue
                for device in unit.devices:
                    if device.memory_bytes is None:
                        continue
                    shortage = MemoryShortage(device.device_id, need, device.memory_bytes, usable)
                    if worst is None or shortage.ratio > worst.ratio:
                        worst = shortage
        return worst

    @cached_property
    def distinct_replicas(self) -> tuple[int, ...]:
        """Indices of unlike replicas: the first replica of each combination of class (`Placement.replica_classes`) and
        number of micro-batches.
        """
        return first_of_each(zip(self.placement.replica_classes, self.micro_batches, strict=True))

    def _need(self, model: MemoryModel, replica: int, rank: int) -> float:
        blocks = tuple(self.blocks[stage] for stage in self.stages_by_rank[rank])
        return model.need(self.role(replica, rank), blocks)


@dataclass(frozen=True)
class MemoryShortage:
    """A device whose memory is too small for its part of a layout."""

    device_id: DeviceId
    need_bytes: float
    memory_bytes: float
    usable: float
    """Share of the memory that a plan may fill."""

    @property
    def usable_bytes(self) -> float:
        return self.usable * self.memory_bytes

    @property
    def ratio(self) -> float:
        return self.need_bytes / self.usable_bytes

    def __str__(self) -> str:
        """Return a clause for messages with the bytes that the device needs, has and may use."""
        return (
            f"{self.device_id} would need {format_bytes(self.need_bytes)} and has {format_bytes(self.memory_bytes)}, "
            f"of which {self.usable * 100:g} % ({format_bytes(self.usable_bytes)}) may be used"
        )
