"""Encodes numbers as bytes, in full or reduced precision. The caller adds rounding errors to its residual."""

from __future__ import annotations

from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from hpctrain.compress.codecs.indices import pack_bits, unpack_bits

BLOCK = 256
"""Numbers that share a scale, whose 4 bytes are 0.016 bytes per number."""
_LARGEST = 15
"""The code FP16 scales a block so that its largest magnitude is just below 2 to this power; fp16 itself reaches
2^16.
"""
_LEAST_EXPONENT = -100
"""Smallest exponent of a block: far below it, 2^(15−exponent) overflows fp32; such small gradients count as zero."""


class ValueCode(IntEnum):
    """The precision in which numbers are sent."""

    FP32 = 0
    """Full precision, exact."""
    FP16 = 1
    """11 bits of mantissa, after each block is scaled by a power of two, because unscaled gradients underflow fp16."""
    BF16 = 2
    """8 bits of mantissa, and the range of fp32."""
    INT8 = 3
    """255 steps between plus and minus the largest magnitude of the block."""
    SIGN = 4
    """One bit per number, times the block's mean magnitude (Seide et al. 2014; the mean as in signSGD-EF, Karimireddy
    2019).
    """


def encode_values(values: Tensor, code: ValueCode) -> Tensor:
    """Return encoded numbers: [·], uint8, the scales of the blocks first.

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
    """Return the decoded numbers: [count], fp32.

    Args:
        data: what `encode_values` returned; its memory begins at a multiple of 4.
        count: number of values.
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
    """Return for each block the exponent of the smallest power of two above all magnitudes: [blocks, 1]."""
    return torch.frexp(blocks.abs().amax(1, keepdim=True)).exponent.clamp_min(_LEAST_EXPONENT).float()


def _joined(scales: Tensor, encoded: Tensor) -> Tensor:
    return torch.cat([scales.flatten().view(torch.uint8), encoded.view(torch.uint8)])


def _scaled(numbers: Tensor, scales: Tensor) -> Tensor:
    count = numbers.numel()
    return (_blocks(numbers) * scales.unsqueeze(1)).flatten()[:count]
