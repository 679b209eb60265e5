"""Plans that replace a previous plan: a warm start on the surviving devices, and the moves of state between devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, islice, pairwise, product

import numpy as np
from numpy.typing import NDArray

from hpctrain.planner.cost.memory_options import memory_options_of_plan
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import ScheduleSpec
from hpctrain.planner.devices.tensor_parallel_group import Placement, TensorParallelGroup
from hpctrain.planner.layout.layout import Layout, Option
from hpctrain.planner.search.codec_choice import candidate_codecs, searched_node_sums
from hpctrain.planner.search.evaluate import evaluate
from hpctrain.planner.search.space import EXHAUSTIVE_DEVICES, SearchSpace, WarmStart
from hpctrain.planner.simulate.predict import Prediction, predict
from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.plan.compression import AutoCompression
from hpctrain.records.plan.plan import ParallelDims, Plan
from hpctrain.records.plan.prediction import Move
from hpctrain.records.run.run import Run


def warm_started(previous: Plan, plain: SearchSpace, run: Run | None) -> SearchSpace:
    """Return the space of the plan that replaces `previous`, with a warm start on the surviving devices.

    Args:
        plain: the space with the memory options and the codec of the run file.
        run: if given, the space may use the codec that mode auto chose for the previous plan, because the surviving
            devices were placed for that codec; None: the codec of `plain`.
    """
    if run is not None and isinstance(run.compression, AutoCompression):
        codec = previous.codec
        same = plain.with_work(codec=codec, intra_node="flat" if codec.exact else searched_node_sums(run.compression))
        if codec in candidate_codecs(run.steps, run.compression.loss_limit) and (
            start := make_warm_start(same, previous)
        ):
            same.warm_start, same.replaces = start, True
            return same
    plain.warm_start, plain.replaces = make_warm_start(plain, previous), True
    return plain


def uses_one_codec(space: SearchSpace) -> bool:
    """Return whether a search with a warm start is the only one, because the run stands still meanwhile.

    It is on more than `EXHAUSTIVE_DEVICES` devices, and where the previous plan compresses gradients. If it sums
    exactly, a codec may pay off on the devices that are left.
    """
    return len(space.pool.devices) > EXHAUSTIVE_DEVICES or not space.work.codec.exact


def make_warm_start(plain: SearchSpace, previous: Plan) -> WarmStart | None:
    """Return the best plan with the previous pp and tp on the surviving devices; None if none fits.

    It has the previous memory options, or ZeRO 1 instead of 2 and 3, with which replicas may have unequal numbers of
    micro-batches. Devices keep their pipeline rank where possible. Devices of incomplete replicas fill the gaps.

    Args:
        plain: the space with the memory options of the run file.
    """
    memory_options = memory_options_of_plan(previous)
    choices = [memory_options]
    if memory_options.zero > 1 and plain.work.fixed is None:
        choices.append(replace(memory_options, zero=1))
    starts = []
    for choice in choices:
        space = plain if choice == plain.work.memory_options else plain.with_work(memory_options=choice)
        if (start := _start_with(space, previous)) is not None:
            starts.append(start)
    return min(starts, key=lambda start: start.best.total, default=None)


def _start_with(space: SearchSpace, previous: Plan) -> WarmStart | None:
    """Return the best plan with the previous pp and tp and the memory options of a space on the surviving devices; None
    if none fits."""
    pp, tp, previous_size = previous.pp, previous.tp, previous.replicas[0].micro_batch
    sizes = [size for size in space.work.micro_batch_sizes() if previous_size <= 2 * size <= 4 * previous_size]
    options = list(product(space.work.schedule_specs(pp), sizes))

    def is_possible(dp: int) -> bool:
        # With ZeRO 2 and 3, not every number of replicas divides the batch.
        dims = ParallelDims(pp, dp, tp)
        return space.allows(dims) and not all(space.why_no_layout(Option(dims, *option)) for option in options)

    largest = islice(filter(is_possible, range(space.most_replicas(pp, tp), 0, -1)), space.limits.max_replica_counts)
    best: Prediction | None = None
    reused: list[Layout] = []
    # A plan that leaves devices idle may survive as it is.
    for dp in dict.fromkeys([*filter(is_possible, [previous.dp]), *largest]):
        placement = surviving_placement(space.units(tp), previous, dp)
        if not space.can_shard(placement):
            continue
        same = _same_cut(space, previous, placement)
        if same is not None:
            reused.append(same)
            prediction = predict(space.cost, same)
            best = prediction if best is None or prediction.total < best.total else best
        for schedule_spec, size in options:
            option = Option(ParallelDims(pp, dp, tp), schedule_spec, size)
            best = evaluate(space, option, best, placements=[placement]).best
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

    Whole replicas stay. Then tensor-parallel groups of incomplete replicas keep their pipeline rank. Unused groups fill
    the gaps, where possible at a rank at which a group with equal figures was.

    Args:
        units: the tensor-parallel groups to choose from, at least pp × dp.
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
    """Return what remains of the previous plan's placement.

    Returns:
        The whole replicas, each as its groups by pipeline rank; [pipeline rank] -> the remaining groups of incomplete
        replicas; pipeline rank -> `group_spec`, the figures of its groups that decide times and memory.
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
    """Return [replica][pipeline rank] -> the device ids of the tensor-parallel group in the previous plan."""
    return [previous.pipeline_rank_devices(replica) for replica in range(previous.dp)]


HeldState = dict[DeviceId, tuple[int, frozenset[int]]]
"""Device -> (its position in the tensor-parallel group, the blocks whose state it holds)."""


def minimise_moves(
    cost: CostModel, best: Prediction, previous: Plan, reused_layouts: Sequence[Layout], max_slowdown: float
) -> Prediction:
    """Return a plan about as fast as the best plan; where possible, it moves less state than the best plan does.

    It is the first of `reused_layouts` that is fast enough and has the best plan's memory options. If there is none, it
    is the best plan with nodes of equal devices exchanged, so that devices keep the blocks they hold, if that plan is
    fast enough and `previous` has the same tp. Otherwise it is the best plan itself.

    Args:
        reused_layouts: layouts on the surviving devices of the previous plan, the one with the fewest moves first.
        max_slowdown: a plan is fast enough if its step is longer than the best one by at most this share.
    """
    limit = best.total * (1 + max_slowdown)
    for layout in reused_layouts:
        if layout.memory_options == best.layout.memory_options:
            reused = predict(cost, layout, whole=True)
            if reused.total <= limit:
                return reused
    if previous.tp != best.layout.tp:
        return best
    exchanged = _exchanged(cost, best.layout, _held(previous))
    if exchanged is None:
        return best
    other = predict(cost, exchanged, whole=True)
    return other if other.total <= limit else best


def _exchanged(cost: CostModel, layout: Layout, held: HeldState) -> Layout | None:
    """Return the layout with nodes of equal devices exchanged so that the fewest blocks move.

    The result is None if no exchange makes fewer blocks move, or if the layout after the exchange does not fit the
    memory.

    Args:
        held: the blocks whose state each device holds now.
    """
    slots = _by_node(layout)
    taker_of = _exchange(cost, slots, _missing(slots, held))
    if all(node == taker for node, taker in taker_of.items()):
        return None
    replacement = {
        unit: other
        for node, taker in taker_of.items()
        for (unit, _), (other, _) in zip(slots[node], slots[taker], strict=True)
    }
    moved = replace(layout, placement=Placement(tuple(replacement[unit] for unit in row) for row in layout.placement))
    return None if moved.shards != layout.shards or moved.memory_shortage(cost.memory) else moved


def moves_between(previous: Plan, plan: Plan) -> tuple[list[Move], list[int]]:
    """Return the moves of state from the previous plan to the new one, and the blocks that have to come from a
    checkpoint.

    A block comes from a checkpoint if no device that both plans use holds its state. If tp changes, every block is
    split anew and counts as moved.
    """
    held, wanted = _held(previous), _held(plan)
    same_cut = previous.tp == plan.tp
    holders: dict[tuple[int, int], list[DeviceId]] = {}
    for device_id, (position, blocks) in held.items():
        if device_id in wanted:
            for block in blocks:
                holders.setdefault((position if same_cut else 0, block), []).append(device_id)
    sent: dict[DeviceId, int] = {}
    moves: list[Move] = []
    lost: set[int] = set()
    for device_id, (position, blocks) in wanted.items():
        held_position, held_blocks = held.get(device_id, (position, frozenset()))
        missing = blocks - held_blocks if same_cut and held_position == position else blocks
        source_of: dict[int, DeviceId] = {}
        for block in sorted(missing):
            sources = holders.get((position if same_cut else 0, block))
            if not sources:
                lost.add(block)
                continue
            # Prefer a source on the target's node, then the source that has sent the least.
            source_of[block] = min(
                sources, key=lambda source: (source.node != device_id.node, sent.get(source, 0), source)
            )
            sent[source_of[block]] = sent.get(source_of[block], 0) + 1
        moves += _runs(source_of, device_id)
    return moves, sorted(lost)


def _runs(source_of: dict[int, DeviceId], target: DeviceId) -> list[Move]:
    """Return the moves to a device, with consecutive blocks from one source joined into one move. Blocks that the
    device holds itself need no move.

    Args:
        source_of: block -> the device that sends it.
    """
    moves: list[Move] = []
    for block, source in source_of.items():
        if source == target:
            continue
        if moves and moves[-1].source == source and moves[-1].layers[1] == block:
            moves[-1] = Move(layers=(moves[-1].layers[0], block + 1), source=source, target=target)
        else:
            moves.append(Move(layers=(block, block + 1), source=source, target=target))
    return moves


def _held(plan: Plan) -> HeldState:
    held: dict[DeviceId, tuple[int, set[int]]] = {}
    for replica in plan.replicas:
        for stage, row in zip(plan.stages, replica.devices, strict=True):
            for position, device_id in enumerate(row):
                held.setdefault(device_id, (position, set()))[1].update(range(*stage.layers))
    return {device_id: (position, frozenset(blocks)) for device_id, (position, blocks) in held.items()}


UnitsByNode = dict[str, list[tuple[TensorParallelGroup, frozenset[int]]]]
"""Node -> its tensor-parallel groups, each with the blocks that the group holds in the new plan."""


def _by_node(layout: Layout) -> UnitsByNode:
    """Return the tensor-parallel groups of each node, ascending by the group's field `index`. A group across nodes
    counts for the node of its first device.
    """
    blocks = [range(*edges) for edges in pairwise([0, *accumulate(layout.blocks)])]
    by_node: UnitsByNode = {}
    for row in layout.placement:
        for unit, stages in zip(row, layout.stages_by_rank, strict=True):
            wanted = frozenset(block for stage in stages for block in blocks[stage])
            by_node.setdefault(unit.node, []).append((unit, wanted))
    return {node: sorted(units, key=lambda item: item[0].index) for node, units in by_node.items()}


def _missing(slots: UnitsByNode, held: HeldState) -> NDArray[np.int64]:
    """Return [node, other], both in the order of `slots`, -> number of blocks that would have to be sent to the node
    `other` if it took over the groups of `node`.
    """
    none: frozenset[int] = frozenset()
    present = [[held.get(unit.device_ids[0], (0, none))[1] for unit, _ in units] for units in slots.values()]
    wanted = [[blocks for _, blocks in units] for units in slots.values()]
    # Nodes with unequal numbers of groups are never exchanged.
    return np.array(
        [[sum(len(a - b) for a, b in zip(row, other, strict=False)) for other in present] for row in wanted],
        dtype=np.int64,
    )


def _exchange(cost: CostModel, slots: UnitsByNode, missing: NDArray[np.int64]) -> dict[str, str]:
    """Return node -> the node with equal devices that takes over its blocks, chosen so that the fewest blocks are sent.

    Args:
        slots: node -> its tensor-parallel groups, each with its blocks in the new plan.
        missing: [node, other], both in the order of `slots` -> number of blocks to send to the node `other` if it takes
            over the groups of `node`.
    """
    names = list(slots)
    kinds: dict[tuple[object, ...], list[int]] = {}
    for number, name in enumerate(names):
        kinds.setdefault(tuple(cost.kind(unit) for unit, _ in slots[name]), []).append(number)
    taker_of: dict[str, str] = {}
    for equal in kinds.values():
        sent = missing[np.ix_(equal, equal)]
        takers = np.arange(len(equal))
        if (sent.diagonal() > sent.min(axis=1)).any():
            from scipy.optimize import linear_sum_assignment  # loading it takes as long as the search on 256 devices

            _, takers = linear_sum_assignment(sent)
        taker_of.update((names[node], names[equal[taker]]) for node, taker in zip(equal, takers, strict=True))
    return taker_of
