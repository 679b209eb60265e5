"""The plan that ran, on the devices that are left of it: what a new plan has to beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from hpctrain.planner.cost.memory_options import saving_of_plan
from hpctrain.planner.cost.workload import Order
from hpctrain.planner.devices.tensor_parallel_group import Cells, Unit
from hpctrain.planner.layout.degrees import EVERY_COUNT, Shape
from hpctrain.planner.layout.layout import Layout
from hpctrain.planner.layout.partition import fit_layout, why_undefined
from hpctrain.planner.search.codec_choice import candidates
from hpctrain.planner.search.option_search import Search, Start
from hpctrain.planner.simulate.predict import Prediction, predict
from hpctrain.records.plan.compression import AutoCompression
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.run import Run

MOST_REPLICAS = 2
"""Numbers of replicas that are tried, the largest first."""


def begin_with(previous: Plan, plain: Search, shapes: Sequence[Shape], run: Run | None) -> Search:
    """The search for the plan that replaces this one; its start is the best with what is left.

    Args:
        run: where the search may go by the way of summing that mode auto chose for the previous plan: what is left of
            it was placed for that.
    """
    if run is not None and isinstance(run.compression, AutoCompression) and searches_once(plain):
        codec = previous.compression[0].codec
        same = plain.summing(codec)
        if codec in candidates(run.steps, run.compression.lossy) and (start := kept_start(same, shapes, previous)):
            same.start = start
            return same
    plain.start = kept_start(plain, shapes, previous)
    return plain


def searches_once(search: Search) -> bool:
    """Whether a plan that replaces another is searched for by one way of summing: on many devices a search stays near
    to what is left, and a run stands still meanwhile."""
    return len(search.fleet.workers) > EVERY_COUNT


def kept_start(plain: Search, shapes: Sequence[Shape], previous: Plan) -> Start | None:
    """The best with the previous plan's pipeline ranks, tensor parallelism and way of saving memory on what is left;
    None where nothing of it fits.

    Devices keep their rank as far as they can; those of replicas that are not whole any more fill the holes.
    """
    saving = saving_of_plan(previous)
    search = plain if saving == plain.work.saving else plain.saving(saving)
    pp, tp, size = previous.pp, previous.tp, previous.replicas[0].micro_batch
    counts = sorted((shape[1] for shape in shapes if (shape[0], shape[2]) == (pp, tp)), reverse=True)
    sizes = [each for each in search.work.micro_batch_sizes() if size <= 2 * each <= 4 * size]
    best: Prediction | None = None
    kept: list[Layout] = []
    for dp in counts[:MOST_REPLICAS]:
        cells = kept_cells(search.units(tp)[0], previous, dp)
        if not search.can_shard(cells):
            continue
        same = _same_cut(search, previous, cells)
        if same is not None:
            kept.append(same)
            found = predict(search.cost, same)
            best = found if best is None or found.total < best.total else best
        for order, each in product(search.work.orders(pp), sizes):
            best = search.explore((pp, dp, tp), order, each, best, cells=[cells]).best
    return None if best is None else Start(search, best, (*kept, best.layout))


def _same_cut(search: Search, previous: Plan, cells: Cells) -> Layout | None:
    """The previous schedule, micro-batch and blocks on these devices, where they fit."""
    stages, size = previous.stages, previous.replicas[0].micro_batch
    order = Order(previous.schedule, len(stages) // previous.pp)
    pp, dp = len(cells[0]), len(cells)
    if order not in search.work.orders(pp) or size not in search.work.micro_batch_sizes():
        return None
    if why_undefined(search.cost, pp, dp, order, size):
        return None
    layout = replace(
        fit_layout(search.cost, cells, order, size),
        blocks=tuple(stage.layers[1] - stage.layers[0] for stage in stages),
    )
    counts = tuple(replica.rows // size for replica in previous.replicas)
    nothing_lost = [[unit.places for unit in row] for row in cells] == _places(previous)
    if nothing_lost and all(counts) and sum(counts) == sum(layout.micro_batches):
        layout = replace(layout, micro_batches=counts)
    return None if layout.excess(search.cost.memory) else layout


def kept_cells(units: Sequence[Unit], previous: Plan, dp: int) -> Cells:
    """So many replicas of the previous plan's pipeline ranks on these units, which are enough of them: whole replicas
    stay, then units keep their rank, and the others go where one like them was."""
    rows, loose, kinds = _standing(units, previous)
    rows, given_up = rows[:dp], rows[dp:]
    for row in given_up:
        for rank, unit in enumerate(row):
            loose[rank].append(unit)
    used = {unit for row in rows for unit in row}
    columns = [column[: dp - len(rows)] for column in loose]
    used.update(unit for column in columns for unit in column)
    spare = [unit for unit in units if unit not in used]
    for rank, column in enumerate(columns):
        while len(column) < dp - len(rows):
            like = (unit for unit in spare if unit.figures == kinds[rank])
            taken = next(like, spare[0])
            spare.remove(taken)
            column.append(taken)
    return Cells((*rows, *zip(*columns, strict=True)))


def _standing(
    units: Sequence[Unit], previous: Plan
) -> tuple[list[tuple[Unit, ...]], list[list[Unit]], list[object | None]]:
    """Whole replicas, [pipeline rank] -> units of the others, and [pipeline rank] -> what units there can do."""
    known = {unit.places: unit for unit in units}
    rows, loose = [], [list[Unit]() for _ in range(previous.pp)]
    kinds: list[object | None] = [None] * previous.pp
    for places in _places(previous):
        left = [known.get(each) for each in places]
        whole = tuple(unit for unit in left if unit is not None)
        if len(whole) == len(left):
            rows.append(whole)
        for rank, unit in enumerate(left):
            if unit is not None:
                kinds[rank] = unit.figures
                if len(whole) < len(left):
                    loose[rank].append(unit)
    return rows, loose, kinds


def _places(previous: Plan) -> list[list[tuple[str, ...]]]:
    """By replica the devices of each pipeline rank."""
    return [previous.pipeline_rows(replica) for replica in range(previous.dp)]
