"""The solver `exact`: tries, on a few devices, every order of the devices, cut, division of the batch over replicas,
schedule and set of memory options."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Literal, get_args

from hpctrain.base.errors import InputError
from hpctrain.planner.cost.memory_options import MemoryOptions
from hpctrain.planner.devices.tensor_parallel_group import Placement, interchangeable_classes
from hpctrain.planner.layout.layout import Layout, Option
from hpctrain.planner.layout.placement import all_placements, count_placements
from hpctrain.planner.search.best_first import best_first_search
from hpctrain.planner.search.evaluate import faster_of
from hpctrain.planner.search.space import SearchSpace
from hpctrain.planner.search.state import SearchResult, may_split_sequences
from hpctrain.records.plan.plan import Recompute, ZeroLevel


def exhaustive_search(plain: SearchSpace) -> SearchResult:
    """Return the fastest of all plans by the cost model, with all memory options if the run file fixes no degrees. The
    lower bound of the result is the plan's predicted time.

    Raises:
        InputError: there are too many devices, or too many plans, to try all. This is known before any plan is tried.
    """
    devices, limits = len(plain.pool.devices), plain.limits
    if devices > limits.max_exact_devices:
        raise InputError(
            f"--solver exact: found {devices} devices, allowed: up to {limits.max_exact_devices}; use --solver auto"
        )
    spaces = [plain]
    if plain.work.fixed is None:
        shard: Literal["all", "node"] = "all" if plain.work.may_shard_gradients else "node"
        choices = itertools.product(get_args(ZeroLevel), get_args(Recompute), (False, True))
        _, *others = (
            MemoryOptions(zero, shard=shard if zero else "all", recompute=recompute, sequence_parallel=split)
            for zero, recompute, split in choices
        )
        spaces += [plain.with_work(memory_options=memory_options) for memory_options in others]
    result = best_first_search(plain)
    best, winner = result.best, result.space
    options = [
        (space, option)
        for space in spaces
        for option in space.options(space.candidate_dims)
        if may_split_sequences(space.work, option.dims.tp) or not space.work.memory_options.sequence_parallel
        if not space.why_no_layout(option) and (best is None or space.bounds.step_s(option) < best.total)
    ]
    count = sum(_exact_parts(space, option)[0] for space, option in options)
    if count > limits.max_exact_layouts:
        raise InputError(
            f"--solver exact: found {count} plans that may be the fastest, allowed: up to {limits.max_exact_layouts}; "
            "use --solver auto, or a model with fewer layers and a smaller batch.global"
        )
    for space, option in sorted(options, key=lambda pair: pair[0].bounds.step_s(pair[1])):
        if best is not None and space.bounds.step_s(option) >= best.total:
            continue
        for layout in _layouts(space, option):
            prediction = faster_of(space.cost, best, layout, rounding=1e-9)
            if prediction is not best:
                best, winner = prediction, space
    return SearchResult(winner, best, math.inf if best is None else best.total, ended=True)


def _exact_parts(space: SearchSpace, option: Option) -> tuple[int, Iterator[Placement]]:
    """Return the number of placements, cuts and divisions of the batch of an option together, and its placements.

    The number counts placements that differ only by an exchange of replicas or of equal devices once, and all orders of
    the shares of the batch.
    """
    pp, dp, tp = option.dims
    work, size = space.work, option.micro_batch
    units = space.units(tp)
    classes = interchangeable_classes(units, space.pool.links, work.stage_boundary_bytes(size), tolerance=0.0)
    placements = count_placements(classes, pp, dp)
    middle = max(0, option.stages - 2)
    cuts = math.comb(work.spec.layers - middle + option.stages - 1, option.stages - 1)
    shares = 1 if work.memory_options.equal_micro_batches else math.comb(work.sequences // size - 1, dp - 1)
    return placements * cuts * shares, all_placements(units, classes, pp, dp)


def _layouts(space: SearchSpace, option: Option) -> Iterator[Layout]:
    """Yield all layouts of an option."""
    work, size, dp = space.work, option.micro_batch, option.dims.dp
    total = work.sequences // size
    counts = [(total // dp,) * dp] if work.memory_options.equal_micro_batches else list(compositions(total, dp, 1))
    cuts = [blocks for blocks in compositions(work.spec.layers, option.stages, 0) if all(blocks[1:-1])]
    for placement in _exact_parts(space, option)[1]:
        if space.can_shard(placement):
            for blocks, share in itertools.product(cuts, counts):
                yield Layout(placement, option.schedule_spec.name, size, share, blocks, work.memory_options)


def compositions(total: int, parts: int, least: int) -> Iterator[tuple[int, ...]]:
    """Yield all tuples of `parts` numbers that add up to `total`, each number at least `least`."""
    end = total - parts * least + parts - 1
    if end < parts - 1:
        return
    for bars in itertools.combinations(range(end), parts - 1):
        yield tuple(b - a - 1 + least for a, b in itertools.pairwise((-1, *bars, end)))
