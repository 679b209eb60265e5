"""Sums what low-rank products leave out of the gradients, as integers of few bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.compress.codecs.buffers import Scratch
from hpctrain.compress.codecs.rotated_integers import RotatedIntegerCode
from hpctrain.compress.reducers.reduce_scatter_all_gather import BucketCodec, ReduceScatterAllGather
from hpctrain.records.plan.compression import BUCKET_BYTES
from hpctrain.records.plan.gradient_codec import FULL_BYTES


def padded(numbers: int, world: int) -> int:
    """Return the length of the memory that an `IntegerRemainder` needs for residuals of this many numbers."""
    multiple = world * RotatedIntegerCode.part_multiple
    return -(-numbers // multiple) * multiple


class IntegerRemainder(BucketCodec):
    """Sums residuals over the ranks as integers, and leaves in them the rounding errors.

    A rank keeps the rounding errors of its own numbers and of the sums that it rounds, so the sums plus the residuals
    of all ranks stay what the residuals were before. The residuals of all matrices lie one after the other; a bucket is
    a segment of them.
    """

    part_multiple = RotatedIntegerCode.part_multiple

    def __init__(self, group: dist.ProcessGroup, bits: int, memory: Tensor, sizes: Sequence[int]) -> None:
        """Create the sums before the first step.

        Args:
            group: the ranks.
            bits: bits of an integer.
            memory: [n], fp32: the residuals of all matrices, and padding up to a length that `padded` gives.
            sizes: count of numbers of each matrix.
        """
        world = dist.get_world_size(group)
        self._code = RotatedIntegerCode(bits, seed=0)
        self._padding = memory[sum(sizes) :]
        self._segments = list(memory.split(padded(BUCKET_BYTES // FULL_BYTES, world)))
        self._pieces = _pieces(sizes, [segment.numel() for segment in self._segments])
        self._reducer = ReduceScatterAllGather(group, dict.fromkeys(range(len(self._segments)), self))
        self._targets: Sequence[Tensor] = ()
        self._scratch = Scratch()

    def reduce(self, targets: Sequence[Tensor]) -> int:
        """Write the sums of the residuals to `targets`; the residuals become the rounding errors. Collective.

        Args:
            targets: for each matrix, memory for its sums: flat, fp32.

        Returns:
            Bytes that this rank sent.
        """
        self._targets = targets
        self._padding.zero_()
        sent_bytes = self._reducer.reduce(self._segments)
        self._targets = ()
        return sent_bytes

    def bytes_of(self, numbers: int) -> int:
        return self._code.bytes_of(numbers)

    def encode(self, bucket: Sequence[int], tensors: list[Tensor], outgoing: Tensor) -> None:
        for part, message in zip(tensors[0].view(len(outgoing), -1), outgoing, strict=True):
            self._code.write(part, message)

    def reduce_part(self, bucket: Sequence[int], incoming: Tensor, rank: int) -> Tensor:
        error = self._segments[bucket[0]].view(len(incoming), -1)[rank]
        total, part = self._scratch.take(tuple(error.shape), error), torch.empty_like(incoming[rank])
        first, *others = incoming
        self._code.read(first, total)
        self._code.add(others, total)
        self._code.write(total, part)
        error += total
        return part

    def decode(self, bucket: Sequence[int], gathered: Tensor, tensors: list[Tensor]) -> None:
        sums = self._scratch.take((tensors[0].numel(),), tensors[0])
        for part, message in zip(sums.view(len(gathered), -1), gathered, strict=True):
            self._code.read(message, part)
        for number, matrix, segment in self._pieces[bucket[0]]:
            self._targets[number][matrix] = sums[segment]


def _pieces(sizes: Sequence[int], segments: Sequence[int]) -> list[list[tuple[int, slice, slice]]]:
    """Return, for each segment, which stretches of matrices it has: (number of the matrix, stretch of the matrix,
    stretch of the segment).

    Args:
        sizes: count of numbers of each matrix; the matrices lie one after the other.
        segments: length of each segment; the segments lie one after the other.
    """
    pieces, begin = [], 0
    for length in segments:
        first, pieces_here = 0, []
        for number, size in enumerate(sizes):
            start, end = max(begin, first), min(begin + length, first + size)
            if start < end:
                pieces_here.append((number, slice(start - first, end - first), slice(start - begin, end - begin)))
            first += size
        pieces.append(pieces_here)
        begin += length
    return pieces
