"""Solvers: each returns the best plan of a space, or raises the reason why there is none.

The exhaustive one tries every order of a few devices, cut, split of the batch, schedule and memory options.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Literal, get_args

from hpctrain.base.errors import HpctrainError, InputError, RefusedError
from hpctrain.base.units import format_count
from hpctrain.planner.cost.memory_options import DEFAULT_MEMORY_OPTIONS, MemoryOptions
from hpctrain.planner.devices.tensor_parallel_group import interchangeable_classes
from hpctrain.planner.layout.layout import Layout, MemoryShortage, Option
from hpctrain.planner.layout.placement import all_placements
from hpctrain.planner.search.best_first import best_first_search
from hpctrain.planner.search.evaluate import faster_of, refine
from hpctrain.planner.search.neighbours import WHY_NO_SHARDING, shortage
from hpctrain.planner.search.paper import solve_as_paper
from hpctrain.planner.search.space import SearchSpace
from hpctrain.planner.search.state import ChosenPlan, SearchResult
from hpctrain.planner.simulate.predict import predict
from hpctrain.records.plan.plan import Recompute, Rejected, ZeroLevel

Solver = Literal["auto", "exact", "paper"]


def solve(space: SearchSpace, solver: Solver) -> ChosenPlan:
    """Return the fastest plan; a plan with memory options only if no plan fits without them.

    Args:
        solver: 'auto' searches for the fastest plan by the cost model; 'exact' tries every plan on a few devices;
            'paper' follows the paper's rules.

    Raises:
        RefusedError: no plan fits even with memory options.
        InputError: no layout is possible with the given degrees and batch.
    """
    if not space.candidate_dims:
        raise _no_feasible_dims(space)
    if solver == "paper":
        return solve_as_paper(space)
    result = exhaustive_search(space) if solver == "exact" else best_first_search(space)
    if result.best is None:
        raise _nothing_fits(_leanest(space))
    winner = result.space
    notes: list[str] = []
    rejected: list[Rejected] = []
    if winner is not space:
        notes.append(f"Chosen to save memory: {result.best.layout.memory_options}.")
        rejected.append(_why_memory_options(space, result.best.layout))
    if not winner.pool_placements.complete:
        notes.append("There were too many orders of devices to try all; the likely ones were tried.")
    if not result.ended:
        notes.append("Options that could be faster by the bound were left when many others had not been.")
    best = predict(winner.cost, refine(winner, result.best).layout, whole=True)
    return ChosenPlan(winner, best, rejected, notes, min(result.bound_s, best.total))


def _leanest(plain: SearchSpace) -> SearchSpace:
    """Return the space with the memory options that need the least memory and leave candidates."""
    if plain.work.fixed is not None:
        return plain
    levels: tuple[ZeroLevel, ...] = get_args(ZeroLevel)[::-1] if plain.work.may_shard_gradients else (0,)
    lean = (plain.with_work(memory_options=MemoryOptions(zero=zero, recompute="full")) for zero in levels)
    return next((space for space in lean if space.candidate_dims), plain)


def _why_memory_options(plain: SearchSpace, layout: Layout) -> Rejected:
    """Return the rejected neighbour that has the layout's degrees and no memory options."""
    lack = plain.fit_layout(layout.placement, layout.option).memory_shortage(plain.cost.memory)
    reason = "no placement of it fits" if lack is None else str(lack)
    return Rejected(change="zero 0 and recompute none", reason=f"with {layout.dims}, {reason}")


def _no_feasible_dims(space: SearchSpace) -> HpctrainError:
    """Return the error for impossible degrees.

    It is a RefusedError if there are too few devices, an InputError if the model does not allow the degrees.
    """
    dims, reason = next(iter(space.impossible.items()))
    text = f"parallel: found {dims}; {reason}"
    if math.prod(dims) > len(space.pool.devices):
        return RefusedError(f"{text}; lower a degree or add nodes")
    return InputError(f"{text}; lower a degree, or use parallel.mode auto")


def _nothing_fits(space: SearchSpace) -> HpctrainError:
    """Return the error for a space in which no plan fits.

    It names the degrees that lack the least memory, or another reason if no memory is lacking.
    """
    work = space.work
    lacks = [(dims, shortage(space, dims)) for dims in space.candidate_dims]
    short = [(dims, lack) for dims, lack in lacks if isinstance(lack, MemoryShortage)]
    if not short:
        reason = next(lack for _, lack in lacks if isinstance(lack, str))
        change = "; change batch.global, a degree, parallel.micro_batch or parallel.schedule"
        return InputError(f"parallel: {reason}{change * (reason != WHY_NO_SHARDING)}")
    dims, excess = min(short, key=lambda item: (item[1].ratio, item[0]))
    how = f" and {work.memory_options}" if work.memory_options != DEFAULT_MEMORY_OPTIONS else ""
    return RefusedError(
        f"the model ({format_count(work.spec.parameters())} parameters) cannot fit: with {dims}{how}, "
        f"the nearest to fitting, {excess}; use more or larger devices, a smaller model or "
        "data.seq_len"
        + (", or compression.mode bf16, which keeps nothing" if work.codec.has_state else "")
        + (", or parallel.mode auto" if work.fixed is not None else "")
    )


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
        _, *lean = itertools.product(get_args(ZeroLevel), get_args(Recompute), (False, True))  # the first saves nothing
        given = (MemoryOptions(zero, recompute=recompute, sequence_parallel=split) for zero, recompute, split in lean)
        return _fastest([plain.with_work(memory_options=memory_options) for memory_options in given], start)
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
