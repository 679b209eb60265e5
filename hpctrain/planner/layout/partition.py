"""Sharing out blocks and micro-batches over given devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from hpctrain.planner.cost.memory import in_chunks
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import Order
from hpctrain.planner.devices.tensor_parallel_group import Cells, Unit
from hpctrain.planner.layout.layout import Layout
from hpctrain.planner.layout.split_evenly import share_out
from hpctrain.schedule.runnable import SUMS_PER_MICRO_BATCH, sums_each_micro_batch


def why_undefined(cost: CostModel, pp: int, dp: int, order: Order, micro_batch: int) -> str | None:
    """None when there is a layout of these numbers, whatever its memory, else the reason why not."""
    total, layers = cost.work.rows // micro_batch, cost.work.spec.layers
    if total < dp:
        made = f"{total} micro-batch{'es' * (total > 1)} of {micro_batch}"
        return f"batch.global {cost.work.rows} makes {made}, too few for {dp} replicas"
    if layers < pp * order.chunks:
        return f"the model's {layers} blocks are too few for the {pp * order.chunks} stages of schedule {order}"
    if reason := cost.work.spec.why_no_pipeline(pp * order.chunks):
        return reason
    saving = cost.work.saving
    if saving.equal_counts and total % dp:
        return (
            f"{total} micro-batches of {micro_batch} do not go evenly into {dp} replicas, as zero "
            f"{saving.zero} needs, which sums gradients after each"
        )
    if saving.shard == "all" and sums_each_micro_batch(cost.work.codec.mode, saving.zero, -(-total // dp)):
        return (
            f"{-(-total // dp)} micro-batches with compression {cost.work.codec.mode} and zero {saving.zero}: "
            f"{SUMS_PER_MICRO_BATCH}"
        )
    return None


def fit_layout(cost: CostModel, cells: Cells, order: Order, micro_batch: int) -> Layout:
    """Blocks and micro-batches shared out by speed, within each device's memory where there is a way.

    Blocks are cut to make the slowest pipeline rank as fast as possible, given the micro-batches of each replica;
    these go to replicas by the speed of their slowest rank. The two are settled in turn. A layout that exceeds some
    memory (see `Layout.excess`) means that no cut fits. `why_undefined` is None.
    """
    pp, dp, saving = len(cells[0]), len(cells), cost.work.saving
    total, layers = cost.work.rows // micro_batch, cost.work.spec.layers
    pace = _by_replica(
        cells, lambda row: 1.0 if saving.equal_counts
        else sum(1 / cost.parts(unit, micro_batch).whole_model(layers) for unit in row),
    )  # fmt: skip
    counts = _micro_batches(total, [1 / speed for speed in pace])
    best: Layout | None = None
    fastest = math.inf
    for _ in range(3):
        nothing = (0,) * (pp * order.chunks)
        layout = _cut(cost, Layout(cells, order.schedule, micro_batch, tuple(counts), nothing, saving))
        if dp == 1 or saving.equal_counts:
            return layout
        slowest = _slowest_by_replica(cost, layout)
        reached = max(count * each for count, each in zip(counts, slowest, strict=True))
        if reached >= fastest:
            break
        best, fastest = layout, reached
        counts = _micro_batches(total, slowest)
    assert best is not None, "the first layout is better than none"
    return best


def _by_replica(cells: Cells, value: Callable[[tuple[Unit, ...]], float]) -> list[float]:
    """[replica] -> a value that depends on its devices only, worked out once for those that are alike."""
    values = [value(cells[replica]) for replica in cells.examples]
    return [values[number] for number in cells.alike]


def _micro_batches(total: int, seconds: Sequence[float]) -> list[int]:
    """Micro-batches of each replica, from the seconds that its slowest rank takes for one."""
    replicas = len(seconds)
    if min(seconds) == max(seconds):
        return [total // replicas + (replica < total % replicas) for replica in range(replicas)]
    counts = share_out(total, lambda i, n: n * seconds[i], [1] * replicas, [total] * replicas)
    assert counts is not None, "the caller gives at least one micro-batch for each replica"
    return counts


def _cut(cost: CostModel, layout: Layout) -> Layout:
    """The layout with its blocks shared out over the pipeline ranks."""
    layers, pp, chunks = cost.work.spec.layers, layout.pp, layout.order.chunks
    times = [_rank_seconds(cost, layout, rank) for rank in range(pp)]

    def seconds(rank: int, count: int) -> float:
        return max(fixed + count * per_block for fixed, per_block in times[rank])

    # Only the first and the last stage may be without a block: they hold the embedding and the head.
    ends = (0, len(layout.blocks) - 1)
    least = [0 if set(stages) <= set(ends) else chunks for stages in layout.stages_by_rank]
    most = [_blocks_that_fit(cost, layout, rank) for rank in range(pp)]
    counts = share_out(layers, seconds, least, most) or share_out(layers, seconds, least, [layers] * pp)
    assert counts is not None, "the caller gives at least one block for each stage"
    shared = [iter(in_chunks(count, chunks)) for count in counts]
    return replace(layout, blocks=tuple(next(shared[rank]) for rank in layout.owner))


def _rank_seconds(cost: CostModel, layout: Layout, rank: int) -> list[tuple[float, float]]:
    """(fixed, per block) seconds of a step on a pipeline rank, for each replica."""
    found = []
    for replica in layout.unlike:
        count = layout.micro_batches[replica]
        parts = cost.parts(layout.cells[replica][rank], layout.micro_batch)
        fixed = sum(parts.embedding) * (rank == layout.owner[0]) + sum(parts.head) * (rank == layout.owner[-1])
        found.append((count * fixed, count * (sum(parts.block) + sum(parts.block_tp))))
    return list(dict.fromkeys(found))


def _blocks_that_fit(cost: CostModel, layout: Layout, rank: int) -> int:
    """The most blocks that every replica's unit at this pipeline rank can hold; -1 when not even none."""
    # What decides it is the same in many of them.
    unlike: dict[tuple[str, float, int], int] = {}
    for replica in layout.unlike:
        unit = layout.cells[replica][rank]
        unlike.setdefault((unit.kind, unit.memory_bytes, layout.micro_batches[replica]), replica)
    return min(
        cost.memory.most_blocks(layout.role(replica, rank), memory_bytes)
        for (_, memory_bytes, _), replica in unlike.items()
    )


def _slowest_by_replica(cost: CostModel, layout: Layout) -> list[float]:
    """Seconds for one micro-batch of the slowest pipeline rank of each replica."""

    def slowest(row: tuple[Unit, ...]) -> float:
        times = [0.0] * layout.pp
        for rank, share in zip(layout.owner, layout.shares, strict=True):
            times[rank] += cost.stage(row[rank], layout.micro_batch, share).both
        return max(times)

    return _by_replica(layout.cells, slowest)
