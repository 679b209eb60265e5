"""Search on more than `EXHAUSTIVE_DEVICES` devices, and on their parts.

On a slow network or with a small batch, a plan for few nodes may be faster than any plan for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from hpctrain.planner.bounds.closed_form import ideal_step_s
from hpctrain.planner.devices.pool import DevicePool
from hpctrain.planner.devices.tensor_parallel_group import Placement
from hpctrain.planner.search.best_first import best_first_search
from hpctrain.planner.search.evaluate import pack_within_nodes, refine
from hpctrain.planner.search.option_search import OptionSearch
from hpctrain.planner.search.space import EXHAUSTIVE_DEVICES, SearchSpace
from hpctrain.planner.search.state import SearchResult, SearchState
from hpctrain.planner.simulate.predict import Prediction, predict


def search_pool(whole: SearchSpace) -> SearchResult:
    """Return the fastest plan of the searches on a pool and on its parts (`parts_of`), with a lower bound for all plans
    of the pool. Local search improves each plan (`refine`), and the plan's prediction is not extrapolated.

    Parts are searched on more than `EXHAUSTIVE_DEVICES` devices, and not if the plan replaces another one.

    Args:
        whole: the space with the memory options of the run file.
    """
    if len(whole.pool.devices) <= EXHAUSTIVE_DEVICES:
        return refined(best_first_search(whole))
    result = refined(_search_many_devices(whole))
    if whole.replaces or result.best is None:
        return result
    for pool in parts_of(whole.pool, result.best, whole.limits.max_halved_devices):
        best, part = result.best, SearchSpace(pool, whole.cost, whole.limits)
        if len(pool.devices) > whole.limits.max_part_devices or ideal_step_s(pool, whole.work) >= best.total:
            continue
        found = _search_part(part, whole.limits.near_best_factor * best.total)
        if found is not None and found.best is not None and found.best.total < best.total:
            result = _in_whole(whole, result, found.best)
    return result


def refined(result: SearchResult) -> SearchResult:
    """Return the result with its plan improved by local search (`refine`) and predicted without extrapolation."""
    if result.best is None:
        return result
    layout = refine(result.space, result.best).layout
    return result._replace(best=predict(result.space.cost, layout, whole=True))


def parts_of(pool: DevicePool, best: Prediction, max_halved: int) -> Iterator[DevicePool]:
    """Yield parts of a pool: the nodes of each kind, if there are several kinds; the faster half of the nodes; the
    first and the second half in the topology's order; and the nodes of the best plan, if it leaves nodes idle. Nodes
    with the same types of devices are of one kind.

    Args:
        max_halved: largest number of devices of a pool that is halved.
    """
    nodes = pool.by_node()
    names, half = list(nodes), len(nodes) // 2
    by_kind: dict[frozenset[str], list[str]] = {}
    for name, devices in nodes.items():
        by_kind.setdefault(frozenset(device.type for device in devices), []).append(name)
    chosen = list(by_kind.values())
    if len(pool.devices) <= max_halved and half:
        by_speed = sorted(names, key=lambda name: -sum(device.flops for device in nodes[name]))
        chosen += [by_speed[:half], names[:half], names[half:]]
    chosen.append([unit.node for row in best.layout.placement for unit in row])
    for some in dict.fromkeys(map(frozenset, chosen)):
        if len(some) < len(nodes):
            yield _only(pool, some)


def _search_many_devices(plain: SearchSpace) -> SearchResult:
    """Return the best plan of a search near good options (`OptionSearch`), and a lower bound for all plans."""
    state = SearchState(plain)
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


def _search_part(part: SearchSpace, near_s: float) -> SearchResult | None:
    """Return the result of the search on a part; None if the part has few devices and its quickly found plan takes
    `near_s` seconds or more. A search on few devices takes longer than one on many."""
    if not part.candidate_dims:
        return None
    if len(part.pool.devices) > EXHAUSTIVE_DEVICES:
        return refined(_search_many_devices(part))
    state = SearchState(part)
    OptionSearch(state).run()
    if state.best is None or state.best.total >= near_s:
        return None
    return refined(best_first_search(part))


def _only(pool: DevicePool, nodes: Iterable[str]) -> DevicePool:
    wanted = set(nodes)
    return replace(pool, devices=tuple(device for device in pool.devices if device.node in wanted))


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
