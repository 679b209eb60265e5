"""The exhaustive search: best first by a bound, so that what cannot win is never simulated."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from hpctrain.planner.bound import search_bound
from hpctrain.planner.cost import CostModel
from hpctrain.planner.fit import fit_layout, why_undefined
from hpctrain.planner.fleet import Fleet
from hpctrain.planner.layout import Excess, Layout
from hpctrain.planner.placement import placements
from hpctrain.planner.predict import Prediction, lower_bound, predict
from hpctrain.planner.saving import Saving, shard_size
from hpctrain.planner.unit import Cells, Unit, alike_classes, make_units
from hpctrain.planner.workload import Order, Workload
from hpctrain.schedule.placement import stage_ranks
from hpctrain.schedule.runnable import COMPILED_SPLIT

Shape = tuple[int, int, int]
"""(pp, dp, tp)."""
EVERY_COUNT = 8
"""Up to this many devices, every number of them is tried; beyond, those that leave no or few devices idle."""
NO_SHARDS = (
    "shard node needs as many replicas of every stage in each node, two or more, and no placement has that; "
    "use shard all, or other degrees"
)
REFINEMENTS = 40
"""Most changes of one block or one micro-batch that are tried on the winner."""


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
    _orders: dict[Shape, list[Cells]] = field(default_factory=dict)
    _room: dict[tuple[int, int, int, int, Order], tuple[int, int]] = field(default_factory=dict)

    def saving(self, saving: Saving) -> Search:
        """A search of the same fleet for plans that save memory in another way."""
        work = replace(self.work, saving=saving)
        other = Search(work, self.fleet, CostModel(work, self.fleet.links))
        # Units, and the orders they can stand in, do not depend on it.
        other._units, other._orders, other.complete = self._units, self._orders, self.complete
        return other

    def units(self, tp: int) -> tuple[list[Unit], list[int]]:
        """The units of that size, and which of them are alike."""
        if tp not in self._units:
            units = make_units(self.fleet, tp)
            self._units[tp] = (units, alike_classes(units, self.fleet.links, self.work.boundary_bytes(1)))
        return self._units[tp]

    def shapes(self) -> list[Shape]:
        """The degrees to try; what is impossible goes to `impossible`."""
        if self.work.fixed is not None:
            given = self.work.fixed
            candidates = [(given.pp, given.dp, given.tp)]
        else:
            candidates = _degrees(len(self.fleet.workers))
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
            patience: give up after so many shapes and sizes in a row without a better one. Default: look at all that
                could still win.
        """
        options = [
            (search_bound(self.cost, self.units(tp)[0], pp, dp, size), (pp, dp, tp), size)
            for pp, dp, tp in shapes
            for size in sizes
            if self.work.rows // size >= dp
        ]
        waited = 0
        for bound, shape, size in sorted(options):
            if best is not None and (bound >= best.total or waited == patience):
                break
            found = self._explore(shape, size, best)
            waited = 0 if found is not best else waited + 1
            best = found
        return best

    def refine(self, best: Prediction) -> Prediction:
        """Move single blocks between neighbours and single micro-batches between replicas while that helps."""
        for _ in range(REFINEMENTS):
            better = min(
                (predict(self.cost, layout) for layout in _changes(best.layout) if not layout.excess(self.cost.memory)),
                key=lambda prediction: prediction.total,
                default=best,
            )
            if better.total >= best.total * (1 - 1e-6):
                break
            best = better
        return best

    def _explore(self, shape: Shape, size: int, best: Prediction | None) -> Prediction | None:
        """The better of `best` and what this shape has at this micro-batch size."""
        pp, dp, _ = shape
        bounded = []
        for number, cells in enumerate(self._placements(shape)):
            units = [unit for row in cells for unit in row]
            bounded.append((search_bound(self.cost, units, pp, dp, size), number, cells))
        for bound, _, cells in sorted(bounded):
            if best is not None and bound >= best.total:
                break
            for layout in self._layouts(cells, size):
                if best is not None and lower_bound(self.cost, layout) >= best.total:
                    continue
                found = predict(self.cost, layout)
                if best is None or found.total < best.total * (1 - 1e-9):
                    best = found
        return best

    def _placements(self, shape: Shape) -> list[Cells]:
        if shape not in self._orders:
            pp, dp, tp = shape
            units, classes = self.units(tp)
            orders, complete = placements(units, classes, pp, dp, lambda a, b: self.cost.send(a, b, 1))
            self._orders[shape] = orders
            self.complete = self.complete and complete
        return [cells for cells in self._orders[shape] if self.can_shard(cells)]

    def _layouts(self, cells: Cells, size: int) -> Iterator[Layout]:
        """The layouts of all schedules on these cells that fit in memory."""
        pp, dp = len(cells[0]), len(cells)
        cuts: dict[tuple[int, ...], Layout] = {}
        for order in self.work.orders(pp):
            smallest = self.work.micro_batch_sizes()[0]
            if why_undefined(self.cost, pp, dp, order, size):
                continue
            if not (self._can_hold(cells, order, smallest) and self._can_hold(cells, order, size)):
                continue
            # The best cut is that of another schedule with the same places, as long as the memory allows it.
            where = stage_ranks(order.schedule, pp, pp * order.chunks)
            layout = replace(cuts[where], schedule=order.schedule) if where in cuts else None
            if layout is None or layout.excess(self.cost.memory):
                layout = fit_layout(self.cost, cells, order, size)
            if layout.excess(self.cost.memory):
                continue
            cuts[where] = layout
            yield layout

    def can_shard(self, cells: Cells) -> bool:
        """Whether there is something to shard over where sharding is asked for."""
        return self.work.saving.zero == 0 or shard_size(cells, self.work.saving) > 1

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

    def feasible(self, shapes: list[Shape]) -> bool:
        """False when no shape has room for the model, whatever its placement and its micro-batches."""
        smallest = self.work.micro_batch_sizes()[0]
        return any(
            self._can_hold(cells, order, smallest)
            for shape in shapes
            for cells in self._placements(shape)[:1]
            for order in self.work.orders(shape[0])
        )

    def _can_hold(self, cells: Cells, order: Order, size: int) -> bool:
        """Whether the pipeline ranks have room for all blocks if every device had the memory of the largest.

        Larger micro-batches need no less memory, so a size is looked at only between one that fits and one that does
        not.
        """
        pp, dp, tp = len(cells[0]), len(cells), len(cells[0][0].workers)
        key = (pp, dp, tp, shard_size(cells, self.work.saving), order)
        fitting, too_large = self._room.get(key, (0, self.work.rows + 1))
        if fitting < size < too_large:
            # Some replica has at least this many micro-batches, and keeps the fewest activations with just as many.
            count = max(1, -(-(self.work.rows // size) // dp))
            stages = (0,) * (pp * order.chunks)
            layout = Layout(cells, order.schedule, size, (count,) * dp, stages, self.work.saving)
            largest = max(unit.memory_bytes for unit in self.units(tp)[0])
            room: float = 0
            for rank in range(pp):
                most = self.cost.memory.most_blocks(layout.role(0, rank), largest)
                room = room + most if most >= 0 else -math.inf
            holds = room >= self.work.spec.layers
            fitting, too_large = (size, too_large) if holds else (fitting, size)
            self._room[key] = (fitting, too_large)
        return size <= fitting

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


def _degrees(devices: int) -> list[Shape]:
    """(pp, dp, tp) with a product of at most `devices`."""
    return [
        (pp, dp, tp)
        for pp in range(1, devices + 1)
        for dp in range(1, devices // pp + 1)
        for tp in range(1, devices // (pp * dp) + 1)
        if devices <= EVERY_COUNT or pp * dp * tp == 1 or devices - pp * dp * tp <= devices // EVERY_COUNT
    ]


def _changes(layout: Layout) -> Iterator[Layout]:
    """Layouts that differ by one block between neighbouring stages or one micro-batch between neighbouring replicas."""
    last = len(layout.blocks) - 1
    for giver, taker in _neighbours(len(layout.blocks)):
        may_be_empty = giver in (0, last)
        if layout.blocks[giver] > (0 if may_be_empty else 1):
            yield replace(layout, blocks=_moved(layout.blocks, giver, taker))
    if layout.saving.equal_counts:
        return
    for giver, taker in _neighbours(layout.dp):
        if layout.micro_batches[giver] > 1:
            yield replace(layout, micro_batches=_moved(layout.micro_batches, giver, taker))


def _neighbours(count: int) -> list[tuple[int, int]]:
    return [pair for index in range(count - 1) for pair in ((index, index + 1), (index + 1, index))]


def _moved(counts: tuple[int, ...], giver: int, taker: int) -> tuple[int, ...]:
    return tuple(count - (index == giver) + (index == taker) for index, count in enumerate(counts))
