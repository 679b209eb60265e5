"""The options of a search, in the order in which they come up: degrees and micro-batch first, then schedules, then what
saves memory."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

from hpctrain.planner.cost.memory_options import Saving
from hpctrain.planner.cost.workload import Order
from hpctrain.planner.layout.degrees import EVERY_COUNT, Shape
from hpctrain.planner.search.option_search import Search
from hpctrain.planner.simulate.predict import Prediction
from hpctrain.records.plan.plan import Recompute
from hpctrain.schedule.generate import SPLIT_BACKWARD
from hpctrain.schedule.placement import V_SHAPED

MORE: dict[Recompute, Recompute] = {"none": "selective", "selective": "full"}


class Option(NamedTuple):
    """In the queue; `order` is open until degrees and micro-batch come up."""

    turn_s: float
    """Those with the least come up first."""
    number: int
    bound_s: float
    """Seconds that no plan of it beats."""
    shape: Shape
    size: int
    order: Order | None
    saving: Saving


class Options:
    """Those that are still to be looked at.

    Args:
        plain: the search of plans that save memory as the run file says.
    """

    def __init__(self, plain: Search) -> None:
        self.plain = plain
        self.saves_memory = False
        """Whether ZeRO, sequence parallelism and recomputation may be chosen. By the model, sharding is sometimes a
        little faster, too; but no measurement has confirmed what it costs, so speed alone is no reason for it."""
        self.searches = {plain.work.saving: plain}
        self.queue: list[Option] = []
        self._numbers = itertools.count()

    def fill(self, shapes: list[Shape]) -> None:
        """Put all degrees with all micro-batches into the queue, their schedules open."""
        for shape, size in itertools.product(shapes, self.plain.work.micro_batch_sizes()):
            if self.plain.work.rows // size >= shape[1]:
                bound = min(self._work_s(saving, shape, size) for saving in self.savings(shape))
                self._push(bound, shape, size, None, self.plain.work.saving)

    def pop(self) -> Option:
        """The next one."""
        return heapq.heappop(self.queue)

    def open(self, option: Option, best: Prediction | None) -> None:
        """Put the schedules of these degrees and this micro-batch into the queue."""
        for saving in self.savings(option.shape):
            search = self.search(saving)
            orders = search.work.orders(option.shape[0])
            # What saves memory goes on from schedules that are too slow as well as from those that do not fit.
            if not self.saves_memory and not self._any_can_win(search, option, best):
                orders = [order for order in orders if order.schedule in V_SHAPED]
            for order in orders:
                self._put(option, order, saving)

    def _any_can_win(self, search: Search, option: Option, best: Prediction | None) -> bool:
        """False when of these degrees and this micro-batch no schedule but a V-shaped one fits and beats the best."""
        if not search.any_may_fit(option.shape, option.size):
            return False
        if best is None or len(self.plain.fleet.workers) > EVERY_COUNT:
            return True
        return search.any_has_time(option.shape, option.size, best.total)

    def savings(self, shape: Shape) -> Iterator[Saving]:
        """Those to begin with; `save_more` goes on from those that do not fit."""
        work = self.plain.work
        yield work.saving
        if not self.saves_memory:
            return
        _, dp, tp = shape
        split = tp > 1 and work.spec.splits_sequence and work.seq_len % tp == 0
        # Sums within nodes are exact, so all codecs go with them.
        shard: Literal["all", "node"] = "all" if work.sums_into_parts else "node"
        if dp > 1:
            yield Saving(zero=1, shard=shard)
        if split:
            yield Saving(sequence_parallel=True)
        if split and dp > 1:
            yield Saving(zero=1, shard=shard, sequence_parallel=True)

    def save_more(self, option: Option) -> None:
        """What to try where nothing fits."""
        if not self.saves_memory or option.order is None:
            return
        saving = option.saving
        more = []
        if saving.recompute in MORE:
            more.append(replace(saving, recompute=MORE[saving.recompute]))
        if saving.recompute == "none" and saving.zero in (1, 2):
            more.append(replace(saving, zero=2 if saving.zero == 1 else 3))
        for other in more:
            if option.order in self.search(other).work.orders(option.shape[0]):
                self._put(option, option.order, other)

    def _put(self, option: Option, order: Order, saving: Saving) -> None:
        search, (pp, dp, tp) = self.search(saving), option.shape
        if self.plain.work.spec.layers < pp * order.chunks:
            return
        bound = max(option.bound_s, search.bounds.step_s(search.crowd(tp), pp, dp, order, option.size))
        self._push(bound, option.shape, option.size, order, saving)

    def _work_s(self, saving: Saving, shape: Shape, size: int) -> float:
        search, (pp, dp, tp) = self.search(saving), shape
        return search.bounds.work_s(search.crowd(tp), pp, dp, size)

    def _push(self, bound_s: float, shape: Shape, size: int, order: Order | None, saving: Saving) -> None:
        turn_s = bound_s
        if len(self.plain.fleet.workers) <= EVERY_COUNT:
            turn_s *= 1 + _bubble(self.plain.work.rows // size, shape, order)
        heapq.heappush(self.queue, Option(turn_s, next(self._numbers), bound_s, shape, size, order, saving))

    def search(self, saving: Saving) -> Search:
        """For plans that save memory in this way."""
        if saving not in self.searches:
            self.searches[saving] = self.plain.saving(saving)
        return self.searches[saving]


def _bubble(micro_batches: int, shape: Shape, order: Order | None) -> float:
    """Part of the work that a pipeline of equal stages waits for its first and last micro-batches (Narayanan et al.
    2021, section 2.2; Qi et al. 2024, table 2); of an open schedule, as if it were the best."""
    pp, dp, _ = shape
    chunks = 2 if order is None else order.chunks
    cut = order is None or order.schedule in SPLIT_BACKWARD
    return (pp - 1) * dp / (micro_batches * chunks * (3 if cut else 1))
