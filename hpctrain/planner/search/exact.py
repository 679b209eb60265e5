"""The solver `exact`: tries, on a few devices, every order of the devices, cut, division of the batch over replicas,
schedule and set of memory options."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

from hpctrain.base.collector import cached_method
from hpctrain.base.errors import InputError
from hpctrain.planner.cost.memory_options import MemoryOptions
from hpctrain.planner.cost.model import UnitKind
from hpctrain.planner.cost.workload import ModelPart
from hpctrain.planner.devices.tensor_parallel_group import Placement, TensorParallelGroup
from hpctrain.planner.layout.layout import Layout, Option
from hpctrain.planner.layout.placement import all_placements, count_placements
from hpctrain.planner.search.best_first import best_first_search
from hpctrain.planner.search.evaluate import faster_of
from hpctrain.planner.search.space import SearchSpace
from hpctrain.planner.search.state import SearchResult, may_split_sequences
from hpctrain.planner.search.symmetry import PlacementSymmetry
from hpctrain.planner.simulate.predict import least_around_ranks_s
from hpctrain.records.plan.plan import Recompute, ZeroLevel
from hpctrain.schedule.generate import stages_by_rank


def exhaustive_search(plain: SearchSpace) -> SearchResult:
    """Return the fastest of all plans by the cost model, with all memory options if the run file fixes no degrees. The
    lower bound of the result is the plan's predicted time.

    Raises:
        InputError: there are too many devices, or too many plans, to try all. This is known before any plan is tried.
    """
    devices, limits = len(plain.pool.devices), plain.limits
    if devices > limits.max_exact_devices:
        raise InputError(
            f"--solver exact: found {devices} devices, allowed: up to {limits.max_exact_devices}; use --solver auto"
        )
    spaces = [plain]
    if plain.work.fixed is None:
        shard: Literal["all", "node"] = "all" if plain.work.may_shard_gradients else "node"
        choices = itertools.product(get_args(ZeroLevel), get_args(Recompute), (False, True))
        _, *others = (
            MemoryOptions(zero, shard=shard if zero else "all", recompute=recompute, sequence_parallel=split)
            for zero, recompute, split in choices
        )
        spaces += [plain.with_work(memory_options=memory_options) for memory_options in others]
    result = best_first_search(plain)
    best, winner = result.best, result.space
    options = [
        _OptionPlans(space, option)
        for space in spaces
        for option in space.options(space.candidate_dims)
        if may_split_sequences(space.work, option.dims.tp) or not space.work.memory_options.sequence_parallel
        if not space.why_no_layout(option) and (best is None or space.bounds.step_s(option) < best.total)
    ]
    limit_s, most, count = math.inf if best is None else best.total, limits.max_exact_layouts, 0
    if sum(plans.least_placements() for plans in options) > most:
        count = most + 1
    for plans in options:
        if count <= most:
            count += plans.number(limit_s, most - count)
    if count > most:
        raise InputError(
            f"--solver exact: found more than {most} plans that may be the fastest, allowed: up to {most}; use "
            "--solver auto, or a model with fewer layers and a smaller batch.global"
        )
    for plans in sorted(options, key=lambda plans: plans.space.bounds.step_s(plans.option)):
        if best is not None and plans.space.bounds.step_s(plans.option) >= best.total:
            continue
        for layout in plans.layouts(math.inf if best is None else best.total):
            prediction = faster_of(plans.space.cost, best, layout, rounding=1e-9)
            if prediction is not best:
                best, winner = prediction, plans.space
    return SearchResult(winner, best, math.inf if best is None else best.total, ended=True)


Blocks = tuple[int, ...]
"""Blocks of some stages, in the order of the stages."""


class _Assignment(NamedTuple):
    """Devices and micro-batches of a layout, with the blocks that each pipeline rank can compute in time."""

    placement: Placement
    micro_batches: tuple[int, ...]
    """[replica] -> number of micro-batches."""
    blocks: list[list[Blocks]]
    """[pipeline rank] -> the numbers of blocks that its stages may have."""


class _OptionPlans:
    """Counts and yields the plans of an option that may end a step in time.

    Of plans that differ only by an exchange of replicas, equal devices or equal nodes, one counts. A pipeline rank with
    more blocks than it can compute in time excludes all cuts that give it these, so most cuts are never made.
    """

    def __init__(self, space: SearchSpace, option: Option) -> None:
        self.space, self.option = space, option
        self._layers, self._ends = space.work.spec.layers, (0, option.stages - 1)
        self._stages = stages_by_rank(option.schedule_spec.name, option.dims.pp, option.stages)

    def least_placements(self) -> int:
        """Return a number that is at most that of the placements."""
        (pp, dp, _), symmetry = self.option.dims, self._symmetry
        return count_placements(symmetry.classes, pp, dp) // symmetry.node_orders

    def number(self, limit_s: float, most: int) -> int:
        """Return the number of plans that may take less than `limit_s` seconds; each placement and division of the
        batch counts at least once. If there are more than `most`, return any number above it."""
        count = 0
        for assignment in self._assignments(limit_s):
            # Coefficients of a product of polynomials: [blocks in total] -> number of cuts.
            cuts = [1]
            for of_rank in assignment.blocks:
                numbers = Counter(map(sum, of_rank))
                cuts = [
                    sum(cuts[total - held] * many for held, many in numbers.items() if 0 <= total - held < len(cuts))
                    for total in range(self._layers + 1)
                ]
            count += max(1, cuts[self._layers])
            if count > most:
                break
        return count

    def layouts(self, limit_s: float) -> Iterator[Layout]:
        """Yield the layouts of the option that may take less than `limit_s` seconds."""
        name, size = self.option.schedule_spec.name, self.option.micro_batch
        for placement, counts, of_ranks in self._assignments(limit_s):
            for by_rank in _with_sum([sorted(blocks, key=sum) for blocks in of_ranks], self._layers):
                blocks = [0] * self.option.stages
                for stages, held in zip(self._stages, by_rank, strict=True):
                    for stage, number in zip(stages, held, strict=True):
                        blocks[stage] = number
                yield Layout(placement, name, size, counts, tuple(blocks), self.space.work.memory_options)

    @cached_property
    def _units(self) -> list[TensorParallelGroup]:
        return self.space.units(self.option.dims.tp)

    @cached_property
    def _symmetry(self) -> PlacementSymmetry:
        message_bytes = self.space.work.stage_boundary_bytes(self.option.micro_batch)
        return PlacementSymmetry(self._units, self.space.pool.links, message_bytes)

    def _assignments(self, limit_s: float) -> Iterator[_Assignment]:
        """Yield the placements with the divisions of the batch that leave all blocks to ranks that end in time."""
        (pp, dp, _), size, work = self.option.dims, self.option.micro_batch, self.space.work
        total = work.sequences // size
        for placement in all_placements(self._units, self._symmetry.classes, pp, dp):
            if not (self._symmetry.is_first_of_equals(placement) and self.space.can_shard(placement)):
                continue
            least = tuple(self._least_blocks(stage) for stage in range(self.option.stages))
            name = self.option.schedule_spec.name
            layout = Layout(placement, name, size, (-(-total // dp),) * dp, least, work.memory_options)
            remaining = [limit_s - seconds for seconds in least_around_ranks_s(self.space.cost, layout)]
            rows = [tuple(map(self.space.cost.kind, row)) for row in placement]
            if work.memory_options.equal_micro_batches:
                divisions: Iterator[tuple[int, ...]] = iter([(total // dp,) * dp])
            else:
                most = {row: self._most_micro_batches(row, remaining) for row in set(rows)}
                classes = [[self._symmetry.classes[unit.index] for unit in row] for row in placement]
                equal_to_last = [False, *(a == b for a, b in pairwise(classes))]
                divisions = _divisions(total, [most[row] for row in rows], equal_to_last)
            for counts in divisions:
                columns = [tuple({(row[rank], n) for row, n in zip(rows, counts, strict=True)}) for rank in range(pp)]
                blocks = [self._in_time(rank, column, remaining[rank]) for rank, column in enumerate(columns)]
                if self._most_blocks(blocks) >= self._layers:
                    yield _Assignment(placement, counts, blocks)

    def _most_micro_batches(self, row: Sequence[UnitKind], remaining: Sequence[float]) -> int:
        """Return the most micro-batches of a replica whose ranks can hold all blocks and end in time.

        Args:
            row: [pipeline rank] -> kind of its devices.
            remaining: [pipeline rank] -> seconds in which it has to compute.
        """

        def too_many(count: int) -> bool:
            ranks = enumerate(zip(row, remaining, strict=True))
            blocks = [self._in_time(rank, ((kind, count),), seconds) for rank, (kind, seconds) in ranks]
            return self._most_blocks(blocks) < self._layers

        counts = range(1, self.space.work.sequences // self.option.micro_batch - self.option.dims.dp + 2)
        return bisect_left(counts, True, key=too_many)

    def _most_blocks(self, blocks: Sequence[Sequence[Blocks]]) -> int:
        """Return the most blocks that all pipeline ranks can hold together; negative if one can hold none."""
        return sum(max(map(sum, of_rank)) for of_rank in blocks) if all(blocks) else -1

    def _least_blocks(self, stage: int) -> int:
        """Return the fewest blocks that a stage may have: all if it is the only one."""
        if self.option.stages == 1:
            return self._layers
        return 0 if stage in self._ends else 1

    @cached_method
    def _rank_seconds(self, rank: int, kind: UnitKind) -> list[tuple[Blocks, float]]:
        """Return the numbers of blocks that a pipeline rank's stages may have, each with the seconds of a micro-batch's
        passes on devices of a kind (`CostModel.kind`)."""
        cost, size, stages = self.space.cost, self.option.micro_batch, self._stages[rank]
        unit = next(unit for unit in self._units if cost.kind(unit) == kind)

        def seconds(stage: int, blocks: int) -> float:
            first, last = (stage == end for end in self._ends)
            passes = cost.stage(unit, size, ModelPart(blocks, first, last))
            backward = passes.inputs + passes.weights if self.option.splits_backward else passes.backward
            return passes.forward + backward

        ranges = (range(self._least_blocks(stage), self._layers + 1) for stage in stages)
        return [
            (blocks, sum(map(seconds, stages, blocks)))
            for blocks in itertools.product(*ranges)
            if sum(blocks) <= self._layers
        ]

    @cached_method
    def _in_time(self, rank: int, column: tuple[tuple[UnitKind, int], ...], limit_s: float) -> list[Blocks]:
        """Return the numbers of blocks with which a pipeline rank computes its micro-batches in less than `limit_s`
        seconds.

        Args:
            column: (kind of the devices, number of micro-batches) of the replicas.
        """
        by_kind = [(count, self._rank_seconds(rank, kind)) for kind, count in column]
        return [
            entries[0][0]
            for entries in zip(*(seconds for _, seconds in by_kind), strict=True)
            if all(count * entry[1] < limit_s for (count, _), entry in zip(by_kind, entries, strict=True))
        ]


def _with_sum(choices: Sequence[Sequence[Blocks]], total: int) -> Iterator[tuple[Blocks, ...]]:
    """Yield one tuple of each list such that all numbers together add up to `total`.

    Args:
        choices: lists of tuples, each sorted by the sum of the tuple.
    """
    if not choices:
        if total == 0:
            yield ()
        return
    if not all(choices):
        return
    low, high = (sum(sum(each[end]) for each in choices[1:]) for end in (0, -1))
    for chosen in choices[0]:
        if low <= total - sum(chosen) <= high:
            for others in _with_sum(choices[1:], total - sum(chosen)):
                yield (chosen, *others)


def _divisions(total: int, caps: Sequence[int], equal_to_last: Sequence[bool]) -> Iterator[tuple[int, ...]]:
    """Yield the divisions of micro-batches over replicas, each with at least one.

    Args:
        caps: [replica] -> the most that it may have.
        equal_to_last: [replica] -> whether it is equal to the replica before it; then it has at most as many
            micro-batches as that replica.
    """

    def extend(chosen: tuple[int, ...], left: int) -> Iterator[tuple[int, ...]]:
        at = len(chosen)
        if at == len(caps):
            if left == 0:
                yield chosen
            return
        most = min(caps[at], left - (len(caps) - at - 1), chosen[-1] if equal_to_last[at] else left)
        for number in range(max(1, left - sum(caps[at + 1 :])), most + 1):
            yield from extend((*chosen, number), left - number)

    yield from extend((), total)


def compositions(total: int, parts: int, least: int) -> Iterator[tuple[int, ...]]:
    """Yield all tuples of `parts` numbers that add up to `total`, each number at least `least`."""
    end = total - parts * least + parts - 1
    if end < parts - 1:
        return
    for bars in itertools.combinations(range(end), parts - 1):
        yield tuple(b - a - 1 + least for a, b in itertools.pairwise((-1, *bars, end)))
