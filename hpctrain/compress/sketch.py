"""Count sketches: sparse vectors folded so that the sum of the sketches is the sketch of the sum.

After lossless homomorphic compression (Li et al., 2024, arXiv:2402.07529). A number is added to three cells; whoever
knows which positions are not zero finds cells with a single number in them, takes that number out of its other two
cells, and goes on until nothing is left ("peeling"). This succeeds almost surely while numbers per cell stay below
0.818, the threshold of three hash functions (Molloy, 2005, Random Structures & Algorithms 27). What cannot be peeled is
told, never estimated.

Numbers are integers modulo 2³²: cells may wrap around and still give every number exactly, and sums do not depend on
their order, so every rank and every kind of device finds the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

PEELING_LOAD = 0.818
"""Numbers per cell up to which three hash functions can be undone."""
HASHES = 3
_ODD = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_WORD = 0xFFFFFFFF
_PIECE = 1 << 16
"""Positions that are hashed at a time: what is in between stays in the processor's cache."""
_ONE = 1 << 40
"""What a number adds to the census of its cells, beside its own index: a count above all sums of indices."""
_HOPELESS_LOAD = 4
"""Numbers per cell from which on no cell would hold a single one, and a census could overflow."""


def cells_of(positions: Tensor, cells: int) -> Tensor:
    """The three cells of each position, int64 [3, positions], each in another third of the sketch, so never the same.

    Args:
        positions: int64, below 2³².
        cells: of the sketch; a multiple of 3, below 2³¹.
    """
    third = cells // HASHES
    out = torch.empty(HASHES, len(positions), dtype=torch.int64, device=positions.device)
    for piece, target in zip(positions.split(_PIECE), out.split(_PIECE, dim=1), strict=True):
        for row, odd in enumerate(_ODD):
            # Multiply and fold, twice, because the positions of large gradients come in runs. The multipliers are
            # below 2³¹, so that no product of two words reaches 2⁶³.
            word = torch.mul(piece, odd >> 1, out=target[row]).add_(odd).bitwise_and_(_WORD)
            word.bitwise_xor_(word >> 15).mul_(_ODD[row - 1] >> 1).bitwise_and_(_WORD)
            word.bitwise_xor_(word >> 13).mul_(third).bitwise_right_shift_(32).add_(row * third)
    return out


def fold(positions: Tensor, numbers: Tensor, cells: int) -> Tensor:
    """The sketch of the vector that has these numbers at these positions: int32 [cells].

    Args:
        positions: int64 [k], distinct.
        numbers: int32 [k].
        cells: a multiple of 3.
    """
    sketch = torch.zeros(cells, dtype=torch.int32, device=numbers.device)
    for row in cells_of(positions, cells):
        sketch.index_add_(0, row, numbers)
    return sketch


def unfold(sketch: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers at the positions, from a sum of sketches; the sketch is used up.

    Args:
        sketch: int32, the sum of sketches with as many cells.
        positions: int64 [k], distinct: every position that one of them has.

    Returns:
        int32 [k], exact modulo 2³² where found and 0 elsewhere, and bool [k]: found or not.
    """
    numbers = torch.zeros(len(positions), dtype=torch.int32, device=sketch.device)
    found = torch.zeros(len(positions), dtype=torch.bool, device=sketch.device)
    if len(positions) > _HOPELESS_LOAD * len(sketch):
        return numbers, found
    cells = cells_of(positions, len(sketch))
    # How many numbers each cell holds, and the sum of their indices: of a single one that is its index.
    entries = torch.arange(len(positions), device=sketch.device) + _ONE
    census = torch.zeros(len(sketch), dtype=torch.int64, device=sketch.device)
    for row in cells:
        census.index_add_(0, row, entries)
    chosen = torch.empty(len(positions), dtype=torch.int64, device=sketch.device)
    lone = _lone(census).nonzero().squeeze(1)
    while len(lone):
        index = census[lone] - _ONE
        # A number that is alone in several cells is taken from one of them; they all hold it and nothing else.
        turn = torch.arange(len(lone), device=sketch.device)
        chosen[index] = turn
        first = chosen[index] == turn
        index, taken = index[first], sketch[lone[first]]
        numbers[index] = taken
        found[index] = True
        gone = cells[:, index]
        for row in gone:
            sketch.index_add_(0, row, taken, alpha=-1)
            census.index_add_(0, row, entries[index], alpha=-1)
        touched = gone.flatten()
        lone = touched[_lone(census[touched])]
    return numbers, found


def _lone(census: Tensor) -> Tensor:
    return census.bitwise_right_shift(40) == 1
