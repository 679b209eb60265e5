"""Rotated integers: a random Hadamard matrix rotates each block of numbers before the numbers are rounded to 2, 4, 8 or
16 levels.

Whatever the numbers of a block were, after the rotation they are nearly normally distributed. So one scale, and the
levels with the least squared error for a normal distribution, fit every block. Suresh et al. 2017 (arXiv:1611.00429)
rotate before they round for this reason, SDP4Bit (Jia et al. 2024, arXiv:2410.15526) rotates gradients.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from functools import reduce
from types import ModuleType

import torch
from torch import Tensor

from hpctrain.compress.codecs.buffers import Scratch
from hpctrain.compress.codecs.integers import BLOCK, BlockCode
from hpctrain.compress.triton_trial import working_kernels

SCALE_BYTES = 2
"""Bytes of the scale of a block, which is sent in bf16: 0.008 bytes for each number."""
LEVELS: dict[int, tuple[float, ...]] = {
    1: (0.7979,),
    2: (0.4528, 1.510),
    3: (0.2451, 0.7560, 1.344, 2.152),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733),
}
"""Bits -> the positive levels for numbers with a standard deviation of 1 (Max 1960, table I); the negative ones are
their mirror image."""
COMPANDERS: dict[int, tuple[float, float]] = {
    1: (1.0, 1.0),
    2: (1.9184, 0.51036),
    3: (4.2818, 0.41983),
    4: (8.3367, 0.41374),
}
"""Bits -> (a, c), such that the integer part of a·erf(c·x) is the index of the level nearest to x > 0.

A number is compared with no thresholds, because one error function takes less time than 3 or 7 comparisons. With these
constants, which minimise the squared error, the error exceeds that of the nearest level by less than 0.01 %."""
SIDE = 16
"""The Hadamard matrix of 256 rows is the Kronecker product of two of 16: two products with small matrices take 1 ns a
number on a CPU core, one with the large matrix 5 ns."""
_SMALLEST = 1e-30
_PIECE_BLOCKS = 512
"""Count of blocks that are written or read at a time on a CPU, so that they stay in the L2 cache."""


class RotatedIntegerCode(BlockCode):
    """Encodes blocks of numbers as integers of 1 to 4 bits, after a rotation.

    A block x of 256 numbers becomes y = H·(s ∘ x)/16: s are fixed random signs and H is the Hadamard matrix. A message
    holds the scale of each block in bf16, which is its root mean square, then for each number of y/scale the index of
    its level. A byte holds 2 numbers of 4 bits, 4 of 2 bits or 8 of 1 bit. With 3 bits, the low 2 bits of 4 numbers
    make a byte, and after these bytes of a block, the high bits of 8 numbers make a byte.

    Sums of squares must be finite and above zero in fp32: a block with a number above 1e18 counts as not finite, and a
    block with numbers below 1e-23 is sent as zeros. If a block has a number that is not finite, its scale and all its
    decoded numbers are not finite either.
    """

    part_multiple = 2 * BLOCK  # an odd number of scales would leave the next message at an address that is not 4·n

    def __init__(self, bits: int, seed: int) -> None:
        """Create the code.

        Args:
            bits: bits of an integer, from 1 to 4.
            seed: seed of the signs; a message can be read only with the seed with which it was written.

        Raises:
            ValueError: `bits` is not in this range.
        """
        if bits not in LEVELS:
            raise ValueError(f"rotated integers of {bits} bits; allowed: {min(LEVELS)} to {max(LEVELS)}")
        self._bits = bits
        self._signs = block_signs(seed)
        self._hadamard = hadamard_matrix(SIDE) / SIDE**0.5
        positive = torch.tensor(LEVELS[bits])
        self._levels = torch.cat([-positive.flip(0), positive])
        self._table = _level_table(self._levels, bits)
        self._numbers, self._products, self._sums = Scratch(), Scratch(), Scratch()
        self._codes = Scratch(torch.int8)

    def bytes_of(self, numbers: int) -> int:
        return numbers // BLOCK * (SCALE_BYTES + BLOCK * self._bits // 8)

    def write(self, numbers: Tensor, message: Tensor, errors: bool = True) -> None:
        self._move_to(numbers.device)
        if (kernels := _kernels(numbers.device)) is not None:
            scales, payload = self._parts(message)
            compander = COMPANDERS[self._bits]
            kernels.write(numbers.view(-1, BLOCK), scales, payload, self._signs, self._levels, compander, errors)
            return
        half = 2 ** (self._bits - 1)
        factor, slope = COMPANDERS[self._bits]
        for blocks, (scale, packed) in zip(self._blocks(numbers), self._pieces(message), strict=True):
            scale.copy_(torch.linalg.vector_norm(blocks, dim=1).div_(SIDE))
            rotated = self._multiply(torch.mul(blocks, self._signs, out=self._numbers.take(blocks.shape, blocks)))
            # Numbers of a block of zeros are divided by `_SMALLEST` instead of 0, and then decoded as 0.
            stretch = slope / scale.float().clamp_min_(_SMALLEST)
            index = rotated.mul_(stretch[:, None]).erf_().mul_(factor).add_(half)
            codes = self._codes.take(blocks.shape, blocks).copy_(index.clamp_(0, 2 * half - 1))
            self._pack(codes, packed)
            if errors:
                blocks -= self._rotate_back(self._levels_of(scale, packed, self._numbers))

    def read(self, message: Tensor, numbers: Tensor) -> None:
        self._move_to(numbers.device)
        if (kernels := _kernels(numbers.device)) is not None:
            kernels.read(*self._parts(message), self._signs, self._levels, numbers.view(-1, BLOCK), add=False)
            return
        for blocks, piece in zip(self._blocks(numbers), self._pieces(message), strict=True):
            blocks.copy_(self._rotate_back(self._levels_of(*piece, self._numbers)))

    def add(self, messages: Sequence[Tensor], total: Tensor) -> None:
        self._move_to(total.device)
        if (kernels := _kernels(total.device)) is not None:
            for message in messages:
                kernels.read(*self._parts(message), self._signs, self._levels, total.view(-1, BLOCK), add=True)
            return
        pieces = [list(self._pieces(message)) for message in messages]
        for number, blocks in enumerate(self._blocks(total)):
            # The rotation is linear, so the sum of rotated numbers is rotated back.
            rotated = self._levels_of(*pieces[0][number], self._sums)
            for others in pieces[1:]:
                rotated += self._levels_of(*others[number], self._numbers)
            blocks += self._rotate_back(rotated)

    def finite(self, message: Tensor) -> Tensor:
        return self._parts(message)[0].isfinite().all()

    def _move_to(self, device: torch.device) -> None:
        if self._signs.device != device:
            self._signs, self._hadamard, self._levels, self._table = (
                tensor.to(device) for tensor in (self._signs, self._hadamard, self._levels, self._table)
            )

    def _parts(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the two parts of a message: the scales [blocks], bf16, and the integers [blocks, bytes],
        uint8."""
        bytes_ = BLOCK * self._bits // 8
        blocks = message.numel() // (SCALE_BYTES + bytes_)
        scales = message[: SCALE_BYTES * blocks].view(torch.bfloat16)
        return scales, message[SCALE_BYTES * blocks :].view(blocks, bytes_)

    def _blocks(self, numbers: Tensor) -> tuple[Tensor, ...]:
        return numbers.view(-1, BLOCK).split(_blocks_at_a_time(numbers))

    def _pieces(self, message: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        count = _blocks_at_a_time(message)
        scales, payload = self._parts(message)
        return zip(scales.split(count), payload.split(count), strict=True)

    def _multiply(self, blocks: Tensor) -> Tensor:
        """Multiply each block, in place, by the Hadamard matrix divided by 16; return the blocks."""
        products = self._products.take(blocks.shape, blocks)
        torch.mm(blocks.view(-1, SIDE), self._hadamard, out=products.view(-1, SIDE))
        squares = (len(blocks), SIDE, SIDE)
        torch.bmm(self._hadamard.expand(squares), products.view(squares), out=blocks.view(squares))
        return blocks

    def _rotate_back(self, rotated: Tensor) -> Tensor:
        return self._multiply(rotated).mul_(self._signs)

    def _levels_of(self, scale: Tensor, packed: Tensor, scratch: Scratch) -> Tensor:
        """Return the rotated numbers [blocks, 256] that the integers stand for, in the memory of `scratch`."""
        index = packed[:, : BLOCK // 4].int() if self._bits == 3 else packed.int()
        if self._bits == 3:
            high, pairs = packed[:, BLOCK // 4 :].int(), index.view(len(index), -1, 2)
            pairs[:, :, 0] |= (high & 15) << 8
            pairs[:, :, 1] |= (high >> 4) << 8
        rows, width = index.numel(), self._table.shape[1]
        levels = scratch.take((rows, width), self._table)
        torch.index_select(self._table, 0, index.view(-1), out=levels)
        return levels.view(-1, BLOCK).mul_(scale.float()[:, None])

    def _pack(self, codes: Tensor, packed: Tensor) -> None:
        """Pack the indices of levels, int8 [blocks, 256], into `packed`: neighbouring numbers lie in one byte."""
        match self._bits:
            case 4:
                packed.copy_(_merge(codes.view(torch.int16), 4))
            case 3:
                packed[:, : BLOCK // 4].copy_(_merge((codes & 3).view(torch.int32), 6, 12))
                packed[:, BLOCK // 4 :].copy_(_merge((codes >> 2).view(torch.int64), 7, 14, 28))
            case 2:
                packed.copy_(_merge(codes.view(torch.int32), 6, 12))
            case _:
                packed.copy_(_merge(codes.view(torch.int64), 7, 14, 28))


def _blocks_at_a_time(tensor: Tensor) -> int:
    return _PIECE_BLOCKS if tensor.device.type == "cpu" else max(1, tensor.numel())


def _merge(words: Tensor, *shifts: int) -> Tensor:
    """Return the lowest byte of each word after words were or-ed with themselves, shifted right by each of `shifts`."""
    return reduce(lambda word, shift: word | word >> shift, shifts, words) & 255


@functools.cache
def _kernels(device: torch.device) -> ModuleType | None:
    """Return the module with hpctrain's Triton kernels if they work on the device, else None; torch's own operations
    then do the same."""

    def trial() -> ModuleType:
        from hpctrain.compress.codecs import rotated_kernels

        # A trial run compiles the kernels of the usual width.
        numbers, signs, levels = torch.zeros(1, BLOCK, device=device), block_signs(0).to(device), torch.zeros(8)
        scales = torch.empty(1, dtype=torch.bfloat16, device=device)
        payload = torch.empty(1, 96, dtype=torch.uint8, device=device)
        rotated_kernels.write(numbers, scales, payload, signs, levels.to(device), COMPANDERS[3], errors=False)
        return rotated_kernels

    return working_kernels(device, trial, "rotate and round the same numbers")


def block_signs(seed: int) -> Tensor:
    """Return the signs of the numbers of a block, 1 or -1, fp32 [256]: the bits of a SHA-256 hash of the seed, which
    are the same on all machines and with all versions of torch."""
    digest = hashlib.sha256(f"signs of a block, seed {seed}".encode()).digest()
    return torch.tensor([1.0 - 2 * (byte >> bit & 1) for byte in digest for bit in range(8)])


def hadamard_matrix(side: int) -> Tensor:
    """Return the Hadamard matrix of Sylvester's form, entries 1 and -1, fp32 [side, side]; `side` is a power of 2."""
    matrix = torch.ones(1, 1)
    while len(matrix) < side:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def _level_table(levels: Tensor, bits: int) -> Tensor:
    """Return the levels that a packed index stands for, fp32 [indices, numbers of an index].

    An index is a byte; with 3 bits it has 12 bits, the low 2 bits of 4 numbers and then their high bits.
    """
    width = 2 if bits == 3 else bits
    low = torch.arange(256)[:, None] >> torch.arange(0, 8, width) & (2**width - 1)
    high = torch.arange(16)[:, None] >> torch.arange(4) & 1
    return levels[(low + 4 * high[:, None]).flatten(0, 1) if bits == 3 else low]
