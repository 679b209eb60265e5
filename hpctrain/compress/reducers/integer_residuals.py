"""Residuals of sums that travel as integers of few bits."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.base.errors import CheckpointError
from hpctrain.compress.codecs.buffers import BufferPool
from hpctrain.compress.codecs.integers import BlockCode
from hpctrain.compress.collectives.reduce_scatter import Residuals, ResidualStats

_PREFIX = "residual."


class IntegerResiduals(Residuals):
    """The residuals of sums by integers, by key. A key stands for gradients that are summed together, such as a
    bucket.

    A sum writes the next residual to another buffer, and swaps the two buffers once the sums are known to be finite. So
    a sum that is not finite leaves the residual as it was. Without feedback, no residual outlasts its sum.
    """

    def __init__(self, code: BlockCode, of: str, feedback: bool, bounded: bool = False) -> None:
        """Create residuals of zero.

        Args:
            code: encodes the numbers.
            of: what a residual belongs to, for error messages, as 'gradient'.
            feedback: whether a sum adds the residual of the last one with the same key to its gradients.
            bounded: as of `BufferPool`, for the memory of sums that run.
        """
        self.code = code
        self._of = of
        self.feedback = feedback
        self._residuals: dict[Hashable, _Residual] = {}
        self._loaded: dict[str, Tensor] = {}
        """Loaded residuals of sums that have not run since the load: 'residual.NAME' -> tensor."""
        self._pool = BufferPool(same_size=True, bounded=bounded)

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
            self._residuals[key] = self._first(names, sizes, like.new_zeros(length if self.feedback else 0))
        buffer = self._residuals[key].next = self._pool.take(length, like)
        return buffer

    def measure(self, key: Hashable) -> Tensor:
        """Return the squared L2 norm of the gradients in the buffer that `begin` returned, which `stats` uses. Call it
        before `write`."""
        residual = self._residuals[key]
        residual.square = torch.dot(residual.next, residual.next)
        return residual.square

    def write(self, key: Hashable, messages: Tensor, exempt: int | None = None) -> None:
        """Add the residual of the sum `key` to the gradients in the buffer that `begin` returned, and encode the buffer
        as messages, one part of it for each rank.

        With feedback, each encoded part of the buffer then holds its rounding errors.

        Args:
            key: key of the sum, as given to `begin`.
            messages: [ranks, bytes of a part], uint8; written to.
            exempt: rank whose part is not encoded, and stays unrounded in the buffer; None: all parts are encoded.
        """
        residual = self._residuals[key]
        if self.feedback:
            residual.next += residual.current
        for rank, (part, message) in enumerate(zip(self.parts(key, len(messages)), messages, strict=True)):
            if rank != exempt:
                self.code.write(part, message, errors=self.feedback)

    def parts(self, key: Hashable, ranks: int) -> Tensor:
        """Return the buffer that `begin` returned for the sum `key`, as a view [ranks, part]."""
        return self._residuals[key].next.view(ranks, -1)

    def end(self, key: Hashable, finite: bool) -> Tensor:
        """End the sum that `begin` began. If its results are `finite`, the contents of its buffer become the residual.

        Args:
            key: key of the sum, as given to `begin`.
            finite: whether all results of the sum are finite.

        Returns:
            The memory, fp32 [length], that holds no residual any more: with feedback and if `finite`, that of the old
            residual, else the buffer. Pass it to `free` when nothing reads it any more.
        """
        residual = self._residuals[key]
        if finite and self.feedback:
            residual.current, residual.next = residual.next, residual.current
            # A rotation spreads rounding errors over the padding, too, which is no part of the state: a resumed run
            # begins without it.
            residual.current[sum(residual.sizes) :] = 0
        memory, residual.next = residual.next, residual.next.new_empty(0)
        return memory

    def free(self, memory: Tensor) -> None:
        """Take back memory that `end` returned."""
        self._pool.give_back(memory)

    def stats(self) -> ResidualStats:
        """Return the squared norms of this rank's gradients in the last step and of its residuals, each over the
        gradients of all keys together; zeros without feedback. `sent` and `of` are 0, because integers send all
        numbers.
        """
        if not (self._residuals and self.feedback):
            return ResidualStats(0, 0, 0.0, 0.0)
        residuals = self._residuals.values()
        residual_squares = torch.stack([torch.dot(residual.current, residual.current) for residual in residuals])
        squares = torch.stack([residual.square for residual in residuals])
        return ResidualStats(0, 0, float(squares.sum()), float(residual_squares.sum()))

    def state(self) -> dict[str, Tensor]:
        """Return this rank's residuals, 'residual.NAME' -> flat tensor, without a copy; empty without feedback."""
        if not self.feedback:
            return {}
        residuals = {
            f"{_PREFIX}{name}": part
            for residual in self._residuals.values()
            for name, part in zip(residual.names, residual.parts(), strict=True)
        }
        return self._loaded | residuals

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned; residuals that are missing start at zero.

        If a loaded residual has another size than the gradients of its sum, the next such sum raises CheckpointError.
        Without feedback, nothing is restored.
        """
        self._residuals = {}
        if not self.feedback:
            return
        self._loaded = {
            key: tensor.detach().flatten().clone() for key, tensor in state.items() if key.startswith(_PREFIX)
        }

    def _first(self, names: Sequence[object], sizes: list[int], zeros: Tensor) -> _Residual:
        residual = _Residual(names, sizes, zeros, zeros, zeros.new_zeros(()))
        if not self.feedback:
            return residual
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
    """[n], fp32: the residual, which this rank has not sent; empty without feedback."""
    next: Tensor
    """[n], fp32: the next residual while the sum runs; afterwards empty."""
    square: Tensor
    """Squared norm of this rank's gradients in the last step."""

    def parts(self) -> tuple[Tensor, ...]:
        return self.current[: sum(self.sizes)].split(self.sizes)
