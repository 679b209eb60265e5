"""Units (tensor-parallel groups) of several kinds merged into a class: the least of their times, the most memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import sub
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpctrain.planner.bounds.unit_counts import UnitCounts
from hpctrain.planner.cost.model import CostModel, UnitKind
from hpctrain.planner.cost.workload import STAGE_ENDS, ModelPart
from hpctrain.planner.devices.constants import ForwardBackward
from hpctrain.planner.devices.tensor_parallel_group import TensorParallelGroup


class UnitClass(NamedTuple):
    """The least seconds of any unit of a class for one micro-batch, and the most memory."""

    kinds: frozenset[UnitKind]
    number: int
    """Units of the class."""
    kind: str
    memory_bytes: float
    block: ForwardBackward
    """Forward and backward, with what tensor parallelism adds."""
    embedding: ForwardBackward
    head: ForwardBackward
    split: float
    """What splitting a block's backward adds."""
    action: float
    """Cost of starting an action."""
    once: float
    """Cost of a step, however little is computed."""
    copy: float
    """Gathering one number of a gradient into a bucket, and copying its sum back."""
    updates: tuple[float, float, float, float]
    """The optimizer for a block, and for a stage without blocks that holds no end, the embedding, or the head."""

    def update(self, blocks: NDArray[np.float64], first: bool, last: bool) -> NDArray[np.float64]:
        """Seconds of the optimizer on a pipeline rank, for each number of blocks."""
        block, nothing, embedding, head = self.updates
        return nothing + blocks * block + first * (embedding - nothing) + last * (head - nothing)


def unit_classes(cost: CostModel, unit_counts: UnitCounts, size: int, shards: int, most: int) -> list[UnitClass]:
    """At most `most` classes, the fastest first; separated where the next kind is slower by the largest factors."""
    kinds = sorted(
        (_class(cost, unit, number, size, shards) for unit, number in unit_counts.kinds),
        key=lambda each: sum(each.block),
    )
    steps = [sum(b.block) / sum(a.block) for a, b in pairwise(kinds)]
    cuts = sorted(sorted(range(len(steps)), key=lambda at: -steps[at])[: most - 1])
    edges = [0, *(at + 1 for at in cuts), len(kinds)]
    return [_merged(kinds[start:end]) for start, end in pairwise(edges)]


def _class(cost: CostModel, unit: TensorParallelGroup, number: int, size: int, shards: int) -> UnitClass:
    parts, constants = cost.module_times(unit, size), cost.constants[unit.kind]
    nothing, embedding, head = beside = [cost.optimizer_s(unit, ModelPart(0, *ends), shards) for ends in STAGE_ENDS]
    with_block = [cost.optimizer_s(unit, ModelPart(1, *ends), shards) for ends in STAGE_ENDS]
    return UnitClass(
        frozenset([cost.kind(unit)]),
        number,
        unit.kind,
        unit.memory_bytes,
        (parts.block[0] + parts.block_tp[0], parts.block[1] + parts.block_tp[1]),
        parts.embedding,
        parts.head,
        parts.block_split,
        constants.action_ops * unit.launch_s,
        cost.step_overhead_s(unit),
        constants.reducer_bytes / unit.bytes_per_s,
        (min(map(sub, with_block, beside)), nothing, embedding, head),
    )


def _merged(kinds: Sequence[UnitClass]) -> UnitClass:
    def pair(values: Sequence[ForwardBackward]) -> ForwardBackward:
        return min(a for a, _ in values), min(b for _, b in values)

    updates = [min(values) for values in zip(*(each.updates for each in kinds), strict=True)]
    return UnitClass(
        frozenset().union(*(each.kinds for each in kinds)),
        sum(each.number for each in kinds),
        kinds[0].kind,
        max(each.memory_bytes for each in kinds),
        pair([each.block for each in kinds]),
        pair([each.embedding for each in kinds]),
        pair([each.head for each in kinds]),
        min(each.split for each in kinds),
        min(each.action for each in kinds),
        min(each.once for each in kinds),
        min(each.copy for each in kinds),
        (updates[0], updates[1], updates[2], updates[3]),
    )
