"""Options of one way of saving memory: what can be, what it costs at best, and the best of what it has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from hpctrain.planner.bounds.closed_form import Bounds
from hpctrain.planner.bounds.knapsack import Columns
from hpctrain.planner.bounds.memory_feasibility import Room
from hpctrain.planner.bounds.unit_counts import Crowd
from hpctrain.planner.cost.memory_options import Saving, shard_size
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import KEEPS_LEAST, Order, Workload
from hpctrain.planner.devices.pool import Fleet
from hpctrain.planner.devices.tensor_parallel_group import Cells, Unit, alike_classes, make_units
from hpctrain.planner.layout.column_placement import by_mixtures
from hpctrain.planner.layout.degrees import Shape, degrees
from hpctrain.planner.layout.layout import Excess, Layout
from hpctrain.planner.layout.partition import fit_layout, why_undefined
from hpctrain.planner.layout.placement import placements
from hpctrain.planner.simulate.predict import Prediction, lower_bound, predict
from hpctrain.records.plan.compression import Codec
from hpctrain.schedule.runnable import COMPILED_SPLIT

MOST_COMPARED = 64
"""Units whose links are compared pair by pair."""
NO_SHARDS = (
    "shard node needs as many replicas of every stage in each node, two or more, and no placement has that; "
    "use shard all, or other degrees"
)


class Explored(NamedTuple):
    """What was found for one shape, schedule and micro-batch size."""

    best: Prediction | None
    nearest: Layout | None
    """The layout that fits with the smallest bound; None where none fits."""
    bound_s: float
    """Of this one."""

    @property
    def fits(self) -> bool:
        """Whether some layout fits the memory."""
        return self.nearest is not None


class Start(NamedTuple):
    """A plan that is known before a search begins."""

    search: Search
    """Of its way of saving memory."""
    best: Prediction
    kept: tuple[Layout, ...]
    """Its likes for which little state moves, the least first."""


@dataclass(eq=False)
class Search:
    """What is known while searching."""

    work: Workload
    fleet: Fleet
    cost: CostModel
    impossible: dict[Shape, str] = field(default_factory=dict)
    """Shapes that cannot run at all, with the reason."""
    complete: bool = True
    """False when some orders of devices were left out."""
    start: Start | None = None
    """A plan to beat, where this search follows another."""
    _units: dict[int, tuple[list[Unit], list[int]]] = field(default_factory=dict)
    _crowds: dict[int, Crowd] = field(default_factory=dict)
    _orders: dict[Shape, list[Cells]] = field(default_factory=dict)
    _columns: dict[tuple[Shape, Order, int], Columns] = field(default_factory=dict)

    def saving(self, saving: Saving) -> Search:
        """A search of the same fleet for plans that save memory in another way."""
        return self._with(replace(self.work, saving=saving))

    def summing(self, codec: Codec) -> Search:
        """A search of the same fleet for plans whose gradients are summed in another way."""
        other = self._with(replace(self.work, codec=codec))
        other.impossible = self.impossible
        return other

    def _with(self, work: Workload) -> Search:
        other = Search(work, self.fleet, self.cost.with_work(work))
        # Units, and the orders they can stand in, do not depend on it.
        other._units, other._orders, other.complete = self._units, self._orders, self.complete
        return other

    @cached_property
    def bounds(self) -> Bounds:
        return Bounds(self.cost)

    @cached_property
    def room(self) -> Room:
        return Room(self.cost)

    def columns(self, shape: Shape, order: Order, size: int) -> Columns:
        """The bound by columns of these degrees, this schedule and this micro-batch."""
        key = (shape, order, size)
        if key not in self._columns:
            shards = self._most_shards(shape)
            self._columns[key] = Columns(self.cost, self.crowd(shape[2]), shape, order, size, shards)
        return self._columns[key]

    def units(self, tp: int) -> tuple[list[Unit], list[int]]:
        """The units of that size, and which of them are alike."""
        if tp not in self._units:
            units = make_units(self.fleet, tp)
            few = len(units) <= MOST_COMPARED
            message = self.work.boundary_bytes(1)
            classes = alike_classes(units, self.fleet.links, message) if few else list(range(len(units)))
            self._units[tp] = (units, classes)
        return self._units[tp]

    def shapes(self) -> list[Shape]:
        """The degrees to try; what is impossible goes to `impossible`."""
        if self.work.fixed is not None:
            given = self.work.fixed
            candidates = [(given.pp, given.dp, given.tp)]
        else:
            candidates = degrees(len(self.fleet.workers), self.work.spec, self.work.rows)
        found = []
        for shape in candidates:
            reason = self._why_not(shape)
            if reason:
                self.impossible[shape] = reason
            else:
                found.append(shape)
        return found

    def best(
        self, shapes: list[Shape], sizes: list[int], patience: int | None = None, best: Prediction | None = None
    ) -> Prediction | None:
        """The fastest layout of these shapes and micro-batch sizes that fits; None when none fits.

        Args:
            best: the layout to beat, of another search.
            patience: give up after so many options in a row without a better one. Default: look at all that could
                still win.
        """
        queue = [
            (self.bounds.step_s(self.crowd(shape[2]), shape[0], shape[1], order, size), number, shape, order, size)
            for number, (shape, order, size) in enumerate(self.options(shapes, sizes))
        ]
        waited = 0
        for bound, _, shape, order, size in sorted(queue):
            if best is not None and (bound >= best.total or waited == patience):
                break
            found = self.explore(shape, order, size, best).best
            waited = 0 if found is not best else waited + 1
            best = found
        return best

    def options(self, shapes: list[Shape], sizes: list[int] | None = None) -> Iterator[tuple[Shape, Order, int]]:
        """Shapes, schedules and micro-batch sizes, those that divide the batch unless they are given."""
        for shape in shapes:
            for size in self.work.micro_batch_sizes() if sizes is None else sizes:
                if self.work.rows // size >= shape[1]:
                    yield from ((shape, order, size) for order in self.work.orders(shape[0]))

    def crowd(self, tp: int) -> Crowd:
        """The units of that size, counted by kind."""
        if tp not in self._crowds:
            self._crowds[tp] = Crowd(self.cost, self.units(tp)[0])
        return self._crowds[tp]

    def explore(
        self,
        shape: Shape,
        order: Order,
        size: int,
        best: Prediction | None,
        most: int | None = None,
        *,
        cells: Sequence[Cells] | None = None,
    ) -> Explored:
        """The better of `best` and what this shape has with this schedule at this micro-batch size.

        Args:
            most: placements that are looked at; default: all.
            cells: placements to look at. Default: the likely ones.
        """
        pp, dp, _ = shape
        if why_undefined(self.cost, pp, dp, order, size):
            return Explored(best, None, math.inf)
        limit = math.inf if best is None else best.total * (1 - 1e-9)
        nearest, least = None, math.inf
        crowd = self.crowd(shape[2])
        for each in (self._placements(shape) if cells is None else cells)[:most]:
            if not self.room.can_hold(crowd, shape, shard_size(each, self.work.saving), order, size):
                continue
            layout = fit_layout(self.cost, each, order, size)
            if layout.excess(self.cost.memory):
                continue
            bound = lower_bound(self.cost, layout)
            if nearest is None or bound < least:
                nearest, least = layout, bound
            if bound >= limit:
                continue
            found = predict(self.cost, layout)
            if found.total < limit:
                best, limit = found, found.total * (1 - 1e-9)
        return Explored(best, nearest, least)

    def _placements(self, shape: Shape) -> list[Cells]:
        if shape not in self._orders:
            pp, dp, tp = shape
            units, classes = self.units(tp)
            orders, complete = placements(units, classes, pp, dp, lambda a, b: self.cost.send(a, b, 1))
            self._orders[shape] = orders
            self.complete = self.complete and complete
        return [cells for cells in self._orders[shape] if self.can_shard(cells)]

    def can_shard(self, cells: Cells) -> bool:
        """Whether there is something to shard over where sharding is asked for."""
        if self.work.saving.zero == 0:
            return True
        shards = shard_size(cells, self.work.saving)
        # Degrees by hand are refused by name where the codec cannot go with them.
        return shards > 1 and (shards < len(cells) or self.work.fixed is not None or self.work.sums_into_parts)

    def shortage(self, shape: Shape) -> Excess | str | None:
        """Why nothing of this shape runs: the device that lacks memory with the smallest micro-batches, or a sentence.

        None where a layout fits.
        """
        pp, dp, _ = shape
        reason: str | None = None
        for size in self.work.micro_batch_sizes():
            for order in self.work.orders(pp):
                undefined = why_undefined(self.cost, pp, dp, order, size)
                if undefined:
                    reason = reason or undefined
                    continue
                for cells in self._placements(shape)[:1]:
                    return fit_layout(self.cost, cells, order, size).excess(self.cost.memory)
                return NO_SHARDS
        return reason

    def shortage_at(self, cells: Cells, order: Order, size: int) -> Excess | None:
        """The device that lacks memory on these very devices; None where the layout fits."""
        return fit_layout(self.cost, cells, order, size).excess(self.cost.memory)

    def may_fit(self, shape: Shape, order: Order, size: int) -> bool:
        """False when no placement of the shape has room for the model."""
        return self.room.can_hold(self.crowd(shape[2]), shape, self._most_shards(shape), order, size)

    def is_too_large(self, shape: Shape, order: Order, size: int) -> bool:
        """Whether `may_fit` is already known to say no."""
        return self.room.is_too_large(shape, self._most_shards(shape), order, size)

    def any_may_fit(self, shape: Shape, size: int) -> bool:
        """False when no schedule but a V-shaped one has room for the model, as `KEEPS_LEAST` tells."""
        saving = self.work.saving
        if saving.zero or saving.recompute != "none":
            return True  # a stage of several is gathered, or made again, in smaller pieces
        return self.may_fit(shape, KEEPS_LEAST, size)

    def placements_by(self, columns: Columns, limit_s: float) -> list[Cells]:
        """Placements that the bound by columns says may be done in the time."""
        mixtures = columns.mixtures_by(limit_s)
        if mixtures is None:
            return []
        units = self.units(columns.tp)[0]
        classes = [[unit for unit in units if self.cost.kind(unit) in each.kinds] for each in columns.classes]
        return [cells for cells in by_mixtures(classes, mixtures) if self.can_shard(cells)]

    def any_has_time(self, shape: Shape, size: int, limit_s: float) -> bool:
        """False when no schedule but a V-shaped one is done in the time, even with memory without end."""
        crowd, shards = self.crowd(shape[2]), self._most_shards(shape)
        return Columns(self.cost, crowd, shape, Order("1f1b"), size, shards, waits=False).has_time(limit_s)

    def _most_shards(self, shape: Shape) -> int:
        """Replicas that share a state at most."""
        if self.work.saving.zero and self.work.saving.shard == "node":
            return max((shard_size(cells, self.work.saving) for cells in self._placements(shape)), default=1)
        return shape[1] if self.work.saving.zero else 1

    def _why_not(self, shape: Shape) -> str | None:
        pp, dp, tp = shape
        units = len(self.units(tp)[0])
        if reason := self.work.spec.why_no_tensor_parallel(tp):
            return reason
        if reason := self.work.spec.why_no_pipeline(pp):
            return reason
        if self.work.compiled and tp > 1:
            return f"compile is true, and {COMPILED_SPLIT}"
        if pp > self.work.spec.layers:
            return f"the model has {self.work.spec.layers} blocks, fewer than pp {pp}"
        if self.work.saving.zero and dp == 1:
            return f"zero {self.work.saving.zero} shards over replicas, dp 1 is one"
        if dp > self.work.rows:
            return f"batch.global {self.work.rows} is less than one sequence for each of dp {dp} replicas"
        if pp * dp > units and tp == 1:
            return f"{pp * dp} devices are needed, {units} are usable"
        if pp * dp > units:
            return f"pp × dp = {pp * dp} groups of {tp} equal devices are needed, there are {units}"
        return None
