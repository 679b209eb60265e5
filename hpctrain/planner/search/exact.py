"""Every plan on a few devices: each order of them, each cut, each share of the batch, each schedule, each saving."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import get_args

from hpctrain.base.errors import InputError
from hpctrain.planner.cost.memory_options import NO_SAVING, Saving
from hpctrain.planner.cost.workload import Order
from hpctrain.planner.devices.tensor_parallel_group import alike_classes
from hpctrain.planner.layout.degrees import Shape
from hpctrain.planner.layout.layout import Layout
from hpctrain.planner.layout.partition import why_undefined
from hpctrain.planner.layout.placement import every_placement
from hpctrain.planner.search.best_first import Found, find_fastest
from hpctrain.planner.search.option_search import Search
from hpctrain.planner.simulate.predict import lower_bound, predict
from hpctrain.records.plan.plan import Recompute, ZeroLevel

MOST_DEVICES = 8
MOST_CUTS = 20_000
"""Cuts and shares of the batch of one order of devices."""


def find_exact(plain: Search, shapes: list[Shape]) -> Found:
    """The fastest of every plan, by the cost model; of those that save memory where no other fits. Its bound is its
    own time.

    Raises:
        InputError: there are too many plans to look at each.
    """
    devices = len(plain.fleet.workers)
    if devices > MOST_DEVICES:
        raise InputError(f"--solver exact: found {devices} devices, allowed: up to {MOST_DEVICES}; use --solver auto")
    start = find_fastest(plain, shapes)
    # What `auto` found by saving memory is nothing to beat for a plan that need not.
    found = _fastest([plain], start if start.search is plain else Found(plain, None, math.inf, ended=True))
    if found.best is None and plain.work.fixed is None:
        found = _fastest([plain.saving(saving) for saving in _savings()], start)
    return found


def _fastest(searches: Iterable[Search], found: Found) -> Found:
    """The fastest plan of all searches that is faster than what was found."""
    best, winner = found.best, found.search
    for search in searches:
        for shape, order, size in search.options(search.shapes()):
            pp, dp, tp = shape
            bound = search.bounds.step_s(search.crowd(tp), pp, dp, order, size)
            if (best is not None and bound >= best.total) or why_undefined(search.cost, pp, dp, order, size):
                continue
            for layout in _layouts(search, shape, order, size):
                limit = math.inf if best is None else best.total * (1 - 1e-9)
                if lower_bound(search.cost, layout) >= limit or layout.excess(search.cost.memory):
                    continue
                made = predict(search.cost, layout)
                if made.total < limit:
                    best, winner = made, search
    return Found(winner, best, math.inf if best is None else best.total, ended=True)


def _savings() -> Iterator[Saving]:
    """All but the one that saves nothing."""
    levels: tuple[ZeroLevel, ...] = get_args(ZeroLevel)
    kinds: tuple[Recompute, ...] = get_args(Recompute)
    for zero, recompute, sequence in itertools.product(levels, kinds, (False, True)):
        saving = Saving(zero=zero, recompute=recompute, sequence_parallel=sequence)
        if saving != NO_SAVING:
            yield saving


def _layouts(search: Search, shape: Shape, order: Order, size: int) -> Iterator[Layout]:
    pp, dp, tp = shape
    work, stages = search.work, pp * order.chunks
    split = tp > 1 and work.spec.splits_sequence and work.seq_len % tp == 0
    if work.saving.sequence_parallel and not split:
        return
    total = work.rows // size
    counts = [(total // dp,) * dp] if work.saving.equal_counts else list(compositions(total, dp, 1))
    cuts = [blocks for blocks in compositions(work.spec.layers, stages, 0) if all(blocks[1:-1])]
    if len(counts) * len(cuts) > MOST_CUTS:
        raise InputError(
            f"--solver exact: found {len(counts) * len(cuts)} cuts and shares of the batch for pp {pp} × dp {dp}, "
            f"allowed: up to {MOST_CUTS}; use --solver auto, or a model with fewer layers and a smaller batch.global"
        )
    units = search.units(tp)[0]
    classes = alike_classes(units, search.fleet.links, work.boundary_bytes(size), tolerance=0.0)
    for cells in every_placement(units, classes, pp, dp):
        if search.can_shard(cells):
            for blocks, share in itertools.product(cuts, counts):
                yield Layout(cells, order.schedule, size, share, blocks, work.saving)


def compositions(total: int, parts: int, least: int) -> Iterator[tuple[int, ...]]:
    """Ways to write a number as a sum of that many, each of at least `least`."""
    if parts == 1:
        if total >= least:
            yield (total,)
        return
    for first in range(least, total + 1):
        for rest in compositions(total - first, parts - 1, least):
            yield (first, *rest)
