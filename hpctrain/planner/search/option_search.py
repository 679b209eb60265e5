"""Search over neighbouring options: from options that were evaluated to those that differ in one choice."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from math import prod
from statistics import median
from typing import NamedTuple

from hpctrain.planner.cost.memory_options import MemoryOptions
from hpctrain.planner.devices.tensor_parallel_group import Placement
from hpctrain.planner.layout.layout import Layout, Option
from hpctrain.planner.limits import limit_of
from hpctrain.planner.search.evaluate import faster_of
from hpctrain.planner.search.layout_search import simulated_actions
from hpctrain.planner.search.space import EXHAUSTIVE_DEVICES, SearchSpace
from hpctrain.planner.search.state import SearchState, may_split_sequences
from hpctrain.planner.simulate.predict import Prediction, TimedLayout
from hpctrain.records.plan.plan import ParallelDims

LADDER = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
"""Values of pp and dp of the options with which a search begins."""
PP_STEPS = ((1, 0), (-1, 0), (2, 0), (-2, 0), (0, 1), (0, -1), (-1, 1), (1, -1))
"""Changes of (pp, dp) between neighbouring options, besides doubling and halving."""
DOUBLINGS = ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, -1, 0), (1, 0, -1), (0, 1, -1))
"""Powers of two by which neighbouring options multiply (pp, dp, tp); each also with the opposite signs."""

MISFIT_WORK = 0.1
"""Work to find that an option does not fit the memory, as a share of that of an evaluation."""

MAX_SAMPLED_UNITS = 64
"""Largest number of tensor-parallel groups in all placements of an evaluation together; but an evaluation always
compares at least `SearchLimits.least_sampled` placements, if there are so many."""
MANY_ACTIONS = 1000
"""Number of simulated actions that take as long as the rest of an evaluation."""


class EvaluatedOption(NamedTuple):
    """An option that was evaluated with a few placements, and its fastest plan among these."""

    best: Prediction
    space: SearchSpace
    option: Option


class OptionSearch:
    """Evaluates options in order of an estimate of their step time: those near fast ones first.

    The estimate of an option is its priority (`CandidateQueue.priority_s`) times a ratio: the predicted step of the
    evaluated option whose neighbour it is, divided by that option's priority. The search begins with degrees from the
    whole range.

    Args:
        state: the search that gets each better plan.
    """

    def __init__(self, state: SearchState) -> None:
        self.state, self.limits = state, state.limits
        self.evaluated: list[EvaluatedOption] = []
        """The options that fit the memory, in the order of their evaluation."""
        self._seen: set[tuple[MemoryOptions, Option]] = set()
        self._evaluations: Counter[ParallelDims] = Counter()
        """Degrees -> number of evaluated options."""
        self._fastest: dict[ParallelDims, Prediction] = {}
        """Degrees -> their fastest plan."""
        self._queue: list[tuple[float, int, SearchSpace, Option, float]] = []
        """Heap of (estimate in seconds, running number, space, option, ratio of estimate and priority)."""
        self._numbers = itertools.count()
        self._free = 0.0
        """Evaluations that the options so far did not take, because they are known not to fit the memory."""
        devices = len(state.plain.pool.devices)
        self._many = devices > EXHAUSTIVE_DEVICES
        limits = self.limits.replan_options if state.plain.replaces else self.limits.neighbour_options
        self._most = limit_of(limits, devices)
        self._least_sampled = limit_of(self.limits.least_sampled, devices)
        self._sizes = state.plain.work.micro_batch_sizes()

    def run(self) -> None:
        """Evaluate options until none is left that can win, or until the limits of the search.

        The best plan that the state already has is one of those from which the search goes on.
        """
        known_best = self.state.best
        if not (self._many and self.state.plain.replaces and known_best):
            for space, option in self._first_options():
                self._push(space, option, 1.0)
        misfits = []
        first = len(self._queue) if self._many else self.limits.first_options
        for space, option, _ in self._pop(first):
            if not self._evaluate(space, option):
                misfits.append((space, option))
                self._free += 1 - MISFIT_WORK
        self._queue.clear()
        if known_best is not None:
            self.evaluated.append(EvaluatedOption(known_best, self.state.winner, known_best.layout.option))
        ratios = [self._ratio(known.best, known.space, known.option) for known in self.evaluated]
        for space, option in misfits:
            self._push_leaner(space, option, median(ratios) if ratios else 1.0)
        for known, ratio in zip(self.evaluated, ratios, strict=True):
            self._push_neighbours(known.space, known.option, ratio)
        for space, option, ratio in self._pop(self._most):
            best = self._evaluate(space, option)
            if best:
                self._push_neighbours(space, option, self._ratio(best, space, option))
            else:
                self._push_leaner(space, option, ratio)
                self._free += 1 - MISFIT_WORK

    def fastest(self, most: int) -> list[EvaluatedOption]:
        """Return the fastest evaluated option of each pp, tp, power of two up to dp and number of virtual stages, at
        most `most` options, the one with the shortest predicted step first. Fast options often differ only by few
        replicas, and then local search makes them equally fast."""
        fastest: dict[tuple[int, int, int, int], EvaluatedOption] = {}
        for known in sorted(self.evaluated, key=lambda known: known.best.total):
            pp, dp, tp = known.option.dims
            fastest.setdefault((pp, tp, dp.bit_length(), known.option.virtual_stages), known)
        return list(fastest.values())[:most]

    def _pop(self, most: int) -> Iterator[tuple[SearchSpace, Option, float]]:
        """Yield at most `most` options that can win, each with its ratio, the one with the smallest estimate first."""
        self._free = 0.0
        while self._queue and most + self._free > 0:
            _, _, space, option, ratio = heapq.heappop(self._queue)
            best = self.state.best
            if best is None or space.bounds.step_s(option) < best.total:
                yield space, option, ratio
                most -= 1

    def _evaluate(self, space: SearchSpace, option: Option) -> Prediction | None:
        """Return the fastest plan of an option with a few placements and, on few devices, with the best of these in
        reverse order; None if none fits. If none of the sampled placements fits, on few devices others are taken that
        have memory for all blocks."""
        if not space.bounds.may_fit(option):
            return None
        sampled = self._sampled_placements(space, option.dims)
        if not self._many:
            # On few devices, the distribution of the blocks over the groups takes most of the time.
            self._free -= len(sampled) * option.dims.pp * option.dims.dp / MAX_SAMPLED_UNITS - 1
        fitting = _fitting(space, option, sampled)
        if not fitting and not self._many:
            # Few placements may have unlike devices of a pipeline rank with enough memory for the blocks of all.
            roomy = [placement for placement in space.placements(option.dims) if space.has_room(placement, option)]
            fitting = _fitting(space, option, roomy[:: -(-len(roomy) // len(sampled))] if roomy else [])
        if not fitting:
            return None
        best = min((TimedLayout(space.cost, layout) for layout in fitting), key=lambda timed: timed.bound_s).predict()
        if not self._many and option.dims.pp > 1:
            # On unlike devices, which end of the pipeline has the fast ones may change the step by a tenth.
            reverse = Placement(row[::-1] for row in best.layout.placement)
            if space.can_shard(reverse):
                best = faster_of(space.cost, best, space.fit_layout(reverse, option))
        self._free -= simulated_actions(best.layout) / MANY_ACTIONS
        self.evaluated.append(EvaluatedOption(best, space, option))
        self._fastest[option.dims] = min(self._fastest.get(option.dims, best), best, key=lambda known: known.total)
        if self.state.best is None or best.total < self.state.best.total * (1 - 1e-9):
            self.state.take(best, space)
        return best

    def _sampled_placements(self, space: SearchSpace, dims: ParallelDims) -> list[Placement]:
        """Return a few placements of some degrees. On few devices, these are the one of the fastest plan with these
        degrees so far, and others than for the option with these degrees that was evaluated before. On many devices,
        they are always the same, because the links of a placement that was evaluated before are known."""
        likely = space.placements(dims)
        # Placements with pipelines within nodes come first, those with stages within nodes last.
        number = min(len(likely), max(self._least_sampled, MAX_SAMPLED_UNITS // dims.pp // dims.dp))
        shift, fastest = (0, None) if self._many else (self._evaluations[dims], self._fastest.get(dims))
        self._evaluations[dims] += 1
        sampled = [likely[(at * (len(likely) - 1) // max(1, number - 1) + shift) % len(likely)] for at in range(number)]
        if fastest is not None and len(likely) > number and space.can_shard(fastest.layout.placement):
            sampled[0] = fastest.layout.placement
        return sampled

    def _priority_s(self, space: SearchSpace, option: Option) -> float:
        return self.state.candidates.priority_s(space.bounds.step_s(option), space, option)

    def _ratio(self, best: Prediction, space: SearchSpace, option: Option) -> float:
        """Return an option's predicted step divided by its priority; 1 if the priority is 0, as on devices so fast that
        their times are 0."""
        priority_s = self._priority_s(space, option)
        return best.total / priority_s if priority_s > 0 else 1.0

    def _push(self, space: SearchSpace, option: Option, ratio: float) -> None:
        memory_options = space.work.memory_options
        if memory_options.equal_micro_batches:
            option = self._with_equal_micro_batches(option)
        (_, dp, tp), key = option.dims, (memory_options, option)
        if key in self._seen or (memory_options.zero and dp == 1) or space.why_no_layout(option):
            return
        if memory_options.sequence_parallel and not may_split_sequences(space.work, tp):
            return
        self._seen.add(key)
        estimate = ratio * self._priority_s(space, option)
        heapq.heappush(self._queue, (estimate, next(self._numbers), space, option, ratio))

    def _with_equal_micro_batches(self, option: Option) -> Option:
        """Return the option, if its replicas can have equally many micro-batches, or if the run fixes its degrees; else
        with as many replicas as divide the batch, and the largest size of micro-batches, neither larger than those of
        the option."""
        (pp, dp, tp), work = option.dims, self.state.plain.work
        sequences = work.sequences
        if sequences // option.micro_batch % dp == 0 or work.fixed is not None:
            return option
        dp = next(count for count in range(dp, 0, -1) if sequences % count == 0)
        sizes = [size for size in self._sizes if size <= option.micro_batch and sequences // size % dp == 0]
        return option._replace(dims=ParallelDims(pp, dp, tp), micro_batch=sizes[-1]) if sizes else option

    def _first_options(self) -> Iterator[tuple[SearchSpace, Option]]:
        """Yield an option for each of some degrees, with the first schedule that the workload allows, mostly 1f1b, and
        about two micro-batches a pipeline rank, and its space. On few devices, add the same option with the memory
        options of the smallest priority. On many devices, add one with the schedule of the smallest priority and, on up
        to `SearchLimits.max_halved_devices`, one with the schedule and the memory options of the smallest priority: on
        a slow network, ZeRO 2 and 3 are far faster than unsharded state, because their collectives overlap the passes.
        """
        work, every = self.state.plain.work, self.state.plain.candidate_dims
        options = []
        for dims in every:
            if self._many or len(every) <= self.limits.first_options or (dims.pp in LADDER and dims.dp in LADDER):
                size = work.sequences / (2 * dims.pp * dims.dp)
                nearest = min(self._sizes, key=lambda each: max(each / size, size / each))
                while nearest > 1 and work.sequences // nearest < dims.dp:
                    nearest = max((each for each in self._sizes if each < nearest), default=1)
                options.append(Option(dims, work.schedule_specs(dims.pp)[0], nearest))
        plain = self.state.plain
        if not self._many:
            for option in options:
                yield plain, option
                sharded = min(
                    self.state.candidates.first_spaces(option.dims), key=lambda one: self._priority_s(one, option)
                )
                yield sharded, option
            return
        few = len(plain.pool.devices) <= self.limits.max_halved_devices
        taken: Counter[tuple[int, int]] = Counter()
        for option in sorted(options, key=lambda option: (self._priority_s(plain, option), option)):
            similar = prod(option.dims).bit_length(), option.dims.tp
            if taken[similar] < self.limits.first_options_of_size:
                taken[similar] += 1
                spaces = self.state.candidates.first_spaces(option.dims) if few else [plain]
                best = [(space, self._best_schedule(space, option)) for space in spaces]
                least = min(best, key=lambda pair: self._priority_s(*pair))
                yield from dict.fromkeys(((plain, option), best[0], least))

    def _best_schedule(self, space: SearchSpace, option: Option) -> Option:
        """Return the option with the schedule that has the smallest priority."""
        others = (option._replace(schedule_spec=spec) for spec in space.work.schedule_specs(option.dims.pp))
        return min(others, key=lambda other: self._priority_s(space, other))

    def _push_leaner(self, space: SearchSpace, option: Option, ratio: float) -> None:
        smaller = [size for size in self._sizes if size < option.micro_batch]
        if smaller:
            self._push(space, option._replace(micro_batch=smaller[-1]), ratio)
        for leaner in self.state.candidates.leaner_spaces(space, option.dims):
            if option.schedule_spec in leaner.work.schedule_specs(option.dims.pp):
                self._push(leaner, option, ratio)

    def _push_neighbours(self, space: SearchSpace, option: Option, ratio: float) -> None:
        dims, spec, size = option
        for other in self._neighbour_dims(dims):
            if spec in space.work.schedule_specs(other.pp):
                self._push(space, Option(other, spec, size), ratio)
        at = self._sizes.index(size)
        for near in self._sizes[max(0, at - 1) : at] + self._sizes[at + 1 : at + 2]:
            self._push(space, option._replace(micro_batch=near), ratio)
        for other_spec in space.work.schedule_specs(dims.pp):
            self._push(space, option._replace(schedule_spec=other_spec), ratio)
        for other_space in self.state.candidates.neighbour_spaces(space, dims):
            if spec in other_space.work.schedule_specs(dims.pp):
                self._push(other_space, option, ratio)

    def _neighbour_dims(self, dims: ParallelDims) -> Iterator[ParallelDims]:
        pp, dp, tp = dims
        near = [ParallelDims(pp + a, dp + b, tp) for a, b in PP_STEPS]
        for powers in DOUBLINGS:
            for sign in (1, -1):
                near.append(
                    ParallelDims(*(int(n * 2.0 ** (sign * power)) for n, power in zip(dims, powers, strict=True)))
                )
        if self._many:
            near += self._replica_counts(dims)
        return (other for other in dict.fromkeys(near) if self.state.plain.allows(other))

    def _replica_counts(self, dims: ParallelDims) -> Iterator[ParallelDims]:
        """Yield these degrees with three quarters of the replicas, then the same and neighbouring pp and tp, each with
        the largest number of replicas."""
        pp, dp, tp = dims
        yield ParallelDims(pp, 3 * dp // 4, tp)
        near = [(ranks, tp) for ranks in (pp, pp - 1, pp + 1, pp // 2, 2 * pp)]
        for ranks, width in [*near, (pp, tp // 2), (pp, 2 * tp)]:
            if min(ranks, width) > 0 and self.state.plain.allows(ParallelDims(ranks, 1, width)):
                yield ParallelDims(ranks, self.state.plain.most_replicas(ranks, width), width)


def _fitting(space: SearchSpace, option: Option, placements: Iterable[Placement]) -> list[Layout]:
    """Return the option's layouts on these placements that fit the memory."""
    layouts = (space.fit_layout(placement, option) for placement in placements)
    return [layout for layout in layouts if layout.memory_shortage(space.cost.memory) is None]
