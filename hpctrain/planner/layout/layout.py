"""A layout: everything that a plan states, before anybody says how long it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hpctrain.planner.cost.memory import MemoryModel, RankRole
from hpctrain.planner.cost.memory_options import NO_SAVING, Saving, shard_size
from hpctrain.planner.cost.workload import Order, Share
from hpctrain.planner.devices.tensor_parallel_group import Cells, Unit
from hpctrain.schedule.placement import stage_ranks, stages_by_rank


@dataclass(frozen=True, eq=False)
class Layout:
    """Which unit computes which blocks of how many micro-batches in what order."""

    cells: Cells
    schedule: str
    micro_batch: int
    micro_batches: tuple[int, ...]
    """By replica."""
    blocks: tuple[int, ...]
    """By stage; the schedule says which pipeline rank holds it."""
    saving: Saving = NO_SAVING

    @property
    def pp(self) -> int:
        return len(self.cells[0])

    @property
    def dp(self) -> int:
        return len(self.cells)

    @property
    def tp(self) -> int:
        return len(self.cells[0][0].workers)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.pp, self.dp, self.tp

    @property
    def order(self) -> Order:
        """The schedule with its stages on each pipeline rank."""
        return Order(self.schedule, len(self.blocks) // self.pp)

    @cached_property
    def owner(self) -> tuple[int, ...]:
        """Pipeline rank of each stage."""
        return stage_ranks(self.schedule, self.pp, len(self.blocks))

    @cached_property
    def stages_by_rank(self) -> tuple[tuple[int, ...], ...]:
        return stages_by_rank(self.schedule, self.pp, len(self.blocks))

    @cached_property
    def shards(self) -> int:
        """Consecutive replicas that share a state; 1: each holds all of it."""
        return shard_size(self.cells, self.saving)

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        return shares_of(self.blocks)

    def units(self) -> list[Unit]:
        """All units, replica by replica."""
        return [unit for replica in self.cells for unit in replica]

    def unit(self, replica: int, stage: int) -> Unit:
        return self.cells[replica][self.owner[stage]]

    def role(self, replica: int, rank: int) -> RankRole:
        """Where the devices of a replica's pipeline rank stand."""
        return RankRole(
            kind=self.cells[replica][rank].kind,
            schedule=self.schedule,
            pp=self.pp,
            rank=rank,
            stages=len(self.blocks),
            dp=self.dp,
            tp=self.tp,
            shards=self.shards,
            micro_batch=self.micro_batch,
            micro_batches=self.micro_batches[replica],
        )

    def memory(self, model: MemoryModel) -> dict[str, float]:
        """Peak bytes of each device."""
        peaks = {}
        for replica, row in enumerate(self.cells):
            for rank, unit in enumerate(row):
                peaks.update(dict.fromkeys(unit.places, self._need(model, replica, rank)))
        return peaks

    def excess(self, model: MemoryModel) -> Excess | None:
        """The device that its share fills the most above what a plan may use; None when everything fits."""
        usable, worst = model.work.usable, None
        for replica in self.unlike:
            for rank, unit in enumerate(self.cells[replica]):
                need = self._need(model, replica, rank)
                if need <= usable * unit.memory_bytes:
                    continue
                for worker in unit.workers:
                    if worker.memory_bytes is None:
                        continue
                    found = Excess(worker.place, need, worker.memory_bytes, usable)
                    if worst is None or found.ratio > worst.ratio:
                        worst = found
        return worst

    @cached_property
    def unlike(self) -> tuple[int, ...]:
        """A replica of every kind that differs in devices or in its number of micro-batches."""
        first: dict[tuple[int, int], int] = {}
        for replica, key in enumerate(zip(self.cells.alike, self.micro_batches, strict=True)):
            first.setdefault(key, replica)
        return tuple(first.values())

    def _need(self, model: MemoryModel, replica: int, rank: int) -> float:
        blocks = tuple(self.blocks[stage] for stage in self.stages_by_rank[rank])
        return model.need(self.role(replica, rank), blocks)


@dataclass(frozen=True)
class Excess:
    """A device that does not hold what it is given."""

    place: str
    need_bytes: float
    memory_bytes: float
    usable: float
    """Share of it that a plan may fill."""

    @property
    def usable_bytes(self) -> float:
        return self.usable * self.memory_bytes

    @property
    def ratio(self) -> float:
        return self.need_bytes / self.usable_bytes


def shares_of(blocks: Sequence[int]) -> tuple[Share, ...]:
    """What each stage holds, from its number of blocks."""
    last = len(blocks) - 1
    return tuple(Share(count, index == 0, index == last) for index, count in enumerate(blocks))
