"""Encodes selected numbers of a tensor as a message: a header that describes the message, values, positions.

Values are in full or reduced precision; the caller adds rounding errors to its residual. Ascending positions are
written without loss, in the smallest of three forms.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_STRETCH_BITS = 16
_SKIP = 255


class IndexForm(IntEnum):
    """Form in which a message holds the positions of the selected numbers."""

    BITMAP = 0
    """One bit per number of the tensor: n/8 bytes for n numbers. Smallest from a density of about 1/8 up."""
    SHORTS = 1
    """For each block of 65,536 numbers of the tensor, a 4-byte count of its selected numbers; 16 bits per position.
    Smallest far below a density of 1 %.
    """
    GAPS = 2
    """One byte per position: the count of numbers between it and the position before. The byte 255 means "skip 255
    numbers" and stands for no position.
    """


def encode_positions(positions: Tensor, numel: int) -> tuple[IndexForm, Tensor]:
    """Encode the positions of selected numbers in the form that takes the fewest bytes.

    Args:
        positions: [k], int64, ascending, distinct, in [0, numel).
        numel: count of numbers in the tensor.

    Returns:
        The form, and the encoded positions: [bytes], uint8, on the device of `positions`.
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
    """Return the positions that `encode_positions` encoded: [k], int64, ascending.

    Args:
        form: the form that `encode_positions` returned.
        data: the bytes that `encode_positions` returned; their memory begins at a multiple of 4.
        numel: count of numbers in the tensor, as given to `encode_positions`.
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
    """Return the mask [numel], bool, that `pack_bits` packed into `data`."""
    if data.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(data.numpy(), count=numel).view(np.bool_))
    return ((data.unsqueeze(1) >> _bits(data.device)) & 1).flatten()[:numel].bool()


def _bits(device: torch.device) -> Tensor:
    return torch.arange(7, -1, -1, dtype=torch.uint8, device=device)


def mask_of(positions: Tensor, numel: int) -> Tensor:
    """Return a mask [numel], bool, which is true at the given positions and false elsewhere."""
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
    """Return gaps in the form GAPS: [size], uint8. Each gap is one byte, after a byte of 255 for each 255 in the gap.

    Args:
        gaps: [k], int64: counts of numbers between one position and the next.
        large: indices of the gaps of at least 255.
        skips: for each large gap, its count of bytes of 255.
        size: length in bytes.
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


BLOCK = 256
"""Count of numbers that share a scale, whose 4 bytes add 0.016 bytes per number."""
_LARGEST = 15
"""`ValueCode.FP16` scales a block so that its largest magnitude is below 2 to this power; fp16 itself almost reaches
2^16.
"""
_LEAST_EXPONENT = -100
"""Smallest exponent of a block for `ValueCode.FP16`. The block is multiplied by 2^(15−exponent), which for a far
smaller exponent would overflow fp32. Far smaller numbers become zero.
"""


class ValueCode(IntEnum):
    """Precision in which a message holds the selected numbers."""

    FP32 = 0
    """Full precision, exact."""
    FP16 = 1
    """11 significant bits, after each block of 256 is scaled by a power of two, because unscaled gradients underflow
    fp16.
    """
    BF16 = 2
    """8 significant bits, and the range of fp32."""
    INT8 = 3
    """8-bit integers from −127 to 127, in steps of 1/127 of the largest magnitude of a block of 256."""
    SIGN = 4
    """One bit per number, its sign, times the mean magnitude of a block of 256 (Seide et al. 2014; the mean as in
    signSGD-EF, Karimireddy et al. 2019).
    """


def encode_values(values: Tensor, code: ValueCode) -> Tensor:
    """Return numbers encoded in the precision `code`: [bytes], uint8. If the precision has scales, they come first.

    Args:
        values: [k], fp32, contiguous, finite.
        code: precision.
    """
    match code:
        case ValueCode.FP32:
            return values.view(torch.uint8)
        case ValueCode.BF16:
            return values.bfloat16().view(torch.uint8)
        case ValueCode.FP16:
            blocks = _blocks(values)
            scales = torch.exp2(_LARGEST - _exponents(blocks))
            return _joined(scales, (blocks * scales).flatten()[: values.numel()].half())
        case ValueCode.INT8:
            blocks = _blocks(values)
            scales = blocks.abs().amax(1, keepdim=True) / 127
            steps = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)
            return _joined(scales, steps.round_().clamp_(-127, 127).flatten()[: values.numel()].to(torch.int8))
        case ValueCode.SIGN:
            blocks = _blocks(values)
            sizes = torch.full_like(blocks[:, :1], BLOCK)
            sizes[-1:] -= blocks.numel() - values.numel()
            return _joined(blocks.abs().sum(1, keepdim=True) / sizes, pack_bits(values >= 0))


def decode_values(data: Tensor, count: int, code: ValueCode) -> Tensor:
    """Return the numbers that `encode_values` encoded: [count], fp32.

    Args:
        data: what `encode_values` returned; its memory begins at an address that is a multiple of 4 bytes.
        count: count of numbers.
        code: precision, as given to `encode_values`.
    """
    match code:
        case ValueCode.FP32:
            return data.view(torch.float32)
        case ValueCode.BF16:
            return data.view(torch.bfloat16).float()
    scales_bytes = 4 * -(-count // BLOCK)
    scales, encoded = data[:scales_bytes].view(torch.float32), data[scales_bytes:]
    match code:
        case ValueCode.FP16:
            return _scaled(encoded.view(torch.float16).float(), 1 / scales)
        case ValueCode.INT8:
            return _scaled(encoded.view(torch.int8).float(), scales)
        case ValueCode.SIGN:
            return _scaled(unpack_bits(encoded, count).float().mul_(2).sub_(1), scales)


def _blocks(values: Tensor) -> Tensor:
    """Return the values [k] as blocks [ceil(k/BLOCK), BLOCK], padded with zeros."""
    return F.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)


def _exponents(blocks: Tensor) -> Tensor:
    """Return the exponent of the smallest power of two above all magnitudes of each block, at least `_LEAST_EXPONENT`:
    [blocks, 1], fp32.
    """
    return torch.frexp(blocks.abs().amax(1, keepdim=True)).exponent.clamp_min(_LEAST_EXPONENT).float()


def _joined(scales: Tensor, encoded: Tensor) -> Tensor:
    return torch.cat([scales.flatten().view(torch.uint8), encoded.view(torch.uint8)])


def _scaled(numbers: Tensor, scales: Tensor) -> Tensor:
    count = numbers.numel()
    return (_blocks(numbers) * scales.unsqueeze(1)).flatten()[:count]


_HEAD_BYTES = 6 * 8
"""Bytes of the header. It has six int64 numbers: value code, index form, numbers in the tensor, selected numbers, bytes
of values, bytes of positions.
"""
ALIGNMENT = 8
"""Each message and each of its parts begins at a multiple of this many bytes, so that it can be read without a copy."""


def encode(positions: Tensor, values: Tensor, numel: int, code: ValueCode) -> Tensor:
    """Return a message with the selected numbers of a tensor: [bytes], uint8; its length is a multiple of 8.

    Args:
        positions: [k], int64, ascending, distinct, in [0, numel): positions of the selected numbers.
        values: [k], fp32: the numbers at these positions.
        numel: count of numbers in the tensor.
        code: precision of the values.
    """
    form, index = encode_positions(positions, numel)
    data = encode_values(values.contiguous(), code)
    head = torch.tensor([code, form, numel, positions.numel(), data.numel(), index.numel()], dtype=torch.int64)
    parts = [head.view(torch.uint8).to(positions.device)]
    for part in (data, index):
        parts += [part, part.new_zeros(-part.numel() % ALIGNMENT)]
    return torch.cat(parts)


def decode(message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Return the positions [k], int64, ascending, and the values [k], fp32, of a message.

    Args:
        message: what `encode` returned; its memory begins at a multiple of 8, and padding may follow the message.
        numel: count of numbers in the tensor that the message should be about.

    Raises:
        ValueError: the message is about a tensor of another size, or is truncated.
    """
    code, form, of, count, data_bytes, index_bytes = message[:_HEAD_BYTES].view(torch.int64).tolist()
    index_start = _HEAD_BYTES + -(-data_bytes // ALIGNMENT) * ALIGNMENT
    if of != numel or index_start + index_bytes > message.numel():
        raise ValueError(
            f"a message of {message.numel()} bytes about {of} numbers arrived where one about {numel} was expected: "
            "the ranks do not agree on the gradients"
        )
    values = decode_values(message[_HEAD_BYTES : _HEAD_BYTES + data_bytes], count, ValueCode(code))
    index = message[index_start : index_start + index_bytes]
    return decode_positions(IndexForm(form), index, numel), values


def rounded(values: Tensor, code: ValueCode) -> Tensor:
    """Return the values [k], fp32, as a receiver decodes them from a message in the precision `code`."""
    if code is ValueCode.FP32:
        return values
    return decode_values(encode_values(values.contiguous(), code), values.numel(), code)
