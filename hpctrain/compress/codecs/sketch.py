"""Count sketches: sparse vectors folded so that the sum of the sketches is the sketch of the sum.

The method is lossless homomorphic compression (Li et al. 2024, arXiv:2402.07529). The index is the sorted list of the
positions that any rank sends, and all ranks know it. The slot of a number is the place of its position in the index.
Three hash functions of the slot give three cells of the sketch, and the number is added to each of them. A cell that
holds a single number gives that number, which is then subtracted from its other two cells, and so on until nothing
remains ("peeling"). Peeling almost surely succeeds while there are fewer than 0.818 numbers per cell, the threshold of
three hash functions (Molloy 2005, Random Structures & Algorithms 27). Numbers that cannot be peeled are reported, never
estimated.

Slots are cut into pieces of equal size, each with its own cells. So all pieces hold about equally many numbers per
cell, and one piece fits the cache of a CPU core.

Numbers are integers modulo 2³²: cells may wrap around and still give every number exactly. Sums do not depend on their
order, so every rank and every kind of device gets the same bits.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

PEELING_LOAD = 0.818
"""Count of numbers per cell below which peeling almost surely decodes a sketch with three hash functions."""
HASHES = 3
_ODD = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_WORD = 0xFFFFFFFF
_PIECE = 1 << 15
"""Largest count of slots in a piece, so that peeling a piece stays in the cache of a CPU core."""
_ONE = 1 << 40
"""Unit of the count in a cell's census, which is `_ONE` times the count of numbers plus the sum of their slots. `_ONE`
is larger than any sum of slots.
"""
_HOPELESS_LOAD = 4
"""Count of numbers per cell above which `unfold` decodes nothing, because hardly any cell would hold a single number.
"""


def fold(slots: Tensor, numbers: Tensor, count: int, cells: int) -> Tensor:
    """Return the sketch of a sparse vector, int32. Sketches with the same `count` and `cells` have the same length.

    Args:
        slots: int64 [k], distinct and sorted: the slot of each number, as the docstring of this module defines it.
        numbers: int32 [k].
        count: number of slots in the index.
        cells: largest length of the sketch, at least 3. The sketch is a little shorter if `cells` is not a multiple of
            3 times the number of its pieces (the equal parts into which the slots are cut).
    """
    layout = _Layout(count, cells)
    sketch = torch.zeros(layout.pieces * layout.cells, dtype=torch.int32, device=numbers.device)
    for some, theirs in zip(slots.split(_PIECE), numbers.split(_PIECE), strict=True):
        start = some.div(layout.slots, rounding_mode="floor").mul_(layout.cells)
        for row in _cells_of(some, layout.cells):
            sketch.index_add_(0, row.add_(start), theirs)
    return sketch


def unfold(sketch: Tensor, count: int, cells: int, some: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Decode the numbers of all slots, or of some, from a sum of sketches. The sketch is overwritten.

    Args:
        sketch: int32, the sum of sketches made with the same `count` and `cells`.
        count: number of slots in the index, as given to `fold`.
        cells: largest length of the sketch, as given to `fold`.
        some: int64 [n], ascending: the slots that have numbers. A number in another slot spoils those with which it
            shares a cell. None: all slots.

    Returns:
        The numbers, int32 [count] or [n], exact modulo 2³² where decoded and 0 elsewhere; and whether each was decoded,
        bool [count] or [n].
    """
    layout = _Layout(count, cells)
    slots = torch.arange(count, device=sketch.device) if some is None else some
    numbers = torch.zeros(len(slots), dtype=torch.int32, device=sketch.device)
    decoded = torch.zeros(len(slots), dtype=torch.bool, device=sketch.device)
    if len(slots) <= _HOPELESS_LOAD * len(sketch):
        borders = torch.arange(layout.pieces + 1, device=sketch.device) * layout.slots
        ends = torch.searchsorted(slots, borders).tolist()
        for piece, part in enumerate(slice(*between) for between in pairwise(ends)):
            piece_cells = sketch[piece * layout.cells : (piece + 1) * layout.cells]
            _peel(piece_cells, _cells_of(slots[part], layout.cells), numbers[part], decoded[part])
    return numbers, decoded


class _Layout:
    """Division of a sketch's slots and cells into pieces of equal size, each of which fits the cache of a CPU core."""

    def __init__(self, count: int, cells: int) -> None:
        self.pieces = max(1, min(-(-count // _PIECE), cells // HASHES))
        self.slots = max(1, -(-count // self.pieces))
        """Count of slots in a piece; the last piece may have fewer."""
        self.cells = cells // (HASHES * self.pieces) * HASHES
        """Count of cells in a piece."""


def _cells_of(slots: Tensor, cells: int) -> Tensor:
    """Return the three cells of each slot, int64 [3, slots]: the cells to which the slot's number is added. A cell is
    given as its position in the slot's piece (one of the equal parts into which a sketch is cut).

    Each of the three cells lies in another third of the piece, so they differ.

    Args:
        slots: int64, places in the index of the sent positions.
        cells: count of cells in a piece.
    """
    third = cells // HASHES
    out = torch.empty(HASHES, len(slots), dtype=torch.int64, device=slots.device)
    for row, odd in enumerate(_ODD):
        # Multiply and fold, twice, because slots are often consecutive. Multipliers are below 2³¹, so that no product
        # of two words reaches 2⁶³.
        word = torch.mul(slots, odd >> 1, out=out[row]).add_(odd).bitwise_and_(_WORD)
        word.bitwise_xor_(word >> 15).mul_(_ODD[row - 1] >> 1).bitwise_and_(_WORD)
        word.bitwise_xor_(word >> 13).mul_(third).bitwise_right_shift_(32).add_(row * third)
    return out


def _peel(sketch: Tensor, cells: Tensor, numbers: Tensor, decoded: Tensor) -> None:
    """Decode the numbers of one piece of a sketch by peeling.

    Args:
        sketch: int32, the cells of the piece; decoded numbers are subtracted from it.
        cells: int64 [3, slots], the three cells of each slot.
        numbers: int32 [slots], zeros; decoded numbers are written to it.
        decoded: bool [slots], False; set to True where a number was decoded.
    """
    # The census of a cell is its count of numbers and the sum of their slots: for a single number, that is its slot.
    entries = torch.arange(len(numbers), device=sketch.device) + _ONE
    census = torch.zeros(len(sketch), dtype=torch.int64, device=sketch.device)
    for row in cells:
        census.index_add_(0, row, entries)
    chosen = torch.empty_like(entries)
    lone = _lone(census).nonzero().squeeze(1)
    while len(lone):
        slot = census[lone] - _ONE
        # A number that is alone in several cells is read from only one of them.
        turn = torch.arange(len(lone), device=sketch.device)
        chosen[slot] = turn
        first = chosen[slot] == turn
        slot, taken = slot[first], sketch[lone[first]]
        numbers[slot] = taken
        decoded[slot] = True
        gone = cells[:, slot]
        for row in gone:
            sketch.index_add_(0, row, taken, alpha=-1)
            census.index_add_(0, row, entries[slot], alpha=-1)
        touched = gone.flatten()
        lone = touched[_lone(census[touched])]


def _lone(census: Tensor) -> Tensor:
    return census.bitwise_right_shift(40) == 1
