"""Sums of gradients that travel as integers of few bits, for replicas that hold the whole state and for sharded ones.
Rounding errors stay in the residuals.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.errors import CheckpointError
from hpctrain.compress.codecs.buffers import BufferPool, Scratch
from hpctrain.compress.codecs.integers import BlockCode
from hpctrain.compress.collectives.reduce_scatter import (
    FlatGradientLayout,
    ReduceScatter,
    Residuals,
    ResidualStats,
    ShardedParameter,
)
from hpctrain.compress.reducers.bucket_scheduler import unflatten_like
from hpctrain.compress.reducers.reduce_scatter_all_gather import BucketCodec

_PREFIX = "residual."


class IntegerResiduals(Residuals):
    """The residuals of sums by integers, by key. A key stands for gradients that are summed together, such as a
    bucket.

    A sum writes the next residual to another buffer, and swaps the two buffers once the sums are known to be finite. So
    a sum that is not finite leaves the residual as it was.
    """

    def __init__(self, code: BlockCode, of: str) -> None:
        """Create residuals of zero.

        Args:
            code: encodes the numbers.
            of: what a residual belongs to, for error messages, as 'gradient'.
        """
        self.code = code
        self._of = of
        self._residuals: dict[Hashable, _Residual] = {}
        self._loaded: dict[str, Tensor] = {}
        """Loaded residuals of sums that have not run since the load: 'residual.NAME' -> tensor."""
        self._pool = BufferPool(same_size=True)

    def begin(self, key: Hashable, names: Sequence[object], sizes: list[int], length: int, like: Tensor) -> Tensor:
        """Begin a sum of gradients as integers; return an uninitialised buffer, [length], fp32.

        The caller writes its gradients to the buffer, in which the sum leaves the next residual.

        Args:
            key: key of the sum, the same in every step.
            names: names of the sum's residuals in the state; the residuals lie one after the other in the buffer.
            sizes: count of numbers of each residual.
            length: count of numbers of all residuals, including padding.
            like: a tensor on the device.

        Raises:
            CheckpointError: a loaded residual has another size.
        """
        if key not in self._residuals:
            self._residuals[key] = self._first(names, sizes, like.new_zeros(length))
        buffer = self._residuals[key].next = self._pool.take(length, like)
        return buffer

    def write(self, key: Hashable, messages: Tensor, exempt: int | None = None) -> Tensor:
        """Add the residual of the sum `key` to the gradients in the buffer that `begin` returned, and encode the buffer
        as messages, one part of it for each rank.

        Each encoded part of the buffer then holds its rounding errors.

        Args:
            key: key of the sum, as given to `begin`.
            messages: [ranks, bytes of a part], uint8; written to.
            exempt: rank whose part is not encoded, and stays unrounded in the buffer; None: all parts are encoded.

        Returns:
            Squared L2 norm of the gradients, before the residual was added.
        """
        residual = self._residuals[key]
        residual.square = torch.dot(residual.next, residual.next)
        residual.next += residual.current
        for rank, (part, message) in enumerate(zip(self.parts(key, len(messages)), messages, strict=True)):
            if rank != exempt:
                self.code.write(part, message)
        return residual.square

    def parts(self, key: Hashable, ranks: int) -> Tensor:
        """Return the buffer that `begin` returned for the sum `key`, as a view [ranks, part]."""
        return self._residuals[key].next.view(ranks, -1)

    def end(self, key: Hashable, finite: bool) -> Tensor:
        """End the sum that `begin` began. If its results are `finite`, the contents of its buffer become the residual.

        Args:
            key: key of the sum, as given to `begin`.
            finite: whether all results of the sum are finite.

        Returns:
            The memory, fp32 [length], that holds no residual any more: that of the old residual if `finite`, else the
            buffer. Pass it to `free` when nothing reads it any more.
        """
        residual = self._residuals[key]
        if finite:
            residual.current, residual.next = residual.next, residual.current
            # A rotation spreads rounding errors over the padding, too, which is no part of the state: a resumed run
            # begins without it.
            residual.current[sum(residual.sizes) :] = 0
        return residual.next

    def free(self, memory: Tensor) -> None:
        """Take back memory that `end` returned."""
        self._pool.give_back(memory)

    def stats(self) -> ResidualStats:
        """Return the squared norms of this rank's gradients in the last step and of its residuals, each over the
        gradients of all keys together. `sent` and `of` are 0, because integers send all numbers.
        """
        if not self._residuals:
            return ResidualStats(0, 0, 0.0, 0.0)
        residuals = self._residuals.values()
        residual_squares = torch.stack([torch.dot(residual.current, residual.current) for residual in residuals])
        squares = torch.stack([residual.square for residual in residuals])
        return ResidualStats(0, 0, float(squares.sum()), float(residual_squares.sum()))

    def state(self) -> dict[str, Tensor]:
        """Return this rank's residuals, 'residual.NAME' -> flat tensor, without a copy."""
        return self._loaded | {
            f"{_PREFIX}{name}": part
            for residual in self._residuals.values()
            for name, part in zip(residual.names, residual.parts(), strict=True)
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned; residuals that are missing start at zero.

        If a loaded residual has another size than the gradients of its sum, the next such sum raises CheckpointError.
        """
        self._residuals = {}
        self._loaded = {key: tensor.detach().flatten().clone() for key, tensor in state.items()}

    def _first(self, names: Sequence[object], sizes: list[int], zeros: Tensor) -> _Residual:
        residual = _Residual(names, sizes, zeros, zeros, zeros.new_zeros(()))
        for name, part in zip(names, residual.parts(), strict=True):
            loaded = self._loaded.pop(f"{_PREFIX}{name}", None)
            if loaded is None:
                continue
            if loaded.numel() != part.numel():
                raise CheckpointError(
                    f"{_PREFIX}{name}: found {loaded.numel()} numbers for a {self._of} of {part.numel()}; allowed: a "
                    "state saved with the same parallel degrees; drop it to start afresh"
                )
            part.copy_(loaded)
        return residual


@dataclass
class _Residual:
    """The residuals of the gradients that are summed together (a bucket, or a `fully_shard` module), one after the
    other, padded with zeros at the end."""

    names: Sequence[object]
    """Names of the gradients' residuals in the reducer's state."""
    sizes: list[int]
    """Count of numbers of each gradient, in the order of `names`."""
    current: Tensor
    """[n], fp32: the residual, which this rank has not sent."""
    next: Tensor
    """[n], fp32: the next residual while the sum runs; otherwise memory that does not belong to the sum."""
    square: Tensor
    """Squared norm of this rank's gradients in the last step."""

    def parts(self) -> tuple[Tensor, ...]:
        return self.current[: sum(self.sizes)].split(self.sizes)


class QuantizedBucketCodec(BucketCodec):
    """The codec of integers, rotated or not, with a scale per block. Gradients are rounded, and so are their
    sums.

    A rank keeps the rounding errors of its own numbers and of the sums that it owns, and adds them to the next gradient
    (error feedback, as in 1-bit Adam: Tang et al. 2021, arXiv:2102.02888). So nothing is lost: over all steps so far,
    the applied sums plus the present residuals of all ranks are the sum of all gradients. If any number of a bucket is
    not finite on some rank, the bucket's decoded sums are not all finite either, and the bucket's residuals do not
    change.
    """

    def __init__(self, code: BlockCode) -> None:
        """Create the codec with residuals of zero.

        Args:
            code: encodes the numbers.
        """
        self._residuals = self.holder = IntegerResiduals(code, "gradient")
        self._code = code
        self.part_multiple = code.part_multiple

    def bytes_of(self, numbers: int) -> int:
        return self._code.bytes_of(numbers)

    def encode(self, bucket: Sequence[int], tensors: list[Tensor], outgoing: Tensor) -> None:
        sizes = [tensor.numel() for tensor in tensors]
        length = outgoing.shape[0] * (outgoing.shape[1] // self.bytes_of(self.part_multiple)) * self.part_multiple
        numbers = self._residuals.begin(tuple(bucket), bucket, sizes, length, tensors[0])
        torch._foreach_copy_(unflatten_like(numbers[: sum(sizes)], tensors), tensors)
        numbers[sum(sizes) :] = 0
        self._residuals.write(tuple(bucket), outgoing)

    def reduce_part(self, bucket: Sequence[int], incoming: Tensor, rank: int) -> Tensor:
        error = self._residuals.parts(tuple(bucket), len(incoming))[rank]
        total, part = torch.empty_like(error), torch.empty_like(incoming[rank])
        first, *others = incoming
        self._code.read(first, total)
        if others:
            self._code.add(others, total)
        self._code.write(total, part)
        error += total
        return part

    def decode(self, bucket: Sequence[int], gathered: Tensor, tensors: list[Tensor]) -> None:
        # All ranks decode the same messages, so all ranks decide alike.
        finite = bool(torch.stack([self._code.finite(message) for message in gathered]).all())
        sums = self._residuals.end(tuple(bucket), finite)
        for part, message in zip(sums.view(len(gathered), -1), gathered, strict=True):
            self._code.read(message, part)
        numbers = sum(tensor.numel() for tensor in tensors)
        torch._foreach_copy_(tensors, unflatten_like(sums[:numbers], tensors))
        self._residuals.free(sums)


_FULL_BYTES = 4


class QuantizedReduceScatter(ReduceScatter):
    """The reduce-scatter of one `fully_shard` module of a stage, by integers; exempt parameters are summed exactly.

    Each rank owns a part of the sums. Each rank sends each owner the numbers of the owner's part, rounded, and keeps
    the rounding errors in its residuals. The owner adds up the numbers in fp32 and does not send the sums. At N ranks,
    each rank sends (N−1)/N·b bytes for each number of its gradient, where b is 1.016 bytes with mode int8 and 0.258
    bytes with mode rotated_int2. ZeRO++'s qgZ (Wang et al. 2023, arXiv:2306.10209) sends gradients of a sharded state
    in the same form, without residuals.

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
        square = self.residuals.write(self._number, outgoing[:, _FULL_BYTES * self._head :], exempt=rank)
        # The flag tells each owner whether any number of the part is not finite, although the owner receives only some
        # of them.
        heads[:, 0] = 0 * (square + heads[:, 1:].square().sum())

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

    def __init__(self, code: BlockCode) -> None:
        """Create residuals of zero.

        Args:
            code: encodes the numbers.
        """
        self.residuals = IntegerResiduals(code, "part")
        self.outgoing, self.incoming = Scratch(torch.uint8), Scratch(torch.uint8)
