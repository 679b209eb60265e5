"""State and result of a best-first search: the queue of candidates, the best plan so far, the lower bound
of all plans.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from hpctrain.planner.bounds.closed_form import ideal_step_s
from hpctrain.planner.bounds.unit_counts import hides_shard_collectives
from hpctrain.planner.cost.memory_options import MemoryOptions
from hpctrain.planner.cost.workload import ScheduleSpec, Workload
from hpctrain.planner.devices.tensor_parallel_group import Placement
from hpctrain.planner.layout.layout import Option
from hpctrain.planner.search.evaluate import Evaluation, evaluate
from hpctrain.planner.search.space import EXHAUSTIVE_DEVICES, SearchSpace
from hpctrain.planner.simulate.predict import Prediction
from hpctrain.records.plan.plan import ParallelDims, Recompute, ZeroLevel
from hpctrain.records.plan.prediction import Rejected
from hpctrain.schedule.generate import SPLIT_BACKWARD_SCHEDULES, V_SHAPED_SCHEDULES


class SearchResult(NamedTuple):
    """The best plan of a search, a lower bound of all plans of its space, and whether the search `ended` because no
    other option could win."""

    space: SearchSpace
    """The space with the best plan's memory options."""
    best: Prediction | None
    """The best plan; None if none was found."""
    bound_s: float
    """Seconds that no plan of the space beats, whatever its memory options."""
    ended: bool
    """False if options that could still win were skipped, because the search reached one of its limits
    (`SearchLimits`)."""


class ChosenPlan(NamedTuple):
    """The chosen plan of a search, with rejected candidates and notes for the user."""

    space: SearchSpace
    """The space with the best plan's memory options."""
    best: Prediction
    rejected: list[Rejected]
    notes: list[str]
    bound_s: float
    """Seconds that no plan beats, whatever its memory options."""


class SearchState:
    """The remaining candidates and the best plan of a search.

    Args:
        plain: the space with the memory options of the run file.
        limit_s: seconds of the step of a plan that is known already; options that are no faster by their bounds are
            left out.
    """

    def __init__(self, plain: SearchSpace, limit_s: float = math.inf) -> None:
        self.plain, self.winner = plain, plain
        self._limit_s = limit_s
        self.limits = plain.limits
        self.candidates = CandidateQueue(plain)
        self.best: Prediction | None = None
        start = plain.warm_start
        if start is not None:
            self.winner, self.best = start.space, start.best
            self.candidates.spaces[start.space.work.memory_options] = start.space

    @property
    def limit_s(self) -> float:
        """Seconds of the step of the best plan that is known; infinite while there is no plan."""
        return self._limit_s if self.best is None else min(self._limit_s, self.best.total)

    def can_win(self, candidate: UnopenedCandidate | Candidate) -> bool:
        """Return whether a candidate's lower bound is below the best plan's time; always True while there
        is no plan.
        """
        return candidate.bound_s < self.limit_s

    def take(self, prediction: Prediction | None, space: SearchSpace) -> None:
        """Record `prediction` as the best plan and `space` as its space; do nothing if `prediction` is already
        recorded."""
        if prediction is not self.best:
            self.best, self.winner = prediction, space

    def evaluate(self, space: SearchSpace, option: Option, placements: Sequence[Placement] | None = None) -> Evaluation:
        """Return the evaluation of an option with these placements; None: with those of `SearchSpace.placements`. A
        plan of the option that is faster than the best plan becomes the best plan.
        """
        evaluation = evaluate(space, option, self.best, placements)
        self.take(evaluation.best, space)
        return evaluation

    def evaluate_sampled(self, space: SearchSpace, option: Option) -> Evaluation:
        """Return the evaluation of an option with a few placements. A plan of the option that is faster than the best
        plan becomes the best plan.
        """
        return self.evaluate(space, option, space.placements(option.dims)[: self.limits.sampled_placements])

    def try_variants_of_best(self) -> None:
        """Evaluate the best option under other schedules and memory options too, with a few placements. A plan that is
        faster than the best plan becomes the best plan.
        """
        if self.best is None:
            return
        option = self.best.layout.option
        spaces = [
            self.winner,
            *self.candidates.first_spaces(option.dims),
            *self.candidates.faster_spaces(self.plain, option.dims),
        ]
        for space in dict.fromkeys(spaces):
            for schedule_spec in space.work.schedule_specs(option.dims.pp):
                self.evaluate_sampled(space, option._replace(schedule_spec=schedule_spec))

    def result(self, lowest: float, ended: bool) -> SearchResult:
        """Return the best plan, with a lower bound for all plans.

        Args:
            lowest: seconds that no option beats; 0 where no such bound is known.
            ended: False if options that could still win were skipped.
        """
        ideal_s = ideal_step_s(self.plain.pool, self.plain.work)
        bound_s = max(lowest if math.isfinite(lowest) else 0.0, ideal_s)
        if self.best is not None:
            bound_s = min(bound_s, self.best.total)
        return SearchResult(self.winner, self.best, bound_s, ended)


NEXT_RECOMPUTE: dict[Recompute, Recompute] = {"none": "selective", "selective": "full"}
PREVIOUS_ZERO: dict[ZeroLevel, ZeroLevel] = {1: 0, 2: 1, 3: 2}


class UnopenedCandidate(NamedTuple):
    """Degrees and a micro-batch size in the queue. To open the candidate is to queue its schedules as candidates of
    their own.
    """

    priority_s: float
    """Priority in seconds: the candidate with the smallest value is taken first. Of equal priorities, the smallest
    `number` comes first.
    """
    number: int
    bound_s: float
    """Seconds that no plan of the candidate beats."""
    dims: ParallelDims
    micro_batch: int


class Candidate(NamedTuple):
    """An option in the queue, and the space with the memory options that the option uses.

    The queue gives the candidate with the smallest `priority_s` first, and of equal ones that with the smallest
    `number`. No plan of the option beats `bound_s` seconds.
    """

    priority_s: float
    """What `CandidateQueue.priority_s` returns."""
    number: int
    """Position in the order in which candidates were put into the queue."""
    bound_s: float
    option: Option
    space: SearchSpace

    @property
    def dims(self) -> ParallelDims:
        return self.option.dims


class CandidateQueue:
    """The candidates that a search has not evaluated yet.

    Args:
        plain: the space with the memory options of the run file.
    """

    def __init__(self, plain: SearchSpace) -> None:
        self.plain = plain
        self.spaces = {plain.work.memory_options: plain}
        self._few_devices = len(plain.pool.devices) <= EXHAUSTIVE_DEVICES
        self.queue: list[UnopenedCandidate | Candidate] = []
        self._numbers = itertools.count()
        self._pushed: set[tuple[MemoryOptions, Option]] = set()

    def fill(self, candidate_dims: Sequence[ParallelDims]) -> None:
        """Put these degrees with all micro-batch sizes into the queue, each as an `UnopenedCandidate`, which has no
        schedule yet."""
        work = self.plain.work
        for dims, size in itertools.product(candidate_dims, work.micro_batch_sizes()):
            if work.sequences // size >= dims[1]:
                bound_s = min(space.bounds.work_s(dims, size) for space in self.first_spaces(dims))
                priority_s = self._with_bubble(bound_s, dims, size, None)
                candidate = UnopenedCandidate(priority_s, next(self._numbers), bound_s, dims, size)
                heapq.heappush(self.queue, candidate)

    def pop(self) -> UnopenedCandidate | Candidate:
        """Remove and return the candidate with the smallest priority."""
        return heapq.heappop(self.queue)

    def open(self, candidate: UnopenedCandidate, best: Prediction | None) -> None:
        """Put the schedules of a candidate's degrees and micro-batch size into the queue.

        Args:
            best: the best plan so far, None without one; schedules that cannot be faster are left out.
        """
        # On many devices, a knapsack bound takes longer than an evaluation.
        for space in self.first_spaces(candidate.dims) if self._few_devices else [self.plain]:
            dims, size = candidate.dims, candidate.micro_batch
            fits = space.bounds.any_may_fit(dims, size)
            in_time = best is None or not self._few_devices or space.bounds.any_feasible_within(dims, size, best.total)
            for schedule_spec in space.work.schedule_specs(dims.pp):
                option = Option(dims, schedule_spec, size)
                if (fits and in_time) or schedule_spec.name in V_SHAPED_SCHEDULES:
                    self._push(option, space, candidate.bound_s)
                elif in_time:
                    self._push_leaner(space, option, candidate.bound_s)

    def least_step_s(self, candidate: UnopenedCandidate) -> float:
        """Return a lower bound in seconds of the step time of all plans of a candidate: the smallest closed-form bound
        of its schedules.
        """
        dims, size = candidate.dims, candidate.micro_batch
        steps = (
            space.bounds.step_s(Option(dims, schedule_spec, size))
            for space in self.first_spaces(dims)
            for schedule_spec in space.work.schedule_specs(dims.pp)
            if dims.pp * schedule_spec.virtual_stages <= self.plain.work.spec.layers
        )
        return max(candidate.bound_s, min(steps, default=math.inf))

    def first_spaces(self, dims: ParallelDims) -> list[SearchSpace]:
        """Return the search spaces of the memory options that are tried first for these degrees. If their layouts do
        not fit, `push_leaner_options` adds more spaces.

        These are the spaces whose memory options may be the fastest: all others have larger lower bounds.
        """
        spaces = [self.plain]
        for space in spaces:
            spaces += [other for other in self.faster_spaces(space, dims) if other not in spaces]
        return spaces

    def faster_spaces(self, space: SearchSpace, dims: ParallelDims) -> list[SearchSpace]:
        """Return the spaces with ZeRO or sequence parallelism in addition, which may make a step shorter even if the
        options of `space` fit the memory; none if the run file fixes the degrees.

        ZeRO 2 and 3 are among them where their collectives overlap the passes (`hides_shard_collectives`). On CPUs,
        where only a part of their reduce-scatters does, the search tries them only if ZeRO 1 does not fit.
        """
        if self.plain.work.fixed is not None:
            return []
        work, given = self.plain.work, space.work.memory_options
        # Gradients are summed exactly within nodes, so sharding there works with every codec.
        shard: Literal["all", "node"] = "all" if work.may_shard_gradients else "node"
        spaces = []
        levels: tuple[ZeroLevel, ...] = (1,)
        if hides_shard_collectives(work, self.plain.pool.devices[0].kind):
            levels = (1, 2, 3)
        for level in levels:
            if dims.dp > 1 and given.zero == 0:
                spaces.append(self.space(replace(given, zero=level, shard=shard)))
        if may_split_sequences(work, dims.tp) and not given.sequence_parallel:
            spaces.append(self.space(replace(given, sequence_parallel=True)))
        return spaces

    def leaner_spaces(self, space: SearchSpace, dims: ParallelDims) -> list[SearchSpace]:
        """Return the spaces whose memory options save more memory than those of `space` by one step: the next level of
        recomputation, the next ZeRO level (from 0, each level of `faster_spaces`), or sequence parallelism; none if the
        run file fixes the degrees.
        """
        if self.plain.work.fixed is not None:
            return []
        given = space.work.memory_options
        spaces = self.faster_spaces(space, dims)
        if given.zero in (1, 2):
            spaces.append(self.space(replace(given, zero=2 if given.zero == 1 else 3)))
        if given.recompute in NEXT_RECOMPUTE:
            spaces.append(self.space(replace(given, recompute=NEXT_RECOMPUTE[given.recompute])))
        return spaces

    def neighbour_spaces(self, space: SearchSpace, dims: ParallelDims) -> list[SearchSpace]:
        """Return the spaces whose memory options differ from those of `space` in one step: of ZeRO, of recomputation,
        or in sequence parallelism; none if the run file fixes the degrees."""
        if self.plain.work.fixed is not None:
            return []
        given, spaces = space.work.memory_options, self.leaner_spaces(space, dims)
        if given.zero:
            level: ZeroLevel = PREVIOUS_ZERO[given.zero]
            spaces.append(self.space(replace(given, zero=level, shard=given.shard if level else "all")))
        if given.recompute != "none":
            spaces.append(
                self.space(replace(given, recompute="none" if given.recompute == "selective" else "selective"))
            )
        if given.sequence_parallel:
            spaces.append(self.space(replace(given, sequence_parallel=False)))
        return spaces

    def push_leaner_options(self, candidate: Candidate) -> None:
        """Queue the option of a candidate, which does not fit as it is, with leaner memory options."""
        self._push_leaner(candidate.space, candidate.option, candidate.bound_s)

    def _push_leaner(self, space: SearchSpace, option: Option, bound_s: float) -> None:
        for leaner in self.leaner_spaces(space, option.dims):
            if option.schedule_spec in leaner.work.schedule_specs(option.dims.pp):
                # A higher ZeRO level may hide messages that the lower one does not.
                keeps_level = leaner.work.memory_options.zero == space.work.memory_options.zero
                self._push(option, leaner, bound_s if keeps_level else 0.0)

    def _push(self, option: Option, space: SearchSpace, bound_s: float) -> None:
        """Queue an option of a space, unless it was queued before or has more stages than the model has blocks.

        Args:
            bound_s: lower bound of the queued option from which this one was derived, such as by leaner memory options.
                The larger of it and the option's closed-form bound becomes the option's bound.
        """
        key = (space.work.memory_options, option)
        if self.plain.work.spec.layers < option.stages or key in self._pushed:
            return
        self._pushed.add(key)
        bound_s = max(bound_s, space.bounds.step_s(option))
        priority_s = self.priority_s(bound_s, space, option)
        heapq.heappush(self.queue, Candidate(priority_s, next(self._numbers), bound_s, option, space))

    def priority_s(self, bound_s: float, space: SearchSpace, option: Option) -> float:
        """Return the priority of an option, in seconds: its lower bound or, if that is longer, the least seconds of
        computation with an estimate of the bubble's. (The bound counts the start of the pipeline already.) On many
        devices, it is the bound with an estimate of the bubble: with the other priority, plans after a loss were up to
        5 % slower.
        """
        dims, schedule_spec, size = option
        if not self._few_devices:
            return self._with_bubble(bound_s, dims, size, schedule_spec)
        return max(bound_s, self._with_bubble(space.bounds.work_s(dims, size), dims, size, schedule_spec))

    def _with_bubble(
        self, bound_s: float, dims: ParallelDims, micro_batch: int, schedule_spec: ScheduleSpec | None
    ) -> float:
        return bound_s * (1 + _bubble(self.plain.work.sequences // micro_batch, dims, schedule_spec))

    def space(self, memory_options: MemoryOptions) -> SearchSpace:
        """Return the space with these memory options; each space is made once."""
        if memory_options not in self.spaces:
            self.spaces[memory_options] = self.plain.with_work(memory_options=memory_options)
        return self.spaces[memory_options]


def may_split_sequences(work: Workload, tp: int) -> bool:
    """Return whether sequence parallelism over `tp` devices is possible."""
    return tp > 1 and work.spec.supports_sequence_parallel and work.seq_len % tp == 0


def _bubble(micro_batches: int, dims: ParallelDims, schedule_spec: ScheduleSpec | None) -> float:
    """Return the bubble of a pipeline of equal stages, divided by the seconds in which a pipeline rank computes
    (Narayanan et al. 2021, section 2.2; Qi et al. 2024, table 2).

    Args:
        micro_batches: micro-batches of a step over all replicas.
        schedule_spec: the schedule; None: the smallest bubble of any schedule.
    """
    pp, dp, _ = dims
    chunks = 2 if schedule_spec is None else schedule_spec.virtual_stages
    cut = schedule_spec is None or schedule_spec.name in SPLIT_BACKWARD_SCHEDULES
    return (pp - 1) * dp / (micro_batches * chunks * (3 if cut else 1))
