"""Gradients that travel as integers of few bits. Rounding errors go to the residuals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.base.errors import CheckpointError
from hpctrain.compress.codecs.integers import BLOCK, Bits, IntegerCode
from hpctrain.compress.reducers.bucket_scheduler import unflatten_like
from hpctrain.compress.reducers.reducer import residual_ratio_metric

_PREFIX = "residual."


class QuantizedBucketCodec:
    """The codec of `quantized`: integers with a scale per block. Gradients are rounded, and so are their sums.

    A rank keeps the rounding errors of its own numbers and of the sums that it owns, and adds them to the next gradient
    (error feedback, as in 1-bit Adam: Tang et al. 2021, arXiv:2102.02888). So the applied sums and all residuals add up
    to all gradients. If any number of a bucket is not finite on some rank, its sum is not finite either, and the
    residuals of that bucket do not change.
    """

    part_multiple = BLOCK

    def __init__(self, bits: Bits) -> None:
        """
        Args:
            bits: of each number on the wire.
        """
        self._code = IntegerCode(bits)
        self._by_bucket: dict[tuple[int, ...], _BucketResidual] = {}
        """Residuals by bucket."""
        self._loaded: dict[str, Tensor] = {}
        """The argument of `load_state`, until the first step shows the buckets."""
        self._spare: list[Tensor] = []

    def bytes_of(self, numbers: int) -> int:
        return self._code.bytes_of(numbers)

    def encode(self, bucket: Sequence[int], tensors: list[Tensor], outgoing: Tensor) -> None:
        key = tuple(bucket)
        length = outgoing.shape[0] * (outgoing.shape[1] // self.bytes_of(BLOCK)) * BLOCK
        kept = self._by_bucket.get(key) or self._begin(key, tensors, length)
        left = self._memory(length, kept.residual)
        numbers = sum(tensor.numel() for tensor in tensors)
        torch._foreach_copy_(unflatten_like(left[:numbers], tensors), tensors)
        left[numbers:] = 0
        kept.square = torch.dot(left, left)
        left += kept.residual
        for part, message in zip(left.view(len(outgoing), -1), outgoing, strict=True):
            self._code.write(part, message)
        kept.left = left

    def reduce_part(self, bucket: Sequence[int], incoming: Tensor, rank: int) -> Tensor:
        left = self._by_bucket[tuple(bucket)].left
        assert left is not None, "the bucket was written in this step"
        total = torch.empty_like(left.view(len(incoming), -1)[rank])
        first, *others = incoming
        self._code.read(first, total)
        for message in others:
            self._code.add(message, total)
        part = torch.empty_like(incoming[rank])
        self._code.write(total, part)
        left.view(len(incoming), -1)[rank] += total
        return part

    def decode(self, bucket: Sequence[int], gathered: Tensor, tensors: list[Tensor]) -> None:
        kept = self._by_bucket[tuple(bucket)]
        left, kept.left = kept.left, None
        assert left is not None, "the bucket was written in this step"
        # All ranks decode the same messages, so all decide alike.
        if bool(torch.stack([self._code.finite(message) for message in gathered]).all()):
            kept.residual, left = left, kept.residual
        for part, message in zip(left.view(len(gathered), -1), gathered, strict=True):
            self._code.read(message, part)
        numbers = sum(tensor.numel() for tensor in tensors)
        torch._foreach_copy_(tensors, unflatten_like(left[:numbers], tensors))
        self._spare.append(left)

    def state(self) -> dict[str, Tensor]:
        """This rank's residual of each gradient, flat, without a copy."""
        found = dict(self._loaded)
        for bucket, kept in self._by_bucket.items():
            parts = kept.residual[: sum(kept.sizes)].split(kept.sizes)
            found.update({f"{_PREFIX}{index}": part for index, part in zip(bucket, parts, strict=True)})
        return found

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned; missing residuals start at zero.

        If a residual has another size than its gradient, the next step raises CheckpointError.
        """
        self._by_bucket = {}
        self._loaded = {key: tensor.detach().flatten().clone() for key, tensor in state.items()}

    def drop_state(self) -> None:
        """Drop all residuals."""
        self.load_state({})

    def metrics(self) -> dict[str, float]:
        """The residual_norm_ratio of the last step."""
        if not self._by_bucket:
            return {}
        kept = torch.stack([torch.dot(each.residual, each.residual) for each in self._by_bucket.values()]).sum().sqrt()
        gradient = torch.stack([each.square for each in self._by_bucket.values()]).sum().sqrt()
        return residual_ratio_metric(float(kept), float(gradient))

    def _begin(self, bucket: tuple[int, ...], tensors: list[Tensor], length: int) -> _BucketResidual:
        sizes = [tensor.numel() for tensor in tensors]
        residual = tensors[0].new_zeros(length)
        for index, part in zip(bucket, residual[: sum(sizes)].split(sizes), strict=True):
            loaded = self._loaded.pop(f"{_PREFIX}{index}", None)
            if loaded is None:
                continue
            if loaded.numel() != part.numel():
                raise CheckpointError(
                    f"{_PREFIX}{index}: found {loaded.numel()} numbers for a gradient of {part.numel()}; allowed: a "
                    "state saved with the same parallel degrees; drop it to start afresh"
                )
            part.copy_(loaded)
        kept = self._by_bucket[bucket] = _BucketResidual(residual, sizes, residual.new_zeros(()))
        return kept

    def _memory(self, numbers: int, like: Tensor) -> Tensor:
        """A reused buffer, because fresh pages cost more than what is written to them."""
        for index, spare in enumerate(self._spare):
            if spare.numel() == numbers:
                return self._spare.pop(index)
        return like.new_empty(numbers)


@dataclass
class _BucketResidual:
    """The residual of a bucket: those of its gradients one after the other, padded with zeros."""

    residual: Tensor
    """[n], fp32: what this rank has not sent."""
    sizes: list[int]
    """Numbers of each gradient."""
    square: Tensor
    """Squared norm of this rank's gradient in the last step."""
    left: Tensor | None = None
    """[n], fp32: the next residual, while the bucket is on the wire."""
