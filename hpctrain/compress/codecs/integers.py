"""Block quantization: integers of few bits with a scale per block, as in ZeRO++'s qgZ (Wang et al. 2023,
arXiv:2306.10209).

Numbers are rounded to the nearest integer, not at random: the reducers of gradients keep the rounding errors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hpctrain.compress.codecs.buffers import Scratch

BLOCK = 256
"""Count of numbers that share a scale, whose 4 bytes add 0.016 bytes per number. A message holds a multiple of `BLOCK`
numbers.
"""
SCALE_BYTES = 4
_PIECE_BLOCKS = 512
"""Count of blocks that are written or read at a time on a CPU, so that they stay in the L2 cache."""
FEWEST_BITS, MOST_BITS = 2, 8


class BlockCode(ABC):
    """Interface of a code that writes blocks of 256 numbers into messages whose length depends only on the count of
    numbers."""

    part_multiple: int
    """The count of numbers in a message is a multiple of this number, so that its length is a multiple of 4."""

    @abstractmethod
    def bytes_of(self, numbers: int) -> int:
        """Return the length in bytes of a message with `numbers` numbers; `numbers` is a multiple of
        `part_multiple`."""

    @abstractmethod
    def write(self, numbers: Tensor, message: Tensor, errors: bool = True) -> None:
        """Encode numbers as a message.

        Args:
            numbers: [n], fp32, contiguous; n is a multiple of `part_multiple`. May be overwritten.
            message: [bytes_of(n)], uint8, written to; its memory begins at a multiple of 4.
            errors: whether to replace the numbers by their rounding errors; otherwise anything may be left in them.
        """

    @abstractmethod
    def read(self, message: Tensor, numbers: Tensor) -> None:
        """Decode a message into `numbers`.

        Args:
            message: [bytes_of(n)], uint8, as `write` left it.
            numbers: [n], fp32, contiguous; written to.
        """

    @abstractmethod
    def add(self, messages: Sequence[Tensor], total: Tensor) -> None:
        """Decode messages and add their numbers to `total`.

        Args:
            messages: at least one message, uint8 [bytes_of(n)], as `write` left it.
            total: [n], fp32, contiguous.
        """

    @abstractmethod
    def finite(self, message: Tensor) -> Tensor:
        """Return whether all numbers of a message are finite, as a bool tensor [] on the message's device."""


class IntegerCode(BlockCode):
    """Encodes numbers as integers, and decodes them. An integer counts steps of 1/m of its block's largest magnitude,
    with m = 2^(bits−1) − 1.

    A message holds the scales in fp32, then the integers of each block. The bits of an integer are cut into fields of
    8, 4, 2 or 1 bits that add up to `bits`, the lowest bits first. A byte holds one field of 8 bits, or the fields of
    2, 4 or 8 numbers with 4, 2 or 1 bits. If a block has a number that is not finite, its scale and all its decoded
    numbers are not finite either.
    """

    part_multiple = BLOCK

    def __init__(self, bits: int) -> None:
        """Create the code.

        Args:
            bits: bits of an integer, from 2 to 8.

        Raises:
            ValueError: `bits` is not in this range.
        """
        if not FEWEST_BITS <= bits <= MOST_BITS:
            raise ValueError(f"integers of {bits} bits; allowed: {FEWEST_BITS} to {MOST_BITS}")
        self._bits = bits
        self._levels = 2 ** (bits - 1) - 1
        self._widths = [width for width in (8, 4, 2, 1) if bits & width]
        self._scratch = Scratch()

    def bytes_of(self, numbers: int) -> int:
        return numbers // BLOCK * (SCALE_BYTES + BLOCK * self._bits // 8)

    def write(self, numbers: Tensor, message: Tensor, errors: bool = True) -> None:
        scales, payload = self._parts(message)
        for blocks, scale, packed in zip(*self._pieces(numbers, scales, payload), strict=True):
            # The largest magnitude comes from amax and amin: torch's norms of rows take ten times as long.
            torch.maximum(blocks.amax(1), blocks.amin(1).neg_(), out=scale)
            # A block of zeros gets the smallest normal scale: a scale of 0 would make its numbers NaN.
            scale.div_(self._levels).clamp_min_(torch.finfo(torch.float32).tiny)
            steps = torch.div(blocks, scale[:, None], out=self._scratch.take(blocks.shape, blocks)).round_()
            self._pack(steps, packed)
            if errors:
                blocks.addcmul_(steps, scale[:, None], value=-1)

    def read(self, message: Tensor, numbers: Tensor) -> None:
        scales, payload = self._parts(message)
        for blocks, scale, packed in zip(*self._pieces(numbers, scales, payload), strict=True):
            torch.mul(self._unpack(packed, self._scratch.take(blocks.shape, blocks)), scale[:, None], out=blocks)

    def add(self, messages: Sequence[Tensor], total: Tensor) -> None:
        for message in messages:
            scales, payload = self._parts(message)
            for blocks, scale, packed in zip(*self._pieces(total, scales, payload), strict=True):
                blocks.addcmul_(self._unpack(packed, self._scratch.take(blocks.shape, blocks)), scale[:, None])

    def finite(self, message: Tensor) -> Tensor:
        scales, _ = self._parts(message)
        return scales.isfinite().all()

    def _parts(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the two parts of a message: the scales [blocks], fp32, and the integers [bytes], uint8."""
        blocks = message.numel() // (SCALE_BYTES + BLOCK * self._bits // 8)
        return message[: SCALE_BYTES * blocks].view(torch.float32), message[SCALE_BYTES * blocks :]

    def _pieces(self, numbers: Tensor, scales: Tensor, payload: Tensor) -> tuple[tuple[Tensor, ...], ...]:
        count = _PIECE_BLOCKS if numbers.device.type == "cpu" else max(1, scales.numel())
        bytes_ = BLOCK * self._bits // 8
        return numbers.view(-1, BLOCK).split(count), scales.split(count), payload.view(-1, bytes_).split(count)

    def _pack(self, steps: Tensor, packed: Tensor) -> None:
        if self._bits == MOST_BITS:
            packed.view(torch.int8).copy_(steps)
            return
        integers = steps.to(torch.int8)
        for start, width, field in self._fields(packed):
            shifted = integers >> start if start else integers
            lowest, *between, highest = shifted.split(BLOCK * width // 8, dim=1)
            mask = 2**width - 1
            torch.bitwise_or(lowest & mask, highest << (8 - width), out=field)
            for index, part in enumerate(between, 1):
                field |= (part & mask) << (index * width)

    def _unpack(self, packed: Tensor, steps: Tensor) -> Tensor:
        if self._bits == MOST_BITS:
            return steps.copy_(packed.view(torch.int8))
        for start, width, field in self._fields(packed):
            for index, part in enumerate(steps.split(BLOCK * width // 8, dim=1)):
                above = 8 - width * (index + 1)
                # The right shift extends the sign, which only the highest field has.
                numbers = (field << above if above else field) >> (8 - width)
                if start + width < self._bits:
                    numbers &= 2**width - 1
                if start:
                    part += numbers << start
                else:
                    part.copy_(numbers)
        return steps

    def _fields(self, packed: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Yield each field of the packed integers as (its lowest bit, its width in bits, its bytes).

        The bytes are a view [blocks, bytes], int8, of `packed` [blocks, bytes], uint8.
        """
        integers = packed.view(torch.int8)
        start = 0
        for width in self._widths:
            # If one field holds all bits, it is the whole: making a view of it takes long in relation to work on so few
            # numbers.
            first, end = BLOCK * start // 8, BLOCK * (start + width) // 8
            yield start, width, integers if width == self._bits else integers[:, first:end]
            start += width
