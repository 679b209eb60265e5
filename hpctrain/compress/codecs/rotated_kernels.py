"""Rotated integers on a GPU: two Triton kernels. One rotates, rounds and packs blocks of numbers and, if asked, leaves
the rounding errors; the other unpacks blocks and rotates back.

A program works on a few blocks of 256 numbers, which stay in its registers. So writing a message moves 4 bytes for each
number (8 if it leaves errors) and the message, and reading moves 4 bytes (8 if it adds) and the message, where torch's
own operations make about 20 passes. The rotation is eight rounds of sums and differences; there is no matrix product,
so TF32 does not matter.

Tested without a GPU: in Triton's interpreter, the kernels read what the CPU implementation writes and the reverse, and
Triton 3.9 compiles them for sm_80, sm_90 and gfx942. No GPU has run them, so their speed is not known.

Import this module only where Triton is installed and the numbers are on a GPU, because loading Triton takes time. If
the environment variable TRITON_INTERPRET is 1 when Triton is loaded, its interpreter runs the kernels on CPU tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 8
"""Count of blocks that one program works on."""
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
_SIDE: tl.constexpr = tl.constexpr(256)


def write(
    numbers: Tensor, scales: Tensor, payload: Tensor, signs: Tensor, levels: Tensor, compander: tuple[float, float],
    errors: bool,
) -> None:  # fmt: skip
    """Encode blocks of numbers.

    Args:
        numbers: [blocks, 256], fp32, contiguous.
        scales: [blocks], bf16; written to.
        payload: [blocks, 32·bits], uint8, contiguous; written to.
        signs: [256], fp32: the signs of the rotation.
        levels: [2^bits], fp32, ascending.
        compander: the constants (a, c) of `COMPANDERS`.
        errors: whether to replace the numbers by their rounding errors; otherwise they stay as they are.
    """
    blocks, bits = len(numbers), payload.shape[1] // 32
    with torch.cuda.device_of(numbers):
        _write[(triton.cdiv(blocks, ROWS),)](
            numbers, scales, payload, signs, levels, blocks, *compander, bits=bits, rows=ROWS, errors=errors, **_OPTIONS
        )


def read(scales: Tensor, payload: Tensor, signs: Tensor, levels: Tensor, numbers: Tensor, add: bool) -> None:
    """Decode blocks of numbers into `numbers`, or add them to it; the arguments are those of `write`."""
    blocks, bits = len(numbers), payload.shape[1] // 32
    with torch.cuda.device_of(numbers):
        _read[(triton.cdiv(blocks, ROWS),)](
            scales, payload, signs, levels, numbers, blocks, bits=bits, add=add, rows=ROWS, **_OPTIONS
        )


# Triton's compiler reads annotations too, and the only name of this file that it knows is tl.
@triton.jit
def _rotate(x: tl.tensor, rows: tl.constexpr) -> tl.tensor:
    # Each round adds and subtracts neighbours, and moves the lowest bit of a number's place to the top; after eight
    # rounds, all bits are where they were.
    for _ in tl.static_range(8):
        even, odd = tl.split(tl.reshape(x, (rows, _SIDE // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)), (rows, _SIDE))
    return x * 0.0625


@triton.jit
def _packed(codes: tl.tensor, width: tl.constexpr, in_byte: tl.constexpr, rows: tl.constexpr) -> tl.tensor:
    shifts = width * tl.arange(0, in_byte)
    return tl.sum(tl.reshape(codes, (rows, _SIDE // in_byte, in_byte)) << shifts[None, None, :], axis=2).to(tl.uint8)


@triton.jit
def _write(
    numbers: tl.tensor, scales: tl.tensor, payload: tl.tensor, signs: tl.tensor, levels: tl.tensor, blocks: int,
    factor: float, slope: float, bits: tl.constexpr, rows: tl.constexpr,
    errors: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    inside = (row < blocks)[:, None]
    places = row[:, None] * _SIDE + tl.arange(0, _SIDE)[None, :]
    sign = tl.load(signs + tl.arange(0, _SIDE))[None, :]
    x = tl.load(numbers + places, mask=inside, other=0.0)
    scale = (tl.sqrt(tl.sum(x * x, axis=1)) * 0.0625).to(tl.bfloat16)
    tl.store(scales + row, scale, mask=row < blocks)
    wide = scale.to(tl.float32)[:, None]
    half = 2 ** (bits - 1)
    index = tl.erf(_rotate(x * sign, rows) * (slope / tl.maximum(wide, 1e-30))) * factor + half
    codes = tl.minimum(tl.maximum(index, 0.0), 2.0 * half - 1).to(tl.int32)
    line = row[:, None] * (32 * bits)
    if bits == 4:
        tl.store(payload + line + tl.arange(0, 128)[None, :], _packed(codes, 4, 2, rows), mask=inside)
    elif bits == 1:
        tl.store(payload + line + tl.arange(0, 32)[None, :], _packed(codes, 1, 8, rows), mask=inside)
    else:
        tl.store(payload + line + tl.arange(0, 64)[None, :], _packed(codes & 3, 2, 4, rows), mask=inside)
    if bits == 3:
        tl.store(payload + line + 64 + tl.arange(0, 32)[None, :], _packed(codes >> 2, 1, 8, rows), mask=inside)
    if errors:
        tl.store(numbers + places, x - _rotate(tl.load(levels + codes) * wide, rows) * sign, mask=inside)


@triton.jit
def _read(
    scales: tl.tensor, payload: tl.tensor, signs: tl.tensor, levels: tl.tensor, numbers: tl.tensor, blocks: int,
    bits: tl.constexpr, add: tl.constexpr, rows: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    inside = (row < blocks)[:, None]
    place = tl.arange(0, _SIDE)[None, :]
    line = payload + row[:, None] * (32 * bits)
    if bits == 4:
        codes = (tl.load(line + place // 2, mask=inside, other=0).to(tl.int32) >> 4 * (place % 2)) & 15
    elif bits == 1:
        codes = (tl.load(line + place // 8, mask=inside, other=0).to(tl.int32) >> (place % 8)) & 1
    else:
        codes = (tl.load(line + place // 4, mask=inside, other=0).to(tl.int32) >> 2 * (place % 4)) & 3
    if bits == 3:
        high = tl.load(line + 64 + place // 8, mask=inside, other=0).to(tl.int32) >> (place % 8)
        codes += 4 * (high & 1)
    wide = tl.load(scales + row, mask=row < blocks, other=0.0).to(tl.float32)[:, None]
    sign = tl.load(signs + tl.arange(0, _SIDE))[None, :]
    decoded = _rotate(tl.load(levels + codes) * wide, rows) * sign
    target = numbers + row[:, None] * _SIDE + place
    if add:
        decoded += tl.load(target, mask=inside, other=0.0)
    tl.store(target, decoded, mask=inside)
