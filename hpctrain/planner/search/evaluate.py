"""Evaluation of options and layouts, and local search on a good layout.

Local search exchanges pipeline ranks, moves single blocks and micro-batches, packs stages or pipelines within nodes,
and cuts at the seam, where the decoder of an encoder-decoder begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, permutations
from typing import NamedTuple, TypeVar

from hpctrain.planner.cost.memory_options import shard_group_size
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.devices.tensor_parallel_group import Placement, TensorParallelGroup
from hpctrain.planner.layout.layout import Layout, Option
from hpctrain.planner.layout.placement import node_orders, rank_permutations
from hpctrain.planner.limits import limit_of
from hpctrain.planner.search.space import EXHAUSTIVE_DEVICES, SearchSpace
from hpctrain.planner.simulate.predict import Prediction, TimedLayout, predict


class Evaluation(NamedTuple):
    """The result of evaluating an option: the best plan so far, which may be one of an option evaluated before, and
    this option's layout with the smallest lower bound, with the bound in seconds.
    """

    best: Prediction | None
    nearest: Layout | None
    """The layout with the smallest bound among those that fit; None if none fits."""
    bound_s: float
    """Lower bound of `nearest` in seconds; infinite if none fits."""

    @property
    def fits(self) -> bool:
        """Whether some layout of this option fits the memory of its devices."""
        return self.nearest is not None


def evaluate(
    space: SearchSpace,
    option: Option,
    best: Prediction | None,
    placements: Sequence[Placement] | None = None,
) -> Evaluation:
    """Return the faster of `best` and the option's fastest layout, and, of the option's layouts that fit, the one with
    the smallest lower bound.

    Args:
        best: the best plan so far; None if there is none.
        placements: placements to evaluate; None: those of `SearchSpace.placements`.
    """
    nearest, least = None, math.inf
    if space.why_no_layout(option):
        return Evaluation(best, nearest, least)
    limit = math.inf if best is None else best.total * (1 - 1e-9)
    for placement in space.placements(option.dims) if placements is None else placements:
        if not space.bounds.can_hold(option, shard_group_size(placement, space.work.memory_options)):
            continue
        layout = space.fit_layout(placement, option)
        if layout.memory_shortage(space.cost.memory):
            continue
        timed = TimedLayout(space.cost, layout)
        if nearest is None or timed.bound_s < least:
            nearest, least = layout, timed.bound_s
        prediction = timed.predict_below(limit)
        if prediction is not None:
            best, limit = prediction, prediction.total * (1 - 1e-9)
    return Evaluation(best, nearest, least)


def best_of(space: SearchSpace, options: Iterable[Option], patience: int | None = None) -> Prediction | None:
    """Return the fastest layout found for these options that fits; None if none was found. Of each option at most
    `SearchLimits.compared_placements` placements are tried.

    Args:
        patience: stop after this many options in a row without a better layout; None: try all options that could still
            win.
    """
    queue = sorted((space.bounds.step_s(option), number, option) for number, option in enumerate(options))
    most = limit_of(space.limits.compared_placements, len(space.pool.devices))
    best: Prediction | None = None
    waited = 0
    for bound, _, option in queue:
        if best is not None and (bound >= best.total or waited == patience):
            break
        likely = space.placements(option.dims)
        every = max(1, -(-len(likely) // most))
        before, best = best, evaluate(space, option, best, likely[::every]).best
        waited = 0 if best is not before else waited + 1
    return best


BestSoFar = TypeVar("BestSoFar", Prediction, Prediction | None)


def refine(space: SearchSpace, best: Prediction) -> Prediction:
    """Return the plan after rounds of local search: nodes take other places along the pipeline, pipeline ranks are
    exchanged, then single blocks and micro-batches moved, as long as that makes the step shorter. The rounds end when
    one shortens the step by less than the share `SearchLimits.least_gain`; on more than `EXHAUSTIVE_DEVICES` devices,
    where a round takes seconds, after the first.
    """
    many = len(space.pool.devices) > EXHAUSTIVE_DEVICES
    while True:
        before_s = best.total
        for changes in (node_orders, rank_permutations):
            best = _rearrange(space, best, changes)
        best = shift_counts(space, best, space.limits.max_refinements)
        if many or best.total >= (1 - space.limits.least_gain) * before_s:
            return best


def shift_counts(space: SearchSpace, best: Prediction, most: int) -> Prediction:
    """Return the plan after moves of single blocks between stages and of single micro-batches between replicas, as long
    as moves make the step shorter.

    Args:
        most: number of tried changes after which no further round of changes begins.
    """
    paired = limit_of(space.limits.max_paired_stages, len(space.pool.devices))
    return _climb(space.cost, best, partial(_changes, paired), most)


def _rearrange(space: SearchSpace, best: Prediction, changes: Callable[[Placement], Iterator[Placement]]) -> Prediction:
    option, limits = best.layout.option, space.limits
    tried: set[tuple[int, ...]] = set()
    most = min(limits.max_rank_permutations, -(-limits.max_permuted_units // (option.dims.pp * option.dims.dp)))

    def rearranged(layout: Layout) -> Iterator[Layout]:
        for placement in changes(layout.placement):
            if len(tried) >= most:
                return
            key = tuple(unit.index for row in placement for unit in row)
            if key not in tried and space.can_shard(placement):
                tried.add(key)
                yield from _in_order(space, layout, placement)

    return _climb(space.cost, best, rearranged, most)


def _in_order(space: SearchSpace, layout: Layout, placement: Placement) -> Iterator[Layout]:
    """Yield the layouts with the pipeline ranks of a layout in another order: one with blocks and micro-batches
    distributed anew, and one with those that the ranks had, unless it is equal or an inner stage would have no blocks.

    Args:
        placement: the placement of the layout with its ranks in another order.
    """
    fitted = space.fit_layout(placement, layout.option)
    yield fitted
    blocks, stages = list(layout.blocks), layout.stages_by_rank
    before = {unit.index: stages[rank] for rank, unit in enumerate(layout.placement[0])}
    for rank, unit in enumerate(placement[0]):
        for stage, old in zip(stages[rank], before[unit.index], strict=True):
            blocks[stage] = layout.blocks[old]
    moved = replace(layout, placement=placement, blocks=tuple(blocks))
    if all(blocks[1:-1]) and (moved.blocks, moved.micro_batches) != (fitted.blocks, fitted.micro_batches):
        yield moved


def _climb(cost: CostModel, best: Prediction, changes: Callable[[Layout], Iterator[Layout]], most: int) -> Prediction:
    """Return the plan after rounds of changes, each of which applies the change that gives the fastest layout.

    The rounds end when no change makes the step shorter.

    Args:
        changes: yields the layouts that differ from a layout by one change.
        most: number of tried changes after which no further round begins.
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
    """Return the layout's prediction if the layout fits and is faster than `best`, else `best`.

    Args:
        rounding: share of the step time of `best` by which the layout must be faster.
    """
    if best is None:
        return None if layout.memory_shortage(cost.memory) else predict(cost, layout)
    # Most changes of a layout leave its slowest replica as slow as it is, or make it slower.
    slowest = best.slowest if best.layout.dp == layout.dp else None
    prediction = TimedLayout(cost, layout, best.times).predict_below(best.total * (1 - rounding), slowest)
    return best if prediction is None or layout.memory_shortage(cost.memory) else prediction


def _changes(paired: int, layout: Layout) -> Iterator[Layout]:
    """Yield layouts with one change each: a block moved, or a micro-batch moved between replicas that differ in devices
    or in their number of micro-batches.

    A block moves between any two stages, if the layout has at most `paired` of them: moves between neighbours alone end
    where a chain of them would make the step shorter, but each of them longer. In a longer pipeline, a block moves
    between neighbouring stages, or between stages of one pipeline rank.
    """
    last, rank_of = len(layout.blocks) - 1, layout.rank_of_stage
    for giver, taker in permutations(range(last + 1), 2):
        if last >= paired and abs(giver - taker) > 1 and rank_of[giver] != rank_of[taker]:
            continue
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
    """Return the plan `best` with one cut, the nearest to the seam, moved to the seam; or `best` as it is.

    The seam is where the decoder of an encoder-decoder begins. The cut moves only if the new layout fits the memory and
    its step is at most `max_slowdown` longer. The cost model gives the messages of all cuts the size of the largest, so
    it does not see that messages at the seam are smaller.

    Args:
        max_slowdown: largest allowed increase of the step's time, as a share of the time of `best`.
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


def pack_within_nodes(space: SearchSpace, layout: Layout, best: Prediction) -> Prediction:
    """Return the fastest plan among `best` and versions of a layout whose stages or pipelines are packed within nodes.

    The versions have the layout's degrees, schedule and micro-batch size. In two versions each pipeline rank of each
    replica gets devices with the same figures as before, and keeps its blocks and micro-batches; in the third, on the
    fastest devices, blocks and micro-batches are distributed anew.

    Args:
        layout: a layout of the space.
    """
    if 1 in (layout.pp, layout.dp):
        return best
    units = space.units(layout.tp)
    for placement in same_kinds(units, layout.placement):
        if space.can_shard(placement):
            best = faster_of(space.cost, best, replace(layout, placement=placement))
    placement = stages_within_nodes(units, layout.pp, layout.dp)
    if space.can_shard(placement):
        best = faster_of(space.cost, best, space.fit_layout(placement, layout.option))
    return best


def same_kinds(units: Sequence[TensorParallelGroup], placement: Placement) -> Iterator[Placement]:
    """Yield two placements whose devices at each pipeline rank of each replica have the same figures (`GroupSpec`) as
    those of the given placement.

    In the first placement, the groups of each stage (one for each replica) are packed within nodes; in the second, the
    groups of each pipeline.

    Args:
        units: the tensor-parallel groups to choose from, including those of the placement.
    """
    kinds = list(dict.fromkeys(unit.group_spec for unit in units))
    classes = [[unit for unit in units if unit.group_spec == kind] for kind in kinds]
    rows = _placed(classes, [[kinds.index(unit.group_spec) for unit in row] for row in placement])
    by_rank = zip(*placement, strict=True)
    columns = _placed(classes, [[kinds.index(unit.group_spec) for unit in column] for column in by_rank])
    yield Placement(zip(*columns, strict=True))
    yield Placement(rows)


def stages_within_nodes(units: Sequence[TensorParallelGroup], pp: int, dp: int) -> Placement:
    """Return a placement of the pp × dp fastest tensor-parallel groups, with stages packed within nodes.

    Every stage has its faster groups in the same replicas, so that as few replicas as possible wait for slow groups.
    """
    fastest = sorted(units, key=lambda unit: (-unit.flops, unit.index))[: pp * dp]
    stages = groups_within_nodes([fastest], [[dp]] * pp)
    return Placement(zip(*(sorted(stage, key=lambda unit: -unit.flops) for stage in stages), strict=True))


def groups_within_nodes(
    classes: Sequence[Sequence[TensorParallelGroup]], needs: Sequence[Sequence[int]]
) -> list[list[TensorParallelGroup]]:
    """Assign tensor-parallel groups to sets, such as stages or pipelines, each within the node that it fills best, or
    across few nodes.

    Sets that fit into one node are assigned first. Each other set takes the nodes that have most of what it needs.

    Args:
        classes: tensor-parallel groups by class; there are enough of each.
        needs: [set] -> number of groups of each class.

    Returns:
        [set] -> its groups, class by class.
    """
    unused: dict[str, list[list[TensorParallelGroup]]] = {}
    for number, units in enumerate(classes):
        for unit in units:
            unused.setdefault(unit.node, [[] for _ in classes])[number].append(unit)
    free = {node: sum(map(len, units)) for node, units in unused.items()}
    groups: list[list[list[TensorParallelGroup]]] = [[[] for _ in classes] for _ in needs]

    def has(node: str, need: Sequence[int]) -> int:
        return sum(min(asked, len(units)) for asked, units in zip(need, unused[node], strict=True))

    def take(node: str, group: int, need: list[int]) -> None:
        for number, units in enumerate(unused[node]):
            taken, unused[node][number] = units[: need[number]], units[need[number] :]
            groups[group][number] += taken
            need[number] -= len(taken)
            free[node] -= len(taken)

    split = []
    for group, asked in enumerate(needs):
        whole = [node for node in unused if has(node, asked) == sum(asked)]
        if whole:
            take(min(whole, key=free.__getitem__), group, list(asked))
        else:
            split.append(group)
    for group in split:
        need = list(needs[group])
        while any(need):
            take(max(unused, key=lambda node: (has(node, need), -free[node])), group, need)
    return [[unit for units in group for unit in units] for group in groups]


def _placed(
    classes: Sequence[Sequence[TensorParallelGroup]], kinds: Sequence[Sequence[int]]
) -> list[tuple[TensorParallelGroup, ...]]:
    """Assign tensor-parallel groups to sets (stages or pipelines), packed within nodes, with a group of a given class
    at each position of a set: a replica of the stage, or a pipeline rank of the pipeline. Return [set][position].

    Args:
        classes: tensor-parallel groups by class.
        kinds: [set][position] -> class.
    """
    needs = [[group.count(number) for number in range(len(classes))] for group in kinds]
    placed = []
    for group, wanted in zip(groups_within_nodes(classes, needs), kinds, strict=True):
        # `groups_within_nodes` lists the groups of a set class by class.
        order = sorted(range(len(wanted)), key=wanted.__getitem__)
        by_place = dict(zip(order, group, strict=True))
        placed.append(tuple(by_place[place] for place in range(len(wanted))))
    return placed
