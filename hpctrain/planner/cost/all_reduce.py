"""How long the sum of a stage's gradients over its replicas takes, by the way they are sent.

A sum is a number of rounds, each out to others and back again as in a ring all-reduce, 2(n−1)·alpha, and bytes at beta.
Every number counts as compressed; what is exempt (norms, small matrices) goes in a round of its own.
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
    """Of one stage, by the slowest of its rings."""

    sent_bytes: float
    """A device puts on the wire."""
    wire_s: float
    processor_s: float

    @property
    def seconds(self) -> float:
        """Until it is done, where nothing else goes on."""
        return self.wire_s + self.processor_s


NO_ALL_REDUCE = AllReduceTime(0.0, 0.0, 0.0)


def all_reduce_time(
    codec: Codec, rings: RingGroup, size_bytes: float, numbers: float, width: float, chunks: int, copy_s: float,
    each: CodecSeconds | None, bucket_bytes: float,
) -> AllReduceTime:  # fmt: skip
    """The sum of gradients of `size_bytes` uncompressed.

    Args:
        rings: the groups that sum at the same time; for `uses_all_to_all`, with their slowest pairs.
        numbers: of gradients that a device sums.
        width: of a square matrix that low rank compresses as well as those of the model.
        chunks: stages that each device sums at the same time.
        copy_s: seconds to gather a number of a gradient into a flat bucket, and to copy its sum back if it has to be.
        each: seconds for each number by codec, on the slowest device; None for exact sums.
        bucket_bytes: most that is summed at once.
    """
    n = rings.size
    if n == 1:
        return NO_ALL_REDUCE
    if each is None:
        # The search asks for this again and again.
        buckets = bucket_count(size_bytes, bucket_bytes)
        wire_s = buckets * rings.all_reduce_s(size_bytes / buckets, chunks)
        return AllReduceTime(2 * (n - 1) * size_bytes / n, wire_s, numbers * copy_s)
    sent_bytes = wire_bytes(codec, size_bytes, n, width) / n
    # What a ring all-reduce would have to sum to send as much.
    alike_bytes = sent_bytes * n / (2 * (n - 1))
    rounds = _rounds(codec, size_bytes, n, bucket_bytes)
    wire_s = rounds * rings.all_reduce_s(alike_bytes / rounds, chunks)
    return AllReduceTime(sent_bytes, wire_s, numbers * _codec_s(codec, n, copy_s, each))


def overlaps_backward(work: Workload, stages: int, tp: int) -> bool:
    """Whether buckets may leave before the backward pass is over: where a replica is one stage on one device (elsewhere
    the links are busy with other messages) and its state is whole."""
    return stages == tp == 1 and not work.memory_options.zero


def flat_copy_share(work: Workload, stages: int, tp: int) -> float:
    """Of gathering gradients into flat buckets and copying sums back, what is done: exact sums that leave beside the
    backward pass stay where they are."""
    return 0.5 if isinstance(work.codec, NoCompression) and overlaps_backward(work, stages, tp) else 1.0


def uses_all_to_all(codec: Codec) -> bool:
    """Whether messages go from everyone to everyone, and not around a ring."""
    return isinstance(codec, Bf16 | Quantized | TopK | Adaptive)


def low_rank_width(dim: int, tp: int) -> float:
    """Side of a square matrix of which a product of rank r is as small a share as of a dim × dim one in `tp` parts:
    r·(1 + tp)/dim = 2·r/width."""
    return 2 * dim / (1 + tp)


def bucket_count(size_bytes: float, bucket_bytes: float) -> int:
    """Pieces that a rank's gradients are summed in."""
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
