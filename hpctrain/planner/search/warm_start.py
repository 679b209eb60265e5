"""Warm start: the previous plan on its surviving devices, which a new plan has to beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from hpctrain.planner.bounds.option import Option
from hpctrain.planner.cost.memory_options import memory_options_of_plan
from hpctrain.planner.cost.workload import ScheduleSpec
from hpctrain.planner.devices.tensor_parallel_group import Placement, TensorParallelGroup
from hpctrain.planner.layout.degrees import EXHAUSTIVE_DEVICES
from hpctrain.planner.layout.layout import Layout
from hpctrain.planner.search.codecs.codec_choice import candidate_codecs
from hpctrain.planner.search.evaluate import evaluate
from hpctrain.planner.search.space import SearchSpace, WarmStart
from hpctrain.planner.simulate.predict import Prediction, predict
from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.plan.compression import AutoCompression
from hpctrain.records.plan.plan import ParallelDims, Plan
from hpctrain.records.run.run import Run


def warm_started(previous: Plan, plain: SearchSpace, run: Run | None) -> SearchSpace:
    """Return the space of the plan that replaces `previous`, with a warm start on the surviving devices.

    Args:
        run: if given, the space may use the codec that mode auto chose for the previous plan, because the surviving
            devices were placed for that codec.
    """
    if run is not None and isinstance(run.compression, AutoCompression) and uses_one_codec(plain):
        codec = previous.compression[0].codec
        same = plain.with_codec(codec)
        if codec in candidate_codecs(run.steps, run.compression.lossy) and (start := make_warm_start(same, previous)):
            same.warm_start = start
            return same
    plain.warm_start = make_warm_start(plain, previous)
    return plain


def uses_one_codec(space: SearchSpace) -> bool:
    """Whether a search with a warm start tries one codec only.

    It does on many devices: the search stays near the previous plan, because the run stands still meanwhile.
    """
    return len(space.pool.devices) > EXHAUSTIVE_DEVICES


def make_warm_start(plain: SearchSpace, previous: Plan) -> WarmStart | None:
    """Return the best plan with the previous pp, tp and memory options on the surviving devices; None if none fits.

    Devices keep their pipeline rank where possible. Devices of incomplete replicas fill the gaps.
    """
    memory_options = memory_options_of_plan(previous)
    space = plain if memory_options == plain.work.memory_options else plain.with_memory_options(memory_options)
    pp, tp, previous_size = previous.pp, previous.tp, previous.replicas[0].micro_batch
    counts = sorted((dims[1] for dims in plain.candidate_dims if (dims[0], dims[2]) == (pp, tp)), reverse=True)
    sizes = [size for size in space.work.micro_batch_sizes() if previous_size <= 2 * size <= 4 * previous_size]
    best: Prediction | None = None
    reused: list[Layout] = []
    for dp in counts[: space.limits.max_replica_counts]:
        placement = surviving_placement(space.units(tp), previous, dp)
        if not space.can_shard(placement):
            continue
        same = _same_cut(space, previous, placement)
        if same is not None:
            reused.append(same)
            prediction = predict(space.cost, same)
            best = prediction if best is None or prediction.total < best.total else best
        for schedule_spec, size in product(space.work.schedule_specs(pp), sizes):
            best = evaluate(
                space, Option(ParallelDims(pp, dp, tp), schedule_spec, size), best, placements=[placement]
            ).best
    return None if best is None else WarmStart(space, best, (*reused, best.layout))


def _same_cut(space: SearchSpace, previous: Plan, placement: Placement) -> Layout | None:
    """Return the layout with the previous schedule, micro-batch size and blocks on this placement; None if it does not
    fit.
    """
    stages, size = previous.stages, previous.replicas[0].micro_batch
    schedule_spec = ScheduleSpec(previous.schedule, len(stages) // previous.pp)
    option = Option(ParallelDims(previous.pp, len(placement), previous.tp), schedule_spec, size)
    if schedule_spec not in space.work.schedule_specs(option.dims.pp) or size not in space.work.micro_batch_sizes():
        return None
    if space.why_no_layout(option):
        return None
    blocks = tuple(stage.layers[1] - stage.layers[0] for stage in stages)
    layout = replace(space.fit_layout(placement, option), blocks=blocks)
    counts = tuple(replica.sequences // size for replica in previous.replicas)
    nothing_lost = [[unit.device_ids for unit in row] for row in placement] == _device_ids(previous)
    if nothing_lost and all(counts) and sum(counts) == sum(layout.micro_batches):
        layout = replace(layout, micro_batches=counts)
    return None if layout.memory_shortage(space.cost.memory) else layout


def surviving_placement(units: Sequence[TensorParallelGroup], previous: Plan, dp: int) -> Placement:
    """Return a placement of `dp` replicas that keeps as much as possible of the previous plan's placement.

    Whole replicas stay. Then tensor-parallel groups keep their pipeline rank. Free groups go to a rank at which an
    equal group was.

    Args:
        units: the tensor-parallel groups to choose from; there must be enough.
    """
    rows, loose, kinds = _surviving_units(units, previous)
    for row in rows[dp:]:
        for rank, unit in enumerate(row):
            loose[rank].append(unit)
    rows = rows[:dp]
    used = {unit for row in rows for unit in row}
    columns = [column[: dp - len(rows)] for column in loose]
    used.update(unit for column in columns for unit in column)
    spare = [unit for unit in units if unit not in used]
    for rank, column in enumerate(columns):
        while len(column) < dp - len(rows):
            like = (unit for unit in spare if unit.group_spec == kinds.get(rank))
            taken = next(like, spare[0])
            spare.remove(taken)
            column.append(taken)
    return Placement((*rows, *zip(*columns, strict=True)))


def _surviving_units(
    units: Sequence[TensorParallelGroup], previous: Plan
) -> tuple[list[tuple[TensorParallelGroup, ...]], list[list[TensorParallelGroup]], dict[int, object]]:
    """Return the whole replicas, the groups of incomplete replicas by pipeline rank, and `group_spec` by pipeline
    rank.
    """
    known = {unit.device_ids: unit for unit in units}
    rows, loose = [], [list[TensorParallelGroup]() for _ in range(previous.pp)]
    kinds: dict[int, object] = {}
    for device_ids in _device_ids(previous):
        surviving = [(rank, known[ids]) for rank, ids in enumerate(device_ids) if ids in known]
        kinds.update((rank, unit.group_spec) for rank, unit in surviving)
        if len(surviving) == len(device_ids):
            rows.append(tuple(unit for _, unit in surviving))
            continue
        for rank, unit in surviving:
            loose[rank].append(unit)
    return rows, loose, kinds


def _device_ids(previous: Plan) -> list[list[tuple[DeviceId, ...]]]:
    """Device ids of a plan: [replica][pipeline rank] -> the devices of the tensor-parallel group."""
    return [previous.pipeline_rank_devices(replica) for replica in range(previous.dp)]
