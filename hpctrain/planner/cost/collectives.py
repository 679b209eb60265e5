"""Seconds of the collectives of data parallelism: the all-reduce of gradients by codec, and the collectives of ZeRO.

An all-reduce is a number of rounds. Each round takes 2(n−1)·alpha as in a ring all-reduce over n ranks, plus beta for
each byte that a rank sends in the round. All-reduces and all-gathers are rings, which leave a node once for all of its
ranks; in an all-to-all, every rank sends to all ranks of other nodes. The formulas count every number as compressed.
Codecs that send exempt numbers (norms, small matrices) separately have one round more.

With ZeRO, a stage runs one all-gather of weights or reduce-scatter of gradients for each block, and one for the part
outside of blocks. Each is half of a ring all-reduce over the n replicas of a shard group: (n−1)(alpha + size/n·beta).
Several shard groups then all-reduce their parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hpctrain.planner.cost.workload import ModelPart, Workload
from hpctrain.planner.devices.placement_links import PlacementLinks, RingGroup
from hpctrain.records.plan.compression import Codec, Mixed
from hpctrain.records.plan.gradient_codec import FULL_BYTES, MESSAGES, Messages
from hpctrain.records.plan.layer_groups import LayerGroup
from hpctrain.records.topology.topology import CodecSeconds


class AllReduceTime(NamedTuple):
    """Time of one stage's all-reduce on its slowest ring.

    `wire_s` is the seconds of messages, `processor_s` the seconds in which a device copies, encodes and decodes.
    """

    sent_bytes: float
    """Bytes that one device sends."""
    wire_s: float
    processor_s: float

    @property
    def seconds(self) -> float:
        """Seconds of the all-reduce without overlap."""
        return self.wire_s + self.processor_s

    def followed_by(self, other: AllReduceTime) -> AllReduceTime:
        """Return the time of this sum and another one, one after the other."""
        return AllReduceTime(*map(sum, zip(self, other, strict=True)))


NO_ALL_REDUCE = AllReduceTime(0.0, 0.0, 0.0)


class StageGradients(NamedTuple):
    """The gradients of one stage that one device holds: how many numbers they have, and the seconds that the slowest of
    all devices that hold the stage takes to copy and to encode a number.
    """

    numbers: float
    number_bytes: float
    """Bytes of one number of a gradient before compression."""
    width: float
    """Side of a square matrix that low rank shrinks by the same factor as the model's matrices (see
    `low_rank_width`).
    """
    copy_s: float
    """Seconds to copy a number into a flat bucket and, if needed, its sum back."""
    codec_s: CodecSeconds | None
    """Seconds per number of each codec on the slowest device; None for exact sums."""
    flop_s: float = 0.0
    """Seconds of a FLOP of matrix products at the run's precision on the slowest device. Low rank multiplies in fp32,
    so in bf16 and fp16 its products take longer than that."""


def all_reduce_time(
    codec: Codec, rings: RingGroup, pairs: RingGroup, gradients: StageGradients, bucket_bytes: float
) -> AllReduceTime:
    """Return the time to all-reduce the gradients of a stage.

    Args:
        rings: the rings of all groups that all-reduce at the same time.
        pairs: the same groups with the links of all-to-alls, which carry the codec's `all_to_all_share` of the bytes.
        bucket_bytes: bytes of the largest bucket.
    """
    n = rings.size
    if n == 1:
        return NO_ALL_REDUCE
    size_bytes = float(gradients.number_bytes * gradients.numbers)
    buckets = max(1, math.ceil(size_bytes / bucket_bytes))
    if gradients.codec_s is None:
        # Exact sums take this short path, because the search needs them most often.
        wire_s = buckets * rings.all_reduce_s(size_bytes / buckets)
        return AllReduceTime(2 * (n - 1) * size_bytes / n, wire_s, gradients.numbers * gradients.copy_s)
    sent_bytes = codec.wire_bytes(size_bytes, n, gradients.width) / n
    # The tensor size at which a ring all-reduce sends this many bytes.
    alike_bytes = sent_bytes * n / (2 * (n - 1))
    rounds = codec.rounds(buckets, n)
    share = codec.all_to_all_share(n, gradients.width)
    ring_s, pairs_s = (group.all_reduce_s(alike_bytes / rounds) for group in (rings, pairs))
    wire_s = rounds * ((1 - share) * ring_s + share * pairs_s)
    number_s = sum(getattr(gradients.codec_s, rate) for rate in codec.rates) if codec.rates else gradients.copy_s
    number_s = number_s * codec.passes(n) + codec.more_flop(gradients.width) * gradients.flop_s
    return AllReduceTime(sent_bytes, wire_s, gradients.numbers * number_s)


def mixed_sum_time(
    codec: Mixed, parameters: Mapping[LayerGroup, float], rings: RingGroup, pairs: RingGroup,
    gradients: StageGradients, bucket_bytes: float,
) -> AllReduceTime:  # fmt: skip
    """Return the time to all-reduce the gradients of a stage whose layer groups have codecs of their own, one group
    after the other.

    Args:
        parameters: layer group -> number of its parameters in the stage.
        rings: as of `all_reduce_time`, like the arguments that follow.
    """
    taken, whole = NO_ALL_REDUCE, sum(parameters.values())
    for group, count in parameters.items():
        if count:
            one = codec.codec_of(group)
            part = gradients._replace(
                numbers=gradients.numbers * count / whole, codec_s=None if one.exact else gradients.codec_s
            )
            taken = taken.followed_by(all_reduce_time(one, rings, pairs, part, bucket_bytes))
    return taken


def node_sum_time(
    intra_node: Messages, rings: RingGroup, gradients: StageGradients, bucket_bytes: float
) -> AllReduceTime:
    """Return the time of the level within nodes of a stage's sums: the reduce-scatter among the replicas of a node, and
    the all-gather of the sums of all parts.

    Args:
        intra_node: how numbers are sent.
        rings: the rings of the replicas of a node, in all nodes.
        gradients: the whole gradients, with the seconds of codecs.
        bucket_bytes: bytes of the largest bucket of gradients in fp32.
    """
    encoding = MESSAGES[intra_node]
    buckets = max(1, math.ceil(gradients.number_bytes * gradients.numbers / bucket_bytes))
    size_bytes = encoding.number_bytes * gradients.numbers
    # Gradients are copied to messages, and sums back; to round them takes as long as an all-reduce in bf16 computes.
    number_s = gradients.copy_s if encoding.measured_as is None else getattr(gradients.codec_s, encoding.measured_as)
    return AllReduceTime(
        2 * (rings.size - 1) * size_bytes / rings.size,
        buckets * rings.all_reduce_s(size_bytes / buckets),
        gradients.numbers * number_s,
    )


def begins_early(work: Workload, stages: int) -> bool:
    """Return whether the sum of a stage's gradients begins when the stage's last backward is done, while the pipeline
    goes on with other stages.

    It does if the state is not sharded and the codec can send some gradients before it has all of them. In fp16, codecs
    with state wait until the loss scale is removed after the pipeline. Some frameworks begin early only if a replica is
    one stage.

    Args:
        stages: stages of the model.
    """
    if work.memory_options.zero or (stages > 1 and not work.framework.early_sums):
        return False
    return work.codec.early_share > 0 and not (work.precision == "fp16" and work.codec.has_state)


def overlapped_share(work: Workload, stages: int, tp: int, part: ModelPart | None = None) -> float:
    """Return the share of the messages of a stage's all-reduce that may be sent before the stage's last backward ends.

    If `begins_early` returns True, and gradients are not split over the devices of a tensor-parallel group, the share
    is the codec's `early_share`, less the share of the gradients that are ready last: those of the embedding in the
    first stage, and of the last bucket in others. Otherwise the share is 0.
    Of sums by level at most a half may be sent early: the all-gather within nodes comes last.

    Args:
        stages: number of stages of the model.
        part: what the stage holds; None: the part of the model with the largest share.
    """
    if tp > 1 or not begins_early(work, stages):
        return 0.0
    if stages == 1:
        late = work.spec.embedding_parameters() / work.spec.parameters()
    elif part is None:
        late = 0.0
    else:
        size = work.parameters(part, tp)
        last = work.framework.bucket_bytes / work.framework.summed_bytes
        late = min(1.0, max(last, work.spec.embedding_parameters() * part.first) / size) if size else 1.0
    overlap = work.codec.early_share if work.intra_node == "flat" else min(0.5, work.codec.early_share)
    return overlap * (1 - late)


def overlapped_copies_share(work: Workload, kind: str, pieces: int) -> float:
    """Return the share of the messages between the copies of a state that is sharded within nodes which may be sent
    before a stage's last backward ends; 0 if they all wait for its end.

    On a CPU, at ZeRO levels 2 and 3, the sum of a module between nodes begins when its sum within the node has ended,
    at the latest when the second module after it begins its own. In fp16, codecs with state wait until the loss scale
    is removed.

    Args:
        kind: kind of the devices: cuda or cpu.
        pieces: number of the stage's modules that have a sum each.
    """
    waits = work.precision == "fp16" and work.codec.has_state
    if kind != "cpu" or not work.framework.shard_prefetch or work.memory_options.zero < 2 or waits:
        return 0.0
    return work.codec.overlap * max(0.0, 1 - 2 / pieces)


def flat_copy_share(work: Workload, stages: int, tp: int) -> float:
    """Return which share of two copies the reducer makes: of the gradients into flat buckets, and of the sums back.

    The share is one half for exact sums that begin early, because the sums are not copied back; else 1. With tensor
    parallelism they are copied back.

    Args:
        stages: stages of the model.
    """
    in_place = tp == 1 and work.codec.exact and work.intra_node == "flat" and begins_early(work, stages)
    return 0.5 if in_place else 1.0


def low_rank_width(dim: int, tp: int) -> float:
    """Return the side of a square matrix that low rank shrinks by the same factor as a dim × dim matrix in `tp` parts.

    With rank r, the width follows from r·(1 + tp)/dim = 2·r/width.
    """
    return 2 * dim / (1 + tp)


COPY_PASSES = 2
"""Passes over memory that a copy from or to a flat buffer takes: one read and one write."""
SENT_BYTE_PASSES = 15
"""CPU time to send a byte of a collective and to receive another one, as the bytes of memory traffic that take equally
long. Measured were 13 to 16: CPU seconds of the busiest of two and of four processes, all-to-alls of 4 MiB with gloo
over loopback, torch 2.13.
"""


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
        waits = [
            messages_s * alone + max(0.0, messages_s * (1 - alone) - pass_s)
            for messages_s, pass_s in zip((forward, backward, inputs, weights), passes, strict=True)
        ]
        return waits[0], waits[1], waits[2], waits[3]

    def per_step(self, zero: int) -> float:
        """Return the seconds of the ZeRO collectives that run once, at the end of the step, without `early_copies_s`.

        Args:
            zero: ZeRO level.
        """
        late_copies = self.copies - self.early_copies_s
        return late_copies + (self.gather if zero < 3 else 0.0) + (self.scatter if zero == 1 else 0.0)


def shard_collective_times(
    placement_links: PlacementLinks, work: Workload, shares: Sequence[ModelPart], owner: Sequence[int], shards: int
) -> list[ShardCollectiveTimes]:
    """Return [stage] -> seconds of its ZeRO collectives. All stages communicate at about the same time and share the
    network cards.

    Args:
        shares: [stage] -> the part of the model that the stage holds.
        owner: [stage] -> its pipeline rank.
        shards: number of consecutive replicas that share a state (a shard group).
    """
    placement = placement_links.placement
    gathers = placement_links.shard_ring_groups(shards, False)
    across = placement_links.replicate_ring_groups(shards, False)
    tp = len(placement[0][0].devices)
    scatters = _reduce_scatter_groups(placement_links, work, shards)
    times = []
    for share, rank in zip(shares, owner, strict=True):
        parameters = work.parameters(share, tp)
        pieces = share.pieces
        bytes_per_s = min(placement[replica][rank].bytes_per_s for replica in placement.representatives)

        def seconds(size: float, rings: RingGroup, pieces: int = pieces, speed: float = bytes_per_s) -> float:
            return pieces * rings.all_reduce_s(size / pieces) / 2 + COPY_PASSES * size / speed

        # Gradients are compressed within the backward pass only if one group shards over all replicas; see decision 45.
        width = work.codec.number_bytes(shards, work.spec.dim) / FULL_BYTES if shards == len(placement) else 1.0
        within = MESSAGES[work.intra_node].number_bytes / FULL_BYTES if work.intra_node != "flat" else 1.0
        part, summed = work.framework.summed_bytes * parameters / shards, work.framework.summed_bytes * parameters
        rings = [groups[rank] for groups in scatters]
        if len(rings) > 1:
            sizes = [summed * within, summed * width / rings[0].size]
        else:
            sizes = [summed * (width if shards == len(placement) else within)]
        beside = work.codec.beside_share(shards) if shards == len(placement) else 0.0
        times.append(
            ShardCollectiveTimes(
                gather=seconds(work.gathered_bytes * parameters, gathers[rank]),
                scatter=sum(map(seconds, sizes, rings)),
                copies=pieces * across[rank].all_reduce_s(part / pieces),
                pieces=pieces,
                beside_s=beside * _beside_s(rings[-1], sizes[-1], pieces, bytes_per_s)
                if sums_beside(work, placement[0][0].kind)
                else 0.0,
            )
        )
    return times


def _beside_s(group: RingGroup, size_bytes: float, pieces: int, bytes_per_s: float) -> float:
    """Return the seconds of a stage's reduce-scatters in which no CPU is at work on their messages.

    Args:
        size_bytes: bytes of the stage's gradients as they are sent.
        pieces: number of reduce-scatters.
        bytes_per_s: memory bandwidth of the slowest device.
    """
    processor_s = SENT_BYTE_PASSES * (group.size - 1) / group.size * size_bytes / bytes_per_s
    return max(0.0, pieces * group.all_reduce_s(size_bytes / pieces) / 2 - processor_s)


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
