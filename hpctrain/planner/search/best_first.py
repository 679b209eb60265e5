"""The search over everything: degrees, micro-batch, schedule, and what saves memory, best first by their bounds."""

from __future__ import annotations

import heapq
import itertools
import math
from typing import NamedTuple

from hpctrain.planner.bounds.knapsack import KnapsackBound
from hpctrain.planner.cost.workload import ScheduleSpec
from hpctrain.planner.devices.tensor_parallel_group import Placement
from hpctrain.planner.layout.degrees import EXHAUSTIVE_DEVICES, ParallelDims
from hpctrain.planner.layout.layout import Layout
from hpctrain.planner.layout.partition import why_no_layout
from hpctrain.planner.search.end_bound import min_bound_s, overall_bound
from hpctrain.planner.search.local_search import shift_counts
from hpctrain.planner.search.option_search import Evaluation, Search
from hpctrain.planner.search.space import Candidate, CandidateQueue
from hpctrain.planner.search.within_nodes import pack_within_nodes
from hpctrain.planner.simulate.predict import Prediction, predict

PATIENCE_BY_DEVICES = ((512, 3), (2048, 5))
"""(devices, options without a better plan) after which a search on more devices than `EXHAUSTIVE_DEVICES` leaves a pair
of pp and tp: bounds of unlike pairs are not equally near to what there is behind them."""
MIN_PATIENCE = 2
"""The same for still more devices."""
WARM_START_PATIENCE = 1
"""The same where the search begins with a plan to beat."""
MISFIT_FACTOR = 3
"""Times as many options that do not fit count the same."""
SAMPLED_PLACEMENTS = 2
"""Placements of an option that are compared on very many devices; all are of the best one."""
NEAR_BEST_FACTOR = 1.1
"""Times as slow as the best an option with several stages a rank may be and still have its blocks shifted."""
MAX_BLOCK_SHIFTS = 100
"""Changes that are tried on it."""
FULL_PATIENCE = 64
"""Close looks without a better plan after which a search on up to `EXHAUSTIVE_DEVICES` devices leaves the rest."""
FIRST_FULL_EVALUATIONS = 10
"""Options that are looked at closely as soon as they come up: where devices are unlike, the likely placements make no
plan that it is worth to compare with."""
UNLIMITED_DEVICES = 8
"""Devices up to which a search only ends when nothing can win."""
MAX_PACKED_LAYOUTS = 16
"""Options that are compared with stages and pipelines within nodes, in the end."""


class SearchResult(NamedTuple):
    """The end of a search."""

    search: Search
    """Of the best plan's way of saving memory."""
    best: Prediction | None
    bound_s: float
    """No plan of the whole space is faster."""
    ended: bool
    """False where patience ended it."""


class _PendingEvaluation(NamedTuple):
    """An option that a few placements were tried of."""

    priority_s: float
    number: int
    candidate: Candidate
    layout: Layout | None
    """One of them whose time is not known yet."""


def best_first_search(plain: Search, candidate_dims: list[ParallelDims]) -> SearchResult:
    """The fastest plan by the cost model, and a bound for all that were to be compared.

    What saves memory is compared only where no plan fits without (see `CandidateQueue.may_save_memory`).
    """
    auto, start = _BestFirstSearch(plain), plain.warm_start
    if start is not None and start.search is plain:
        auto.best = start.best
    found = auto.run(candidate_dims)
    if found.best is None and plain.work.fixed is None:
        auto.candidates.may_save_memory = True
        if start is not None:
            auto.winner, auto.best = start.search, start.best
            auto.candidates.searches[start.search.work.memory_options] = start.search
        found = auto.run(candidate_dims)
    return found


class _BestFirstSearch:
    def __init__(self, plain: Search) -> None:
        self.plain = plain
        self.candidates = CandidateQueue(plain)
        self.numbers = itertools.count()
        self.evaluated: list[tuple[Candidate, KnapsackBound]] = []
        """Whose bounds by columns are worked out in the end, as far as they matter then."""
        self.near_best: list[tuple[float, int, Search, Layout]] = []
        """Bound and layout of what was looked at closely and fits."""
        self.pending: list[_PendingEvaluation] = []
        """For a close look."""
        self.evaluations_since_best = 0
        """Close looks since the last better plan."""
        self.skipped: list[Candidate] = []
        """When patience ended."""
        self.best: Prediction | None = None
        self.winner = plain

    def run(self, candidate_dims: list[ParallelDims]) -> SearchResult:
        self.candidates.fill(candidate_dims)
        if len(self.plain.pool.devices) > EXHAUSTIVE_DEVICES:
            return self._search_by_pp_tp()
        self._search_all()
        self._try_variants_of_best(None)
        self._pack_within_nodes()
        lowest = min_bound_s(self.candidates, self.evaluated, self.skipped, self.best)
        return SearchResult(
            self.winner, self.best, overall_bound(self.plain, self.best, lowest), ended=not self.skipped
        )

    def _search_all(self) -> None:
        """Until nothing can win, or patience ends and nothing that is near to the best is better."""
        family = None
        while self.candidates.queue or self.pending or (self.skipped and family != self._family()):
            if self.candidates.queue:
                self._evaluate_sampled(self.candidates.pop())
            elif self.pending:
                self._evaluate_or_requeue(heapq.heappop(self.pending))
            else:
                family = self._family()
                near = [candidate for candidate in self.skipped if self._is_near(candidate)]
                self.skipped = [candidate for candidate in self.skipped if not self._is_near(candidate)]
                for candidate in near:
                    self.evaluations_since_best = 0
                    self._evaluate_fully(candidate)

    def _family(self) -> tuple[ParallelDims, ScheduleSpec, int] | None:
        layout = None if self.best is None else self.best.layout
        return None if layout is None else (layout.dims, layout.schedule_spec, layout.micro_batch)

    def _is_near(self, candidate: Candidate) -> bool:
        """Whether an option differs from the best in its pipeline ranks or in its schedule only."""
        family = self._family()
        if family is None or candidate.memory_options != self.winner.work.memory_options:
            return False
        dims, schedule_spec, size = family
        return (candidate.dims[1:], candidate.schedule_spec, candidate.size) == (dims[1:], schedule_spec, size) or (
            candidate.dims,
            candidate.size,
        ) == (dims, size)

    def _search_by_pp_tp(self) -> SearchResult:
        """On many devices: by their bounds, with patience for each pair of pp and tp."""
        devices = len(self.plain.pool.devices)
        patience = next((options for limit, options in PATIENCE_BY_DEVICES if devices <= limit), MIN_PATIENCE)
        if self.best is not None:
            patience = WARM_START_PATIENCE
        lowest, ended = math.inf, True
        tried: dict[tuple[int, int], int] = {}
        while self.candidates.queue and not (
            self.best is not None and self.candidates.queue[0].bound_s >= self.best.total
        ):
            candidate = self.candidates.pop()
            pair = (candidate.dims[0], candidate.dims[2])
            if self.best is not None and tried.get(pair, 0) >= MISFIT_FACTOR * patience:
                lowest, ended = min(lowest, candidate.bound_s), False
                continue
            if candidate.schedule_spec is None:
                self.candidates.open(candidate, self.best)
                continue
            search = self.candidates.search(candidate.memory_options)
            asked = (candidate.dims, candidate.schedule_spec, candidate.size)
            # The cheapest question first.
            if search.is_too_large(*asked) or not search.may_fit(*asked):
                self.candidates.push_leaner_options(candidate)
                continue
            before = self.best
            fits = self._evaluate(search, *asked, SAMPLED_PLACEMENTS).fits
            lowest = min(lowest, candidate.bound_s)
            tried[pair] = 0 if self.best is not before else tried.get(pair, 0) + (MISFIT_FACTOR if fits else 1)
            if not fits:
                self.candidates.push_leaner_options(candidate)
        if self.candidates.queue:
            lowest = min(lowest, self.candidates.queue[0].bound_s)
        self._try_variants_of_best(SAMPLED_PLACEMENTS)
        return SearchResult(self.winner, self.best, overall_bound(self.plain, self.best, lowest), ended)

    def _evaluate_sampled(self, candidate: Candidate) -> None:
        """Open an option, drop it where it cannot win, or try a few placements and leave the rest for later: the
        sooner there is a good plan to compare with, the fewer options have to be looked at closely."""
        if self.best is not None and candidate.bound_s >= self.best.total:
            return
        if candidate.schedule_spec is None:
            self.candidates.open(candidate, self.best)
            return
        search, asked = (
            self.candidates.search(candidate.memory_options),
            (candidate.dims, candidate.schedule_spec, candidate.size),
        )
        # The cheapest question first.
        if search.is_too_large(*asked) or not self._feasible_within(search, candidate) or not search.may_fit(*asked):
            self.candidates.push_leaner_options(candidate)
            return
        before = self.best
        found = None if before is None else self._evaluate(search, *asked, SAMPLED_PLACEMENTS)
        if found is None or self.best is not before or len(self.evaluated) < FIRST_FULL_EVALUATIONS:
            self._evaluate_fully(candidate)
            return
        priority_s = found.bound_s if found.fits else candidate.priority_s
        heapq.heappush(self.pending, _PendingEvaluation(priority_s, next(self.numbers), candidate, found.nearest))

    def _try_variants_of_best(self, most: int | None) -> None:
        """Compare the best option with its other schedules and savings, then all placements of what won."""
        if self.best is None:
            return
        dims, size = self.best.layout.dims, self.best.layout.micro_batch
        for memory_options in self.candidates.first_memory_options(dims):
            search = self.candidates.search(memory_options)
            for schedule_spec in search.work.schedule_specs(dims[0]):
                self._evaluate(search, dims, schedule_spec, size, most)
        if most is not None:
            layout = self.best.layout
            self._evaluate(self.winner, dims, layout.schedule_spec, size, None)

    def _pack_within_nodes(self) -> None:
        """Whether what is near to the best beats it where stages or pipelines stand within nodes.

        In the end, so that no other option is left for it.
        """
        if self.best is None:
            return
        near = [
            (search, layout)
            for bound_s, _, search, layout in sorted(self.near_best)[:MAX_PACKED_LAYOUTS]
            if bound_s <= NEAR_BEST_FACTOR * self.best.total
        ]
        for search, layout in [(self.winner, self.best.layout), *near]:
            found = pack_within_nodes(search, layout, self.best)
            if found is not self.best:
                self.best, self.winner = found, search

    def _evaluate(
        self,
        search: Search,
        dims: ParallelDims,
        schedule_spec: ScheduleSpec,
        size: int,
        most: int | None,
        placement: list[Placement] | None = None,
    ) -> Evaluation:
        """Whether an option beats the best, with these placements or the likely ones."""
        found = search.evaluate(dims, schedule_spec, size, self.best, most, placement=placement)
        if found.best is not self.best:
            self.best, self.winner = found.best, search
        return found

    def _feasible_within(self, search: Search, candidate: Candidate) -> bool:
        """Whether an option could beat the best if memory did not matter."""
        assert candidate.schedule_spec is not None, "only options with a schedule are looked at"
        if self.best is None or why_no_layout(
            search.cost, *candidate.dims[:2], candidate.schedule_spec, candidate.size
        ):
            return self.best is None
        return search.knapsack_bound(candidate.dims, candidate.schedule_spec, candidate.size).feasible_within(
            self.best.total
        )

    def _evaluate_or_requeue(self, pending: _PendingEvaluation) -> None:
        """Look closely at the option whose layout takes the least time, which is worked out when its bound comes up."""
        candidate, layout = pending.candidate, pending.layout
        if layout is None:
            self._evaluate_fully(candidate)
            return
        priority_s = predict(self.candidates.search(candidate.memory_options).cost, layout).total
        heapq.heappush(self.pending, _PendingEvaluation(priority_s, next(self.numbers), candidate, None))

    def _evaluate_fully(self, candidate: Candidate) -> None:
        """Whether an option beats the best, with placements made for it, too."""
        if self.best is not None and candidate.bound_s >= self.best.total:
            return
        if self.evaluations_since_best >= FULL_PATIENCE and len(self.plain.pool.devices) > UNLIMITED_DEVICES:
            self.skipped.append(candidate)
            return
        dims, schedule_spec, size = candidate.dims, candidate.schedule_spec, candidate.size
        assert schedule_spec is not None, "only options with a schedule are looked at"
        search, before = self.candidates.search(candidate.memory_options), self.best
        if why_no_layout(search.cost, dims[0], dims[1], schedule_spec, size):
            self.candidates.push_leaner_options(candidate)
            return
        knapsack_bound = search.knapsack_bound(dims, schedule_spec, size)
        # The cheapest question first; it was asked before, but not with the best of now.
        if before is not None and not (
            knapsack_bound.feasible_within(before.total) and knapsack_bound.may_finish_within(before.total)
        ):
            self.candidates.push_leaner_options(candidate)
            return
        found = self._evaluate(search, dims, schedule_spec, size, None)
        start = candidate.bound_s
        _, high = knapsack_bound.bracket(
            start, knapsack_bound.find_feasible_time(start) if self.best is None else self.best.total
        )
        made = self._evaluate(search, dims, schedule_spec, size, None, search.placements_by(knapsack_bound, high))
        nearer = min(found, made, key=lambda each: each.bound_s)
        if nearer.nearest is not None:
            self.near_best.append((nearer.bound_s, next(self.numbers), search, nearer.nearest))
        if schedule_spec.virtual_stages > 1:
            self._shift_blocks(search, nearer)
        self.evaluated.append((candidate, knapsack_bound))
        self.evaluations_since_best = (
            0 if self.best is not before or self.best is None else self.evaluations_since_best + 1
        )
        if not (found.fits or made.fits):
            self.candidates.push_leaner_options(candidate)

    def _shift_blocks(self, search: Search, found: Evaluation) -> None:
        """Whether an option with several stages a rank beats the best when these hold unlike numbers of blocks.

        Layouts are made with equal ones. Where ranks are unlike, that can be a tenth slower.
        """
        if found.nearest is None or self.best is None or found.bound_s > NEAR_BEST_FACTOR * self.best.total:
            return
        near = predict(search.cost, found.nearest)
        if near.total > NEAR_BEST_FACTOR * self.best.total:
            return
        shifted = shift_counts(search.cost, near, MAX_BLOCK_SHIFTS)
        if shifted.total < self.best.total * (1 - 1e-9):
            self.best, self.winner = shifted, search
