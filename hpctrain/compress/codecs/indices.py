"""Lossless encoding of ascending positions as bytes, in the smallest of three forms."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

_STRETCH_BITS = 16
_SKIP = 255


class IndexForm(IntEnum):
    """How positions are written."""

    BITMAP = 0
    """One bit per number of the tensor: n/8 bytes. Smallest from a density of about 1/8 up."""
    SHORTS = 1
    """A 4-byte count per block of 65,536 numbers, and 16 bits per position. Smallest far below a density of 1 %."""
    GAPS = 2
    """One byte per gap to the previous position. The byte 255 means "skip 255 numbers" and stands for no position."""


def encode_positions(positions: Tensor, numel: int) -> tuple[IndexForm, Tensor]:
    """Write positions in the form that takes the fewest bytes.

    Args:
        positions: [k], int64, ascending, distinct, in [0, numel).
        numel: numbers of the tensor.

    Returns:
        The form, and the bytes: [·], uint8, on the device of the positions.
    """
    count = positions.numel()
    bitmap_bytes = -(-numel // 8)
    shorts_bytes = 4 * _stretches(numel) + 2 * count
    if count >= min(bitmap_bytes, shorts_bytes):
        # GAPS would be no smaller: each gap takes at least a byte.
        if bitmap_bytes <= shorts_bytes:
            return IndexForm.BITMAP, pack_bits(mask_of(positions, numel))
        return IndexForm.SHORTS, _to_shorts(positions, numel)
    gaps = torch.diff(positions, prepend=positions.new_tensor([-1])) - 1
    # Only large gaps are divided: most gaps are small, and division takes longer than all other steps here.
    large = positions_of(gaps >= _SKIP)
    skips = gaps.index_select(0, large) // _SKIP
    gaps_bytes = count + int(skips.sum())
    smallest = min(bitmap_bytes, shorts_bytes, gaps_bytes)
    if gaps_bytes == smallest:
        return IndexForm.GAPS, _to_gaps(gaps, large, skips, gaps_bytes)
    if shorts_bytes == smallest:
        return IndexForm.SHORTS, _to_shorts(positions, numel)
    return IndexForm.BITMAP, pack_bits(mask_of(positions, numel))


def decode_positions(form: IndexForm, data: Tensor, numel: int) -> Tensor:
    """Return the positions that `encode_positions` wrote: [k], int64, ascending.

    Args:
        form: the form that `encode_positions` returned.
        data: the bytes that `encode_positions` returned; their memory begins at a multiple of 4.
        numel: numbers of the tensor, as for `encode_positions`.
    """
    match form:
        case IndexForm.BITMAP:
            return positions_of(unpack_bits(data, numel))
        case IndexForm.SHORTS:
            return _from_shorts(data, numel)
        case IndexForm.GAPS:
            return _from_gaps(data)


def pack_bits(mask: Tensor) -> Tensor:
    """Return a mask [n], bool, as bytes [ceil(n/8)], uint8, most significant bit first."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.packbits(mask.numpy()))
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    return (padded << _bits(mask.device)).sum(1, dtype=torch.uint8)


def unpack_bits(data: Tensor, numel: int) -> Tensor:
    """Return the mask [numel], bool, that `pack_bits` wrote."""
    if data.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(data.numpy(), count=numel).view(np.bool_))
    return ((data.unsqueeze(1) >> _bits(data.device)) & 1).flatten()[:numel].bool()


def _bits(device: torch.device) -> Tensor:
    return torch.arange(7, -1, -1, dtype=torch.uint8, device=device)


def mask_of(positions: Tensor, numel: int) -> Tensor:
    """Return a mask [numel], bool, which is true at these positions."""
    mask = torch.zeros(numel, dtype=torch.bool, device=positions.device)
    mask[positions] = True
    return mask


def positions_of(mask: Tensor) -> Tensor:
    """Return the positions at which a mask is true: int64, ascending."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().flatten()


def _stretches(numel: int) -> int:
    return -(-numel // (1 << _STRETCH_BITS))


def _to_shorts(positions: Tensor, numel: int) -> Tensor:
    stretches = _stretches(numel)
    ends = torch.arange(1, stretches + 1, device=positions.device) << _STRETCH_BITS
    counts = torch.searchsorted(positions, ends).diff(prepend=positions.new_zeros(1))
    # The cast to int16 keeps the low 16 bits; the highest of them becomes the sign.
    return torch.cat([counts.int().view(torch.uint8), positions.short().view(torch.uint8)])


def _from_shorts(data: Tensor, numel: int) -> Tensor:
    stretches = _stretches(numel)
    counts, low = data[: 4 * stretches].view(torch.int32), data[4 * stretches :].view(torch.int16)
    starts = torch.arange(stretches, device=data.device) << _STRETCH_BITS
    return torch.repeat_interleave(starts, counts) + (low.long() & 0xFFFF)


def _to_gaps(gaps: Tensor, large: Tensor, skips: Tensor, size: int) -> Tensor:
    """Return the form GAPS, `size` bytes: one byte per gap, and `skips` bytes of 255 before each of the `large`
    gaps.
    """
    if size == gaps.numel():
        return gaps.to(torch.uint8)
    data = torch.full((size,), _SKIP, dtype=torch.uint8, device=gaps.device)
    lengths = torch.ones_like(gaps).index_add_(0, large, skips)
    data[torch.cumsum(lengths, 0) - 1] = gaps.index_add(0, large, skips, alpha=-_SKIP).to(torch.uint8)
    return data


def _from_gaps(data: Tensor) -> Tensor:
    # A position is the sum of all gaps and skips before it, plus the number of positions before it.
    passed = torch.cumsum(data, 0, dtype=torch.int64)
    meant = positions_of(data != _SKIP)
    if meant.numel() < data.numel():
        passed = passed[meant]
    return passed.add_(torch.arange(passed.numel(), device=data.device))
