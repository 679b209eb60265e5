"""The options of a search, in the order in which they come up: degrees and micro-batch first, then schedules, then what
saves memory."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

from hpctrain.planner.cost.memory_options import MemoryOptions
from hpctrain.planner.cost.workload import ScheduleSpec
from hpctrain.planner.layout.degrees import EXHAUSTIVE_DEVICES, ParallelDims
from hpctrain.planner.search.option_search import Search
from hpctrain.planner.simulate.predict import Prediction
from hpctrain.records.plan.plan import Recompute
from hpctrain.schedule.generate import SPLIT_BACKWARD_SCHEDULES
from hpctrain.schedule.placement import V_SHAPED_SCHEDULES

NEXT_RECOMPUTE: dict[Recompute, Recompute] = {"none": "selective", "selective": "full"}


class Candidate(NamedTuple):
    """In the queue; `schedule_spec` is open until degrees and micro-batch come up."""

    priority_s: float
    """Those with the least come up first."""
    number: int
    bound_s: float
    """Seconds that no plan of it beats."""
    dims: ParallelDims
    size: int
    schedule_spec: ScheduleSpec | None
    memory_options: MemoryOptions


class CandidateQueue:
    """Those that are still to be looked at.

    Args:
        plain: the search of plans that save memory as the run file says.
    """

    def __init__(self, plain: Search) -> None:
        self.plain = plain
        self.may_save_memory = False
        """Whether ZeRO, sequence parallelism and recomputation may be chosen. By the model, sharding is sometimes a
        little faster, too; but no measurement has confirmed what it costs, so speed alone is no reason for it."""
        self.searches = {plain.work.memory_options: plain}
        self.queue: list[Candidate] = []
        self._numbers = itertools.count()

    def fill(self, candidate_dims: list[ParallelDims]) -> None:
        """Put all degrees with all micro-batches into the queue, their schedules open."""
        for dims, size in itertools.product(candidate_dims, self.plain.work.micro_batch_sizes()):
            if self.plain.work.sequences // size >= dims[1]:
                bound = min(
                    self._work_s(memory_options, dims, size) for memory_options in self.first_memory_options(dims)
                )
                self._push(bound, dims, size, None, self.plain.work.memory_options)

    def pop(self) -> Candidate:
        """The next one."""
        return heapq.heappop(self.queue)

    def open(self, candidate: Candidate, best: Prediction | None) -> None:
        """Put the schedules of these degrees and this micro-batch into the queue."""
        for memory_options in self.first_memory_options(candidate.dims):
            search = self.search(memory_options)
            specs = search.work.schedule_specs(candidate.dims[0])
            # What saves memory goes on from schedules that are too slow as well as from those that do not fit.
            if not self.may_save_memory and not self._any_can_win(search, candidate, best):
                specs = [schedule_spec for schedule_spec in specs if schedule_spec.name in V_SHAPED_SCHEDULES]
            for schedule_spec in specs:
                self._put(candidate, schedule_spec, memory_options)

    def _any_can_win(self, search: Search, candidate: Candidate, best: Prediction | None) -> bool:
        """False when of these degrees and this micro-batch no schedule but a V-shaped one fits and beats the best."""
        if not search.any_may_fit(candidate.dims, candidate.size):
            return False
        if best is None or len(self.plain.pool.devices) > EXHAUSTIVE_DEVICES:
            return True
        return search.any_feasible_within(candidate.dims, candidate.size, best.total)

    def first_memory_options(self, dims: ParallelDims) -> Iterator[MemoryOptions]:
        """Those to begin with; `push_leaner_options` goes on from those that do not fit."""
        work = self.plain.work
        yield work.memory_options
        if not self.may_save_memory:
            return
        _, dp, tp = dims
        split = tp > 1 and work.spec.supports_sequence_parallel and work.seq_len % tp == 0
        # Sums within nodes are exact, so all codecs go with them.
        shard: Literal["all", "node"] = "all" if work.may_shard_gradients else "node"
        if dp > 1:
            yield MemoryOptions(zero=1, shard=shard)
        if split:
            yield MemoryOptions(sequence_parallel=True)
        if split and dp > 1:
            yield MemoryOptions(zero=1, shard=shard, sequence_parallel=True)

    def push_leaner_options(self, candidate: Candidate) -> None:
        """What to try where nothing fits."""
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
        """For plans that save memory in this way."""
        if memory_options not in self.searches:
            self.searches[memory_options] = self.plain.with_memory_options(memory_options)
        return self.searches[memory_options]


def _bubble(micro_batches: int, dims: ParallelDims, schedule_spec: ScheduleSpec | None) -> float:
    """Part of the work that a pipeline of equal stages waits for its first and last micro-batches (Narayanan et al.
    2021, section 2.2; Qi et al. 2024, table 2); of an open schedule, as if it were the best."""
    pp, dp, _ = dims
    chunks = 2 if schedule_spec is None else schedule_spec.virtual_stages
    cut = schedule_spec is None or schedule_spec.name in SPLIT_BACKWARD_SCHEDULES
    return (pp - 1) * dp / (micro_batches * chunks * (3 if cut else 1))
