"""Local search on the best layout: exchanged pipeline ranks, single blocks, single micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import permutations

from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.devices.tensor_parallel_group import Placement
from hpctrain.planner.layout.layout import Layout
from hpctrain.planner.layout.partition import fit_layout
from hpctrain.planner.layout.placement import rank_permutations
from hpctrain.planner.simulate.predict import Prediction, lower_bound, predict

MAX_RANK_PERMUTATIONS = 60
"""Permutations of the best layout's pipeline ranks that are tried."""
MAX_PERMUTED_UNITS = 50_000
"""Tensor-parallel groups in all these permutations together: on very many devices each one takes long."""
MAX_REFINEMENTS = 400
"""Changes of one block or micro-batch after which no further round of changes is begun."""


def refine(cost: CostModel, best: Prediction, allowed: Callable[[Placement], bool]) -> Prediction:
    """Exchange pipeline ranks, then move single blocks and micro-batches, as long as that helps.

    Args:
        allowed: whether a placement may be used.
    """
    return shift_counts(cost, _permute_ranks(cost, best, allowed), MAX_REFINEMENTS)


def shift_counts(cost: CostModel, best: Prediction, most: int) -> Prediction:
    """Move single blocks between stages and single micro-batches between replicas, as long as that helps.

    Args:
        most: changes after which no further round of changes is begun.
    """
    tried = 0
    while tried < most:
        better = best
        for layout in _changes(best.layout):
            tried += 1
            better = faster_of(cost, better, layout)
        if better is best:
            break
        best = better
    return best


def _permute_ranks(cost: CostModel, best: Prediction, allowed: Callable[[Placement], bool]) -> Prediction:
    schedule_spec, size = best.layout.schedule_spec, best.layout.micro_batch
    tried: set[tuple[int, ...]] = set()
    most = min(MAX_RANK_PERMUTATIONS, -(-MAX_PERMUTED_UNITS // (best.layout.pp * best.layout.dp)))
    while len(tried) < most:
        better = best
        for placement in rank_permutations(best.layout.placement):
            key = tuple(unit.index for row in placement for unit in row)
            if key in tried or len(tried) >= most or not allowed(placement):
                continue
            tried.add(key)
            better = faster_of(cost, better, fit_layout(cost, placement, schedule_spec, size))
        if better is best:
            break
        best = better
    return best


def faster_of(cost: CostModel, best: Prediction, layout: Layout) -> Prediction:
    """The layout's prediction if it fits and is faster than `best` by more than rounding, else `best`."""
    limit = best.total * (1 - 1e-6)
    if layout.memory_shortage(cost.memory) or lower_bound(cost, layout) >= limit:
        return best
    found = predict(cost, layout)
    return found if found.total < limit else best


def _changes(layout: Layout) -> Iterator[Layout]:
    """Yield layouts with one change: a block moved between neighbouring stages or stages of one rank, or a micro-batch
    moved between unlike replicas."""
    last = len(layout.blocks) - 1
    for giver, taker in dict.fromkeys([*_neighbours(len(layout.blocks)), *_of_one_rank(layout)]):
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


def _neighbours(count: int) -> list[tuple[int, int]]:
    return [pair for index in range(count - 1) for pair in ((index, index + 1), (index + 1, index))]


def _of_one_rank(layout: Layout) -> Iterator[tuple[int, int]]:
    """Pairs of stages of one rank. A move between them leaves the rank's work alone, but changes who waits for it."""
    for stages in layout.stages_by_rank:
        yield from permutations(stages, 2)


def _moved(counts: tuple[int, ...], giver: int, taker: int) -> tuple[int, ...]:
    return tuple(count - (index == giver) + (index == taker) for index, count in enumerate(counts))
