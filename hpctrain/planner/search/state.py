"""State and result of a best-first search: the remaining candidates, the best plan so far, its lower bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from hpctrain.planner.bounds.ideal import ideal_step_s
from hpctrain.planner.bounds.option import Option
from hpctrain.planner.devices.tensor_parallel_group import Placement
from hpctrain.planner.layout.degrees import min_devices_used
from hpctrain.planner.search.candidates import Candidate, CandidateQueue, UnopenedCandidate
from hpctrain.planner.search.evaluate import Evaluation, evaluate
from hpctrain.planner.search.space import SearchSpace
from hpctrain.planner.simulate.predict import Prediction
from hpctrain.records.plan.plan import Rejected


class SearchResult(NamedTuple):
    """The best plan of a search and the lower bound of its space."""

    space: SearchSpace
    """The space with the best plan's memory options."""
    best: Prediction | None
    bound_s: float
    """Seconds that no plan of the whole space beats."""
    ended: bool
    """False if options were skipped because patience ran out."""


class ChosenPlan(NamedTuple):
    """The chosen plan of a space, with rejected candidates and notes for the user."""

    space: SearchSpace
    best: Prediction
    rejected: list[Rejected]
    notes: list[str]
    bound_s: float
    """Seconds that no plan in the search space beats."""


class SearchState:
    """The remaining candidates and the best plan of a search.

    Args:
        plain: the space with the memory options of the run file.
    """

    def __init__(self, plain: SearchSpace) -> None:
        self.plain, self.winner = plain, plain
        self.limits = plain.limits
        self.candidates = CandidateQueue(plain)
        self.best: Prediction | None = None
        if plain.warm_start is not None and plain.warm_start.space is plain:
            self.best = plain.warm_start.best

    def allow_memory_options(self) -> None:
        """Search with memory options from now on, because no plan fits without them."""
        self.candidates.may_save_memory = True
        start = self.plain.warm_start
        if start is not None:
            self.winner, self.best = start.space, start.best
            self.candidates.spaces[start.space.work.memory_options] = start.space

    def can_win(self, candidate: UnopenedCandidate | Candidate) -> bool:
        """Whether a candidate's bound is below the best plan's time."""
        return self.best is None or candidate.bound_s < self.best.total

    def take(self, prediction: Prediction | None, space: SearchSpace) -> None:
        """Record a plan of this space as the best one; do nothing if it is recorded already."""
        if prediction is not self.best:
            self.best, self.winner = prediction, space

    def evaluate(self, space: SearchSpace, option: Option, placements: Sequence[Placement] | None = None) -> Evaluation:
        """Evaluate an option with these placements or the likely ones; make its plan the best one if it is faster."""
        evaluation = evaluate(space, option, self.best, placements)
        self.take(evaluation.best, space)
        return evaluation

    def evaluate_sampled(self, space: SearchSpace, option: Option) -> Evaluation:
        """Evaluate a few placements of an option; make its plan the best one if it is faster."""
        return self.evaluate(space, option, space.placements(option.dims)[: self.limits.sampled_placements])

    def try_variants_of_best(self, sampled: bool) -> None:
        """Compare the best option with other schedules and memory options.

        Args:
            sampled: whether to evaluate a few placements of each variant, then all placements of the winner.
        """
        if self.best is None:
            return
        option = Option.of(self.best.layout)
        for space in self.candidates.first_spaces(option.dims):
            for schedule_spec in space.work.schedule_specs(option.dims.pp):
                variant = option._replace(schedule_spec=schedule_spec)
                self.evaluate_sampled(space, variant) if sampled else self.evaluate(space, variant)
        if sampled:
            self.evaluate(self.winner, Option.of(self.best.layout))

    def result(self, lowest: float, ended: bool) -> SearchResult:
        """Return the best plan, with a lower bound for all plans, including those that leave more devices idle than
        were tried.

        Args:
            lowest: seconds that none of the tried options beats.
        """
        pool, work = self.plain.pool, self.plain.work
        ideal_s = ideal_step_s(pool, work)
        if work.fixed is None and not self.candidates.few_devices:
            used = sorted(pool.devices, key=lambda device: -device.flops)[: min_devices_used(len(pool.devices)) - 1]
            fastest = max(device.bytes_per_s for device in pool.devices)
            same = tuple(replace(device, bytes_per_s=fastest) for device in used)
            # Not all numbers of replicas that leave few devices idle are tried either.
            lowest = min(lowest, ideal_step_s(replace(pool, devices=same), work), ideal_s)
        bound_s = max(lowest if math.isfinite(lowest) else 0.0, ideal_s)
        if self.best is not None:
            bound_s = min(bound_s, self.best.total)
        return SearchResult(self.winner, self.best, bound_s, ended)
