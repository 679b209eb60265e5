"""Sums of numbers that travel as integers, for whole and for sharded gradients; rounding errors stay in residuals."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.base.errors import CheckpointError
from hpctrain.compress.codecs.buffers import BufferPool
from hpctrain.compress.codecs.integers import IntegerCode
from hpctrain.compress.collectives.reduce_scatter import Residuals, ResidualStats

_PREFIX = "residual."


class IntegerResiduals(Residuals):
    """The residuals of sums by integers; the key names the sum, for example a bucket.

    The next residual is written to another buffer; the two are swapped once the sums are known to be finite. So a sum
    that is not finite leaves the residual as it was.
    """

    def __init__(self, bits: int, of: str) -> None:
        """
        Args:
            bits: bits of each number on the wire.
            of: what a residual belongs to, for error messages.
        """
        self.code = IntegerCode(bits)
        self._of = of
        self._residuals: dict[Hashable, _Residual] = {}
        self._loaded: dict[str, Tensor] = {}
        """Loaded residuals of sums that have not run since the load."""
        self._pool = BufferPool(same_size=True)

    def begin(self, key: Hashable, names: Sequence[object], sizes: list[int], length: int, like: Tensor) -> Tensor:
        """Begin a sum; return an uninitialised buffer, [length], fp32.

        The caller writes its numbers to the buffer, which holds the next residual afterwards.

        Args:
            key: key of the sum, the same in every step.
            names: names of its residuals in the state; the residuals lie one after the other.
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
        """Add the residual to the numbers in the buffer and write them to messages, one part each.

        The buffer then holds the rounding errors.

        Args:
            key: key of a sum that was begun.
            messages: [ranks, bytes of a part], uint8.
            exempt: rank whose part is not written, and stays unrounded in the buffer.

        Returns:
            Squared norm of the numbers.
        """
        residual = self._residuals[key]
        residual.square = torch.dot(residual.next, residual.next)
        residual.next += residual.current
        for rank, (part, message) in enumerate(zip(self.parts(key, len(messages)), messages, strict=True)):
            if rank != exempt:
                self.code.write(part, message)
        return residual.square

    def parts(self, key: Hashable, ranks: int) -> Tensor:
        """Return the buffer of a sum that was begun, as [ranks, part]."""
        return self._residuals[key].next.view(ranks, -1)

    def end(self, key: Hashable, finite: bool) -> Tensor:
        """End a sum: make the buffer the residual if the sums are finite.

        Return the memory that is now unused, [length]; pass it to `free` later.
        """
        residual = self._residuals[key]
        if finite:
            residual.current, residual.next = residual.next, residual.current
        return residual.next

    def free(self, memory: Tensor) -> None:
        """Take back memory that `end` returned."""
        self._pool.give_back(memory)

    def stats(self) -> ResidualStats:
        """Return the figures of the last sum of each key; all numbers are sent, so the counts of selected numbers are
        0.
        """
        if not self._residuals:
            return ResidualStats(0, 0, 0.0, 0.0)
        residuals = self._residuals.values()
        residual_squares = torch.stack([torch.dot(residual.current, residual.current) for residual in residuals])
        squares = torch.stack([residual.square for residual in residuals])
        return ResidualStats(0, 0, float(squares.sum()), float(residual_squares.sum()))

    def state(self) -> dict[str, Tensor]:
        """Return this rank's residuals, flat, without a copy."""
        return self._loaded | {
            f"{_PREFIX}{name}": part
            for residual in self._residuals.values()
            for name, part in zip(residual.names, residual.parts(), strict=True)
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned; missing residuals start at zero.

        If a residual has another size than the numbers of its sum, the next such sum raises CheckpointError.
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
    """The residuals of one sum, one after the other, padded with zeros."""

    names: Sequence[object]
    sizes: list[int]
    current: Tensor
    """[n], fp32: the residual, which this rank has not sent."""
    next: Tensor
    """[n], fp32: the next residual while the sum runs; otherwise memory that does not belong to this sum."""
    square: Tensor
    """Squared norm of this rank's numbers in the last step."""

    def parts(self) -> tuple[Tensor, ...]:
        return self.current[: sum(self.sizes)].split(self.sizes)
