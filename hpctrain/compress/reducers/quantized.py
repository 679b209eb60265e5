"""Sums of gradients that travel as integers of few bits, for replicas that hold the whole state. With feedback,
rounding errors stay in the residuals.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.compress.codecs.integers import BlockCode
from hpctrain.compress.reducers.bucket_scheduler import unflatten_like
from hpctrain.compress.reducers.integer_residuals import IntegerResiduals
from hpctrain.compress.reducers.reduce_scatter_all_gather import BucketCodec


class QuantizedBucketCodec(BucketCodec):
    """The codec of integers, rotated or not, with a scale per block. Gradients are rounded, and so are their
    sums.

    With feedback, a rank keeps the rounding errors of its own numbers and of the sums that it owns, and adds them to
    the next gradient (error feedback, as in 1-bit Adam: Tang et al. 2021, arXiv:2102.02888). So nothing is lost: over
    all steps so far, the applied sums plus the present residuals of all ranks are the sum of all gradients. If any
    number of a bucket is not finite on some rank, the bucket's decoded sums are not all finite either, and the bucket's
    residuals do not change.
    """

    def __init__(self, code: BlockCode, feedback: bool = True) -> None:
        """Create the codec with residuals of zero.

        Args:
            code: encodes the numbers.
            feedback: whether rounding errors are added to the next gradient.
        """
        self._residuals = self.holder = IntegerResiduals(code, "gradient", feedback)
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
        if self._residuals.feedback:
            self._residuals.measure(tuple(bucket))
        self._residuals.write(tuple(bucket), outgoing)

    def reduce_part(self, bucket: Sequence[int], incoming: Tensor, rank: int) -> Tensor:
        error = self._residuals.parts(tuple(bucket), len(incoming))[rank]
        total, part = torch.empty_like(error), torch.empty_like(incoming[rank])
        first, *others = incoming
        self._code.read(first, total)
        if others:
            self._code.add(others, total)
        self._code.write(total, part, errors=self._residuals.feedback)
        if self._residuals.feedback:
            error += total
        return part

    def decode(self, bucket: Sequence[int], gathered: Tensor, tensors: list[Tensor]) -> None:
        # All ranks decode the same messages, so all ranks decide alike. On a GPU, the answer waits for the device.
        finite = not self._residuals.feedback or bool(torch.stack([self._code.finite(one) for one in gathered]).all())
        sums = self._residuals.end(tuple(bucket), finite)
        for part, message in zip(sums.view(len(gathered), -1), gathered, strict=True):
            self._code.read(message, part)
        numbers = sum(tensor.numel() for tensor in tensors)
        torch._foreach_copy_(tensors, unflatten_like(sums[:numbers], tensors))
        self._residuals.free(sums)
