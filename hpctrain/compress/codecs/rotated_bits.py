"""Integers of 1 or 2 bits of rotated blocks: each number becomes one of two or four levels.

A block of 256 numbers is multiplied by fixed random signs and by a Hadamard matrix of order 256. Its numbers are then
about normally distributed, whatever the block holds, and a large number is spread over the block (Suresh et al. 2017,
arXiv:1611.00429). With 1 bit a number is its sign times the mean magnitude of the block, with 2 bits the nearest of the
four levels that are optimal for a normal distribution of the block's root mean square (Max 1960, table 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpctrain.compress.codecs.integers import BLOCK, SCALE_BYTES
from hpctrain.compress.codecs.sparse_message import pack_bits, unpack_bits

_SIDE = 16
"""Order of the Hadamard matrix whose Kronecker product with itself rotates a block."""
_LEVELS = (0.4528, 1.5104)
_BORDER = 0.9816
"""Magnitudes of the four levels in root mean squares, and the magnitude between them."""
_SEED = 0
_PIECE_BLOCKS = 512
"""Count of blocks that are written or read at a time on a CPU, so that they stay in the L2 cache."""


class RotatedBits:
    """Encodes numbers as 1 or 2 bits each, and decodes them.

    A message holds a scale in fp32 for each block, then a bit for the sign of each number and, with 2 bits, a bit for
    the larger of the two magnitudes. If a block has a number that is not finite, none of its decoded numbers is finite.
    """

    def __init__(self, bits: int) -> None:
        """Create the code.

        Args:
            bits: bits of a number, 1 or 2.

        Raises:
            ValueError: `bits` is another number.
        """
        if bits not in (1, 2):
            raise ValueError(f"rotated numbers of {bits} bits; allowed: 1 or 2")
        self._bits = bits
        hadamard = torch.ones(1, 1)
        while len(hadamard) < _SIDE:
            hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
        self._hadamard = hadamard / _SIDE**0.5
        self._signs = torch.randint(0, 2, (BLOCK,), generator=torch.Generator().manual_seed(_SEED)).float() * 2 - 1

    def bytes_of(self, numbers: int) -> int:
        """Return the length in bytes of a message with `numbers` numbers; `numbers` is a multiple of `BLOCK` (256)."""
        return numbers // BLOCK * (SCALE_BYTES + BLOCK * self._bits // 8)

    def write(self, numbers: Tensor, message: Tensor) -> None:
        """Encode numbers as a message, and replace the numbers by their rounding errors.

        Args:
            numbers: [n], fp32, contiguous; n is a multiple of `BLOCK`. Overwritten.
            message: [bytes_of(n)], uint8, written to; its memory begins at a multiple of 4.
        """
        for blocks, scales, bits in self._pieces(numbers, message):
            rotated = self._rotate(blocks * self._signs_on(blocks))
            positive = rotated > 0
            if self._bits == 1:
                torch.mean(rotated.abs_(), 1, out=scales)
                bits[0].copy_(pack_bits(positive.flatten()))
                levels = torch.where(positive, scales[:, None], -scales[:, None])
            else:
                scales.copy_(torch.linalg.vector_norm(rotated, dim=1) / BLOCK**0.5)
                large = rotated.abs_() > _BORDER * scales[:, None]
                bits[0].copy_(pack_bits(positive.flatten()))
                bits[1].copy_(pack_bits(large.flatten()))
                levels = self._levels(positive, large, scales)
            blocks.sub_(self._rotate(levels).mul_(self._signs_on(blocks)))

    def read(self, message: Tensor, numbers: Tensor) -> None:
        """Decode a message into `numbers`.

        Args:
            message: [bytes_of(n)], uint8, as `write` left it.
            numbers: [n], fp32, contiguous; written to.
        """
        for blocks, scales, bits in self._pieces(numbers, message):
            torch.mul(self._decoded(scales, bits), self._signs_on(blocks), out=blocks)

    def add(self, message: Tensor, total: Tensor) -> None:
        """Decode a message and add its numbers to `total`.

        Args:
            message: [bytes_of(n)], uint8, as `write` left it.
            total: [n], fp32, contiguous.
        """
        for blocks, scales, bits in self._pieces(total, message):
            blocks.addcmul_(self._decoded(scales, bits), self._signs_on(blocks))

    def finite(self, message: Tensor) -> Tensor:
        """Return whether all numbers of a message are finite, as a bool tensor [] on the message's device."""
        return self._scales(message).isfinite().all()

    def _scales(self, message: Tensor) -> Tensor:
        blocks = message.numel() // self.bytes_of(BLOCK)
        return message[: SCALE_BYTES * blocks].view(torch.float32)

    def _pieces(self, numbers: Tensor, message: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return pieces of (numbers [blocks, 256], scales [blocks], bits [bits of a number, bytes]), as views."""
        scales = self._scales(message)
        count = _PIECE_BLOCKS if numbers.device.type == "cpu" else max(1, len(scales))
        planes = message[SCALE_BYTES * len(scales) :].view(self._bits, -1)
        parts = planes.split(count * BLOCK // 8, dim=1)
        return list(zip(numbers.view(-1, BLOCK).split(count), scales.split(count), parts, strict=True))

    def _decoded(self, scales: Tensor, bits: Tensor) -> Tensor:
        """Return the decoded numbers of blocks before their random signs: [blocks, 256]."""
        shape = (len(scales), BLOCK)
        positive, *larger = (unpack_bits(plane, shape[0] * BLOCK).view(shape) for plane in bits)
        if not larger:
            return self._rotate(torch.where(positive, scales[:, None], -scales[:, None]))
        return self._rotate(self._levels(positive, larger[0], scales))

    @staticmethod
    def _levels(positive: Tensor, large: Tensor, scales: Tensor) -> Tensor:
        small, great = (level * scales[:, None] for level in _LEVELS)
        magnitudes = torch.where(large, great, small)
        return torch.where(positive, magnitudes, -magnitudes)

    def _rotate(self, blocks: Tensor) -> Tensor:
        """Return blocks [n, 256] times a Hadamard matrix. The rotation
        is its own inverse: seen as 16 × 16 matrices X, blocks become (X·H)ᵀ·H.
        """
        hadamard = self._hadamard.to(blocks.device)
        turned = torch.mm(blocks.reshape(-1, _SIDE), hadamard).view(-1, _SIDE, _SIDE).transpose(1, 2)
        return torch.mm(turned.reshape(-1, _SIDE), hadamard).view(-1, BLOCK)

    def _signs_on(self, like: Tensor) -> Tensor:
        self._signs = self._signs.to(like.device)
        return self._signs
