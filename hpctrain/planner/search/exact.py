"""Exhaustive search on a few devices: every order of them, cut, split of the batch, schedule and memory options."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import get_args

from hpctrain.base.errors import InputError
from hpctrain.planner.cost.memory_options import DEFAULT_MEMORY_OPTIONS, MemoryOptions
from hpctrain.planner.cost.workload import ScheduleSpec
from hpctrain.planner.devices.tensor_parallel_group import interchangeable_classes
from hpctrain.planner.layout.layout import Layout
from hpctrain.planner.layout.partition import why_no_layout
from hpctrain.planner.layout.placement import all_placements
from hpctrain.planner.search.best_first import SearchResult, best_first_search
from hpctrain.planner.search.option_search import Search
from hpctrain.planner.simulate.predict import lower_bound, predict
from hpctrain.records.plan.parallel_dims import ParallelDims
from hpctrain.records.plan.plan import Recompute, ZeroLevel

MAX_DEVICES = 8
MAX_CUTS = 20_000
"""Largest number of cuts times splits of the batch for one order of devices."""


def exhaustive_search(plain: Search, candidate_dims: list[ParallelDims]) -> SearchResult:
    """Return the fastest of all plans by the cost model; its bound is its own time.

    Plans with memory options are tried only if no other fits.

    Raises:
        InputError: there are too many plans to try all.
    """
    devices = len(plain.pool.devices)
    if devices > MAX_DEVICES:
        raise InputError(f"--solver exact: found {devices} devices, allowed: up to {MAX_DEVICES}; use --solver auto")
    start = best_first_search(plain, candidate_dims)
    # A start that saves memory is no limit for plans that do without: these are preferred even if slower.
    found = _fastest([plain], start if start.search is plain else SearchResult(plain, None, math.inf, ended=True))
    if found.best is None and plain.work.fixed is None:
        found = _fastest([plain.with_memory_options(memory_options) for memory_options in _all_memory_options()], start)
    return found


def _fastest(searches: Iterable[Search], found: SearchResult) -> SearchResult:
    """The fastest plan of all searches, or `found` if none is faster."""
    best, winner = found.best, found.search
    for search in searches:
        for dims, schedule_spec, size in search.options(search.candidate_dims()):
            pp, dp, tp = dims
            bound = search.closed_form_bound.step_s(search.unit_counts(tp), pp, dp, schedule_spec, size)
            if (best is not None and bound >= best.total) or why_no_layout(search.cost, pp, dp, schedule_spec, size):
                continue
            for layout in _layouts(search, dims, schedule_spec, size):
                limit = math.inf if best is None else best.total * (1 - 1e-9)
                if lower_bound(search.cost, layout) >= limit or layout.memory_shortage(search.cost.memory):
                    continue
                made = predict(search.cost, layout)
                if made.total < limit:
                    best, winner = made, search
    return SearchResult(winner, best, math.inf if best is None else best.total, ended=True)


def _all_memory_options() -> Iterator[MemoryOptions]:
    """All memory options but the default, which saves nothing."""
    levels: tuple[ZeroLevel, ...] = get_args(ZeroLevel)
    kinds: tuple[Recompute, ...] = get_args(Recompute)
    for zero, recompute, sequence in itertools.product(levels, kinds, (False, True)):
        memory_options = MemoryOptions(zero=zero, recompute=recompute, sequence_parallel=sequence)
        if memory_options != DEFAULT_MEMORY_OPTIONS:
            yield memory_options


def _layouts(search: Search, dims: ParallelDims, schedule_spec: ScheduleSpec, size: int) -> Iterator[Layout]:
    pp, dp, tp = dims
    work, stages = search.work, pp * schedule_spec.virtual_stages
    split = tp > 1 and work.spec.supports_sequence_parallel and work.seq_len % tp == 0
    if work.memory_options.sequence_parallel and not split:
        return
    total = work.sequences // size
    counts = [(total // dp,) * dp] if work.memory_options.equal_micro_batches else list(compositions(total, dp, 1))
    cuts = [blocks for blocks in compositions(work.spec.layers, stages, 0) if all(blocks[1:-1])]
    if len(counts) * len(cuts) > MAX_CUTS:
        raise InputError(
            f"--solver exact: found {len(counts) * len(cuts)} cuts and shares of the batch for pp {pp} × dp {dp}, "
            f"allowed: up to {MAX_CUTS}; use --solver auto, or a model with fewer layers and a smaller batch.global"
        )
    units = search.units(tp)[0]
    classes = interchangeable_classes(units, search.pool.links, work.stage_boundary_bytes(size), tolerance=0.0)
    for placement in all_placements(units, classes, pp, dp):
        if search.can_shard(placement):
            for blocks, share in itertools.product(cuts, counts):
                yield Layout(placement, schedule_spec.name, size, share, blocks, work.memory_options)


def compositions(total: int, parts: int, least: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write `total` as an ordered sum of `parts` numbers, each at least `least`."""
    if parts == 1:
        if total >= least:
            yield (total,)
        return
    for first in range(least, total + 1):
        for rest in compositions(total - first, parts - 1, least):
            yield (first, *rest)
