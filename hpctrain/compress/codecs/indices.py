"""Ascending positions as bytes, in the smallest of three forms. Lossless."""

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
    """A bit for every number of the tensor: n/8 bytes; smallest from a density of about 1/8 up."""
    SHORTS = 1
    """How many there are in each stretch of 65,536 numbers, 4 bytes, and 16 bits for each; smallest far below 1 %."""
    GAPS = 2
    """A byte for each gap to the position before; the byte 255 says that 255 numbers are passed and none is meant."""


def encode_positions(positions: Tensor, numel: int) -> tuple[IndexForm, Tensor]:
    """Write positions in the form that takes the fewest bytes.

    Args:
        positions: [k], int64, ascending, without repetition, from 0 to below `numel`.
        numel: of the tensor that they are positions of.

    Returns:
        The form, and the bytes: [·], uint8, on the device of the positions.
    """
    count = positions.numel()
    bitmap_bytes = -(-numel // 8)
    shorts_bytes = 4 * _stretches(numel) + 2 * count
    if count >= min(bitmap_bytes, shorts_bytes):
        # Gaps take a byte each or more.
        if bitmap_bytes <= shorts_bytes:
            return IndexForm.BITMAP, pack_bits(_mask(positions, numel))
        return IndexForm.SHORTS, _to_shorts(positions, numel)
    gaps = torch.diff(positions, prepend=positions.new_tensor([-1])) - 1
    # Most gaps are small, and dividing takes longer than all else here.
    large = _nonzero(gaps >= _SKIP)
    skips = gaps.index_select(0, large) // _SKIP
    gaps_bytes = count + int(skips.sum())
    smallest = min(bitmap_bytes, shorts_bytes, gaps_bytes)
    if gaps_bytes == smallest:
        return IndexForm.GAPS, _to_gaps(gaps, large, skips, gaps_bytes)
    if shorts_bytes == smallest:
        return IndexForm.SHORTS, _to_shorts(positions, numel)
    return IndexForm.BITMAP, pack_bits(_mask(positions, numel))


def decode_positions(form: IndexForm, data: Tensor, numel: int) -> Tensor:
    """The positions again: [k], int64, ascending.

    Args:
        form: as given by `encode_positions`.
        data: its bytes; their memory begins at a multiple of 4.
        numel: as given to `encode_positions`.
    """
    match form:
        case IndexForm.BITMAP:
            return _nonzero(unpack_bits(data, numel))
        case IndexForm.SHORTS:
            return _from_shorts(data, numel)
        case IndexForm.GAPS:
            return _from_gaps(data)


def pack_bits(mask: Tensor) -> Tensor:
    """[n], bool, as [ceil(n/8)], uint8; the first is the highest bit."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.packbits(mask.numpy()))
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    return (padded << _bits(mask.device)).sum(1, dtype=torch.uint8)


def unpack_bits(data: Tensor, numel: int) -> Tensor:
    """The mask that `pack_bits` was given: [numel], bool."""
    if data.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(data.numpy(), count=numel).view(np.bool_))
    return ((data.unsqueeze(1) >> _bits(data.device)) & 1).flatten()[:numel].bool()


def _bits(device: torch.device) -> Tensor:
    return torch.arange(7, -1, -1, dtype=torch.uint8, device=device)


def _mask(positions: Tensor, numel: int) -> Tensor:
    mask = torch.zeros(numel, dtype=torch.bool, device=positions.device)
    mask[positions] = True
    return mask


def _nonzero(mask: Tensor) -> Tensor:
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().flatten()


def _stretches(numel: int) -> int:
    return -(-numel // (1 << _STRETCH_BITS))


def _to_shorts(positions: Tensor, numel: int) -> Tensor:
    stretches = _stretches(numel)
    ends = torch.arange(1, stretches + 1, device=positions.device) << _STRETCH_BITS
    counts = torch.searchsorted(positions, ends).diff(prepend=positions.new_zeros(1))
    # int16 keeps the low 16 bits, the sign among them.
    return torch.cat([counts.int().view(torch.uint8), positions.short().view(torch.uint8)])


def _from_shorts(data: Tensor, numel: int) -> Tensor:
    stretches = _stretches(numel)
    counts, low = data[: 4 * stretches].view(torch.int32), data[4 * stretches :].view(torch.int16)
    starts = torch.arange(stretches, device=data.device) << _STRETCH_BITS
    return torch.repeat_interleave(starts, counts) + (low.long() & 0xFFFF)


def _to_gaps(gaps: Tensor, large: Tensor, skips: Tensor, size: int) -> Tensor:
    """One byte for each gap, and before the large ones as many more as they have `skips`: `size` in all."""
    if size == gaps.numel():
        return gaps.to(torch.uint8)
    data = torch.full((size,), _SKIP, dtype=torch.uint8, device=gaps.device)
    lengths = torch.ones_like(gaps).index_add_(0, large, skips)
    data[torch.cumsum(lengths, 0) - 1] = gaps.index_add(0, large, skips, alpha=-_SKIP).to(torch.uint8)
    return data


def _from_gaps(data: Tensor) -> Tensor:
    # Every position lies behind all that was passed and all positions before it.
    passed = torch.cumsum(data, 0, dtype=torch.int64)
    meant = _nonzero(data != _SKIP)
    if meant.numel() < data.numel():
        passed = passed[meant]
    return passed.add_(torch.arange(passed.numel(), device=data.device))
