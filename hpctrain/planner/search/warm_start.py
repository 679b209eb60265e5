"""Warm start: the previous plan on its surviving devices, which a new plan has to beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from hpctrain.planner.cost.memory_options import memory_options_of_plan
from hpctrain.planner.cost.workload import ScheduleSpec
from hpctrain.planner.devices.tensor_parallel_group import Placement, TensorParallelGroup
from hpctrain.planner.layout.degrees import EXHAUSTIVE_DEVICES
from hpctrain.planner.layout.layout import Layout
from hpctrain.planner.layout.partition import fit_layout, why_no_layout
from hpctrain.planner.search.codec_choice import candidate_codecs
from hpctrain.planner.search.option_search import Search, WarmStart
from hpctrain.planner.simulate.predict import Prediction, predict
from hpctrain.records.format.device_id import DeviceId
from hpctrain.records.plan.compression import AutoCompression
from hpctrain.records.plan.parallel_dims import ParallelDims
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.run import Run

MAX_REPLICA_COUNTS = 2
"""How many numbers of replicas are tried, the largest first."""


def warm_started(previous: Plan, plain: Search, candidate_dims: Sequence[ParallelDims], run: Run | None) -> Search:
    """Return the search for the plan that replaces `previous`, with a warm start on the surviving devices.

    Args:
        run: if given, the search may use the codec that mode auto chose for the previous plan, for which the surviving
            devices were placed.
    """
    if run is not None and isinstance(run.compression, AutoCompression) and uses_one_codec(plain):
        codec = previous.compression[0].codec
        same = plain.with_codec(codec)
        if codec in candidate_codecs(run.steps, run.compression.lossy) and (
            start := make_warm_start(same, candidate_dims, previous)
        ):
            same.warm_start = start
            return same
    plain.warm_start = make_warm_start(plain, candidate_dims, previous)
    return plain


def uses_one_codec(search: Search) -> bool:
    """Whether a search with a warm start tries one codec only.

    That is so on many devices: the search stays near the previous plan, and the run stands still meanwhile.
    """
    return len(search.pool.devices) > EXHAUSTIVE_DEVICES


def make_warm_start(plain: Search, candidate_dims: Sequence[ParallelDims], previous: Plan) -> WarmStart | None:
    """Return the best plan with the previous pp, tp and memory options on the surviving devices; None if none fits.

    Devices keep their pipeline rank where possible. Devices of incomplete replicas fill the gaps.
    """
    memory_options = memory_options_of_plan(previous)
    search = plain if memory_options == plain.work.memory_options else plain.with_memory_options(memory_options)
    pp, tp, size = previous.pp, previous.tp, previous.replicas[0].micro_batch
    counts = sorted((dims[1] for dims in candidate_dims if (dims[0], dims[2]) == (pp, tp)), reverse=True)
    sizes = [each for each in search.work.micro_batch_sizes() if size <= 2 * each <= 4 * size]
    best: Prediction | None = None
    kept: list[Layout] = []
    for dp in counts[:MAX_REPLICA_COUNTS]:
        placement = surviving_placement(search.units(tp)[0], previous, dp)
        if not search.can_shard(placement):
            continue
        same = _same_cut(search, previous, placement)
        if same is not None:
            kept.append(same)
            found = predict(search.cost, same)
            best = found if best is None or found.total < best.total else best
        for schedule_spec, each in product(search.work.schedule_specs(pp), sizes):
            best = search.evaluate(ParallelDims(pp, dp, tp), schedule_spec, each, best, placement=[placement]).best
    return None if best is None else WarmStart(search, best, (*kept, best.layout))


def _same_cut(search: Search, previous: Plan, placement: Placement) -> Layout | None:
    """The layout with the previous schedule, micro-batch size and blocks on this placement; None if it does not fit."""
    stages, size = previous.stages, previous.replicas[0].micro_batch
    schedule_spec = ScheduleSpec(previous.schedule, len(stages) // previous.pp)
    pp, dp = len(placement[0]), len(placement)
    if schedule_spec not in search.work.schedule_specs(pp) or size not in search.work.micro_batch_sizes():
        return None
    if why_no_layout(search.cost, pp, dp, schedule_spec, size):
        return None
    layout = replace(
        fit_layout(search.cost, placement, schedule_spec, size),
        blocks=tuple(stage.layers[1] - stage.layers[0] for stage in stages),
    )
    counts = tuple(replica.sequences // size for replica in previous.replicas)
    nothing_lost = [[unit.device_ids for unit in row] for row in placement] == _device_ids(previous)
    if nothing_lost and all(counts) and sum(counts) == sum(layout.micro_batches):
        layout = replace(layout, micro_batches=counts)
    return None if layout.memory_shortage(search.cost.memory) else layout


def surviving_placement(units: Sequence[TensorParallelGroup], previous: Plan, dp: int) -> Placement:
    """Return a placement of `dp` replicas that keeps as much as possible of the previous plan's.

    Whole replicas stay. Then tensor-parallel groups keep their pipeline rank. Free groups go to a rank where one like
    them was.

    Args:
        units: the tensor-parallel groups to choose from; there are enough.
    """
    rows, loose, kinds = _surviving_units(units, previous)
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
            like = (unit for unit in spare if unit.group_spec == kinds[rank])
            taken = next(like, spare[0])
            spare.remove(taken)
            column.append(taken)
    return Placement((*rows, *zip(*columns, strict=True)))


def _surviving_units(
    units: Sequence[TensorParallelGroup], previous: Plan
) -> tuple[list[tuple[TensorParallelGroup, ...]], list[list[TensorParallelGroup]], list[object | None]]:
    """Whole replicas, [pipeline rank] -> groups of incomplete replicas, and [pipeline rank] -> `group_spec` there."""
    known = {unit.device_ids: unit for unit in units}
    rows, loose = [], [list[TensorParallelGroup]() for _ in range(previous.pp)]
    kinds: list[object | None] = [None] * previous.pp
    for device_ids in _device_ids(previous):
        left = [known.get(each) for each in device_ids]
        whole = tuple(unit for unit in left if unit is not None)
        if len(whole) == len(left):
            rows.append(whole)
        for rank, unit in enumerate(left):
            if unit is not None:
                kinds[rank] = unit.group_spec
                if len(whole) < len(left):
                    loose[rank].append(unit)
    return rows, loose, kinds


def _device_ids(previous: Plan) -> list[list[tuple[DeviceId, ...]]]:
    """[replica][pipeline rank] -> device ids."""
    return [previous.pipeline_rank_devices(replica) for replica in range(previous.dp)]
