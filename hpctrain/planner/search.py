"""Options of one way of saving memory: what can be, what it costs at best, and the best of what it has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from hpctrain.planner.cost import CostModel
from hpctrain.planner.crowd import Bounds, Crowd
from hpctrain.planner.degrees import Shape, degrees
from hpctrain.planner.fit import fit_layout, why_undefined
from hpctrain.planner.fleet import Fleet
from hpctrain.planner.layout import Excess, Layout
from hpctrain.planner.memory import RankRole
from hpctrain.planner.placement import placements, rank_orders
from hpctrain.planner.predict import Prediction, lower_bound, predict
from hpctrain.planner.saving import Saving, shard_size
from hpctrain.planner.unit import Cells, Unit, alike_classes, make_units
from hpctrain.planner.workload import Order, Workload
from hpctrain.records.codec import keeps_state
from hpctrain.records.compression import Codec
from hpctrain.schedule.runnable import COMPILED_SPLIT

MOST_COMPARED = 64
"""Units whose links are compared pair by pair."""
NO_SHARDS = (
    "shard node needs as many replicas of every stage in each node, two or more, and no placement has that; "
    "use shard all, or other degrees"
)
TURNS = 60
"""Orders of the winner's pipeline ranks that are tried."""
REFINEMENTS = 400
"""Changes of one block or one micro-batch that are tried on the winner; those that were begun are finished."""


NOTHING = 1e9
"""Blocks that are missing where a device cannot even hold what stands beside them."""


class Explored(NamedTuple):
    """What was found for one shape, schedule and micro-batch size."""

    best: Prediction | None
    fits: bool
    """Whether some layout fits the memory."""


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
    _units: dict[int, tuple[list[Unit], list[int]]] = field(default_factory=dict)
    _crowds: dict[int, Crowd] = field(default_factory=dict)
    _orders: dict[Shape, list[Cells]] = field(default_factory=dict)
    _room: dict[tuple[int, int, int, int, Order], tuple[int, int]] = field(default_factory=dict)

    def saving(self, saving: Saving) -> Search:
        """A search of the same fleet for plans that save memory in another way."""
        return self._with(replace(self.work, saving=saving))

    def summing(self, codec: Codec) -> Search:
        """A search of the same fleet for plans whose gradients are summed in another way."""
        return self._with(replace(self.work, codec=codec))

    def _with(self, work: Workload) -> Search:
        other = Search(work, self.fleet, self.cost.with_work(work))
        # Units, and the orders they can stand in, do not depend on it.
        other._units, other._orders, other.complete = self._units, self._orders, self.complete
        return other

    @cached_property
    def bounds(self) -> Bounds:
        return Bounds(self.cost)

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
    ) -> Explored:
        """The better of `best` and what this shape has with this schedule at this micro-batch size.

        Args:
            most: placements that are looked at; default: all.
        """
        pp, dp, _ = shape
        if why_undefined(self.cost, pp, dp, order, size):
            return Explored(best, fits=False)
        limit = math.inf if best is None else best.total * (1 - 1e-9)
        fits = False
        for cells in self._placements(shape)[:most]:
            if not self._can_hold(shape, shard_size(cells, self.work.saving), order, size):
                continue
            layout = fit_layout(self.cost, cells, order, size)
            if layout.excess(self.cost.memory):
                continue
            fits = True
            if lower_bound(self.cost, layout) >= limit:
                continue
            found = predict(self.cost, layout)
            if found.total < limit:
                best, limit = found, found.total * (1 - 1e-9)
        return Explored(best, fits)

    def refine(self, best: Prediction) -> Prediction:
        """Exchange pipeline ranks, then move single blocks between neighbours and single micro-batches between
        replicas, while that helps."""
        best = self._turn(best)
        tried = 0
        while tried < REFINEMENTS:
            better = best
            for layout in _changes(best.layout):
                tried += 1
                better = self._faster(better, layout)
            if better is best:
                break
            best = better
        return best

    def _turn(self, best: Prediction) -> Prediction:
        order, size = best.layout.order, best.layout.micro_batch
        tried: set[tuple[int, ...]] = set()
        while len(tried) < TURNS:
            better = best
            for cells in rank_orders(best.layout.cells):
                key = tuple(unit.index for row in cells for unit in row)
                if key in tried or len(tried) >= TURNS or not self.can_shard(cells):
                    continue
                tried.add(key)
                better = self._faster(better, fit_layout(self.cost, cells, order, size))
            if better is best:
                break
            best = better
        return best

    def _faster(self, best: Prediction, layout: Layout) -> Prediction:
        """The layout's prediction where it fits and is faster by more than rounding, else `best`."""
        limit = best.total * (1 - 1e-6)
        if layout.excess(self.cost.memory) or lower_bound(self.cost, layout) >= limit:
            return best
        found = predict(self.cost, layout)
        return found if found.total < limit else best

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
        return shards > 1 and (shards < len(cells) or self.work.fixed is not None or not keeps_state(self.work.codec))

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
        shards = 1
        if self.work.saving.zero:
            shards = shape[1]
            if self.work.saving.shard == "node":
                shards = max((shard_size(cells, self.work.saving) for cells in self._placements(shape)), default=1)
        return self._can_hold(shape, shards, order, size)

    def _can_hold(self, shape: Shape, shards: int, order: Order, size: int) -> bool:
        """Whether the pipeline ranks have room for all blocks with the devices shared out as well as can be.

        Larger micro-batches need no less memory, so a size is looked at only between one that fits and one that does
        not, and the smallest comes first: mostly it says no for all.
        """
        pp, dp, tp = shape
        key = (pp, dp, tp, shards, order)
        smallest = self.work.micro_batch_sizes()[0]
        for each in (size,) if key in self._room else dict.fromkeys((smallest, size)):
            fitting, too_large = self._room.get(key, (0, self.work.rows + 1))
            if fitting < each < too_large:
                holds = self._holds(shape, shards, order, each)
                self._room[key] = (each, too_large) if holds else (fitting, each)
        return size <= self._room[key][0]

    def _holds(self, shape: Shape, shards: int, order: Order, size: int) -> bool:
        pp, dp, tp = shape
        # Some replica has at least this many micro-batches, and keeps the fewest activations with just as many.
        count = max(1, -(-(self.work.rows // size) // dp))
        kind, stages = self.crowd(tp).kinds[0][0].kind, pp * order.chunks
        roles = [RankRole(kind, order.schedule, pp, rank, stages, dp, tp, shards, size, count) for rank in range(pp)]
        return self._room_for(roles) >= self.work.spec.layers

    def _room_for(self, roles: Sequence[RankRole]) -> float:
        """Blocks that the pipeline ranks hold at most; below nothing where one of them holds not even none.

        A rank holds what the smallest of its replicas' units holds, so no more ranks have large memories than there
        are large units for all their replicas.
        """
        sizes: dict[float, int] = {}
        for unit, number in self.crowd(roles[0].tp).kinds:
            sizes[unit.memory_bytes] = sizes.get(unit.memory_bytes, 0) + number
        levels = sorted(sizes)
        most = sum(self._held(roles, levels[-1]))
        if len(levels) == 1 or most < self.work.spec.layers:
            return most  # not enough even where all are as large as the largest
        room, units = 0.0, sum(sizes.values())
        below = [0.0] * len(roles)
        for level in levels:
            held = self._held(roles, level)
            ranks = min(len(roles), units // roles[0].dp)
            if level == levels[0] or ranks == len(roles):
                room = sum(held)
            else:
                room += sum(sorted((a - b for a, b in zip(held, below, strict=True)), reverse=True)[:ranks])
            below, units = held, units - sizes[level]
        return room

    def _held(self, roles: Sequence[RankRole], memory_bytes: float) -> list[float]:
        """[pipeline rank] -> blocks that so much memory holds at most."""
        held = (float(self.cost.memory.most_blocks(role, memory_bytes)) for role in roles)
        return [blocks if blocks >= 0 else -NOTHING for blocks in held]

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


def _changes(layout: Layout) -> Iterator[Layout]:
    """Layouts that differ by one block between neighbouring stages or one micro-batch between unlike
    replicas."""
    last = len(layout.blocks) - 1
    for giver, taker in _neighbours(len(layout.blocks)):
        may_be_empty = giver in (0, last)
        if layout.blocks[giver] > (0 if may_be_empty else 1):
            yield replace(layout, blocks=_moved(layout.blocks, giver, taker))
    if layout.saving.equal_counts:
        return
    # Replicas with the same devices and as many micro-batches are one and the same, wherever they stand.
    for giver in layout.unlike:
        for taker in layout.unlike:
            if giver != taker and layout.micro_batches[giver] > 1:
                yield replace(layout, micro_batches=_moved(layout.micro_batches, giver, taker))


def _neighbours(count: int) -> list[tuple[int, int]]:
    return [pair for index in range(count - 1) for pair in ((index, index + 1), (index + 1, index))]


def _moved(counts: tuple[int, ...], giver: int, taker: int) -> tuple[int, ...]:
    return tuple(count - (index == giver) + (index == taker) for index, count in enumerate(counts))
