"""Local search on the best layout: exchanges ranks, moves single blocks and micro-batches, cuts at the seam."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate, pairwise, permutations
from typing import TypeVar

from hpctrain.planner.bounds.option import Option
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.layout.layout import Layout
from hpctrain.planner.layout.placement import rank_permutations
from hpctrain.planner.search.space import SearchSpace
from hpctrain.planner.simulate.predict import Prediction, lower_bound, predict

BestSoFar = TypeVar("BestSoFar", Prediction, Prediction | None)


def refine(space: SearchSpace, best: Prediction) -> Prediction:
    """Exchange pipeline ranks, then move single blocks and micro-batches, as long as that helps."""
    return shift_counts(space.cost, _permute_ranks(space, best), space.limits.max_refinements)


def shift_counts(cost: CostModel, best: Prediction, most: int) -> Prediction:
    """Move single blocks between stages and single micro-batches between replicas, as long as that makes the step
    shorter.

    Args:
        most: number of changes after which no further round of changes begins.
    """
    return _climb(cost, best, _changes, most)


def _permute_ranks(space: SearchSpace, best: Prediction) -> Prediction:
    option, limits = Option.of(best.layout), space.limits
    tried: set[tuple[int, ...]] = set()
    most = min(limits.max_rank_permutations, -(-limits.max_permuted_units // (option.dims.pp * option.dims.dp)))

    def permuted(layout: Layout) -> Iterator[Layout]:
        for placement in rank_permutations(layout.placement):
            key = tuple(unit.index for row in placement for unit in row)
            if key not in tried and len(tried) < most and space.can_shard(placement):
                tried.add(key)
                yield space.fit_layout(placement, option)

    return _climb(space.cost, best, permuted, most)


def _climb(cost: CostModel, best: Prediction, changes: Callable[[Layout], Iterator[Layout]], most: int) -> Prediction:
    """Apply the change that gives the fastest layout, round by round, as long as one makes the step shorter.

    Args:
        most: number of changes after which no further round begins.
    """
    tried = 0
    while tried < most:
        better = best
        for layout in changes(best.layout):
            tried += 1
            better = faster_of(cost, better, layout)
        if better is best:
            break
        best = better
    return best


def faster_of(cost: CostModel, best: BestSoFar, layout: Layout, rounding: float = 1e-6) -> BestSoFar | Prediction:
    """Return the layout's prediction if it fits and is faster than `best` by more than rounding, else `best`."""
    limit = math.inf if best is None else best.total * (1 - rounding)
    if lower_bound(cost, layout) >= limit or layout.memory_shortage(cost.memory):
        return best
    prediction = predict(cost, layout)
    return prediction if prediction.total < limit else best


def _changes(layout: Layout) -> Iterator[Layout]:
    """Yield layouts with one change each: a block moved, or a micro-batch moved between unlike replicas.

    A block moves between neighbouring stages, or between stages of one rank.
    """
    last = len(layout.blocks) - 1
    neighbours = (pair for a, b in pairwise(range(last + 1)) for pair in ((a, b), (b, a)))
    # A move between stages of one rank does not change the rank's work, but it changes which ranks wait.
    of_one_rank = (pair for stages in layout.stages_by_rank for pair in permutations(stages, 2))
    for giver, taker in dict.fromkeys([*neighbours, *of_one_rank]):
        may_be_empty = giver in (0, last)
        if layout.blocks[giver] > (0 if may_be_empty else 1):
            yield replace(layout, blocks=_moved(layout.blocks, giver, taker))
    if layout.memory_options.equal_micro_batches:
        return
    # Replicas with equal devices and equally many micro-batches are interchangeable.
    for giver in layout.distinct_replicas:
        for taker in layout.distinct_replicas:
            if giver != taker and layout.micro_batches[giver] > 1:
                yield replace(layout, micro_batches=_moved(layout.micro_batches, giver, taker))


def _moved(counts: tuple[int, ...], giver: int, taker: int) -> tuple[int, ...]:
    return tuple(count - (index == giver) + (index == taker) for index, count in enumerate(counts))


def cut_at_seam(cost: CostModel, best: Prediction, max_slowdown: float) -> Prediction:
    """Return the plan with its nearest cut moved to the seam if that fits and costs next to nothing, else the plan.

    The seam is where the decoder of an encoder-decoder begins. The cost model gives the messages of all cuts the size
    of the largest, so it does not see that messages at the seam are smaller.

    Args:
        max_slowdown: share of the step's time that the cut at the seam may cost.
    """
    seam, blocks = cost.work.spec.preferred_cut, best.layout.blocks
    if seam is None or len(blocks) == 1:
        return best
    cuts = list(accumulate(blocks))[:-1]
    nearest = min(range(len(cuts)), key=lambda index: abs(cuts[index] - seam))
    moved = list(blocks)
    moved[nearest] += seam - cuts[nearest]
    moved[nearest + 1] -= seam - cuts[nearest]
    if moved == list(blocks) or min(moved) < 0 or not all(moved[1:-1]):
        return best
    layout = replace(best.layout, blocks=tuple(moved))
    if layout.memory_shortage(cost.memory):
        return best
    prediction = predict(cost, layout)
    return prediction if prediction.total <= (1 + max_slowdown) * best.total else best
