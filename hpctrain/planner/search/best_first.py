"""Best-first search over degrees, micro-batch size, schedule and memory options."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Sequence

from hpctrain.planner.bounds.knapsack import KnapsackBound
from hpctrain.planner.layout.layout import Layout
from hpctrain.planner.layout.placement import staggered_replicas
from hpctrain.planner.limits import limit_of
from hpctrain.planner.search.evaluate import Evaluation, faster_of, pack_within_nodes, refine, shift_counts
from hpctrain.planner.search.layout_search import anneal
from hpctrain.planner.search.option_search import OptionSearch
from hpctrain.planner.search.space import SearchSpace
from hpctrain.planner.search.state import Candidate, SearchResult, SearchState, UnopenedCandidate
from hpctrain.planner.simulate.predict import Prediction, predict

SAMPLED_WORK, FULL_WORK = 3, 20
"""Work of a sampled and of a full evaluation, in checks of a knapsack bound."""


def best_first_search(plain: SearchSpace, limit_s: float = math.inf) -> SearchResult:
    """Return the fastest plan by the cost model, and a lower bound for all plans of the space.

    If the run file fixes no degrees, the search compares all memory options (ZeRO, sequence parallelism and
    recomputation).

    Args:
        plain: the space with the memory options of the run file.
        limit_s: seconds of the step of a plan that is known already. If the search finds no plan that is nearly as
            fast (`SearchLimits.improvable_factor`), it ends without local search, and the bound of its result is the
            ideal step (`ideal_step_s`). Otherwise it finds the same plan as without a limit.
    """
    return _BestFirstSearch(plain, limit_s).run()


class _BestFirstSearch(SearchState):
    """A best-first search. A candidate that can win gets a sampled evaluation, of a few placements; the promising
    candidates also get a full one, of all placements that their space tries.
    On more than `EXHAUSTIVE_DEVICES` devices, the search of `many_devices.py` takes its place.
    """

    def __init__(self, plain: SearchSpace, limit_s: float) -> None:
        super().__init__(plain)
        self.improvable_s = plain.limits.improvable_factor * limit_s
        self.numbers = itertools.count()
        self.evaluated: list[tuple[Candidate, KnapsackBound]] = []
        """Fully evaluated options; their knapsack bounds are tightened at the end where that matters."""
        self.near_best: list[tuple[float, int, SearchSpace, Layout]] = []
        """(bound in seconds, running number, space, layout) of the fully evaluated options that fit the memory."""
        self.pending: list[tuple[float, float, int, Candidate]] = []
        """Heap of (predicted seconds, bound in seconds, running number, candidate): the candidates that wait for a full
        evaluation after a sampled one.
        """
        self.work = 0
        """Work of the search so far, in checks of a knapsack bound, each of which takes some milliseconds."""

    def run(self) -> SearchResult:
        devices = len(self.plain.pool.devices)
        self.candidates.fill(self.plain.candidate_dims)
        most_work = limit_of(self.limits.best_first_work, devices)
        while (self.candidates.queue or self.pending) and self.work < most_work:
            if self.candidates.queue:
                self._evaluate_sampled(self.candidates.pop())
            else:
                self._evaluate_fully(heapq.heappop(self.pending)[-1])
        complete = not self._skipped()
        if not complete:
            self._search_neighbours()
        if self.best is None or self.best.total > self.improvable_s:
            return self.result(0.0, ended=False)
        self._pack_within_nodes()
        self._refine_best()
        self._stagger_replicas()
        before = self.best
        self._anneal_layouts(self.limits.annealing_work / (self.limits.short_annealing if complete else 1))
        if self.best is not before:
            self.take(shift_counts(self.winner, self.best, self.limits.max_refinements), self.winner)
        skipped = self._skipped()
        return self.result(self._min_bound_s(skipped), ended=not skipped)

    def _skipped(self) -> list[UnopenedCandidate | Candidate]:
        """Return the candidates that were not evaluated fully although they can win."""
        waiting = [*self.candidates.queue, *(entry[-1] for entry in self.pending)]
        return [candidate for candidate in waiting if self.can_win(candidate)]

    def _search_neighbours(self) -> None:
        """Search near the best options, instead of in order of the bounds: these are too far below the predicted steps
        to prove that the remaining options cannot win."""
        search = OptionSearch(self)
        search.run()
        for best, space, option in search.fastest(self.limits.full_evaluations):
            nearest = self.evaluate(space, option, space.placements(option.dims)[: self.limits.full_placements])
            for layout, bound_s in ((nearest.nearest or best.layout, nearest.bound_s), (best.layout, best.total)):
                self.near_best.append((bound_s, next(self.numbers), space, layout))

    def _evaluate_sampled(self, candidate: UnopenedCandidate | Candidate) -> None:
        """Drop a candidate that cannot win; open an unopened one, so that its schedules become candidates; evaluate a
        few placements of any other.

        After this sampled evaluation, the first candidates of a search and each one that yielded a new best plan get a
        full evaluation at once. The others wait in `pending`: the sooner there is a good plan to compare with, the
        fewer candidates need a full evaluation.
        """
        if not self.can_win(candidate):
            return
        if isinstance(candidate, UnopenedCandidate):
            self.candidates.open(candidate, self.best)
            self.work += 1
            return
        space, option, before = candidate.space, candidate.option, self.best
        # The condition that is cheapest to compute comes first.
        if (
            space.bounds.is_too_large(option)
            or not self._feasible(candidate, memory=False)
            or not space.bounds.may_fit(option)
        ):
            self.candidates.push_leaner_options(candidate)
            return
        if before is None:
            self._evaluate_fully(candidate)
            return
        self.work += SAMPLED_WORK
        sampled = self.evaluate_sampled(space, option)
        if self.best is not before or len(self.evaluated) < self.limits.first_full_evaluations:
            self._evaluate_fully(candidate)
            return
        nearest = sampled.nearest
        predicted_s = candidate.priority_s if nearest is None else predict(space.cost, nearest).total
        heapq.heappush(self.pending, (predicted_s, sampled.bound_s, next(self.numbers), candidate))

    def _feasible(self, candidate: Candidate, memory: bool) -> bool:
        """Return whether an option has a layout, and its knapsack bound allows a plan that is faster than the best plan
        so far. While there is no plan, the result is True without any check.

        Args:
            memory: whether the bound counts the memory, too; to compute it then takes longer.
        """
        space, option = candidate.space, candidate.option
        if self.best is None:
            return True
        if space.why_no_layout(option):
            return False
        self.work += 1
        bound, limit_s = space.bounds.knapsack(option), self.best.total
        return bound.feasible_within(limit_s) and (not memory or bound.may_finish_within(limit_s))

    def _evaluate_fully(self, candidate: Candidate) -> None:
        """Evaluate an option with all placements that its space tries (`SearchSpace.placements`) and with placements
        from its knapsack bound, unless the option cannot win.
        """
        if not self.can_win(candidate):
            return
        space, option = candidate.space, candidate.option
        if space.why_no_layout(option) or not self._feasible(candidate, memory=True):
            self.candidates.push_leaner_options(candidate)
            return
        self.work += FULL_WORK
        likely, bound = self.evaluate(space, option), space.bounds.knapsack(option)
        high = bound.find_feasible_time(candidate.bound_s) if self.best is None else self.best.total
        _, limit_s = bound.bracket(candidate.bound_s, high)
        bounding = self.evaluate(space, option, space.bounds.placements_by(bound, limit_s))
        nearer = min(likely, bounding, key=lambda evaluation: evaluation.bound_s)
        if nearer.nearest is not None:
            self.near_best.append((nearer.bound_s, next(self.numbers), space, nearer.nearest))
        if option.virtual_stages > 1:
            self._shift_blocks(space, nearer)
        self.evaluated.append((candidate, bound))
        if not (likely.fits or bounding.fits):
            self.candidates.push_leaner_options(candidate)

    def _shift_blocks(self, space: SearchSpace, evaluation: Evaluation) -> None:
        """Try to move single blocks between stages and single micro-batches between replicas, in the evaluation's
        layout with the smallest bound (`nearest`).

        A layout begins with equal numbers of blocks on the stages of one pipeline rank. If the pipeline ranks have
        unlike devices, such a layout can be a tenth slower than one with unequal numbers.
        """
        if evaluation.nearest is None or self.best is None:
            return
        near_s = self.limits.near_best_factor * self.best.total
        if evaluation.bound_s > near_s or (near := predict(space.cost, evaluation.nearest)).total > near_s:
            return
        shifted = shift_counts(space, near, self.limits.max_block_shifts)
        if shifted.total < self.best.total * (1 - 1e-9):
            self.take(shifted, space)

    def _pack_within_nodes(self) -> None:
        """Try the layouts near the best with stages or pipelines packed within nodes.

        Packing comes last, so that a packed layout does not prune options that could be packed as well.
        """
        if self.best is None:
            return
        near_s = self.limits.near_best_factor * self.best.total
        near = sorted(self.near_best)[: self.limits.max_packed_layouts]
        layouts = [(space, layout) for bound_s, _, space, layout in near if bound_s <= near_s]
        for space, layout in [(self.winner, self.best.layout), *layouts]:
            self.take(pack_within_nodes(space, layout, self.best), space)

    def _refine_best(self) -> None:
        """Improve the best plan by local search, then try its devices with other schedules and micro-batch sizes; begin
        again with a plan that is faster."""
        tried = None
        while self.best is not tried and self.best is not None:
            self.take(refine(self.winner, self.best), self.winner)
            tried, space, layout = self.best, self.winner, self.best.layout
            for option in space.options([layout.dims]):
                self.evaluate(space, option, [layout.placement])

    def _stagger_replicas(self) -> None:
        """Try the best option with replicas that leave nodes at different pipeline ranks, where messages take much of
        the step.

        The fastest such layout gets local search before it is compared with the best plan: the shift moves devices to
        the other end of the pipeline, and local search finds better places for their nodes.
        """
        best, space, limits = self.best, self.winner, self.limits
        if best is None or 1 in (best.layout.dp, best.layout.pp):
            return
        if best.terms["pipeline_send"] < limits.least_send_share * best.total:
            return
        fastest: Prediction | None = None
        for likely in [best.layout.placement, *space.placements(best.layout.dims)]:
            for placement in staggered_replicas(likely):
                if space.can_shard(placement):
                    fastest = faster_of(space.cost, fastest, space.fit_layout(placement, best.layout.option))
        if fastest is not None and fastest.total < limits.near_best_factor * best.total:
            refined = refine(space, fastest)
            if refined.total < best.total * (1 - 1e-9):
                self.take(refined, space)
                # The replicas of these layouts share cards: annealing them would take longer than it gains.
                self.near_best.clear()

    def _anneal_layouts(self, work: float) -> None:
        """Compare the fastest layouts of several degrees and numbers of stages after local search: anneal each for a
        short time, then the faster half of them for twice as long, and so on, until one is left (successive halving,
        Jamieson and Talwalkar 2016). The fastest of all becomes the best plan.

        Args:
            work: work of each round (`anneal`), shared by its layouts.
        """
        if self.best is None:
            return
        limits, rng = self.limits, random.Random(0)
        near = sorted(self.near_best)[: limits.max_packed_layouts]
        known = [(predict(space.cost, layout), space) for _, _, space, layout in near]
        first = {(self.best.layout.dims, len(self.best.layout.blocks)): (self.best, self.winner)}
        for plan, space in sorted(known, key=lambda pair: pair[0].total):
            first.setdefault((plan.layout.dims, len(plan.layout.blocks)), (plan, space))
        plans = list(first.values())[: limits.annealed_options]
        while plans:
            share = work / len(plans)
            plans = sorted(
                (anneal(self.candidates, space, plan, share, limits.annealing_slowdown, rng) for plan, space in plans),
                key=lambda pair: pair[0].total,
            )
            if plans[0][0].total < self.best.total:
                self.take(*plans[0])
            plans = plans[: len(plans) // 2]

    def _min_bound_s(self, skipped: Sequence[UnopenedCandidate | Candidate]) -> float:
        """Return the smallest lower bound of all options, in seconds: of those that were evaluated fully or skipped,
        and of the others, which cannot beat `limit_s`.

        Closed-form bounds are replaced by knapsack bounds, as long as these are not too many.
        """
        lowest = self.limit_s
        for candidate, bound in sorted(self.evaluated, key=lambda pair: pair[0].bound_s):
            lowest, _ = bound.bracket(candidate.bound_s, lowest)
        waiting = [(other.bound_s, next(self.numbers), other) for other in skipped]
        heapq.heapify(waiting)
        devices = len(self.plain.pool.devices)
        for _ in range(limit_of(self.limits.max_skipped_bounds, devices)):
            if not waiting or waiting[0][0] >= lowest:
                break
            other = heapq.heappop(waiting)[-1]
            if isinstance(other, UnopenedCandidate):
                bound_s = self.candidates.least_step_s(other)
                if bound_s <= other.bound_s:  # as exact as it gets
                    return bound_s
                heapq.heappush(waiting, (bound_s, next(self.numbers), other._replace(bound_s=bound_s)))
            else:
                # The memory is not checked: that would take most of the time that skipping saves.
                bound = other.space.bounds.knapsack(other.option)
                lowest, _ = bound.bracket(other.bound_s, lowest, memory=False)
        return min(lowest, waiting[0][0]) if waiting else lowest
