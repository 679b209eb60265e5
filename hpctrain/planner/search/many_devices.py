"""Search on more than `EXHAUSTIVE_DEVICES` devices, and on their parts.

On a slow network or with a small batch, a plan for few nodes may be faster than any plan for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import inf, prod

from hpctrain.planner.bounds.closed_form import ideal_step_s
from hpctrain.planner.devices.pool import DevicePool
from hpctrain.planner.devices.tensor_parallel_group import Placement
from hpctrain.planner.limits import limit_of
from hpctrain.planner.search.best_first import best_first_search
from hpctrain.planner.search.evaluate import pack_within_nodes, refine
from hpctrain.planner.search.option_search import OptionSearch
from hpctrain.planner.search.space import EXHAUSTIVE_DEVICES, SearchSpace
from hpctrain.planner.search.state import SearchResult, SearchState, UnopenedCandidate
from hpctrain.planner.simulate.predict import Prediction, predict

LEAST_USED = 7 / 8
"""Share of the devices that the plans use with which a search begins."""
MISFIT_FACTOR = 3
"""An option that does not fit the memory uses up this many times less patience than one that fits."""


def search_pool(whole: SearchSpace) -> SearchResult:
    """Return the fastest plan of the searches on a pool and on its parts (`parts_of`), with a lower bound for all plans
    of the pool. Local search has improved each plan (`refine`), and the plan's prediction is not extrapolated.

    Parts are searched on more than `EXHAUSTIVE_DEVICES` devices, and not if the plan replaces another one.

    Args:
        whole: the space with the memory options of the run file.
    """
    if len(whole.pool.devices) <= EXHAUSTIVE_DEVICES:
        return predicted_in_full(best_first_search(whole))
    result = refined(_search_many_devices(whole, inf))
    if whole.replaces or result.best is None:
        return result
    for pool in parts_of(whole.pool, result.best, whole.limits.max_halved_devices):
        best, part = result.best, SearchSpace(pool, whole.cost, whole.limits)
        if len(pool.devices) > whole.limits.max_part_devices or not part.candidate_dims:
            continue
        if ideal_step_s(pool, whole.work) >= best.total:
            continue
        many = len(pool.devices) > EXHAUSTIVE_DEVICES
        of_part = _search_many_devices(part, best.total) if many else best_first_search(part, best.total)
        if of_part.best is None or of_part.best.total >= whole.limits.near_best_factor * best.total:
            continue
        better = (refined(of_part) if many else predicted_in_full(of_part)).best
        if better is not None and better.total < best.total:
            result = _in_whole(whole, result, better)
    return result


def refined(result: SearchResult) -> SearchResult:
    """Return the result with its plan improved by local search (`refine`) and predicted without extrapolation."""
    if result.best is None:
        return result
    return predicted_in_full(result._replace(best=refine(result.space, result.best)))


def predicted_in_full(result: SearchResult) -> SearchResult:
    """Return the result with its plan predicted without extrapolation."""
    if result.best is None:
        return result
    return result._replace(best=predict(result.space.cost, result.best.layout, whole=True))


def parts_of(pool: DevicePool, best: Prediction, max_halved: int) -> Iterator[DevicePool]:
    """Yield parts of a pool: the nodes of each kind, if there are several kinds; the faster half of all nodes, and of
    those of a kind with many devices; the first and the second half in the topology's order; and the nodes of the best
    plan, if they are at most half of all. Nodes with the same types of devices are of one kind.

    Args:
        max_halved: largest number of devices of a pool that is halved.
    """
    nodes = pool.by_node()
    names, half = list(nodes), len(nodes) // 2
    by_kind: dict[frozenset[str], list[str]] = {}
    for name, devices in nodes.items():
        by_kind.setdefault(frozenset(device.type for device in devices), []).append(name)
    chosen = list(by_kind.values())
    if len(pool.devices) <= max_halved:
        # A search on few devices tries all numbers of replicas, so halves of few are no new parts.
        large = [some for some in chosen if sum(len(nodes[name]) for name in some) > EXHAUSTIVE_DEVICES]
        for some in [names, *large]:
            by_speed = sorted(some, key=lambda name: -sum(device.flops for device in nodes[name]))
            chosen.append(by_speed[: len(some) // 2])
        chosen += [names[:half], names[half:]]
    used = {unit.node for row in best.layout.placement for unit in row}
    if len(used) <= half:
        chosen.append(list(used))
    for wanted in dict.fromkeys(map(frozenset, chosen)):
        if 0 < len(wanted) < len(nodes):
            yield replace(pool, devices=tuple(device for device in pool.devices if device.node in wanted))


def _search_many_devices(plain: SearchSpace, limit_s: float) -> SearchResult:
    """Return the best plan of a search in the order of the bounds and of one near good options (`OptionSearch`), and a
    lower bound for all plans.

    Args:
        limit_s: seconds of the step of a plan that is known already.
    """
    state = SearchState(plain, limit_s)
    _search_by_bounds(state)
    search = OptionSearch(state)
    search.run()
    for known in search.fastest(state.limits.full_evaluations_of_many):
        state.evaluate(known.space, known.option)
    if state.best is not None and len(plain.pool.devices) <= state.limits.max_packed_devices:
        state.take(pack_within_nodes(state.winner, state.best.layout, state.best), state.winner)
    if plain.work.fixed is None:
        return state.result(ideal_step_s(plain.pool, plain.work), ended=False)
    options = plain.options(plain.candidate_dims)
    bounds = (plain.bounds.step_s(option) for option in options if not plain.why_no_layout(option))
    return state.result(min(bounds, default=0.0), ended=False)


def _search_by_bounds(state: SearchState) -> None:
    """Evaluate options in the order of their bounds, with most of the devices, until for each pair of pp and tp too
    many options in a row brought no better plan (`patience_by_devices`)."""
    candidates, limits, plain = state.candidates, state.limits, state.plain
    devices = len(plain.pool.devices)
    patience = limit_of(limits.patience_by_devices, devices)
    patience = MISFIT_FACTOR * (limits.replan_patience if plain.replaces else patience)
    used: Counter[tuple[int, int]] = Counter()
    candidates.fill(
        [
            dims
            for dims in plain.candidate_dims
            if (plain.work.spec.layers % dims.pp == 0 or dims.pp & (dims.pp - 1) == 0)
            and (prod(dims) >= LEAST_USED * devices or dims.dp == plain.work.sequences)
        ]
    )
    evaluations = limits.replan_evaluations if plain.replaces else inf
    while candidates.queue and evaluations > 0:
        candidate = candidates.pop()
        pp, _, tp = candidate.dims
        if not state.can_win(candidate) or (state.best is not None and used[pp, tp] >= patience):
            continue
        if isinstance(candidate, UnopenedCandidate):
            candidates.open(candidate, state.best)
            continue
        bounds, before = candidate.space.bounds, state.best
        if bounds.is_too_large(candidate.option) or not bounds.may_fit(candidate.option):
            candidates.push_leaner_options(candidate)
            continue
        fits = state.evaluate_sampled(candidate.space, candidate.option).fits
        evaluations -= 1
        used[pp, tp] = 0 if state.best is not before else used[pp, tp] + (MISFIT_FACTOR if fits else 1)
        if not fits:
            candidates.push_leaner_options(candidate)
    state.try_variants_of_best()


def _in_whole(whole: SearchSpace, result: SearchResult, best: Prediction) -> SearchResult:
    """Return the result with a part's plan, whose tensor-parallel groups are those of the whole pool where it has the
    same groups."""
    layout = best.layout
    units = {unit.device_ids: unit for unit in whole.units(layout.tp)}
    placement = Placement(tuple(units.get(unit.device_ids, unit) for unit in row) for row in layout.placement)
    options = layout.memory_options
    space = whole if options == whole.work.memory_options else whole.with_work(memory_options=options)
    best = replace(best, layout=replace(layout, placement=placement))
    return SearchResult(space, best, min(result.bound_s, best.total), result.ended)
