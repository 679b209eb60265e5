"""The plans next to the chosen one, and why each of them lost."""

from __future__ import annotations

import math

from hpctrain.base.units import format_bytes
from hpctrain.planner.cost.workload import ScheduleSpec
from hpctrain.planner.devices.tensor_parallel_group import Placement
from hpctrain.planner.layout.layout import MemoryShortage
from hpctrain.planner.layout.partition import fit_layout, why_no_layout
from hpctrain.planner.layout.placement import topology_order
from hpctrain.planner.search.option_search import Search
from hpctrain.planner.simulate.predict import Prediction, largest_increase, predict
from hpctrain.records.plan.parallel_dims import ParallelDims
from hpctrain.records.plan.plan import Rejected

MAX_OTHER_DIMS = 6
"""Other degrees that are tried, the smallest bound first."""
MAX_IMPOSSIBLE = 3
"""Impossible degrees that are listed."""
OTHER_DIMS_PATIENCE = 2
"""Options tried for other degrees after their best so far."""


def rejected_neighbours(search: Search, best: Prediction, candidate_dims: list[ParallelDims]) -> list[Rejected]:
    """Plans with other degrees, micro-batch sizes, schedules or devices in file order, each with why it lost."""
    found = _other_dims(search, best, candidate_dims) + _impossible(search)
    layout, work = best.layout, search.work
    schedule_spec = layout.schedule_spec
    sizes = work.micro_batch_sizes()
    position = sizes.index(layout.micro_batch)
    for size in sizes[max(0, position - 1) : position] + sizes[position + 1 : position + 2]:
        found += _same_devices(search, best, layout.placement, schedule_spec, size, f"micro-batch {size}")
    for other in work.schedule_specs(layout.pp):
        if other != schedule_spec:
            found += _same_devices(search, best, layout.placement, other, layout.micro_batch, f"schedule {other}")
    listed = topology_order(search.units(layout.tp)[0], layout.pp, layout.dp)
    if _device_ids(listed) != _device_ids(layout.placement) and search.can_shard(listed):
        change = "devices in the order of the topology file"
        found += _same_devices(search, best, listed, schedule_spec, layout.micro_batch, change)
    return found


def describe_memory_shortage(excess: MemoryShortage) -> str:
    """One clause with the bytes that a device needs, has and may use."""
    return (
        f"{excess.device_id} would need {format_bytes(excess.need_bytes)} and has {format_bytes(excess.memory_bytes)}, "
        f"of which {excess.usable * 100:g} % ({format_bytes(excess.usable_bytes)}) may be used"
    )


def describe_lack(lack: MemoryShortage | str) -> str:
    """Why the degrees have no layout, in one clause."""
    return lack if isinstance(lack, str) else describe_memory_shortage(lack)


def nearest_dims(search: Search, candidate_dims: list[ParallelDims]) -> list[ParallelDims]:
    """The degrees sorted by their lower bound, smallest first."""
    sizes = search.work.micro_batch_sizes()

    def bound(dims: ParallelDims) -> float:
        pp, dp, tp = dims
        fitting = [size for size in sizes if search.work.sequences // size >= dp]
        return min(
            (search.closed_form_bound.work_s(search.unit_counts(tp), pp, dp, size) for size in fitting),
            default=math.inf,
        )

    return sorted(candidate_dims, key=lambda dims: (bound(dims), dims))


def _other_dims(search: Search, best: Prediction, candidate_dims: list[ParallelDims]) -> list[Rejected]:
    sizes = search.work.micro_batch_sizes()
    others = nearest_dims(search, [dims for dims in candidate_dims if dims != best.layout.dims])
    found = []
    for dims in others[:MAX_OTHER_DIMS]:
        other = search.best([dims], sizes, OTHER_DIMS_PATIENCE)
        if other is not None:
            found.append(_slower(str(dims), best, other))
        elif (lack := search.shortage(dims)) is not None:
            found.append(Rejected(change=str(dims), reason=describe_lack(lack)))
    return sorted(found, key=lambda entry: (entry.delta_s is None, entry.delta_s or 0.0))


def _impossible(search: Search) -> list[Rejected]:
    """One entry for each reason, with the smallest degrees that have it."""
    first: dict[str, ParallelDims] = {}
    for dims in sorted(search.impossible, key=lambda dims: (dims[2], dims)):
        first.setdefault(search.impossible[dims], dims)
    return [Rejected(change=str(dims), reason=reason) for reason, dims in first.items()][:MAX_IMPOSSIBLE]


def _same_devices(
    search: Search, best: Prediction, placement: Placement, schedule_spec: ScheduleSpec, size: int, change: str
) -> list[Rejected]:
    undefined = why_no_layout(search.cost, len(placement[0]), len(placement), schedule_spec, size)
    if undefined:
        return [Rejected(change=change, reason=undefined)]
    layout = fit_layout(search.cost, placement, schedule_spec, size)
    excess = layout.memory_shortage(search.cost.memory)
    if excess is not None:
        return [Rejected(change=change, reason=describe_memory_shortage(excess))]
    return [_slower(change, best, predict(search.cost, layout))]


def _slower(change: str, best: Prediction, other: Prediction) -> Rejected:
    delta = other.total - best.total
    if delta <= 1e-6 * best.total:
        return Rejected(change=change, delta_s=max(0.0, delta), reason="no faster, and nothing else is won")
    return Rejected(change=change, delta_s=delta, reason=largest_increase(best.terms, other.terms))


def _device_ids(placement: Placement) -> list[tuple[str, ...]]:
    return [unit.device_ids for replica in placement for unit in replica]
