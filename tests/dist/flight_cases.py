"""Reduce-scatters of sharded states that go on while a rank does something else, beside those that it waits for; called
by the cases beside it, on four ranks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from gloo_calls import most_under_way, sums_of_rank
from processes import largest
from scatter_cases import PARTS, gradients, of_rank
from torch import Tensor

from hpctrain.base.activity import ACTIVITY
from hpctrain.compress.build import build_reduce_scatters
from hpctrain.compress.collectives.level_reduce_scatter import LevelGroups, scatters_by_level
from hpctrain.compress.collectives.overlapped_work import OverlappedWork
from hpctrain.compress.collectives.reduce_scatter import ShardedParameter, residuals_of
from hpctrain.compress.collectives.sums_in_flight import SumsInFlight
from hpctrain.records.plan.codec_spec import CodecSpec

MICRO_BATCHES, STEPS = 2, 4
SUM = "sum gradients"


class Stage:
    """The reduce-scatters of a stage under a codec, and the sums that this rank owns."""

    def __init__(self, codec: dict[str, Any], groups: LevelGroups | None, group: Any = None) -> None:
        self.world = dist.get_world_size()
        self.group, self.groups = group or dist.group.WORLD, groups
        pieces = [
            [ShardedParameter(name, torch.Size(shape), of_rank(shape, self.world)) for name, shape in part.items()]
            for part in PARTS
        ]
        spec = CodecSpec.model_validate({"codec": codec})
        scatters = build_reduce_scatters(spec, pieces, groups.between if groups else self.group, "cpu")
        self.scatters = scatters_by_level(scatters, groups, None) if groups else scatters
        self.residuals = residuals_of(self.scatters)
        self.in_flight = SumsInFlight()

    def state(self) -> dict[str, Tensor]:
        return {} if self.residuals is None else {key: part.clone() for key, part in self.residuals.state().items()}

    def load(self, state: dict[str, Tensor]) -> Stage:
        if self.residuals is not None:
            self.residuals.load_state(state)
        return self

    def waiting(self, rows: list[list[Tensor]]) -> list[Tensor]:
        """The sums of a step, by module, if the rank waits for each of them."""
        sums = self._step(rows, lambda scatter, *given: scatter(*given))
        self._end_step()
        return sums

    def overlapped(self, rows: list[list[Tensor]]) -> list[Tensor]:
        """The same, if up to two of them are on their way while the next one is encoded."""
        with self.in_flight:
            sums = self._step(rows, lambda *given: self.in_flight.begin(*given, SUM))
        self._end_step()
        return sums

    def _end_step(self) -> None:
        if self.residuals is not None:
            self.residuals.end_step(torch.device("cpu"))

    def _step(self, rows: list[list[Tensor]], summed: Any) -> list[Tensor]:
        sums: list[Tensor] = []
        self.sent = 0
        for number, micro_batch in enumerate(rows):
            for index in reversed(range(len(PARTS))):
                output = torch.empty(micro_batch[index].numel() // self.world)
                self.sent += summed(self.scatters[index], output, micro_batch[index], self.group)
                if number == 0:
                    sums.insert(0, output)
                else:
                    sums[index] += output  # as torch does, whether the sum has ended or not
        return sums


def rows_of(rank: int, step: int, world: int) -> list[list[Tensor]]:
    return [gradients(rank, 10 * step + number, world) for number in range(MICRO_BATCHES)]


def unequal(one: list[Tensor], other: list[Tensor]) -> float:
    return float(sum(not torch.equal(a.nan_to_num(7e7), b.nan_to_num(7e7)) for a, b in zip(one, other, strict=True)))


def changed(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [key for key in one if not torch.equal(one[key], other[key])]


def begins_alone(stage: Stage, rows: list[Tensor], gate: dist.ProcessGroup, modules: Sequence[int]) -> None:
    """Begin sums of these modules on the first ranks before the other ranks begin any: who waited would wait for
    ever."""
    first = dist.get_rank() < (1 if stage.groups is None else 2)  # the ranks of a node wait for each other
    if not first:
        dist.barrier(gate)
    with stage.in_flight:
        for index in modules:
            output = torch.empty(rows[index].numel() // stage.world)
            stage.in_flight.begin(stage.scatters[index], output, rows[index], stage.group, SUM)
            assert not output.any(), "no sum yet"
        if first:
            dist.barrier(gate)


def beside_waiting(
    codec: dict[str, Any],
    rank: int,
    gate: dist.ProcessGroup,
    groups: LevelGroups | None = None,
    alone: Sequence[int] = (2, 0),
) -> dict[str, Any]:
    """Steps of both forms of the sums, one of them with a gradient that is not finite; a state that is taken over; an
    error while sums are on their way.

    `alone`: modules whose sums a rank can begin before the others do.
    """
    world = dist.get_world_size()
    waits, goes_on = Stage(codec, groups), Stage(codec, groups)
    differ, kept, infinite = 0.0, [], []
    for step in range(STEPS):
        rows = rows_of(rank, step, world)
        if step == 1 and rank == 1:
            rows[0][0][123] = torch.inf
        if step == STEPS - 1:
            goes_on = Stage(codec, groups).load(goes_on.state())
        expected = waits.waiting(rows)
        with sums_of_rank() as events:
            found = goes_on.overlapped(rows)
        differ += unequal(expected, found) + abs(waits.sent - goes_on.sent)
        infinite.append(largest([float(not part.isfinite().all()) for part in found]))
        kept += changed(waits.state(), goes_on.state())
    begins_alone(goes_on, rows[0], gate, alone)
    before, error = goes_on.state(), ""
    kept_back = [key for key in before if key.startswith("residual.")]
    with patch.object(OverlappedWork, "wait", side_effect=RuntimeError("a rank is lost")):
        try:
            goes_on.overlapped(rows)
        except RuntimeError as raised:
            error = str(raised)
    again = Stage(codec, groups).load(goes_on.state())
    touched = changed(*({key: state[key] for key in kept_back} for state in (before, again.state())))
    differ += unequal(again.waiting(rows), goes_on.overlapped(rows))
    return {
        "differ": largest([differ]),
        "infinite": infinite,
        "residuals differ": kept,
        "residuals": len(kept_back),
        "under way": most_under_way(events, "wait"),
        "error": error,
        "touched": touched,
    }


def lost_rank(rank: int) -> dict[str, Any]:
    """What rank 0 sees if no other rank ever sends its messages."""
    dist.barrier()  # or the others would come too late to make the group
    group = dist.new_group(timeout=timedelta(seconds=3))
    found: dict[str, Any] = {}
    if rank == 0:
        stage = Stage({"mode": "int4"}, None, group)
        rows = gradients(rank, 0, stage.world)
        try:
            stage.overlapped([rows])
        except RuntimeError as error:
            found["error"] = type(error).__name__
        found["operation"], found["waits"] = ACTIVITY.now.operation, ACTIVITY.now.waits
        found["residual"] = any(bool(part.any()) for part in stage.state().values())
        stage.in_flight.finish()  # nothing is left to wait for
    dist.barrier()
    return found
