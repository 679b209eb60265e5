"""A reduce-scatter of integers: each rank sends each owner the numbers of the owner's part, rounded, and keeps the
rounding errors in its residuals. The owner adds them up in fp32 and sends nothing on.

At N ranks a number of the gradient costs (N−1)/N·b bytes, where b is 1.016 (8 bits) or 0.516 (4 bits). ZeRO++'s qgZ
(Wang et al. 2023, arXiv:2306.10209) sends gradients of a sharded state in this form, without residuals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.errors import CheckpointError
from hpctrain.compress.codecs.integers import BLOCK, Bits, IntegerCode
from hpctrain.compress.collectives.reduce_scatter import FlatGradientLayout, ResidualStats, ShardedParameter

_PREFIX = "residual."
_FULL_BYTES = 4


class QuantizedReduceScatter:
    """The reduce-scatter of one part of a stage; exempt parameters are summed exactly.

    A rank's own numbers are not rounded. If any rank's gradient is not finite, all owners get NaN, and the residuals of
    the part do not change.
    """

    def __init__(
        self, pieces: Sequence[ShardedParameter], compressed: Sequence[int], number: int, residuals: QuantizedResiduals
    ) -> None:
        """
        Args:
            pieces: the parameters, in the order of the flat gradient.
            compressed: indices of the parameters to compress, ascending; at least one.
            number: index of the part in its stage.
            residuals: those of the stage, which all of its parts share.
        """
        self.residuals = residuals
        self._part = FlatGradientLayout(pieces, compressed)
        self._number = number
        self._sizes = [end - start for start, end in self._part.compressed]
        self._exempt_sizes = [end - start for start, end in self._part.exempt]
        self._filled = -(-sum(self._sizes) // BLOCK) * BLOCK
        """Integers in an owner's message, padding included."""
        self._head = 1 + sum(self._exempt_sizes)
        """Numbers in fp32 at the head of a message: a flag (0, or NaN if the gradient is not finite), and those that
        are summed exactly."""

    def __call__(self, output: Tensor, gradient: Tensor, group: dist.ProcessGroup) -> int:
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        rows = self._part.rows(gradient, world)
        left = self.residuals.begin(self._number, world * self._filled, gradient).view(world, -1)
        length = _FULL_BYTES * self._head + self.residuals.code.bytes_of(self._filled)
        outgoing = self.residuals.message("outgoing", world, length, gradient)
        incoming = self.residuals.message("incoming", world, length, gradient)
        square = self._write(rows, left, outgoing, rank)
        dist.all_to_all_single(incoming.view(-1), outgoing.view(-1), group=group)
        heads = self._heads(incoming).sum(0)
        if math.isfinite(float(heads[0])):
            self._add_up(incoming, heads, left[rank], output, rank)
            self.residuals.keep(self._number, left, square)
        else:
            output.fill_(math.nan)
            self.residuals.keep_as_it_was(left)
        return (world - 1) * length

    def _write(self, rows: Tensor, left: Tensor, outgoing: Tensor, rank: int) -> Tensor:
        """Write the messages, and the rounding errors to `left`.

        Args:
            rows: [world, part]: the gradient.
            left: [world, filled], uninitialised. The row of this rank gets its own numbers, unrounded.
            outgoing: [world, bytes], uint8; of this rank's own message only the head is written.

        Returns:
            Squared norm of the compressed parameters' gradient.
        """
        numbers = sum(self._sizes)
        _copy(left[:, :numbers].split(self._sizes, 1), rows, self._part.compressed)
        left[:, numbers:] = 0
        exempt = self._heads(outgoing)[:, 1:]
        _copy(exempt.split(self._exempt_sizes, 1), rows, self._part.exempt)
        square = torch.dot(left.view(-1), left.view(-1))
        # Tells each owner if any number of the part is not finite, although it receives only some of them.
        self._heads(outgoing)[:, 0] = 0 * (square + exempt.square().sum())
        left += self.residuals.residual(self._number).view_as(left)
        for owner, message in enumerate(outgoing):
            if owner != rank:
                self.residuals.code.write(left[owner], message[_FULL_BYTES * self._head :])
        return square

    def _add_up(self, incoming: Tensor, heads: Tensor, own: Tensor, output: Tensor, rank: int) -> None:
        """Write the sums of this rank's part to `output`.

        Args:
            incoming: [world, bytes], uint8.
            heads: [head]: the sum of the messages' fp32 numbers.
            own: [filled]: this rank's own numbers; set to zero afterwards, because they leave no residual.
            output: [part].
        """
        for sender, message in enumerate(incoming):
            if sender != rank:
                self.residuals.code.add(message[_FULL_BYTES * self._head :], own)
        compressed = own[: sum(self._sizes)].split(self._sizes)
        exempt = heads[1:].split(self._exempt_sizes)
        for stretches, sums in ((self._part.compressed, compressed), (self._part.exempt, exempt)):
            for (start, end), values in zip(stretches, sums, strict=True):
                output[start:end] = values
        own.zero_()

    def _heads(self, messages: Tensor) -> Tensor:
        """The fp32 heads, [world, head], of messages [world, bytes]."""
        return messages[:, : _FULL_BYTES * self._head].view(torch.float32)


def _copy(targets: Sequence[Tensor], rows: Tensor, stretches: Sequence[tuple[int, int]]) -> None:
    for target, (start, end) in zip(targets, stretches, strict=True):
        target.copy_(rows[:, start:end])


class QuantizedResiduals:
    """The residuals of a stage, by part, and the buffers that its parts share.

    The next residual is written to another buffer; the two are swapped once the sums are known to be finite.
    """

    def __init__(self, bits: Bits) -> None:
        """
        Args:
            bits: of each number on the wire.
        """
        self.code = IntegerCode(bits)
        self._residuals: dict[int, Tensor] = {}
        self._squares: dict[int, Tensor] = {}
        """Squared norm of this rank's gradient by part, when the part was last summed."""
        self._loaded: dict[str, Tensor] = {}
        """Loaded residuals of parts that were not summed since."""
        self._spare: list[Tensor] = []
        self._messages: dict[str, Tensor] = {}

    def begin(self, number: int, numbers: int, like: Tensor) -> Tensor:
        """Begin to sum a part; return an uninitialised buffer for its next residual, [numbers].

        Raises:
            CheckpointError: the loaded residual has another size.
        """
        if number not in self._residuals:
            self._residuals[number] = self._first(number, numbers, like)
        for index, spare in enumerate(self._spare):
            if spare.numel() == numbers:
                return self._spare.pop(index)
        return like.new_empty(numbers)

    def residual(self, number: int) -> Tensor:
        """The residual of a part for which `begin` was called, flat."""
        return self._residuals[number]

    def keep(self, number: int, left: Tensor, square: Tensor) -> None:
        """Replace the residual of a part that was summed.

        Args:
            left: the buffer from `begin`, with the new residual.
            square: squared norm of this rank's gradient.
        """
        self._spare.append(self._residuals[number])
        self._residuals[number] = left.view(-1)
        self._squares[number] = square

    def keep_as_it_was(self, left: Tensor) -> None:
        """Take back the buffer from `begin` and leave the residual unchanged, because the sums are not finite."""
        self._spare.append(left.view(-1))

    def message(self, purpose: str, world: int, length: int, like: Tensor) -> Tensor:
        """An uninitialised buffer [world, length], uint8. On a CPU all parts share it, because fresh pages cost more
        than what is written to them; on CUDA torch's allocator reuses memory."""
        if like.is_cuda:
            return like.new_empty(world, length, dtype=torch.uint8)
        kept = self._messages.get(purpose)
        if kept is None or kept.numel() < world * length:
            kept = self._messages[purpose] = torch.empty(world * length, dtype=torch.uint8)
        return kept[: world * length].view(world, length)

    def end_step(self, device: torch.device) -> None:
        """Do nothing: each part replaced its residual already."""

    def stats(self) -> ResidualStats:
        """Figures of the last sum of each part; all numbers are sent, so the counts are 0."""
        squares, residuals = list(self._squares.values()), [self._residuals[number] for number in self._squares]
        if not squares:
            return ResidualStats(0, 0, 0.0, 0.0)
        kept = torch.stack([torch.dot(residual, residual) for residual in residuals])
        return ResidualStats(0, 0, float(torch.stack(squares).sum()), float(kept.sum()))

    def state(self) -> dict[str, Tensor]:
        """This rank's residual of each part, flat, without a copy."""
        return self._loaded | {f"{_PREFIX}{number}": residual for number, residual in self._residuals.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned; missing residuals start at zero.

        If a residual has another size than its part, the next sum of that part raises CheckpointError.
        """
        self._residuals, self._squares = {}, {}
        self._loaded = {key: tensor.detach().flatten().clone() for key, tensor in state.items()}

    def _first(self, number: int, numbers: int, like: Tensor) -> Tensor:
        loaded = self._loaded.pop(f"{_PREFIX}{number}", None)
        if loaded is None:
            return like.new_zeros(numbers)
        if loaded.numel() != numbers:
            raise CheckpointError(
                f"{_PREFIX}{number}: found {loaded.numel()} numbers for a part of {numbers}; allowed: a state saved "
                "with the same parallel degrees; drop it to start afresh"
            )
        return loaded.to(like.device)
