"""Time of the data-parallel all-reduce of a stage's gradients, by codec.

An all-reduce is a number of rounds. Each round takes 2(n−1)·alpha as in a ring all-reduce over n ranks, plus beta for
each byte. Every number counts as compressed; exempt numbers (norms, small matrices) go in a round of their own.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hpctrain.planner.cost.workload import Workload
from hpctrain.planner.devices.placement_links import RingGroup
from hpctrain.records.plan.compression import Codec
from hpctrain.records.topology.topology import CodecSeconds


class AllReduceTime(NamedTuple):
    """Time of one stage's all-reduce, as its slowest ring takes it."""

    sent_bytes: float
    """Bytes that one device sends."""
    wire_s: float
    processor_s: float

    @property
    def seconds(self) -> float:
        """Seconds of the all-reduce without overlap."""
        return self.wire_s + self.processor_s


NO_ALL_REDUCE = AllReduceTime(0.0, 0.0, 0.0)


class StageGradients(NamedTuple):
    """The gradients of one stage on a device, and the seconds that a device takes for each of their numbers."""

    numbers: float
    number_bytes: float
    """Bytes of one number of a gradient before compression."""
    width: float
    """Side of a square matrix that low rank compresses as well as the model's matrices."""
    copy_s: float
    """Seconds to copy a number into a flat bucket and, if needed, its sum back."""
    codec_s: CodecSeconds | None
    """Seconds per number of each codec on the slowest device; None for exact sums."""


def all_reduce_time(
    codec: Codec, rings: RingGroup, gradients: StageGradients, chunks: int, bucket_bytes: float
) -> AllReduceTime:
    """Return the time to all-reduce the gradients of a stage.

    Args:
        rings: the rings that are at work at the same time; for codecs with `all_to_all`, with their slowest pairs.
        chunks: stages that each device sums at the same time.
        bucket_bytes: largest bucket.
    """
    n = rings.size
    if n == 1:
        return NO_ALL_REDUCE
    size_bytes = float(gradients.number_bytes * gradients.numbers)
    buckets = max(1, math.ceil(size_bytes / bucket_bytes))
    if gradients.codec_s is None:
        # Exact sums take this short path, because the search needs them most often.
        wire_s = buckets * rings.all_reduce_s(size_bytes / buckets, chunks)
        return AllReduceTime(2 * (n - 1) * size_bytes / n, wire_s, gradients.numbers * gradients.copy_s)
    sent_bytes = codec.wire_bytes(size_bytes, n, gradients.width) / n
    # The tensor size at which a ring all-reduce sends this many bytes.
    alike_bytes = sent_bytes * n / (2 * (n - 1))
    rounds = codec.rounds(buckets, n)
    wire_s = rounds * rings.all_reduce_s(alike_bytes / rounds, chunks)
    number_s = gradients.copy_s if codec.measured_as is None else getattr(gradients.codec_s, codec.measured_as)
    return AllReduceTime(sent_bytes, wire_s, gradients.numbers * (number_s * codec.passes(n)))


def overlaps_backward(work: Workload, stages: int, tp: int) -> bool:
    """Whether buckets may be sent before the backward pass ends.

    They may if a replica is one stage on one device and its state is not sharded. Otherwise the links are busy with
    other messages.
    """
    return stages == tp == 1 and not work.memory_options.zero


def flat_copy_share(work: Workload, stages: int, tp: int) -> float:
    """Share of the copies between gradients and flat buckets that the reducer makes.

    It is one half for exact sums that overlap the backward pass, because these are not copied back; else 1.
    """
    return 0.5 if work.codec.exact and overlaps_backward(work, stages, tp) else 1.0


def low_rank_width(dim: int, tp: int) -> float:
    """Side of a square matrix that low rank compresses as well as a dim × dim matrix in `tp` parts.

    With rank r, the width follows from r·(1 + tp)/dim = 2·r/width.
    """
    return 2 * dim / (1 + tp)
