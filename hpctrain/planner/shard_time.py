"""How long ZeRO's collectives take: weights gathered from their parts, gradients summed into them.

Per stage and replica group: an all-gather or a reduce-scatter is half of a ring all-reduce, (n−1)(alpha + size/n·beta)
for each block and for what stands outside of blocks. Where several groups hold copies, they add up their parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.planner.network import Links, ring_sum_s, rings_leaving
from hpctrain.planner.unit import Unit
from hpctrain.planner.workload import Share, Workload

COPY_PASSES = 2
"""What is gathered or summed is copied from or to flat buffers: read and written once."""


@dataclass(frozen=True)
class ShardTime:
    """Seconds of a stage's collectives, by the slowest of its replica groups."""

    gather: float
    """All weights, from their parts."""
    scatter: float
    """All gradients, summed into their parts."""
    copies: float
    """The sums between groups that hold copies of the state."""

    def per_micro_batch(self, zero: int) -> tuple[float, float, float, float]:
        """What the passes of a micro-batch wait for: forward, backward, and its inputs and weights where it is cut."""
        gather = self.gather if zero == 3 else 0.0
        scatter = self.scatter if zero >= 2 else 0.0
        return gather, gather + scatter, gather, gather + scatter

    def per_step(self, zero: int) -> float:
        """What is left for the end of the step."""
        return self.copies + (self.gather if zero < 3 else 0.0) + (self.scatter if zero == 1 else 0.0)


def shard_times(
    links: Links, work: Workload, rings: Sequence[Sequence[Unit]], shares: Sequence[Share], shards: int
) -> list[ShardTime]:
    """The collectives of every stage; those of all stages run at about the same time and share the network cards.

    Args:
        rings: [stage] -> the units of its replicas.
        shares: what each stage holds.
        shards: consecutive replicas that share a state.
    """
    columns = [list(zip(*(unit.places for unit in ring), strict=True)) for ring in rings]
    groups = [
        [places[at : at + shards] for places in column for at in range(0, len(places), shards)] for column in columns
    ]
    across = [[places[at::shards] for places in column for at in range(shards)] for column in columns]
    leaving_groups = rings_leaving([ring for stage in groups for ring in stage])
    leaving_copies = rings_leaving([ring for stage in across for ring in stage])
    found = []
    for ring, share, own, copies in zip(rings, shares, groups, across, strict=True):
        parameters = work.parameters(share, len(ring[0].workers))
        pieces = share.blocks + (share.first or share.last)
        bytes_per_s = min(unit.bytes_per_s for unit in ring)

        def seconds(
            size: float, pieces: int = pieces, own: list[tuple[str, ...]] = own, speed: float = bytes_per_s
        ) -> float:
            sent = max(ring_sum_s(links, places, size / pieces, leaving_groups) for places in own) / 2
            return pieces * sent + COPY_PASSES * size / speed

        part = work.framework.gradient_bytes * parameters / shards
        found.append(
            ShardTime(
                gather=seconds(work.gathered_bytes * parameters),
                scatter=seconds(work.framework.gradient_bytes * parameters),
                copies=pieces * max(ring_sum_s(links, places, part / pieces, leaving_copies) for places in copies),
            )
        )
    return found
