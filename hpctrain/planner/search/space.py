"""The queue of options of a search: degrees and micro-batch size first, then schedules, then memory options."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

from hpctrain.planner.cost.memory_options import MemoryOptions
from hpctrain.planner.cost.workload import ScheduleSpec
from hpctrain.planner.layout.degrees import EXHAUSTIVE_DEVICES
from hpctrain.planner.search.option_search import Search
from hpctrain.planner.simulate.predict import Prediction
from hpctrain.records.plan.parallel_dims import ParallelDims
from hpctrain.records.plan.plan import Recompute
from hpctrain.schedule.generate import SPLIT_BACKWARD_SCHEDULES
from hpctrain.schedule.placement import V_SHAPED_SCHEDULES

NEXT_RECOMPUTE: dict[Recompute, Recompute] = {"none": "selective", "selective": "full"}


class Candidate(NamedTuple):
    """An option in the queue; `schedule_spec` is None until its degrees and micro-batch size are opened."""

    priority_s: float
    """The option with the smallest value is taken first."""
    number: int
    bound_s: float
    """Seconds that no plan of this option beats."""
    dims: ParallelDims
    size: int
    schedule_spec: ScheduleSpec | None
    memory_options: MemoryOptions


class CandidateQueue:
    """The options that are still to be evaluated.

    Args:
        plain: the search with the memory options of the run file.
    """

    def __init__(self, plain: Search) -> None:
        self.plain = plain
        self.may_save_memory = False
        """Whether ZeRO, sequence parallelism and recomputation may be chosen. By the cost model, sharding is sometimes
        a little faster. No measurement has confirmed that, so speed alone is no reason for it."""
        self.searches = {plain.work.memory_options: plain}
        self.queue: list[Candidate] = []
        self._numbers = itertools.count()

    def fill(self, candidate_dims: list[ParallelDims]) -> None:
        """Put all degrees with all micro-batch sizes into the queue, without schedules."""
        for dims, size in itertools.product(candidate_dims, self.plain.work.micro_batch_sizes()):
            if self.plain.work.sequences // size >= dims[1]:
                bound = min(
                    self._work_s(memory_options, dims, size) for memory_options in self.first_memory_options(dims)
                )
                self._push(bound, dims, size, None, self.plain.work.memory_options)

    def pop(self) -> Candidate:
        """Remove and return the option with the smallest priority."""
        return heapq.heappop(self.queue)

    def open(self, candidate: Candidate, best: Prediction | None) -> None:
        """Put the schedules of these degrees and this micro-batch size into the queue."""
        for memory_options in self.first_memory_options(candidate.dims):
            search = self.search(memory_options)
            specs = search.work.schedule_specs(candidate.dims[0])
            # Leaner memory options are derived from schedules that are too slow as well as from those that do not fit.
            if not self.may_save_memory and not self._any_can_win(search, candidate, best):
                specs = [schedule_spec for schedule_spec in specs if schedule_spec.name in V_SHAPED_SCHEDULES]
            for schedule_spec in specs:
                self._put(candidate, schedule_spec, memory_options)

    def _any_can_win(self, search: Search, candidate: Candidate, best: Prediction | None) -> bool:
        """False if only V-shaped schedules of these degrees and this micro-batch size could fit and beat the best."""
        if not search.any_may_fit(candidate.dims, candidate.size):
            return False
        if best is None or len(self.plain.pool.devices) > EXHAUSTIVE_DEVICES:
            return True
        return search.any_feasible_within(candidate.dims, candidate.size, best.total)

    def first_memory_options(self, dims: ParallelDims) -> Iterator[MemoryOptions]:
        """The memory options to begin with; `push_leaner_options` adds more where these do not fit."""
        work = self.plain.work
        yield work.memory_options
        if not self.may_save_memory:
            return
        _, dp, tp = dims
        split = tp > 1 and work.spec.supports_sequence_parallel and work.seq_len % tp == 0
        # Gradients are summed exactly within nodes, so sharding there works with every codec.
        shard: Literal["all", "node"] = "all" if work.may_shard_gradients else "node"
        if dp > 1:
            yield MemoryOptions(zero=1, shard=shard)
        if split:
            yield MemoryOptions(sequence_parallel=True)
        if split and dp > 1:
            yield MemoryOptions(zero=1, shard=shard, sequence_parallel=True)

    def push_leaner_options(self, candidate: Candidate) -> None:
        """Queue the same option with more recomputation or a higher ZeRO level, because it does not fit."""
        if not self.may_save_memory or candidate.schedule_spec is None:
            return
        memory_options = candidate.memory_options
        more = []
        if memory_options.recompute in NEXT_RECOMPUTE:
            more.append(replace(memory_options, recompute=NEXT_RECOMPUTE[memory_options.recompute]))
        if memory_options.recompute == "none" and memory_options.zero in (1, 2):
            more.append(replace(memory_options, zero=2 if memory_options.zero == 1 else 3))
        for other in more:
            if candidate.schedule_spec in self.search(other).work.schedule_specs(candidate.dims[0]):
                self._put(candidate, candidate.schedule_spec, other)

    def _put(self, candidate: Candidate, schedule_spec: ScheduleSpec, memory_options: MemoryOptions) -> None:
        search, (pp, dp, tp) = self.search(memory_options), candidate.dims
        if self.plain.work.spec.layers < pp * schedule_spec.virtual_stages:
            return
        bound = max(
            candidate.bound_s,
            search.closed_form_bound.step_s(search.unit_counts(tp), pp, dp, schedule_spec, candidate.size),
        )
        self._push(bound, candidate.dims, candidate.size, schedule_spec, memory_options)

    def _work_s(self, memory_options: MemoryOptions, dims: ParallelDims, size: int) -> float:
        search, (pp, dp, tp) = self.search(memory_options), dims
        return search.closed_form_bound.work_s(search.unit_counts(tp), pp, dp, size)

    def _push(
        self,
        bound_s: float,
        dims: ParallelDims,
        size: int,
        schedule_spec: ScheduleSpec | None,
        memory_options: MemoryOptions,
    ) -> None:
        priority_s = bound_s
        if len(self.plain.pool.devices) <= EXHAUSTIVE_DEVICES:
            priority_s *= 1 + _bubble(self.plain.work.sequences // size, dims, schedule_spec)
        heapq.heappush(
            self.queue, Candidate(priority_s, next(self._numbers), bound_s, dims, size, schedule_spec, memory_options)
        )

    def search(self, memory_options: MemoryOptions) -> Search:
        """The search with these memory options, made once."""
        if memory_options not in self.searches:
            self.searches[memory_options] = self.plain.with_memory_options(memory_options)
        return self.searches[memory_options]


def _bubble(micro_batches: int, dims: ParallelDims, schedule_spec: ScheduleSpec | None) -> float:
    """Bubble of a pipeline of equal stages, as a share of its work (Narayanan et al. 2021, section 2.2; Qi et al. 2024,
    table 2). Without a schedule, the smallest that any schedule has."""
    pp, dp, _ = dims
    chunks = 2 if schedule_spec is None else schedule_spec.virtual_stages
    cut = schedule_spec is None or schedule_spec.name in SPLIT_BACKWARD_SCHEDULES
    return (pp - 1) * dp / (micro_batches * chunks * (3 if cut else 1))
