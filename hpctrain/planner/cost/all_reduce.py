"""Time of the data-parallel all-reduce of a stage's gradients, by codec.

An all-reduce is a number of rounds, each with 2(n−1)·alpha as in a ring all-reduce, and bytes at beta. Every number
counts as compressed; exempt numbers (norms, small matrices) go in a round of their own.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hpctrain.planner.cost.workload import Workload
from hpctrain.planner.devices.placement_links import RingGroup
from hpctrain.records.plan.codec import wire_bytes
from hpctrain.records.plan.compression import (
    Adaptive,
    Bf16,
    Codec,
    LocalSteps,
    NoCompression,
    PowerSgd,
    Quantized,
    Tagc,
    TopK,
)
from hpctrain.records.topology.topology import CodecSeconds


class AllReduceTime(NamedTuple):
    """Time of one stage's all-reduce, by its slowest ring."""

    sent_bytes: float
    """Bytes that one device sends."""
    wire_s: float
    processor_s: float

    @property
    def seconds(self) -> float:
        """Seconds of the all-reduce without overlap."""
        return self.wire_s + self.processor_s


NO_ALL_REDUCE = AllReduceTime(0.0, 0.0, 0.0)


def all_reduce_time(
    codec: Codec, rings: RingGroup, size_bytes: float, numbers: float, width: float, chunks: int, copy_s: float,
    each: CodecSeconds | None, bucket_bytes: float,
) -> AllReduceTime:  # fmt: skip
    """Return the time to all-reduce gradients of `size_bytes` (uncompressed).

    Args:
        rings: the rings that are at work at the same time; for codecs with `uses_all_to_all`, with their slowest pairs.
        numbers: how many numbers of a gradient a device sums.
        width: side of a square matrix that low rank compresses as well as the model's matrices.
        chunks: stages that each device sums at the same time.
        copy_s: seconds to copy one number of a gradient into a flat bucket and, if needed, its sum back.
        each: seconds for each number by codec, on the slowest device; None for exact sums.
        bucket_bytes: largest bucket.
    """
    n = rings.size
    if n == 1:
        return NO_ALL_REDUCE
    if each is None:
        # The search needs exact sums most often, so they take this short path.
        buckets = bucket_count(size_bytes, bucket_bytes)
        wire_s = buckets * rings.all_reduce_s(size_bytes / buckets, chunks)
        return AllReduceTime(2 * (n - 1) * size_bytes / n, wire_s, numbers * copy_s)
    sent_bytes = wire_bytes(codec, size_bytes, n, width) / n
    # The size of a ring all-reduce that sends as many bytes.
    alike_bytes = sent_bytes * n / (2 * (n - 1))
    rounds = _rounds(codec, size_bytes, n, bucket_bytes)
    wire_s = rounds * rings.all_reduce_s(alike_bytes / rounds, chunks)
    return AllReduceTime(sent_bytes, wire_s, numbers * _codec_s(codec, n, copy_s, each))


def overlaps_backward(work: Workload, stages: int, tp: int) -> bool:
    """Whether buckets may be sent before the backward pass ends.

    That is so if a replica is one stage on one device and its state is not sharded. Otherwise the links are busy with
    other messages.
    """
    return stages == tp == 1 and not work.memory_options.zero


def flat_copy_share(work: Workload, stages: int, tp: int) -> float:
    """Share of the copies between gradients and flat buckets that is made.

    Exact sums that overlap the backward pass are not copied back, so half of it.
    """
    return 0.5 if isinstance(work.codec, NoCompression) and overlaps_backward(work, stages, tp) else 1.0


def uses_all_to_all(codec: Codec) -> bool:
    """Whether the codec sends messages from every rank to every other, instead of around a ring."""
    return isinstance(codec, Bf16 | Quantized | TopK | Adaptive)


def low_rank_width(dim: int, tp: int) -> float:
    """Side of a square matrix that low rank compresses as well as a dim × dim matrix in `tp` parts.

    From r·(1 + tp)/dim = 2·r/width, with rank r.
    """
    return 2 * dim / (1 + tp)


def bucket_count(size_bytes: float, bucket_bytes: float) -> int:
    """Number of buckets that a rank's gradients are summed in."""
    return max(1, math.ceil(size_bytes / bucket_bytes))


def _rounds(codec: Codec, size_bytes: float, n: int, bucket_bytes: float) -> float:
    match codec:
        case Bf16() | Quantized():
            return bucket_count(size_bytes, bucket_bytes)
        case LocalSteps(every=every):
            return bucket_count(size_bytes, bucket_bytes) / every
        case PowerSgd():
            return 2  # the factors, one after the other; what is exempt travels with the first
        case Tagc():
            return 3  # exempt numbers, the index, the values
    return 2 if n == 2 else 3  # exempt numbers; sizes and values, to all at once or to owners and back


def _codec_s(codec: Codec, n: int, copy_s: float, each: CodecSeconds) -> float:
    match codec:
        case Bf16():
            return each.bf16
        case Quantized():
            return each.quantized
        case PowerSgd():
            return each.power_sgd
        case TopK() | Adaptive():
            # From three ranks on, owners choose again from the sums of their part.
            return each.topk * (1 + 1 / n if n > 2 else 1)
        case Tagc():
            return each.topk  # folding and unfolding a sketch was not measured
        case LocalSteps(every=every):
            return copy_s / every
    return copy_s
