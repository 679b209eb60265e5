"""Sharing out blocks and micro-batches over given devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hpctrain.planner.cost import CostModel
from hpctrain.planner.layout import Cells, Layout, rank_bytes
from hpctrain.planner.memory import USABLE
from hpctrain.planner.share_out import share_out
from hpctrain.schedule.generate import interleaves


def fit_layout(cost: CostModel, cells: Cells, schedule: str, micro_batch: int) -> Layout | None:
    """Blocks and micro-batches shared out by speed, within each device's memory where there is a way.

    Blocks are cut to make the slowest pipeline rank as fast as possible, given the micro-batches of each replica;
    these go to replicas by the speed of their slowest rank. The two are settled in turn. A layout that exceeds some
    memory (see `Layout.excess`) means that no cut fits.

    Returns:
        None when the schedule is not defined for these numbers, or there is less than one piece for each.
    """
    pp, dp = len(cells[0]), len(cells)
    total = cost.work.rows // micro_batch
    chunks = 2 if schedule == "interleaved_1f1b" else 1
    layers = cost.work.spec.layers
    if total < dp or layers < pp * chunks:
        return None
    pace = [sum(1 / cost.parts(unit, micro_batch).whole_model(layers) for unit in row) for row in cells]
    counts = _micro_batches(total, [1 / speed for speed in pace])
    best: Layout | None = None
    fastest = math.inf
    for _ in range(3):
        if chunks > 1 and any(interleaves(pp, pp * chunks, count) for count in counts):
            break
        layout = _cut(cost, Layout(cells, schedule, micro_batch, tuple(counts), (0,) * (pp * chunks)))
        slowest = _slowest_by_replica(cost, layout)
        reached = max(count * each for count, each in zip(counts, slowest, strict=True))
        if reached >= fastest:
            break
        best, fastest = layout, reached
        if dp == 1:
            break
        counts = _micro_batches(total, slowest)
    return best


def _micro_batches(total: int, seconds: Sequence[float]) -> list[int]:
    """Micro-batches of each replica, from the seconds that its slowest rank takes for one."""
    counts = share_out(total, lambda i, n: n * seconds[i], [1] * len(seconds), [total] * len(seconds))
    assert counts is not None, "the caller gives at least one micro-batch for each replica"
    return counts


def _cut(cost: CostModel, layout: Layout) -> Layout:
    """The layout with its blocks shared out over the pipeline ranks."""
    layers, pp, chunks = cost.work.spec.layers, layout.pp, len(layout.blocks) // layout.pp
    times = [_rank_seconds(cost, layout, rank) for rank in range(pp)]

    def seconds(rank: int, count: int) -> float:
        return max(fixed + count * per_block for fixed, per_block in times[rank])

    if pp == 1:
        counts: list[int] | None = [layers]
    else:
        # Only the first and the last stage may be without a block: they hold the embedding and the head.
        least = [0 if chunks == 1 and rank in (0, pp - 1) else chunks for rank in range(pp)]
        most = [_blocks_that_fit(cost, layout, rank, layers) for rank in range(pp)]
        counts = share_out(layers, seconds, least, most) or share_out(layers, seconds, least, [layers] * pp)
    assert counts is not None, "the caller gives at least one block for each stage"
    return replace(layout, blocks=_in_chunks(counts, chunks))


def _in_chunks(counts: Sequence[int], chunks: int) -> tuple[int, ...]:
    """Blocks of each stage, from those of each pipeline rank: equal over its chunks, the rest to the earlier ones."""
    return tuple(count // chunks + (chunk < count % chunks) for chunk in range(chunks) for count in counts)


def _rank_seconds(cost: CostModel, layout: Layout, rank: int) -> list[tuple[float, float]]:
    """(fixed, per block) seconds of a step on a pipeline rank, for each replica."""
    found = []
    for replica, count in zip(layout.cells, layout.micro_batches, strict=True):
        parts = cost.parts(replica[rank], layout.micro_batch)
        fixed = sum(parts.embedding) * (rank == 0) + sum(parts.head) * (rank == layout.pp - 1)
        found.append((count * fixed, count * (sum(parts.block) + sum(parts.block_tp))))
    return list(dict.fromkeys(found))


def _blocks_that_fit(cost: CostModel, layout: Layout, rank: int, layers: int) -> int:
    """The most blocks that every replica's unit at this pipeline rank can hold; -1 when not even none."""
    chunks = len(layout.blocks) // layout.pp
    most = layers
    seen: set[tuple[float, int]] = set()
    for replica, micro_batches in zip(layout.cells, layout.micro_batches, strict=True):
        unit = replica[rank]
        if (unit.memory_bytes, micro_batches) in seen:
            continue
        seen.add((unit.memory_bytes, micro_batches))
        usable = USABLE * unit.memory_bytes
        low, high = -1, most
        while low < high:
            middle = (low + high + 1) // 2
            split = [middle // chunks + (chunk < middle % chunks) for chunk in range(chunks)]
            fits = rank_bytes(layout, cost, unit, rank, micro_batches, split) <= usable
            low, high = (middle, high) if fits else (low, middle - 1)
        most = low
    return most


def _slowest_by_replica(cost: CostModel, layout: Layout) -> list[float]:
    """Seconds for one micro-batch of the slowest pipeline rank of each replica."""
    slowest = []
    for replica in range(layout.dp):
        times = [0.0] * layout.pp
        for stage, share in enumerate(layout.shares):
            times[stage % layout.pp] += cost.stage(layout.unit(replica, stage), layout.micro_batch, share).both
        slowest.append(max(times))
    return slowest
