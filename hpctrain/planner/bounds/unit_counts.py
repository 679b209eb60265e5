"""Counts tensor-parallel groups of one size by kind (groups for which the cost model computes the same), and merges
kinds into classes, each with the least time and the largest memory of its kinds.

By these counts, a bound takes as long to compute for ten thousand groups as for ten.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import sub
from typing import NamedTuple

import numpy as np

from hpctrain.planner.bounds.arrays import FloatArray
from hpctrain.planner.cost.model import CostModel, UnitKind
from hpctrain.planner.cost.shard_collectives import sums_beside
from hpctrain.planner.cost.workload import STAGE_ENDS, ModelPart, Workload
from hpctrain.planner.devices.constants import ForwardBackward
from hpctrain.planner.devices.tensor_parallel_group import TensorParallelGroup
from hpctrain.planner.layout.layout import Option


class UnitCounts:
    """The tensor-parallel groups of one size, counted by kind (`UnitKind`), and the smallest alpha and beta of their
    links."""

    def __init__(self, cost: CostModel, units: Sequence[TensorParallelGroup]) -> None:
        counts = Counter(cost.kind(unit) for unit in units)
        first = {cost.kind(unit): unit for unit in reversed(units)}
        self.kinds = [(first[kind], count) for kind, count in counts.items()]
        """One entry a kind: (the first group of the kind, number of groups of the kind)."""
        self.tp = len(units[0].devices) if units else 1
        self.total = len(units)
        self.within_nodes = all(len({device.node for device in unit.devices}) == 1 for unit, _ in self.kinds)
        self.by_node = sorted(Counter(unit.node for unit in units).values(), reverse=True)
        self.most_in_a_node = max(self.by_node, default=0)
        within = [cost.links.between(unit.device_ids[0], unit.device_ids[0])[1] for unit, _ in self.kinds]
        self.within_beta = min(within, default=0.0)
        device_ids = {unit.node: unit.device_ids[0] for unit in units}
        self.inside = {cost.links.between(device_id, device_id) for device_id in device_ids.values()}
        """The distinct (alpha, beta) of links within nodes."""
        self.alpha, beta = cost.links.least()
        senders = self.tp if self.within_nodes else 1
        cards = cost.links.ports.most_cards
        self.message_beta = beta * max(1.0, senders / cards)
        """The least seconds per byte of stage messages that leave a node together, one from each device of a group."""
        self.ring_beta = beta * senders / cards
        """The least seconds per byte of the rings that leave a node together, one from each device of a group."""

    def least_nodes(self, size: int) -> int:
        """Return the smallest number of nodes that together hold `size` tensor-parallel groups."""
        return 1 + bisect_left(list(accumulate(self.by_node)), size)

    def ring(self, size: int) -> tuple[float, float]:
        """Return the least (alpha, beta), in s and s/byte, of a hop of a ring through `size` tensor-parallel groups,
        which lie in one node where that is possible.
        """
        if size <= self.most_in_a_node:
            return 0.0, min(self.ring_beta, self.within_beta) if self.ring_beta else 0.0
        return self.alpha, self.ring_beta


def counts_all_reduce(work: Workload, dp: int) -> bool:
    """Return whether bounds count the all-reduce of gradients.

    Bounds leave it out with one replica, with a codec that is not exact, with sums by level, and with state that is
    sharded within nodes.
    """
    sharded_in_nodes = work.memory_options.zero and work.memory_options.shard == "node"
    return dp > 1 and work.codec.exact and work.intra_node == "flat" and not sharded_in_nodes


def hides_shard_collectives(work: Workload, kind: str) -> bool:
    """Return whether ZeRO's collectives overlap the passes that they belong to, on devices of this kind."""
    return work.framework.shard_prefetch and kind == "cuda"


def late_shard_bytes(work: Workload, kind: str) -> tuple[float, float]:
    """Return the bytes for each parameter that ZeRO gathers (weights) and scatters (gradients) in every step without
    overlapping a pass; 0 for reduce-scatters of which only a part overlaps a pass, as on CPUs.

    Args:
        kind: kind of the devices: cuda or cpu.
    """
    level, hidden = work.memory_options.zero, hides_shard_collectives(work, kind)
    gathered = 0.0 if level == 3 and hidden else work.gathered_bytes
    return gathered, 0.0 if level >= 2 and (hidden or sums_beside(work, kind)) else work.framework.summed_bytes


def shard_bytes_per_micro_batch(work: Workload) -> tuple[float, float]:
    """Return the bytes for each parameter that ZeRO's collectives send beside or before the forward and the backward
    pass of every micro-batch."""
    gathered = work.gathered_bytes if work.memory_options.zero == 3 else 0.0
    return gathered, gathered + (work.framework.summed_bytes if work.memory_options.zero >= 2 else 0.0)


class UnitClass(NamedTuple):
    """A class of tensor-parallel groups: all groups of one or more kinds (`UnitKind`), which bounds treat as equal. It
    holds the least seconds that any of these groups takes, for one micro-batch where a field does not say otherwise,
    and the largest memory of a group.
    """

    kinds: frozenset[UnitKind]
    """Kinds of the groups in the class."""
    number: int
    """Number of tensor-parallel groups of the class."""
    kind: str
    """Kind of the devices: cuda or cpu."""
    memory_bytes: float
    """Largest memory of a group in the class."""
    block: ForwardBackward
    """Seconds of a block's forward and backward, including collectives of tensor parallelism."""
    embedding: ForwardBackward
    head: ForwardBackward
    split: float
    """Seconds that splitting a block's backward into I and W adds."""
    action: float
    """Seconds to start an action."""
    once: float
    """Seconds that a step costs however little is computed."""
    copy: float
    """Seconds to copy one number of a gradient into a bucket and its sum back."""
    sent_byte: float
    """Seconds in which a CPU sends a byte of a collective and receives another one."""
    gather: tuple[float, float]
    """Seconds of ZeRO's all-gather besides its messages: of each byte, and of each block."""
    scatter: tuple[float, float]
    """Seconds of ZeRO's reduce-scatter besides its messages: of each byte, and of each block."""
    updates: tuple[float, ...]
    """Seconds of a step's optimizer update for (a block, a stage with neither blocks nor ends of the model, a stage
    with only the embedding, a stage with only the head).
    """

    def update(self, blocks: FloatArray, first: bool, last: bool) -> FloatArray:
        """Return the seconds of a step's optimizer update on a pipeline rank, for each number of blocks in `blocks`.

        Args:
            blocks: numbers of blocks that the pipeline rank may hold.
            first: whether the pipeline rank holds the embedding.
            last: whether the pipeline rank holds the head.
        """
        block, nothing, embedding, head = self.updates
        return nothing + blocks * block + first * (embedding - nothing) + last * (head - nothing)


def unit_classes(cost: CostModel, unit_counts: UnitCounts, option: Option, shards: int, most: int) -> list[UnitClass]:
    """Return at most `most` classes of tensor-parallel groups, the fastest class first.

    A class merges one or more kinds of groups. The kinds are sorted by the seconds of a block. A class ends where the
    factor from a kind's seconds to those of the next slower kind is among the `most` − 1 largest factors.

    Args:
        shards: replicas that share a state, which shortens the update.
    """
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
        [cost.optimizer_s(unit, ModelPart(blocks, *ends), shards) for ends in STAGE_ENDS] for blocks in (0, 1)
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
        constants.sent_byte_passes / unit.bytes_per_s,
        (
            constants.all_gather.passes / unit.bytes_per_s,
            (constants.all_gather.ops + constants.wait_ops) * unit.launch_s,
        ),
        (constants.reduce_scatter.passes / unit.bytes_per_s, constants.reduce_scatter.ops * unit.launch_s),
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
