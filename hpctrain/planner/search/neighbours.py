"""Lists the plans that differ from the chosen plan in one setting, and why each of them lost."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hpctrain.planner.devices.tensor_parallel_group import Placement
from hpctrain.planner.layout.layout import MemoryShortage, Option
from hpctrain.planner.layout.placement import topology_order
from hpctrain.planner.search.evaluate import best_of
from hpctrain.planner.search.space import SearchSpace
from hpctrain.planner.simulate.predict import Prediction, largest_increase, predict
from hpctrain.records.plan.plan import ParallelDims
from hpctrain.records.plan.prediction import Rejected

WHY_NO_SHARDING = (
    "shard node needs as many replicas of every stage in each node, two or more, and no placement has that; "
    "use shard all, or other degrees"
)


def rejected_neighbours(space: SearchSpace, best: Prediction, candidate_dims: Sequence[ParallelDims]) -> list[Rejected]:
    """Return plans with other degrees, micro-batch sizes or schedules than the best plan, or with the devices in the
    topology's order, each with the reason why it lost.

    Args:
        candidate_dims: the degrees that the search tried, as `SearchSpace.candidate_dims` lists them.
    """
    rejected = _other_dims(space, best, candidate_dims) + _impossible(space)
    placement, option = best.layout.placement, best.layout.option
    sizes = space.work.micro_batch_sizes()
    position = sizes.index(option.micro_batch)
    for size in sizes[max(0, position - 1) : position] + sizes[position + 1 : position + 2]:
        rejected.append(_compared(space, best, placement, option._replace(micro_batch=size), f"micro-batch {size}"))
    for schedule_spec in space.work.schedule_specs(option.dims.pp):
        if schedule_spec != option.schedule_spec:
            other = option._replace(schedule_spec=schedule_spec)
            rejected.append(_compared(space, best, placement, other, f"schedule {schedule_spec}"))
    listed = topology_order(space.units(option.dims.tp), option.dims.pp, option.dims.dp)
    if _device_ids(listed) != _device_ids(placement) and space.can_shard(listed):
        rejected.append(_compared(space, best, listed, option, "devices in the order of the topology file"))
    return rejected


def shortage(space: SearchSpace, dims: ParallelDims) -> MemoryShortage | str | None:
    """Return why a layout of these degrees does not run, tried with one placement and the smallest micro-batch size
    that has a layout; None if this layout runs.

    The reason is the device that lacks memory. It is a sentence if no micro-batch size has a layout, or if no placement
    can shard state as the memory options ask.
    """
    reason: str | None = None
    for size in space.work.micro_batch_sizes():
        for schedule_spec in space.work.schedule_specs(dims[0]):
            option = Option(dims, schedule_spec, size)
            if why := space.why_no_layout(option):
                reason = reason or why
                continue
            for placement in space.placements(dims)[:1]:
                return space.fit_layout(placement, option).memory_shortage(space.cost.memory)
            return WHY_NO_SHARDING
    return reason


def nearest_dims(space: SearchSpace, candidate_dims: Sequence[ParallelDims]) -> list[ParallelDims]:
    """Return the degrees sorted by the lower bound of their step time, smallest first."""

    def bound(dims: ParallelDims) -> float:
        fitting = [size for size in space.work.micro_batch_sizes() if space.work.sequences // size >= dims[1]]
        return min((space.bounds.work_s(dims, size) for size in fitting), default=math.inf)

    return sorted(candidate_dims, key=lambda dims: (bound(dims), dims))


def _other_dims(space: SearchSpace, best: Prediction, candidate_dims: Sequence[ParallelDims]) -> list[Rejected]:
    limits, rejected = space.limits, []
    others = nearest_dims(space, [dims for dims in candidate_dims if dims != best.layout.dims])
    for dims in others[: limits.max_other_dims]:
        other = best_of(space, space.options([dims]), limits.other_dims_patience)
        if other is not None:
            rejected.append(_slower(str(dims), best, other))
        elif (lack := shortage(space, dims)) is not None:
            rejected.append(Rejected(change=str(dims), reason=str(lack)))
    return sorted(rejected, key=lambda entry: (entry.delta_s is None, entry.delta_s or 0.0))


def _impossible(space: SearchSpace) -> list[Rejected]:
    """Return a rejected entry for each reason why degrees of the space are impossible, at most
    `SearchLimits.max_impossible` entries. Of all degrees with the same reason, an entry names those with the smallest
    tp.
    """
    first: dict[str, ParallelDims] = {}
    for dims in sorted(space.impossible, key=lambda dims: (dims[2], dims)):
        first.setdefault(space.impossible[dims], dims)
    entries = [Rejected(change=str(dims), reason=reason) for reason, dims in first.items()]
    return entries[: space.limits.max_impossible]


def _compared(space: SearchSpace, best: Prediction, placement: Placement, option: Option, change: str) -> Rejected:
    if why := space.why_no_layout(option):
        return Rejected(change=change, reason=why)
    layout = space.fit_layout(placement, option)
    excess = layout.memory_shortage(space.cost.memory)
    if excess is not None:
        return Rejected(change=change, reason=str(excess))
    return _slower(change, best, predict(space.cost, layout))


def _slower(change: str, best: Prediction, other: Prediction) -> Rejected:
    delta = other.total - best.total
    if delta <= 1e-6 * best.total:
        return Rejected(change=change, delta_s=max(0.0, delta), reason="no faster, and nothing else is won")
    return Rejected(change=change, delta_s=delta, reason=largest_increase(best.terms, other.terms))


def _device_ids(placement: Placement) -> list[tuple[str, ...]]:
    return [unit.device_ids for replica in placement for unit in replica]
