"""Simulated annealing of a plan: devices, blocks, micro-batches, schedule and memory options change, several at once.

Changes of one thing at a time (`hpctrain.planner.search.evaluate.refine`) end where no single change makes the step
shorter.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from hpctrain.planner.devices.tensor_parallel_group import Placement, TensorParallelGroup
from hpctrain.planner.layout.layout import Layout
from hpctrain.planner.search.space import SearchSpace
from hpctrain.planner.search.state import CandidateQueue
from hpctrain.planner.simulate.predict import Prediction, TimedLayout

SIMULATED_PASSES = 6
"""About how many micro-batches a pipeline rank are simulated."""
ACTIONS_OF_A_GROUP = 100
"""Number of simulated actions that take as long as one tensor-parallel group in the other steps of a prediction."""
GROUPS_OF_A_TRY = 3
"""Number of tensor-parallel groups that take as long as the part of a try that does not depend on their number."""
OPTION_SHARE = 0.1
"""Share of the random changes that concern the micro-batch size, the schedule or the memory options."""


def anneal(
    candidates: CandidateQueue,
    start: SearchSpace,
    plan: Prediction,
    work: float,
    first_slowdown: float,
    rng: random.Random,
) -> tuple[Prediction, SearchSpace]:
    """Return the fastest plan that simulated annealing finds from a plan, at worst the plan itself, and its space.

    The degrees stay.

    Args:
        candidates: gives the spaces of other memory options.
        start: the space with the memory options of the plan.
        work: limit of the work, which is the number of tensor-parallel groups in all tried layouts together; each try
            counts as `GROUPS_OF_A_TRY` more, and every `ACTIONS_OF_A_GROUP` simulated actions as another one.
        first_slowdown: largest share by which the first changes may make the step longer; it falls to 0 in the end.
        rng: draws the changes.
    """
    best, winner = plan, start
    current, space = plan, start
    units = start.units(plan.layout.tp)
    done = 0.0
    while done < work:
        done += GROUPS_OF_A_TRY + plan.layout.pp * plan.layout.dp
        if rng.random() < OPTION_SHARE:
            other_space, layout = _other_option(candidates, space, current.layout, rng)
        else:
            other_space, layout = space, random_move(space, current.layout, units, rng)
        if layout is None:
            continue
        limit_s = current.total * (1 + first_slowdown * max(0.0, 1 - done / work) * rng.random() ** 2)
        if layout.memory_shortage(other_space.cost.memory):
            continue
        timed = TimedLayout(other_space.cost, layout)
        if timed.bound_s >= limit_s:
            continue
        other = timed.predict_below(limit_s)
        done += simulated_actions(layout) / ACTIONS_OF_A_GROUP
        if other is not None:
            current, space = other, other_space
            if current.total < best.total * (1 - 1e-9):
                best, winner = current, space
    return best, winner


def _other_option(
    candidates: CandidateQueue, space: SearchSpace, layout: Layout, rng: random.Random
) -> tuple[SearchSpace, Layout | None]:
    """Return the layout's devices with another micro-batch size, schedule or set of memory options, and the space of
    these memory options; no layout where there is none."""
    option, kind = layout.option, rng.randrange(3)
    if kind == 0:
        option = option._replace(micro_batch=rng.choice(space.work.micro_batch_sizes()))
    elif kind == 1:
        option = option._replace(schedule_spec=rng.choice(space.work.schedule_specs(option.dims.pp)))
    else:
        space = rng.choice([space, *candidates.neighbour_spaces(space, option.dims)])
    if (
        option.schedule_spec not in space.work.schedule_specs(option.dims.pp)
        or space.why_no_layout(option)
        or not space.can_shard(layout.placement)
    ):
        return space, None
    return space, space.fit_layout(layout.placement, option)


def simulated_actions(layout: Layout) -> int:
    """Return about how many actions a prediction of the layout simulates; it extrapolates long action tables."""
    counts = (layout.micro_batches[replica] for replica in layout.distinct_replicas)
    return 2 * len(layout.blocks) * sum(min(count, SIMULATED_PASSES * layout.pp) for count in counts)


def random_move(
    space: SearchSpace, layout: Layout, units: Sequence[TensorParallelGroup], rng: random.Random
) -> Layout | None:
    """Return the layout after one to three random changes of devices, blocks and micro-batches; None if the result is
    the same layout or one of the changes cannot be made.

    Args:
        units: all tensor-parallel groups of the layout's size, also those that the layout leaves idle.
    """
    kind = rng.random()
    moved: Layout | None = layout
    if kind < 0.6:
        moved = _with_other_devices(space, layout, units, rng)
        if moved is not None and rng.random() < 0.4:
            fitted = space.fit_layout(moved.placement, moved.option)
            return fitted if rng.random() < 0.7 else _with_moved_blocks(fitted, rng)
    if moved is not None and kind > 0.4:
        moved = _with_moved_blocks(moved, rng)
    if moved is not None and layout.dp > 1 and rng.random() < 0.3:
        moved = _with_moved_micro_batches(moved, rng)
    return None if moved is layout else moved


def _with_other_devices(
    space: SearchSpace, layout: Layout, units: Sequence[TensorParallelGroup], rng: random.Random
) -> Layout | None:
    """Return the layout with two groups exchanged, with an idle group in the place of one, with two pipeline ranks
    exchanged, or with one pipeline rank at another position; None if the placement cannot shard state as the memory
    options ask, or if nothing would change.
    """
    pp, dp = layout.pp, layout.dp
    rows = [list(row) for row in layout.placement]
    a, b = rng.randrange(pp), rng.randrange(pp)
    replica, other = rng.randrange(dp), rng.randrange(dp)
    kind = rng.random()
    if kind < 0.2 and len(units) > pp * dp:
        used = {unit.index for row in rows for unit in row}
        rows[replica][a] = rng.choice([unit for unit in units if unit.index not in used])
    elif kind < 0.35 and a != b:
        for row in rows:
            row[a], row[b] = row[b], row[a]
    elif kind < 0.45 and a != b:
        for row in rows:
            row.insert(b, row.pop(a))
    else:
        rows[replica][a], rows[other][b] = rows[other][b], rows[replica][a]
    placement = Placement(map(tuple, rows))
    if placement == layout.placement or not space.can_shard(placement):
        return None
    return replace(layout, placement=placement)


def _with_moved_blocks(layout: Layout, rng: random.Random) -> Layout | None:
    """Return the layout with one block moved from a random stage to another; None if both are the same stage, or if
    the stage has no block to give."""
    stages, blocks = len(layout.blocks), list(layout.blocks)
    giver, taker = rng.randrange(stages), rng.randrange(stages)
    if giver == taker or blocks[giver] <= (0 if giver in (0, stages - 1) else 1):
        return None
    blocks[giver], blocks[taker] = blocks[giver] - 1, blocks[taker] + 1
    return replace(layout, blocks=tuple(blocks))


def _with_moved_micro_batches(layout: Layout, rng: random.Random) -> Layout | None:
    """Return the layout with one micro-batch moved from a random replica to another; None if both are the same replica,
    if the replica has only one, or if all replicas need the same number."""
    counts = list(layout.micro_batches)
    giver, taker = rng.randrange(layout.dp), rng.randrange(layout.dp)
    if giver == taker or counts[giver] == 1 or layout.memory_options.equal_micro_batches:
        return None
    counts[giver], counts[taker] = counts[giver] - 1, counts[taker] + 1
    return replace(layout, micro_batches=tuple(counts))
