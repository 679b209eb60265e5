"""Seconds of ZeRO's collectives: all-gather of weights, reduce-scatter of gradients.

A stage runs one collective for each block and one for the part outside of blocks. Each is half of a ring all-reduce
over the n replicas of a shard group: (n−1)(alpha + size/n·beta). Several shard groups then all-reduce their parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hpctrain.planner.cost.workload import ModelPart, Workload
from hpctrain.planner.devices.placement_links import PlacementLinks, RingGroup
from hpctrain.records.plan.gradient_codec import FULL_BYTES

COPY_PASSES = 2
"""Passes over memory that a copy from or to a flat buffer takes: one read and one write."""


class ShardCollectiveTimes(NamedTuple):
    """Seconds of a stage's ZeRO collectives, as its slowest shard group takes them."""

    gather: float
    """Seconds of the all-gather of all weights."""
    scatter: float
    """Seconds of the reduce-scatter of all gradients."""
    copies: float
    """Seconds of the all-reduce between the shard groups, each of which holds a copy of the state."""

    def per_micro_batch(self, zero: int) -> tuple[float, float, float, float]:
        """Seconds that the passes of a micro-batch wait: (forward, whole backward, I, W)."""
        gather = self.gather if zero == 3 else 0.0
        scatter = self.scatter if zero >= 2 else 0.0
        return gather, gather + scatter, gather, gather + scatter

    def per_step(self, zero: int) -> float:
        """Seconds of the ZeRO collectives that run once, at the end of the step."""
        return self.copies + (self.gather if zero < 3 else 0.0) + (self.scatter if zero == 1 else 0.0)


def shard_collective_times(
    placement_links: PlacementLinks, work: Workload, shares: Sequence[ModelPart], owner: Sequence[int], shards: int
) -> list[ShardCollectiveTimes]:
    """[stage] -> its ZeRO collectives; all stages communicate at about the same time and share the network cards.

    Args:
        shares: [stage] -> the part of the model that the stage holds.
        owner: [stage] -> its pipeline rank.
        shards: number of consecutive replicas that share a state.
    """
    placement = placement_links.placement
    groups, across = placement_links.shard_ring_groups(shards)
    chunks, tp = len(shares) // len(placement[0]), len(placement[0][0].devices)
    times = []
    for share, rank in zip(shares, owner, strict=True):
        parameters = work.parameters(share, tp)
        pieces = share.blocks + (share.first or share.last)
        bytes_per_s = min(placement[replica][rank].bytes_per_s for replica in placement.representatives)

        def seconds(
            size: float, pieces: int = pieces, rings: RingGroup = groups[rank], speed: float = bytes_per_s
        ) -> float:
            return pieces * rings.all_reduce_s(size / pieces, chunks) / 2 + COPY_PASSES * size / speed

        # Gradients are compressed within the backward pass only if one group shards over all replicas; see decision 45.
        width = work.codec.dense_bytes / FULL_BYTES if shards == len(placement) else 1.0
        part = work.framework.gradient_bytes * parameters / shards
        times.append(
            ShardCollectiveTimes(
                gather=seconds(work.gathered_bytes * parameters),
                scatter=seconds(work.framework.gradient_bytes * parameters * width),
                copies=pieces * across[rank].all_reduce_s(part / pieces, chunks),
            )
        )
    return times
