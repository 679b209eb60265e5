"""Best-first search over degrees, micro-batch size, schedule and memory options."""

from __future__ import annotations

import heapq
import itertools
import math
from typing import NamedTuple

from hpctrain.planner.bounds.knapsack import KnapsackBound
from hpctrain.planner.cost.workload import ScheduleSpec
from hpctrain.planner.devices.tensor_parallel_group import Placement
from hpctrain.planner.layout.degrees import EXHAUSTIVE_DEVICES
from hpctrain.planner.layout.layout import Layout
from hpctrain.planner.layout.partition import why_no_layout
from hpctrain.planner.search.end_bound import min_bound_s, overall_bound
from hpctrain.planner.search.local_search import shift_counts
from hpctrain.planner.search.option_search import Evaluation, Search
from hpctrain.planner.search.space import Candidate, CandidateQueue
from hpctrain.planner.search.within_nodes import pack_within_nodes
from hpctrain.planner.simulate.predict import Prediction, predict
from hpctrain.records.plan.parallel_dims import ParallelDims

PATIENCE_BY_DEVICES = ((512, 3), (2048, 5))
"""(largest number of devices, patience) on more than `EXHAUSTIVE_DEVICES` devices. The search leaves a pair of pp and
tp after that many options without a better plan: bounds are not equally tight for all pairs."""
MIN_PATIENCE = 2
"""The patience on still more devices."""
WARM_START_PATIENCE = 1
"""The patience with a warm start."""
MISFIT_FACTOR = 3
"""An option that does not fit uses up this many times less patience than one that fits."""
SAMPLED_PLACEMENTS = 2
"""Placements in a sampled evaluation; the best option gets all of its placements evaluated in the end."""
NEAR_BEST_FACTOR = 1.1
"""An option is near the best if it takes at most this many times as long; local changes may then help."""
MAX_BLOCK_SHIFTS = 100
"""Changes of single blocks that are tried on an option near the best."""
FULL_PATIENCE = 64
"""Full evaluations without a better plan after which a search on up to `EXHAUSTIVE_DEVICES` devices skips the rest."""
FIRST_FULL_EVALUATIONS = 10
"""The first options are evaluated fully at once: on unlike devices a sampled evaluation gives no plan that is good
enough for pruning."""
UNLIMITED_DEVICES = 8
"""Up to this many devices, the search ends only when no option can win."""
MAX_PACKED_LAYOUTS = 16
"""Layouts near the best that are tried with stages or pipelines packed within nodes, at the end of the search."""


class SearchResult(NamedTuple):
    """The best plan of a search and the lower bound of its space."""

    search: Search
    """The search with the best plan's memory options."""
    best: Prediction | None
    bound_s: float
    """Seconds that no plan of the whole space beats."""
    ended: bool
    """False if options were skipped because patience ran out."""


class _PendingEvaluation(NamedTuple):
    """An option after its sampled evaluation; a full evaluation may follow."""

    priority_s: float
    number: int
    candidate: Candidate
    layout: Layout | None
    """A layout whose time is not predicted yet; None if `priority_s` is a prediction or nothing fitted."""


def best_first_search(plain: Search, candidate_dims: list[ParallelDims]) -> SearchResult:
    """Return the fastest plan by the cost model, and a lower bound for all plans of the space.

    Memory options are searched only if no plan fits without them (see `CandidateQueue.may_save_memory`).
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
        """Fully evaluated options; their knapsack bounds are tightened at the end where that matters."""
        self.near_best: list[tuple[float, int, Search, Layout]] = []
        """(bound, number, search, layout) of fully evaluated options that fit."""
        self.pending: list[_PendingEvaluation] = []
        """Heap of the options that wait for a full evaluation."""
        self.evaluations_since_best = 0
        """Full evaluations since the last better plan."""
        self.skipped: list[Candidate] = []
        """Options that were not evaluated because patience had run out."""
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
        """Search until no option can win, or until patience runs out and no skipped option near the best is better."""
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
        """Whether an option differs from the best only in its pipeline ranks, or only in its schedule."""
        family = self._family()
        if family is None or candidate.memory_options != self.winner.work.memory_options:
            return False
        dims, schedule_spec, size = family
        return (candidate.dims[1:], candidate.schedule_spec, candidate.size) == (dims[1:], schedule_spec, size) or (
            candidate.dims,
            candidate.size,
        ) == (dims, size)

    def _search_by_pp_tp(self) -> SearchResult:
        """Search many devices in order of bounds, with separate patience for each pair of pp and tp."""
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
        """Open an option, drop it if it cannot win, or evaluate a few placements and leave the rest for later.

        The sooner there is a good plan to compare with, the fewer options need a full evaluation.
        """
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
        """Compare the best option with other schedules and memory options, then evaluate all placements of the winner.

        Args:
            most: placements of each variant; None for all, and then the winner needs no second evaluation.
        """
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
        """Try the layouts near the best with stages or pipelines packed within nodes.

        This comes last, so that a packed layout does not prune options that could be packed as well.
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
        """Evaluate an option, with these placements or the likely ones, and take it if it beats the best."""
        found = search.evaluate(dims, schedule_spec, size, self.best, most, placement=placement)
        if found.best is not self.best:
            self.best, self.winner = found.best, search
        return found

    def _feasible_within(self, search: Search, candidate: Candidate) -> bool:
        """Whether an option could beat the best if memory were unlimited."""
        assert candidate.schedule_spec is not None, "only options with a schedule are looked at"
        if self.best is None or why_no_layout(
            search.cost, *candidate.dims[:2], candidate.schedule_spec, candidate.size
        ):
            return self.best is None
        return search.knapsack_bound(candidate.dims, candidate.schedule_spec, candidate.size).feasible_within(
            self.best.total
        )

    def _evaluate_or_requeue(self, pending: _PendingEvaluation) -> None:
        """Evaluate a pending option fully, or predict its layout first and requeue it by the predicted time."""
        candidate, layout = pending.candidate, pending.layout
        if layout is None:
            self._evaluate_fully(candidate)
            return
        priority_s = predict(self.candidates.search(candidate.memory_options).cost, layout).total
        heapq.heappush(self.pending, _PendingEvaluation(priority_s, next(self.numbers), candidate, None))

    def _evaluate_fully(self, candidate: Candidate) -> None:
        """Evaluate an option with all likely placements and those of its knapsack bound, unless it cannot win."""
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
        # The cheapest check first. It was made before, but against an earlier best plan.
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
        """Try unequal numbers of blocks on the stages of a rank.

        Layouts begin with equal numbers. On unlike ranks that can be a tenth slower.
        """
        if found.nearest is None or self.best is None or found.bound_s > NEAR_BEST_FACTOR * self.best.total:
            return
        near = predict(search.cost, found.nearest)
        if near.total > NEAR_BEST_FACTOR * self.best.total:
            return
        shifted = shift_counts(search.cost, near, MAX_BLOCK_SHIFTS)
        if shifted.total < self.best.total * (1 - 1e-9):
            self.best, self.winner = shifted, search
