"""Exhaustive search on a few devices: every order of devices, cut, split of the batch, schedule and memory options."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import get_args

from hpctrain.base.errors import InputError
from hpctrain.planner.cost.memory_options import DEFAULT_MEMORY_OPTIONS, MemoryOptions
from hpctrain.planner.devices.tensor_parallel_group import interchangeable_classes
from hpctrain.planner.layout.layout import Layout, Option
from hpctrain.planner.layout.placement import all_placements
from hpctrain.planner.search.best_first import best_first_search
from hpctrain.planner.search.local_search import faster_of
from hpctrain.planner.search.space import SearchSpace
from hpctrain.planner.search.state import SearchResult
from hpctrain.records.plan.plan import Recompute, ZeroLevel


def exhaustive_search(plain: SearchSpace) -> SearchResult:
    """Return the fastest of all plans by the cost model; its lower bound is its predicted time.

    Plans with memory options are tried only if no other plan fits.

    Raises:
        InputError: there are too many plans to try all.
    """
    devices, most = len(plain.pool.devices), plain.limits.max_exact_devices
    if devices > most:
        raise InputError(f"--solver exact: found {devices} devices, allowed: up to {most}; use --solver auto")
    start = best_first_search(plain)
    # A warm start with memory options does not limit plans without them: these are preferred even if slower.
    result = _fastest([plain], start if start.space is plain else SearchResult(plain, None, math.inf, ended=True))
    if result.best is None and plain.work.fixed is None:
        return _fastest([plain.with_memory_options(memory_options) for memory_options in _all_memory_options()], start)
    return result


def _fastest(spaces: Iterable[SearchSpace], start: SearchResult) -> SearchResult:
    """Return the fastest plan of all spaces, or `start` if none is faster."""
    best, winner = start.best, start.space
    for space in spaces:
        for option in space.options(space.candidate_dims):
            too_slow = best is not None and space.bounds.step_s(option) >= best.total
            if too_slow or space.why_no_layout(option):
                continue
            for layout in _layouts(space, option):
                prediction = faster_of(space.cost, best, layout, rounding=1e-9)
                if prediction is not best:
                    best, winner = prediction, space
    return SearchResult(winner, best, math.inf if best is None else best.total, ended=True)


def _all_memory_options() -> Iterator[MemoryOptions]:
    """Yield all memory options except the default, which saves no memory."""
    for zero, recompute, split in itertools.product(get_args(ZeroLevel), get_args(Recompute), (False, True)):
        memory_options = MemoryOptions(zero=zero, recompute=recompute, sequence_parallel=split)
        if memory_options != DEFAULT_MEMORY_OPTIONS:
            yield memory_options


def _layouts(space: SearchSpace, option: Option) -> Iterator[Layout]:
    pp, dp, tp = option.dims
    work, size = space.work, option.micro_batch
    split = tp > 1 and work.spec.supports_sequence_parallel and work.seq_len % tp == 0
    if work.memory_options.sequence_parallel and not split:
        return
    total = work.sequences // size
    counts = [(total // dp,) * dp] if work.memory_options.equal_micro_batches else list(compositions(total, dp, 1))
    cuts = [blocks for blocks in compositions(work.spec.layers, option.stages, 0) if all(blocks[1:-1])]
    if len(counts) * len(cuts) > space.limits.max_exact_cuts:
        raise InputError(
            f"--solver exact: found {len(counts) * len(cuts)} cuts and shares of the batch for pp {pp} × dp {dp}, "
            f"allowed: up to {space.limits.max_exact_cuts}; use --solver auto, or a model with fewer layers and a "
            "smaller batch.global"
        )
    units = space.units(tp)
    classes = interchangeable_classes(units, space.pool.links, work.stage_boundary_bytes(size), tolerance=0.0)
    for placement in all_placements(units, classes, pp, dp):
        if space.can_shard(placement):
            for blocks, share in itertools.product(cuts, counts):
                yield Layout(placement, option.schedule_spec.name, size, share, blocks, work.memory_options)


def compositions(total: int, parts: int, least: int) -> Iterator[tuple[int, ...]]:
    """Yield all ordered sums of `parts` numbers that add up to `total`, each number at least `least`."""
    end = total - parts * least + parts - 1
    if end < parts - 1:
        return
    for bars in itertools.combinations(range(end), parts - 1):
        yield tuple(b - a - 1 + least for a, b in itertools.pairwise((-1, *bars, end)))
