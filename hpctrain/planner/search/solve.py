"""Solvers: each returns the best plan of a space, or raises the reason why there is none."""

from __future__ import annotations

import math
from typing import Literal, get_args

from hpctrain.base.errors import HpctrainError, InputError, RefusedError
from hpctrain.base.units import format_count
from hpctrain.planner.cost.memory_options import DEFAULT_MEMORY_OPTIONS, MemoryOptions
from hpctrain.planner.layout.layout import Layout, MemoryShortage
from hpctrain.planner.search.best_first import best_first_search
from hpctrain.planner.search.exact import exhaustive_search
from hpctrain.planner.search.local_search import refine
from hpctrain.planner.search.neighbours import WHY_NO_SHARDING, describe_memory_shortage, shortage
from hpctrain.planner.search.paper import solve_as_paper
from hpctrain.planner.search.space import SearchSpace
from hpctrain.planner.search.state import ChosenPlan
from hpctrain.planner.simulate.predict import predict
from hpctrain.records.plan.plan import Rejected, ZeroLevel

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
    lean = (plain.with_memory_options(MemoryOptions(zero=zero, recompute="full")) for zero in levels)
    return next((space for space in lean if space.candidate_dims), plain)


def _why_memory_options(plain: SearchSpace, layout: Layout) -> Rejected:
    """Return the rejected neighbour that has the layout's degrees and no memory options."""
    lack = plain.fit_layout(layout.placement, layout.option).memory_shortage(plain.cost.memory)
    reason = "no placement of it fits" if lack is None else describe_memory_shortage(lack)
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
        f"the nearest to fitting, {describe_memory_shortage(excess)}; use more or larger devices, a smaller model or "
        "data.seq_len"
        + (", or compression.mode bf16, which keeps nothing" if work.codec.has_state else "")
        + (", or parallel.mode auto" if work.fixed is not None else "")
    )
