"""Block quantization: integers of few bits with a scale per block, as in ZeRO++'s qgZ (Wang et al. 2023,
arXiv:2306.10209). Rounding is to the nearest, because rounding errors go to the residual."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

BLOCK = 256
"""Numbers that share a scale, whose 4 bytes add 0.016 bytes to each. A message holds a multiple of it."""
SCALE_BYTES = 4
_PIECE_BLOCKS = 512
"""Blocks that are written or read at a time on a CPU, so that they stay in the L2 cache."""
Bits = Literal[4, 8]


class IntegerCode:
    """Writes and reads numbers as multiples of 1/127 (8 bits) or 1/7 (4 bits) of their block's largest magnitude.

    A message holds the scales in fp32, then one byte per number (8 bits) or per two numbers (4 bits). A block with a
    number that is not finite has a scale that is not finite, and so are its decoded numbers.
    """

    def __init__(self, bits: Bits) -> None:
        self._bits = bits
        self._levels = 2 ** (bits - 1) - 1
        self._work = torch.empty(0)

    def bytes_of(self, numbers: int) -> int:
        """Length of a message in bytes.

        Args:
            numbers: a multiple of `BLOCK`.
        """
        return numbers // BLOCK * (SCALE_BYTES + BLOCK * self._bits // 8)

    def write(self, numbers: Tensor, message: Tensor) -> None:
        """Write numbers to a message, and replace them by their rounding errors.

        Args:
            numbers: [n], fp32, contiguous; n is a multiple of `BLOCK`. Overwritten.
            message: [bytes_of(n)], uint8; its memory begins at a multiple of 4.
        """
        scales, payload = self._parts(message)
        for blocks, scale, packed in zip(*self._pieces(numbers, scales, payload), strict=True):
            # The largest magnitude by amax and amin: torch's norms of rows take ten times as long.
            torch.maximum(blocks.amax(1), blocks.amin(1).neg_(), out=scale)
            # A block of zeros gets the smallest normal scale: a scale of 0 would make its numbers NaN.
            scale.div_(self._levels).clamp_min_(torch.finfo(torch.float32).tiny)
            steps = torch.div(blocks, scale[:, None], out=self._like(blocks)).round_()
            self._pack(steps, packed)
            blocks.addcmul_(steps, scale[:, None], value=-1)

    def read(self, message: Tensor, numbers: Tensor) -> None:
        """Decode a message into `numbers`.

        Args:
            message: [bytes_of(n)], uint8, as `write` left it.
            numbers: [n], fp32, contiguous; written to.
        """
        scales, payload = self._parts(message)
        for blocks, scale, packed in zip(*self._pieces(numbers, scales, payload), strict=True):
            torch.mul(self._unpack(packed, self._like(blocks)), scale[:, None], out=blocks)

    def add(self, message: Tensor, total: Tensor) -> None:
        """Decode a message and add its numbers to `total`.

        Args:
            message: [bytes_of(n)], uint8, as `write` left it.
            total: [n], fp32, contiguous.
        """
        scales, payload = self._parts(message)
        for blocks, scale, packed in zip(*self._pieces(total, scales, payload), strict=True):
            blocks.addcmul_(self._unpack(packed, self._like(blocks)), scale[:, None])

    def finite(self, message: Tensor) -> Tensor:
        """Whether all numbers of a message are finite: a scalar tensor on the message's device."""
        scales, _ = self._parts(message)
        return scales.isfinite().all()

    def _parts(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """The scales [blocks], fp32, and the integers [bytes], uint8, of a message."""
        blocks = message.numel() // (SCALE_BYTES + BLOCK * self._bits // 8)
        return message[: SCALE_BYTES * blocks].view(torch.float32), message[SCALE_BYTES * blocks :]

    def _pieces(self, numbers: Tensor, scales: Tensor, payload: Tensor) -> tuple[tuple[Tensor, ...], ...]:
        count = _PIECE_BLOCKS if numbers.device.type == "cpu" else max(1, scales.numel())
        bytes_ = BLOCK * self._bits // 8
        return numbers.view(-1, BLOCK).split(count), scales.split(count), payload.view(-1, bytes_).split(count)

    def _pack(self, steps: Tensor, packed: Tensor) -> None:
        integers = packed.view(torch.int8)
        if self._bits == 8:
            integers.copy_(steps)
            return
        low, high = steps.to(torch.int8).split(BLOCK // 2, dim=1)
        torch.bitwise_or(low & 15, high << 4, out=integers)

    def _unpack(self, packed: Tensor, steps: Tensor) -> Tensor:
        integers = packed.view(torch.int8)
        if self._bits == 8:
            return steps.copy_(integers)
        low, high = steps.split(BLOCK // 2, dim=1)
        # The right shift extends the sign.
        low.copy_((integers << 4) >> 4)
        high.copy_(integers >> 4)
        return steps

    def _like(self, blocks: Tensor) -> Tensor:
        """Uninitialised memory of this shape, reused on a CPU because fresh pages cost more than what is written."""
        if blocks.is_cuda:
            return torch.empty_like(blocks)
        if self._work.numel() < blocks.numel():
            self._work = torch.empty(blocks.numel())
        return self._work[: blocks.numel()].view_as(blocks)
