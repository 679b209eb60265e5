"""Small changes of the winner: other devices at other ranks, single blocks, single micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import permutations

from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.devices.tensor_parallel_group import Cells
from hpctrain.planner.layout.layout import Layout
from hpctrain.planner.layout.partition import fit_layout
from hpctrain.planner.layout.placement import rank_orders
from hpctrain.planner.simulate.predict import Prediction, lower_bound, predict

TURNS = 60
"""Orders of the winner's pipeline ranks that are tried."""
TURNED_UNITS = 50_000
"""Units in all of them together: on very many devices each order takes a while."""
REFINEMENTS = 400
"""Changes of one block or one micro-batch that are tried on the winner; those that were begun are finished."""


def refine(cost: CostModel, best: Prediction, allowed: Callable[[Cells], bool]) -> Prediction:
    """Exchange pipeline ranks, then move single blocks between neighbours and single micro-batches between
    replicas, while that helps.

    Args:
        allowed: whether the devices may stand like that.
    """
    return adjust(cost, _turn(cost, best, allowed), REFINEMENTS)


def adjust(cost: CostModel, best: Prediction, most: int) -> Prediction:
    """Move single blocks and micro-batches while that helps.

    Args:
        most: changes after which no further round of them is begun.
    """
    tried = 0
    while tried < most:
        better = best
        for layout in _changes(best.layout):
            tried += 1
            better = faster(cost, better, layout)
        if better is best:
            break
        best = better
    return best


def _turn(cost: CostModel, best: Prediction, allowed: Callable[[Cells], bool]) -> Prediction:
    order, size = best.layout.order, best.layout.micro_batch
    tried: set[tuple[int, ...]] = set()
    most = min(TURNS, -(-TURNED_UNITS // (best.layout.pp * best.layout.dp)))
    while len(tried) < most:
        better = best
        for cells in rank_orders(best.layout.cells):
            key = tuple(unit.index for row in cells for unit in row)
            if key in tried or len(tried) >= most or not allowed(cells):
                continue
            tried.add(key)
            better = faster(cost, better, fit_layout(cost, cells, order, size))
        if better is best:
            break
        best = better
    return best


def faster(cost: CostModel, best: Prediction, layout: Layout) -> Prediction:
    """The layout's prediction where it fits and is faster by more than rounding, else `best`."""
    limit = best.total * (1 - 1e-6)
    if layout.excess(cost.memory) or lower_bound(cost, layout) >= limit:
        return best
    found = predict(cost, layout)
    return found if found.total < limit else best


def _changes(layout: Layout) -> Iterator[Layout]:
    """Layouts that differ by one block between neighbouring stages, or stages of one rank, or by one micro-batch
    between unlike replicas."""
    last = len(layout.blocks) - 1
    for giver, taker in dict.fromkeys([*_neighbours(len(layout.blocks)), *_of_one_rank(layout)]):
        may_be_empty = giver in (0, last)
        if layout.blocks[giver] > (0 if may_be_empty else 1):
            yield replace(layout, blocks=_moved(layout.blocks, giver, taker))
    if layout.saving.equal_counts:
        return
    # Replicas with the same devices and as many micro-batches are one and the same, wherever they stand.
    for giver in layout.unlike:
        for taker in layout.unlike:
            if giver != taker and layout.micro_batches[giver] > 1:
                yield replace(layout, micro_batches=_moved(layout.micro_batches, giver, taker))


def _neighbours(count: int) -> list[tuple[int, int]]:
    return [pair for index in range(count - 1) for pair in ((index, index + 1), (index + 1, index))]


def _of_one_rank(layout: Layout) -> Iterator[tuple[int, int]]:
    """What a rank computes stays the same, but not how long the others wait for it."""
    for stages in layout.stages_by_rank:
        yield from permutations(stages, 2)


def _moved(counts: tuple[int, ...], giver: int, taker: int) -> tuple[int, ...]:
    return tuple(count - (index == giver) + (index == taker) for index, count in enumerate(counts))
