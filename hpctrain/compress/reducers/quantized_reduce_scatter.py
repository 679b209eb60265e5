"""Sums of gradients of a sharded state that travel as integers of few bits. With feedback, rounding errors stay in the
residuals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.compress.codecs.buffers import BufferPool
from hpctrain.compress.codecs.integers import BlockCode
from hpctrain.compress.collectives.overlapped_work import begin_all_to_all
from hpctrain.compress.collectives.reduce_scatter import (
    FlatGradientLayout,
    ReduceScatter,
    ScatterUnderWay,
    ShardedParameter,
)
from hpctrain.compress.reducers.integer_residuals import IntegerResiduals

_FULL_BYTES = 4


class QuantizedReduceScatter(ReduceScatter):
    """The reduce-scatter of one `fully_shard` module of a stage, by integers; exempt parameters are summed exactly.

    Each rank owns a part of the sums. Each rank sends each owner the numbers of the owner's part, rounded; with
    feedback, it keeps the rounding errors in its residuals. The owner adds up the numbers in fp32 and does not send the
    sums. At N ranks, each rank sends (N−1)/N·b bytes for each number of its gradient, where b is 1.016 bytes with mode
    int8 and 0.258 bytes with mode rotated_int2. ZeRO++'s qgZ (Wang et al. 2023, arXiv:2306.10209) sends gradients of a
    sharded state in the same form, without residuals.

    The numbers of a rank's own part are not rounded. If any rank's gradient is not finite, all owners get NaN, and the
    module's residuals do not change.
    """

    residuals: IntegerResiduals

    def __init__(
        self, pieces: Sequence[ShardedParameter], compressed: Sequence[int], number: int, shared: QuantizedStage
    ) -> None:
        """Create the reduce-scatter before the first step.

        Args:
            pieces: the module's parameters, in the order of the flat gradient.
            compressed: indices in `pieces` of the parameters to compress, ascending; at least one.
            number: index of the module in its stage.
            shared: the residuals and message memory that all reduce-scatters of the stage share.
        """
        self.residuals = shared.residuals
        self._shared = shared
        self._part = FlatGradientLayout(pieces, compressed)
        self._number = number
        self._sizes = [end - start for start, end in self._part.compressed]
        self._exempt_sizes = [end - start for start, end in self._part.exempt]
        multiple = self.residuals.code.part_multiple
        self._filled = -(-sum(self._sizes) // multiple) * multiple
        """Count of integers in the message to an owner, including padding."""
        self._head = 1 + sum(self._exempt_sizes)
        """Count of fp32 numbers at the head of a message: a flag, and the numbers that are summed exactly.

        The flag is 0, or NaN if the gradient is not finite.
        """

    def begin(self, gradient: Tensor, group: dist.ProcessGroup) -> ScatterUnderWay:
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        rows = self._part.rows(gradient, world)
        length = _FULL_BYTES * self._head + self.residuals.code.bytes_of(self._filled)
        outgoing, incoming = (self._shared.messages.take(world * length, gradient, torch.uint8) for _ in range(2))
        self._write(rows, outgoing.view(world, -1), rank)
        work = begin_all_to_all(incoming, outgoing, group)
        write_sums = partial(self._write_sums, outgoing, incoming.view(world, -1), rank)
        return ScatterUnderWay((world - 1) * length, work, write_sums)

    def _write_sums(self, outgoing: Tensor, incoming: Tensor, rank: int, output: Tensor) -> None:
        """Write the sums of this rank's part to `output`, and store the next residuals if the sums are finite.

        Args:
            outgoing: memory of the messages that were sent.
            incoming: [world, bytes], uint8: the messages of all ranks.
            rank: this rank.
            output: [part]; written to.
        """
        heads = self._heads(incoming).sum(0)
        finite = math.isfinite(float(heads[0]))
        if finite:
            self._add_up(incoming, heads, output, rank)
        else:
            output.fill_(math.nan)
        self.residuals.free(self.residuals.end(self._number, finite))
        self._shared.messages.give_back(outgoing, incoming)

    def _write(self, rows: Tensor, outgoing: Tensor, rank: int) -> None:
        """Write this rank's messages to all ranks into `outgoing`. The part whose sums this rank itself owns stays
        unrounded in the residuals' buffer.

        Args:
            rows: [world, part]: the gradient; row i is the part whose sums rank i owns.
            outgoing: [world, bytes], uint8; written to: row i is the message to rank i. In the message to this rank
                itself, only the head is written: the flag and the numbers that are summed exactly.
            rank: this rank.
        """
        world, numbers = len(rows), sum(self._sizes)
        length = world * self._filled
        parts = self.residuals.begin(self._number, [self._number], [length], length, rows).view(world, -1)
        _copy(parts[:, :numbers].split(self._sizes, 1), rows, self._part.compressed)
        parts[:, numbers:] = 0
        heads = self._heads(outgoing)
        _copy(heads[:, 1:].split(self._exempt_sizes, 1), rows, self._part.exempt)
        messages = outgoing[:, _FULL_BYTES * self._head :]
        square = self.residuals.measure(self._number)
        self.residuals.write(self._number, messages, exempt=rank)
        parts[:, numbers:] = 0  # padding leaves no residual
        # The flag tells each owner whether any number of the part is not finite, although the owner receives only some
        # of them. A finite number divided by a small scale may be too large for a message.
        coded = [self.residuals.code.finite(message) for to, message in enumerate(messages) if to != rank]
        heads[:, 0] = 0 * (square + heads[:, 1:].square().sum())
        heads[:, 0].masked_fill_(~torch.stack(coded).all(), math.nan)

    def _add_up(self, incoming: Tensor, heads: Tensor, output: Tensor, rank: int) -> None:
        """Write the sums of this rank's part to `output`.

        Args:
            incoming: [world, bytes], uint8: the messages of all ranks.
            heads: [head]: the sum over the messages of the fp32 numbers at their heads.
            output: [part]; written to.
            rank: this rank.
        """
        total = self.residuals.parts(self._number, len(incoming))[rank]
        others = [message[_FULL_BYTES * self._head :] for sender, message in enumerate(incoming) if sender != rank]
        self.residuals.code.add(others, total)
        compressed = total[: sum(self._sizes)].split(self._sizes)
        exempt = heads[1:].split(self._exempt_sizes)
        for stretches, sums in ((self._part.compressed, compressed), (self._part.exempt, exempt)):
            for (start, end), values in zip(stretches, sums, strict=True):
                output[start:end] = values
        total.zero_()  # this rank's own numbers leave no residual

    def _heads(self, messages: Tensor) -> Tensor:
        """Return the heads of messages, uint8 [world, bytes], as an fp32 view [world, head].

        A head is the first numbers of a message: a flag, and the numbers that are summed exactly.
        """
        return messages[:, : _FULL_BYTES * self._head].view(torch.float32)


def _copy(targets: Sequence[Tensor], rows: Tensor, stretches: Sequence[tuple[int, int]]) -> None:
    for target, (start, end) in zip(targets, stretches, strict=True):
        target.copy_(rows[:, start:end])


class QuantizedStage:
    """The residuals and the message memory that the reduce-scatters of one sharded stage share."""

    def __init__(self, code: BlockCode, feedback: bool = True) -> None:
        """Create residuals of zero.

        Args:
            code: encodes the numbers.
            feedback: whether rounding errors are added to the next gradient.
        """
        self.residuals = IntegerResiduals(code, "part", feedback, bounded=True)
        self.messages = BufferPool(bounded=True)
