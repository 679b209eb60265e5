"""Units (tensor-parallel groups) of several kinds merged into a class: the least of their times, the most memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import sub
from typing import NamedTuple

import numpy as np

from hpctrain.planner.bounds.arrays import FloatArray
from hpctrain.planner.bounds.option import Option
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
    updates: tuple[float, ...]
    """The optimizer for a block, and for a stage without blocks that holds no end, the embedding, or the head."""

    def update(self, blocks: FloatArray, first: bool, last: bool) -> FloatArray:
        """Seconds of the optimizer on a pipeline rank, for each number of blocks."""
        block, nothing, embedding, head = self.updates
        return nothing + blocks * block + first * (embedding - nothing) + last * (head - nothing)


def unit_classes(cost: CostModel, unit_counts: UnitCounts, option: Option, shards: int, most: int) -> list[UnitClass]:
    """At most `most` classes, the fastest first; separated where the next kind is slower by the largest factors."""
    kinds = sorted(
        (_class(cost, unit, number, option.micro_batch, shards) for unit, number in unit_counts.kinds),
        key=lambda kind: sum(kind.block),
    )
    steps = [sum(b.block) / sum(a.block) for a, b in pairwise(kinds)]
    cuts = sorted(sorted(range(len(steps)), key=lambda at: -steps[at])[: most - 1])
    edges = [0, *(at + 1 for at in cuts), len(kinds)]
    return [_merged(kinds[start:end]) for start, end in pairwise(edges)]


def _class(cost: CostModel, unit: TensorParallelGroup, number: int, micro_batch: int, shards: int) -> UnitClass:
    parts, constants = cost.module_times(unit, micro_batch), cost.constants[unit.kind]
    without_blocks, with_block = (
        [cost.optimizer_s(unit, ModelPart(blocks, *ends), micro_batch, shards) for ends in STAGE_ENDS]
        for blocks in (0, 1)
    )
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
        (min(map(sub, with_block, without_blocks)), *without_blocks),
    )


def _merged(kinds: Sequence[UnitClass]) -> UnitClass:
    if len(kinds) == 1:
        return kinds[0]
    seconds = zip(*(kind[4:] for kind in kinds), strict=True)  # all fields but the first four
    return UnitClass(
        frozenset().union(*(kind.kinds for kind in kinds)),
        sum(kind.number for kind in kinds),
        kinds[0].kind,
        max(kind.memory_bytes for kind in kinds),
        *(np.min(values, axis=0).tolist() for values in seconds),
    )
