"""The plans next to the chosen one, and why each of them lost."""

from __future__ import annotations

import math

from hpctrain.base.units import format_bytes
from hpctrain.planner.cost.workload import Order
from hpctrain.planner.devices.tensor_parallel_group import Cells
from hpctrain.planner.layout.degrees import Shape
from hpctrain.planner.layout.layout import Excess
from hpctrain.planner.layout.partition import fit_layout, why_undefined
from hpctrain.planner.layout.placement import file_order
from hpctrain.planner.search.option_search import Search
from hpctrain.planner.simulate.predict import Prediction, blame, predict
from hpctrain.records.plan.plan import Rejected

MOST_SHAPES = 6
"""Other degrees that are looked at, nearest by their bound first."""
MOST_IMPOSSIBLE = 3
"""Other degrees that cannot be at all."""
PATIENCE = 2
"""Micro-batch sizes tried for other degrees after their best so far."""


def rejected_neighbours(search: Search, best: Prediction, shapes: list[Shape]) -> list[Rejected]:
    """Other degrees, other micro-batches, other schedules and the devices in file order, each at its best."""
    found = _other_shapes(search, best, shapes) + _impossible(search)
    layout, work = best.layout, search.work
    order = layout.order
    sizes = work.micro_batch_sizes()
    position = sizes.index(layout.micro_batch)
    for size in sizes[max(0, position - 1) : position] + sizes[position + 1 : position + 2]:
        found += _same_devices(search, best, layout.cells, order, size, f"micro-batch {size}")
    for other in work.orders(layout.pp):
        if other != order:
            found += _same_devices(search, best, layout.cells, other, layout.micro_batch, f"schedule {other}")
    listed = file_order(search.units(layout.tp)[0], layout.pp, layout.dp)
    if _places(listed) != _places(layout.cells) and search.can_shard(listed):
        change = "devices in the order of the topology file"
        found += _same_devices(search, best, listed, order, layout.micro_batch, change)
    return found


def describe_shape(shape: Shape) -> str:
    """(2, 1, 1) -> 'pp 2 × dp 1 × tp 1'."""
    return "pp {} × dp {} × tp {}".format(*shape)


def describe_excess(excess: Excess) -> str:
    """One clause with the numbers of a device that is too small."""
    return (
        f"{excess.place} would need {format_bytes(excess.need_bytes)} and has {format_bytes(excess.memory_bytes)}, "
        f"of which {excess.usable * 100:g} % ({format_bytes(excess.usable_bytes)}) may be used"
    )


def describe_lack(lack: Excess | str) -> str:
    """Why a shape does not run, in one clause."""
    return lack if isinstance(lack, str) else describe_excess(lack)


def nearest_shapes(search: Search, shapes: list[Shape]) -> list[Shape]:
    """The shapes, the one with the smallest bound first."""
    sizes = search.work.micro_batch_sizes()

    def bound(shape: Shape) -> float:
        pp, dp, tp = shape
        fitting = [size for size in sizes if search.work.rows // size >= dp]
        return min((search.bounds.work_s(search.crowd(tp), pp, dp, size) for size in fitting), default=math.inf)

    return sorted(shapes, key=lambda shape: (bound(shape), shape))


def _other_shapes(search: Search, best: Prediction, shapes: list[Shape]) -> list[Rejected]:
    sizes = search.work.micro_batch_sizes()
    others = nearest_shapes(search, [shape for shape in shapes if shape != best.layout.shape])
    found = []
    for shape in others[:MOST_SHAPES]:
        other = search.best([shape], sizes, PATIENCE)
        if other is not None:
            found.append(_slower(describe_shape(shape), best, other))
        elif (lack := search.shortage(shape)) is not None:
            found.append(Rejected(change=describe_shape(shape), reason=describe_lack(lack)))
    return sorted(found, key=lambda entry: (entry.delta_s is None, entry.delta_s or 0.0))


def _impossible(search: Search) -> list[Rejected]:
    """One entry for each reason, from the smallest degrees that meet it."""
    first: dict[str, Shape] = {}
    for shape in sorted(search.impossible, key=lambda shape: (shape[2], shape)):
        first.setdefault(search.impossible[shape], shape)
    return [Rejected(change=describe_shape(shape), reason=reason) for reason, shape in first.items()][:MOST_IMPOSSIBLE]


def _same_devices(
    search: Search, best: Prediction, cells: Cells, order: Order, size: int, change: str
) -> list[Rejected]:
    undefined = why_undefined(search.cost, len(cells[0]), len(cells), order, size)
    if undefined:
        return [Rejected(change=change, reason=undefined)]
    layout = fit_layout(search.cost, cells, order, size)
    excess = layout.excess(search.cost.memory)
    if excess is not None:
        return [Rejected(change=change, reason=describe_excess(excess))]
    return [_slower(change, best, predict(search.cost, layout))]


def _slower(change: str, best: Prediction, other: Prediction) -> Rejected:
    delta = other.total - best.total
    if delta <= 1e-6 * best.total:
        return Rejected(change=change, delta_s=max(0.0, delta), reason="no faster, and nothing else is won")
    return Rejected(change=change, delta_s=delta, reason=blame(best.terms, other.terms))


def _places(cells: Cells) -> list[tuple[str, ...]]:
    return [unit.places for replica in cells for unit in replica]
