"""A reduce-scatter of integers: each rank sends each owner the numbers of the owner's part, rounded.

The sender keeps the rounding errors in its residuals. The owner adds up the numbers in fp32 and sends nothing on.

At N ranks a number of the gradient costs (N−1)/N·b bytes, where b is 1.016 (8 bits) or 0.516 (4 bits). ZeRO++'s qgZ
(Wang et al. 2023, arXiv:2306.10209) sends gradients of a sharded state in this form, without residuals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.compress.codecs.buffers import Scratch
from hpctrain.compress.codecs.integers import BLOCK
from hpctrain.compress.collectives.reduce_scatter import FlatGradientLayout, ReduceScatter, ShardedParameter
from hpctrain.compress.reducers.integer_sums import IntegerResiduals

_FULL_BYTES = 4


class QuantizedReduceScatter(ReduceScatter):
    """The reduce-scatter of one part of a stage; exempt parameters are summed exactly.

    A rank's own numbers are not rounded. If any rank's gradient is not finite, all owners get NaN, and the residuals of
    the part do not change.
    """

    residuals: IntegerResiduals

    def __init__(
        self, pieces: Sequence[ShardedParameter], compressed: Sequence[int], number: int, shared: QuantizedStage
    ) -> None:
        """
        Args:
            pieces: the parameters, in the order of the flat gradient.
            compressed: indices of the parameters to compress, ascending; at least one.
            number: index of the part in its stage.
            shared: the residuals and message memory that all parts of the stage share.
        """
        self.residuals = shared.residuals
        self._shared = shared
        self._part = FlatGradientLayout(pieces, compressed)
        self._number = number
        self._sizes = [end - start for start, end in self._part.compressed]
        self._exempt_sizes = [end - start for start, end in self._part.exempt]
        self._filled = -(-sum(self._sizes) // BLOCK) * BLOCK
        """Count of integers in the message to an owner, including padding."""
        self._head = 1 + sum(self._exempt_sizes)
        """Count of fp32 numbers at the head of a message: a flag, and the numbers that are summed exactly.

        The flag is 0, or NaN if the gradient is not finite.
        """

    def __call__(self, output: Tensor, gradient: Tensor, group: dist.ProcessGroup) -> int:
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        length = _FULL_BYTES * self._head + self.residuals.code.bytes_of(self._filled)
        outgoing = self._shared.outgoing.take((world, length), gradient)
        incoming = self._shared.incoming.take((world, length), gradient)
        self._write(self._part.rows(gradient, world), outgoing, rank)
        dist.all_to_all_single(incoming.view(-1), outgoing.view(-1), group=group)
        heads = self._heads(incoming).sum(0)
        finite = math.isfinite(float(heads[0]))
        if finite:
            self._add_up(incoming, heads, output, rank)
        else:
            output.fill_(math.nan)
        self.residuals.free(self.residuals.end(self._number, finite))
        return (world - 1) * length

    def _write(self, rows: Tensor, outgoing: Tensor, rank: int) -> None:
        """Write the messages. The part of this rank stays unrounded.

        Args:
            rows: [world, part]: the gradient.
            outgoing: [world, bytes], uint8; only the head of the message to this rank itself is written.
        """
        world, numbers = len(rows), sum(self._sizes)
        length = world * self._filled
        parts = self.residuals.begin(self._number, [self._number], [length], length, rows).view(world, -1)
        _copy(parts[:, :numbers].split(self._sizes, 1), rows, self._part.compressed)
        parts[:, numbers:] = 0
        heads = self._heads(outgoing)
        _copy(heads[:, 1:].split(self._exempt_sizes, 1), rows, self._part.exempt)
        square = self.residuals.write(self._number, outgoing[:, _FULL_BYTES * self._head :], exempt=rank)
        # The flag tells each owner whether any number of the part is not finite, although the owner receives only some
        # of them.
        heads[:, 0] = 0 * (square + heads[:, 1:].square().sum())

    def _add_up(self, incoming: Tensor, heads: Tensor, output: Tensor, rank: int) -> None:
        """Write the sums of this rank's part to `output`.

        Args:
            incoming: [world, bytes], uint8: the messages of all ranks.
            heads: [head]: the sum of the fp32 numbers of all messages.
            output: [part].
        """
        total = self.residuals.parts(self._number, len(incoming))[rank]
        for sender, message in enumerate(incoming):
            if sender != rank:
                self.residuals.code.add(message[_FULL_BYTES * self._head :], total)
        compressed = total[: sum(self._sizes)].split(self._sizes)
        exempt = heads[1:].split(self._exempt_sizes)
        for stretches, sums in ((self._part.compressed, compressed), (self._part.exempt, exempt)):
            for (start, end), values in zip(stretches, sums, strict=True):
                output[start:end] = values
        total.zero_()  # this rank's own numbers leave no residual

    def _heads(self, messages: Tensor) -> Tensor:
        """Return the fp32 heads, [world, head], of messages [world, bytes]."""
        return messages[:, : _FULL_BYTES * self._head].view(torch.float32)


def _copy(targets: Sequence[Tensor], rows: Tensor, stretches: Sequence[tuple[int, int]]) -> None:
    for target, (start, end) in zip(targets, stretches, strict=True):
        target.copy_(rows[:, start:end])


class QuantizedStage:
    """The residuals and the message memory that the parts of a sharded stage share."""

    def __init__(self, bits: int) -> None:
        """
        Args:
            bits: bits of each number on the wire.
        """
        self.residuals = IntegerResiduals(bits, "part")
        self.outgoing, self.incoming = Scratch(torch.uint8), Scratch(torch.uint8)
