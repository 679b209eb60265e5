"""The search over everything: degrees, micro-batch, schedule, and what saves memory, best first by their bounds."""

from __future__ import annotations

import heapq
import itertools
import math
from typing import NamedTuple

from hpctrain.planner.bounds.knapsack import Columns
from hpctrain.planner.cost.workload import Order
from hpctrain.planner.devices.tensor_parallel_group import Cells
from hpctrain.planner.layout.degrees import EVERY_COUNT, Shape
from hpctrain.planner.layout.layout import Layout
from hpctrain.planner.layout.partition import why_undefined
from hpctrain.planner.search.end_bound import end_bound, least_s
from hpctrain.planner.search.local_search import adjust
from hpctrain.planner.search.option_search import Explored, Search
from hpctrain.planner.search.space import Option, Options
from hpctrain.planner.search.within_nodes import stand_together
from hpctrain.planner.simulate.predict import Prediction, predict

PATIENCE = ((512, 3), (2048, 5))
"""(devices, options without a better plan) after which a search on more devices than `EVERY_COUNT` leaves a pair of pp
and tp: bounds of unlike pairs are not equally near to what there is behind them."""
LEAST_PATIENCE = 2
"""The same for still more devices."""
STARTED_PATIENCE = 1
"""The same where the search begins with a plan to beat."""
HOPELESS = 3
"""Times as many options that do not fit count the same."""
FIRST_PLACEMENTS = 2
"""Placements of an option that are compared on very many devices; all are of the best one."""
NEAR = 1.1
"""Times as slow as the best an option with several stages a rank may be and still have its blocks shifted."""
SHIFTS = 100
"""Changes that are tried on it."""
CLOSE_PATIENCE = 64
"""Close looks without a better plan after which a search on up to `EVERY_COUNT` devices leaves the rest."""
FIRST_LOOKS = 10
"""Options that are looked at closely as soon as they come up: where devices are unlike, the likely placements make no
plan that it is worth to compare with."""
EVERY_LOOK = 8
"""Devices up to which a search only ends when nothing can win."""
MOST_NEAR = 16
"""Options that are compared with stages and pipelines within nodes, in the end."""


class Found(NamedTuple):
    """The end of a search."""

    search: Search
    """Of the best plan's way of saving memory."""
    best: Prediction | None
    bound_s: float
    """No plan of the whole space is faster."""
    ended: bool
    """False where patience ended it."""


class _Waiting(NamedTuple):
    """An option that a few placements were tried of."""

    turn_s: float
    number: int
    option: Option
    layout: Layout | None
    """One of them whose time is not known yet."""


def find_fastest(plain: Search, shapes: list[Shape]) -> Found:
    """The fastest plan by the cost model, and a bound for all that were to be compared.

    What saves memory is compared only where no plan fits without (see `Options.saves_memory`).
    """
    auto, start = _Auto(plain), plain.start
    if start is not None and start.search is plain:
        auto.best = start.best
    found = auto.run(shapes)
    if found.best is None and plain.work.fixed is None:
        auto.options.saves_memory = True
        if start is not None:
            auto.winner, auto.best = start.search, start.best
            auto.options.searches[start.search.work.saving] = start.search
        found = auto.run(shapes)
    return found


class _Auto:
    def __init__(self, plain: Search) -> None:
        self.plain = plain
        self.options = Options(plain)
        self.numbers = itertools.count()
        self.looked_at: list[tuple[Option, Columns]] = []
        """Whose bounds by columns are worked out in the end, as far as they matter then."""
        self.near: list[tuple[float, int, Search, Layout]] = []
        """Bound and layout of what was looked at closely and fits."""
        self.waiting: list[_Waiting] = []
        """For a close look."""
        self.waited = 0
        """Close looks since the last better plan."""
        self.left: list[Option] = []
        """When patience ended."""
        self.best: Prediction | None = None
        self.winner = plain

    def run(self, shapes: list[Shape]) -> Found:
        self.options.fill(shapes)
        if len(self.plain.fleet.workers) > EVERY_COUNT:
            return self._run_by_pairs()
        self._look_at_all()
        self._improve(None)
        self._stand_together()
        lowest = least_s(self.options, self.looked_at, self.left, self.best)
        return Found(self.winner, self.best, end_bound(self.plain, self.best, lowest), ended=not self.left)

    def _look_at_all(self) -> None:
        """Until nothing can win, or patience ends and nothing that is near to the best is better."""
        family = None
        while self.options.queue or self.waiting or (self.left and family != self._family()):
            if self.options.queue:
                self._glance(self.options.pop())
            elif self.waiting:
                self._wait_or_look(heapq.heappop(self.waiting))
            else:
                family = self._family()
                near = [option for option in self.left if self._is_near(option)]
                self.left = [option for option in self.left if not self._is_near(option)]
                for option in near:
                    self.waited = 0
                    self._look_closely(option)

    def _family(self) -> tuple[Shape, Order, int] | None:
        layout = None if self.best is None else self.best.layout
        return None if layout is None else (layout.shape, layout.order, layout.micro_batch)

    def _is_near(self, option: Option) -> bool:
        """Whether an option differs from the best in its pipeline ranks or in its schedule only."""
        family = self._family()
        if family is None or option.saving != self.winner.work.saving:
            return False
        shape, order, size = family
        return (option.shape[1:], option.order, option.size) == (shape[1:], order, size) or (
            option.shape,
            option.size,
        ) == (shape, size)

    def _run_by_pairs(self) -> Found:
        """On many devices: by their bounds, with patience for each pair of pp and tp."""
        devices = len(self.plain.fleet.workers)
        patience = next((options for limit, options in PATIENCE if devices <= limit), LEAST_PATIENCE)
        if self.best is not None:
            patience = STARTED_PATIENCE
        lowest, ended = math.inf, True
        tried: dict[tuple[int, int], int] = {}
        while self.options.queue and not (self.best is not None and self.options.queue[0].bound_s >= self.best.total):
            option = self.options.pop()
            pair = (option.shape[0], option.shape[2])
            if self.best is not None and tried.get(pair, 0) >= HOPELESS * patience:
                lowest, ended = min(lowest, option.bound_s), False
                continue
            if option.order is None:
                self.options.open(option, self.best)
                continue
            search = self.options.search(option.saving)
            asked = (option.shape, option.order, option.size)
            # The cheapest question first.
            if search.is_too_large(*asked) or not search.may_fit(*asked):
                self.options.save_more(option)
                continue
            before = self.best
            fits = self._look(search, *asked, FIRST_PLACEMENTS).fits
            lowest = min(lowest, option.bound_s)
            tried[pair] = 0 if self.best is not before else tried.get(pair, 0) + (HOPELESS if fits else 1)
            if not fits:
                self.options.save_more(option)
        if self.options.queue:
            lowest = min(lowest, self.options.queue[0].bound_s)
        self._improve(FIRST_PLACEMENTS)
        return Found(self.winner, self.best, end_bound(self.plain, self.best, lowest), ended)

    def _glance(self, option: Option) -> None:
        """Open an option, drop it where it cannot win, or try a few placements and leave the rest for later: the
        sooner there is a good plan to compare with, the fewer options have to be looked at closely."""
        if self.best is not None and option.bound_s >= self.best.total:
            return
        if option.order is None:
            self.options.open(option, self.best)
            return
        search, asked = self.options.search(option.saving), (option.shape, option.order, option.size)
        # The cheapest question first.
        if search.is_too_large(*asked) or not self._has_time(search, option) or not search.may_fit(*asked):
            self.options.save_more(option)
            return
        before = self.best
        found = None if before is None else self._look(search, *asked, FIRST_PLACEMENTS)
        if found is None or self.best is not before or len(self.looked_at) < FIRST_LOOKS:
            self._look_closely(option)
            return
        turn_s = found.bound_s if found.fits else option.turn_s
        heapq.heappush(self.waiting, _Waiting(turn_s, next(self.numbers), option, found.nearest))

    def _improve(self, most: int | None) -> None:
        """Compare the best option with its other schedules and savings, then all placements of what won."""
        if self.best is None:
            return
        shape, size = self.best.layout.shape, self.best.layout.micro_batch
        for saving in self.options.savings(shape):
            search = self.options.search(saving)
            for order in search.work.orders(shape[0]):
                self._look(search, shape, order, size, most)
        if most is not None:
            layout = self.best.layout
            self._look(self.winner, shape, layout.order, size, None)

    def _stand_together(self) -> None:
        """Whether what is near to the best beats it where stages or pipelines stand within nodes.

        In the end, so that no other option is left for it.
        """
        if self.best is None:
            return
        near = [
            (search, layout)
            for bound_s, _, search, layout in sorted(self.near)[:MOST_NEAR]
            if bound_s <= NEAR * self.best.total
        ]
        for search, layout in [(self.winner, self.best.layout), *near]:
            found = stand_together(search, layout, self.best)
            if found is not self.best:
                self.best, self.winner = found, search

    def _look(
        self, search: Search, shape: Shape, order: Order, size: int, most: int | None, cells: list[Cells] | None = None
    ) -> Explored:
        """Whether an option beats the best, with these placements or the likely ones."""
        found = search.explore(shape, order, size, self.best, most, cells=cells)
        if found.best is not self.best:
            self.best, self.winner = found.best, search
        return found

    def _has_time(self, search: Search, option: Option) -> bool:
        """Whether an option could beat the best if memory did not matter."""
        assert option.order is not None, "only options with a schedule are looked at"
        if self.best is None or why_undefined(search.cost, *option.shape[:2], option.order, option.size):
            return self.best is None
        return search.columns(option.shape, option.order, option.size).has_time(self.best.total)

    def _wait_or_look(self, waiting: _Waiting) -> None:
        """Look closely at the option whose layout takes the least time, which is worked out when its bound comes up."""
        option, layout = waiting.option, waiting.layout
        if layout is None:
            self._look_closely(option)
            return
        turn_s = predict(self.options.search(option.saving).cost, layout).total
        heapq.heappush(self.waiting, _Waiting(turn_s, next(self.numbers), option, None))

    def _look_closely(self, option: Option) -> None:
        """Whether an option beats the best, with placements made for it, too."""
        if self.best is not None and option.bound_s >= self.best.total:
            return
        if self.waited >= CLOSE_PATIENCE and len(self.plain.fleet.workers) > EVERY_LOOK:
            self.left.append(option)
            return
        shape, order, size = option.shape, option.order, option.size
        assert order is not None, "only options with a schedule are looked at"
        search, before = self.options.search(option.saving), self.best
        if why_undefined(search.cost, shape[0], shape[1], order, size):
            self.options.save_more(option)
            return
        columns = search.columns(shape, order, size)
        # The cheapest question first; it was asked before, but not with the best of now.
        if before is not None and not (columns.has_time(before.total) and columns.may_end_by(before.total)):
            self.options.save_more(option)
            return
        found = self._look(search, shape, order, size, None)
        start = option.bound_s
        _, high = columns.bracket(start, columns.some_end(start) if self.best is None else self.best.total)
        made = self._look(search, shape, order, size, None, search.placements_by(columns, high))
        nearer = min(found, made, key=lambda each: each.bound_s)
        if nearer.nearest is not None:
            self.near.append((nearer.bound_s, next(self.numbers), search, nearer.nearest))
        if order.chunks > 1:
            self._shift(search, nearer)
        self.looked_at.append((option, columns))
        self.waited = 0 if self.best is not before or self.best is None else self.waited + 1
        if not (found.fits or made.fits):
            self.options.save_more(option)

    def _shift(self, search: Search, found: Explored) -> None:
        """Whether an option with several stages a rank beats the best when these hold unlike numbers of blocks.

        Layouts are made with equal ones. Where ranks are unlike, that can be a tenth slower.
        """
        if found.nearest is None or self.best is None or found.bound_s > NEAR * self.best.total:
            return
        near = predict(search.cost, found.nearest)
        if near.total > NEAR * self.best.total:
            return
        shifted = adjust(search.cost, near, SHIFTS)
        if shifted.total < self.best.total * (1 - 1e-9):
            self.best, self.winner = shifted, search
