"""Seconds of the collectives of ZeRO.

A stage runs one all-gather of weights or reduce-scatter of gradients for each block, and one for the part outside of
blocks. Each is half of a ring all-reduce over the n replicas of a shard group: (n−1)(alpha + size/n·beta). Several
shard groups then all-reduce their parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpctrain.base.collector import cached_method
from hpctrain.planner.cost.workload import ModelPart, Workload
from hpctrain.planner.devices.constants import CollectiveCost, CostConstants
from hpctrain.planner.devices.placement_links import PlacementLinks, RingGroup, SlowestRates
from hpctrain.records.plan.gradient_codec import FULL_BYTES, MESSAGES


class ShardCollectiveTimes(NamedTuple):
    """Seconds of a stage's ZeRO collectives, as its slowest shard group takes them."""

    gather: float
    """Seconds of the all-gather of all weights."""
    scatter: float
    """Seconds of the reduce-scatter of all gradients."""
    copies: float
    """Seconds of the all-reduce between the shard groups; each shard group holds a copy of the whole state."""
    early_copies_s: float = 0.0
    """Part of `copies`: seconds of messages that need not wait for the rank's last backward."""
    pieces: int = 1
    """Number of parts of the stage that have a collective each."""
    beside_s: float = 0.0
    """Seconds of the reduce-scatter's messages that pass beside the computation of a rank on a CPU, with no processor
    at work on them."""

    def per_micro_batch(
        self, zero: int, passes: tuple[float, float, float, float], prefetched: bool
    ) -> tuple[float, float, float, float]:
        """Return the seconds that each pass of a micro-batch waits for collectives: (forward, whole backward, I, W).

        Args:
            zero: ZeRO level.
            passes: seconds of these passes without collectives.
            prefetched: whether collectives overlap the pass that they belong to, except for one of their `pieces`;
                otherwise only the reduce-scatter of a whole backward overlaps it, for at most `beside_s`.
        """
        gather = self.gather if zero == 3 else 0.0
        scatter = self.scatter if zero >= 2 else 0.0
        forward, backward, inputs, weights = gather, gather + scatter, gather, gather + scatter
        alone = 1 / self.pieces
        if not prefetched:
            hidden = min(passes[1], self.beside_s * (1 - alone)) if zero >= 2 else 0.0
            return forward, backward - hidden, inputs, weights

        def wait_s(messages_s: float, pass_s: float) -> float:
            return messages_s * alone + max(0.0, messages_s * (1 - alone) - pass_s)

        return (
            wait_s(forward, passes[0]), wait_s(backward, passes[1]), wait_s(inputs, passes[2]),
            wait_s(weights, passes[3]),
        )  # fmt: skip

    def per_step(self, zero: int) -> float:
        """Return the seconds of the ZeRO collectives that run once, at the end of the step, without `early_copies_s`.

        Args:
            zero: ZeRO level.
        """
        late_copies = self.copies - self.early_copies_s
        return late_copies + (self.gather if zero < 3 else 0.0) + (self.scatter if zero == 1 else 0.0)


@dataclass(frozen=True)
class _StageCollectives:
    """Seconds of the ZeRO collectives of a stage with `pieces` parts (blocks, and the part outside of blocks), each of
    which has a collective of its own. Sizes are bytes of the whole stage.
    """

    pieces: int
    byte_s: float
    """Seconds to read or write a byte in memory."""
    launch_s: float
    constants: CostConstants

    def gather_s(self, size_bytes: float, group: RingGroup) -> float:
        """Return the seconds of the all-gathers, each with the wait for the last rank."""
        wait_s = self.pieces * self.constants.wait_ops * self.launch_s
        return wait_s + self._seconds(self.constants.all_gather, size_bytes, group)

    def scatter_s(self, size_bytes: float, group: RingGroup) -> float:
        """Return the seconds of the reduce-scatters."""
        return self._seconds(self.constants.reduce_scatter, size_bytes, group)

    def messages_s(self, size_bytes: float, group: RingGroup) -> float:
        """Return the seconds of the messages of one collective for each part; a CPU that sends and receives is busy for
        a share of them, and they take no less."""
        return max(self._wire_s(size_bytes, group), self._sending_s(size_bytes, group))

    def beside_s(self, size_bytes: float, group: RingGroup) -> float:
        """Return the seconds of these messages in which no CPU is at work on them."""
        return max(0.0, self._wire_s(size_bytes, group) - self._sending_s(size_bytes, group))

    def _seconds(self, cost: CollectiveCost, size_bytes: float, group: RingGroup) -> float:
        host_s = self.pieces * cost.ops * self.launch_s
        return self.messages_s(size_bytes, group) + cost.passes * size_bytes * self.byte_s + host_s

    def _wire_s(self, size_bytes: float, group: RingGroup) -> float:
        return self.pieces * group.all_reduce_s(size_bytes / self.pieces) / 2

    def _sending_s(self, size_bytes: float, group: RingGroup) -> float:
        return self.constants.sent_byte_passes * (group.size - 1) / group.size * size_bytes * self.byte_s


class ShardCollectives:
    """Seconds of the ZeRO collectives of one workload; caches its results, because a search asks for the same stages on
    the same links again and again.

    Args:
        constants: kind of device (cpu or cuda) -> the cost model's constants for it.
    """

    def __init__(self, work: Workload, constants: Mapping[str, CostConstants]) -> None:
        self.work, self.constants = work, constants

    def times(
        self, placement_links: PlacementLinks, shares: Sequence[ModelPart], owner: Sequence[int], shards: int
    ) -> list[ShardCollectiveTimes]:
        """Return [stage] -> seconds of its ZeRO collectives. All stages communicate at about the same time and share
        the network cards.

        Args:
            shares: [stage] -> the part of the model that the stage holds.
            owner: [stage] -> its pipeline rank.
            shards: number of consecutive replicas that share a state (a shard group).
        """
        placement = placement_links.placement
        gathers, slowest = placement_links.shard_ring_groups(shards, False), placement_links.slowest_rates
        # One shard group over all replicas has nothing to all-reduce.
        across = None if shards == len(placement) else placement_links.replicate_ring_groups(shards, False)
        scatters = list(zip(*_reduce_scatter_groups(placement_links, self.work, shards), strict=True))
        group = len(placement[0][0].devices), placement[0][0].kind, shards
        return [
            self._of_stage(
                *group, share, slowest[rank], gathers[rank], scatters[rank], across[rank] if across else None
            )
            for share, rank in zip(shares, owner, strict=True)
        ]

    @cached_method
    def _of_stage(
        self, tp: int, kind: str, shards: int, share: ModelPart, slowest: SlowestRates, gathers: RingGroup,
        scatters: tuple[RingGroup, ...], across: RingGroup | None,
    ) -> ShardCollectiveTimes:  # fmt: skip
        """Return the seconds of a stage's collectives.

        Args:
            gathers: links of the all-gathers.
            scatters: [level] -> links of the reduce-scatters.
            across: links of the all-reduce between shard groups; None if there is only one shard group.
        """
        work, codec, over_all, parameters = self.work, self.work.codec, across is None, self.work.parameters(share, tp)
        # Gradients are compressed within the backward pass only if one group shards over all replicas; see decision 45.
        width = codec.number_bytes(shards, work.spec.dim) / FULL_BYTES if over_all else 1.0
        within = MESSAGES[work.intra_node].number_bytes / FULL_BYTES if work.intra_node != "flat" else 1.0
        stage = _StageCollectives(share.pieces, 1 / slowest.bytes_per_s, slowest.launch_s, self.constants[kind])
        summed = work.framework.sharded_sum_factor * work.framework.summed_bytes * parameters
        sizes = [summed * (width if over_all else within)]
        if len(scatters) > 1:
            sizes = [summed * within, summed * width / scatters[0].size]
        scatter_s = sum(map(stage.scatter_s, sizes, scatters))
        if over_all and codec.sharded_sums == "selected":
            scatter_s += stage.messages_s(0.0, scatters[-1])  # first, ranks tell each other how long their messages are
        copies_s = beside_s = 0.0
        if across is not None:
            copies_s = 2 * stage.messages_s(work.framework.summed_bytes * parameters / shards, across)
        elif sums_beside(work, kind):
            beside_s = codec.beside_share(shards) * stage.beside_s(sizes[-1], scatters[-1])
        return ShardCollectiveTimes(
            gather=stage.gather_s(work.gathered_bytes * parameters, gathers),
            scatter=scatter_s,
            copies=copies_s,
            pieces=share.pieces,
            beside_s=beside_s,
        )


def sums_beside(work: Workload, kind: str) -> bool:
    """Return whether the reduce-scatters of a state that is sharded over all replicas go on while a rank on a CPU
    computes; by level, these are the ones between nodes.

    Args:
        kind: kind of the devices: cuda or cpu.
    """
    return kind == "cpu" and work.framework.shard_prefetch and work.codec.sharded_sums != "none"


def _reduce_scatter_groups(placement_links: PlacementLinks, work: Workload, shards: int) -> list[list[RingGroup]]:
    """Return [level of the reduce-scatter of gradients][pipeline rank] -> its rings, or the links of its all-to-alls:
    one level over all replicas of a shard group, or the level within nodes and the one between them.

    Args:
        shards: number of consecutive replicas that share a state (a shard group).
    """
    placement, replicas = placement_links.placement, placement_links.level_replicas
    # Gradients go to owners, which add them up, if they are compressed or on a CPU; see decision 45.
    pairs = placement[0][0].kind == "cpu" or not work.codec.exact
    if work.intra_node == "flat" or shards < len(placement) or replicas == 1:
        return [placement_links.shard_ring_groups(shards, pairs)]
    # By level they go to owners on every kind of device.
    return [placement_links.shard_ring_groups(replicas, True), placement_links.replicate_ring_groups(replicas, True)]
