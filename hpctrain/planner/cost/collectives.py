"""Seconds of the all-reduce of gradients over the replicas, by codec.

An all-reduce is a number of rounds. Each round takes 2(n−1)·alpha as in a ring all-reduce over n ranks, plus beta for
each byte that a rank sends in the round. All-reduces and all-gathers are rings, which leave a node once for all of its
ranks; in an all-to-all, every rank sends to all ranks of other nodes. The formulas count every number as compressed.
Codecs that send exempt numbers (norms, small matrices) separately have one round more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from hpctrain.planner.cost.workload import ModelPart, Workload
from hpctrain.planner.devices.placement_links import RingGroup
from hpctrain.records.plan.compression import Codec, Mixed
from hpctrain.records.plan.gradient_codec import MESSAGES, Messages
from hpctrain.records.plan.layer_groups import LayerGroup
from hpctrain.records.topology.topology import CodecSeconds


class AllReduceTime(NamedTuple):
    """Time of one stage's all-reduce on its slowest ring.

    `wire_s` is the seconds of messages, `processor_s` the seconds in which a device copies, encodes and decodes. Of the
    messages' seconds, a CPU is at work on sending and receiving for `sending_s`; with a fast link these are longer.
    """

    sent_bytes: float
    """Bytes that one device sends."""
    wire_s: float
    processor_s: float
    sending_s: float = 0.0

    @property
    def beside_s(self) -> float:
        """Seconds of messages on which no CPU is at work; they may pass while the device computes."""
        return max(0.0, self.wire_s - self.sending_s)

    @property
    def seconds(self) -> float:
        """Seconds of the all-reduce without overlap."""
        return self.beside_s + self.sending_s + self.processor_s

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
    sent_byte_s: float = 0.0
    """Seconds in which a CPU sends a byte and receives another one."""


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
        return _with_sending(gradients, 2 * (n - 1) * size_bytes / n, wire_s, gradients.copy_s)
    sent_bytes = codec.wire_bytes(size_bytes, n, gradients.width) / n
    # The tensor size at which a ring all-reduce sends this many bytes.
    alike_bytes = sent_bytes * n / (2 * (n - 1))
    rounds = codec.rounds(buckets, n)
    share = codec.all_to_all_share(n, gradients.width)
    ring_s, pairs_s = (group.all_reduce_s(alike_bytes / rounds) for group in (rings, pairs))
    wire_s = rounds * ((1 - share) * ring_s + share * pairs_s)
    number_s = sum(getattr(gradients.codec_s, rate) for rate in codec.rates) if codec.rates else gradients.copy_s
    number_s = number_s * codec.passes(n) + codec.more_flop(gradients.width) * gradients.flop_s
    return _with_sending(gradients, sent_bytes, wire_s, number_s)


def _with_sending(gradients: StageGradients, sent_bytes: float, wire_s: float, number_s: float) -> AllReduceTime:
    """Return the time of an all-reduce.

    Args:
        sent_bytes: bytes that a rank sends.
        wire_s: seconds of its messages.
        number_s: seconds in which a device copies, encodes and decodes a number.
    """
    return AllReduceTime(sent_bytes, wire_s, gradients.numbers * number_s, sent_bytes * gradients.sent_byte_s)


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
    sent_bytes = 2 * (rings.size - 1) * size_bytes / rings.size
    return _with_sending(gradients, sent_bytes, buckets * rings.all_reduce_s(size_bytes / buckets), number_s)


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
