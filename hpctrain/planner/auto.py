"""The search over everything: degrees, micro-batch, schedule, and what saves memory, best first by their bounds."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from hpctrain.planner.bound import step_bound
from hpctrain.planner.degrees import EVERY_COUNT, Shape, least_used
from hpctrain.planner.predict import Prediction
from hpctrain.planner.saving import Saving
from hpctrain.planner.search import Search
from hpctrain.planner.workload import Order
from hpctrain.records.model_spec import ModelSpec
from hpctrain.records.plan import Recompute

MARGIN = 0.05
"""What saves memory has to be faster by that part of a step: its own costs are the least certain."""
FEW = 8
"""Up to this many devices the search goes on until nothing can win."""
PATIENCE = ((64, 60), (512, 14), (2048, 14))
"""(devices, options in a row without a better plan) after which a search on more devices than `FEW` ends."""
LEAST_PATIENCE = 10
"""The same for still more devices."""
HOPELESS = 3
"""Times as many options that do not fit count the same."""
FIRST_PLACEMENTS = 2
"""Placements of an option that are compared on very many devices; all are of the best one."""
MORE: dict[Recompute, Recompute] = {"none": "selective", "selective": "full"}


class Found(NamedTuple):
    """The end of a search."""

    search: Search
    """Of the best plan's way of saving memory."""
    best: Prediction | None
    bound_s: float
    """No plan of the whole space is faster."""
    ended: bool
    """False where patience ended it."""


class _Option(NamedTuple):
    """In the queue; `order` is open until degrees and micro-batch come up."""

    bound_s: float
    number: int
    shape: Shape
    size: int
    order: Order | None
    saving: Saving


def find_fastest(plain: Search, shapes: list[Shape]) -> Found:
    """The fastest plan by the cost model, and a bound for all of them.

    Savings that only cost time are looked at where nothing fits without them: recomputation step by step, and levels 2
    and 3 of ZeRO. Levels 0 and 1, and sequence parallelism, are always compared.
    """
    return _Auto(plain).run(shapes)


class _Auto:
    def __init__(self, plain: Search) -> None:
        self.plain = plain
        self.searches = {plain.work.saving: plain}
        self.queue: list[_Option] = []
        self.numbers = itertools.count()
        self.best: Prediction | None = None
        self.winner = plain

    def run(self, shapes: list[Shape]) -> Found:
        for shape, size in itertools.product(shapes, self.plain.work.micro_batch_sizes()):
            if self.plain.work.rows // size >= shape[1]:
                bound = min(self._work_s(saving, shape, size) for saving in self._savings(shape))
                self._push(_Option(bound, next(self.numbers), shape, size, None, self.plain.work.saving))
        devices = len(self.plain.fleet.workers)
        patience = next((options for most, options in PATIENCE if devices <= most), LEAST_PATIENCE)
        most = None if devices <= EVERY_COUNT else FIRST_PLACEMENTS
        lowest, waited, explored = math.inf, 0, 0
        while self.queue and not (self.best is not None and self.queue[0].bound_s >= self.best.total):
            if devices > FEW and self.best is not None and (waited >= patience or explored >= HOPELESS * patience):
                break
            option = heapq.heappop(self.queue)
            if option.order is None:
                self._open(option)
                continue
            search, before = self._search(option.saving), self.best
            if not search.may_fit(option.shape, option.order, option.size):
                self._save_more(option)
                continue
            lowest = min(lowest, option.bound_s)
            margin = MARGIN if option.saving != self.plain.work.saving and before is not None else 0.0
            found = search.explore(option.shape, option.order, option.size, before, margin, most)
            explored += 1
            if found.best is not before:
                self.best, self.winner, waited, explored = found.best, search, 0, 0
            elif found.fits:
                waited += 1
            if not found.fits:
                self._save_more(option)
        self._place_again(most)
        ended = not self.queue or (self.best is not None and self.queue[0].bound_s >= self.best.total)
        if self.queue:
            lowest = min(lowest, self.queue[0].bound_s)
        return Found(self.winner, self.best, self._bound(lowest), ended)

    def _place_again(self, most: int | None) -> None:
        """Compare all placements of the best option."""
        if self.best is None or most is None:
            return
        layout = self.best.layout
        order = Order(layout.schedule, len(layout.blocks) // layout.pp)
        self.best = self.winner.explore(layout.shape, order, layout.micro_batch, self.best).best

    def _bound(self, lowest: float) -> float:
        """With the plans that leave more devices idle than those that are tried."""
        fleet, work = self.plain.fleet, self.plain.work
        if work.fixed is None and len(fleet.workers) > EVERY_COUNT:
            used = sorted(fleet.workers, key=lambda worker: -worker.flops)[: least_used(len(fleet.workers)) - 1]
            fastest = max(fleet.workers, key=lambda worker: worker.bytes_per_s).bytes_per_s
            same = tuple(replace(worker, bytes_per_s=fastest) for worker in used)
            lowest = min(lowest, step_bound(replace(fleet, workers=same), work))
            # Nor are all numbers of replicas tried that leave few idle.
            lowest = min(lowest, step_bound(fleet, work))
        bound = max(lowest if math.isfinite(lowest) else 0.0, step_bound(fleet, work))
        return bound if self.best is None else min(bound, self.best.total)

    def _open(self, option: _Option) -> None:
        """Put the schedules of these degrees and this micro-batch into the queue."""
        for saving in self._savings(option.shape):
            for order in self._search(saving).work.orders(option.shape[0]):
                self._put(option, order, saving)

    def _savings(self, shape: Shape) -> Iterator[Saving]:
        """Those that may be faster than nothing."""
        work = self.plain.work
        yield work.saving
        if work.fixed is not None:
            return
        _, dp, tp = shape
        split = tp > 1 and isinstance(work.spec, ModelSpec) and work.seq_len % tp == 0
        if dp > 1:
            yield Saving(zero=1)
        if split:
            yield Saving(sequence_parallel=True)
        if split and dp > 1:
            yield Saving(zero=1, sequence_parallel=True)

    def _save_more(self, option: _Option) -> None:
        """What to try where nothing fits."""
        if self.plain.work.fixed is not None or option.order is None:
            return
        saving = option.saving
        more = []
        if saving.recompute in MORE:
            more.append(replace(saving, recompute=MORE[saving.recompute]))
        if saving.recompute == "none" and saving.zero in (1, 2):
            more.append(replace(saving, zero=2 if saving.zero == 1 else 3))
        for other in more:
            if option.order in self._search(other).work.orders(option.shape[0]):
                self._put(option, option.order, other)

    def _put(self, option: _Option, order: Order, saving: Saving) -> None:
        search, (pp, dp, tp) = self._search(saving), option.shape
        if self.plain.work.spec.layers < pp * order.chunks:
            return
        bound = max(option.bound_s, search.bounds.step_s(search.crowd(tp), pp, dp, order, option.size))
        self._push(_Option(bound, next(self.numbers), option.shape, option.size, order, saving))

    def _work_s(self, saving: Saving, shape: Shape, size: int) -> float:
        search, (pp, dp, tp) = self._search(saving), shape
        return search.bounds.work_s(search.crowd(tp), pp, dp, size)

    def _push(self, option: _Option) -> None:
        heapq.heappush(self.queue, option)

    def _search(self, saving: Saving) -> Search:
        if saving not in self.searches:
            self.searches[saving] = self.plain.saving(saving)
        return self.searches[saving]
