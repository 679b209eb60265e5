"""A self-describing message with selected numbers of a tensor: header, values, positions."""

from __future__ import annotations

import torch
from torch import Tensor

from hpctrain.compress.codecs.indices import IndexForm, decode_positions, encode_positions
from hpctrain.compress.codecs.values import ValueCode, decode_values, encode_values

_HEAD_BYTES = 6 * 8
"""Bytes of the header. It has six int64 numbers: value code, index form, numel, count, bytes of values, bytes of
index.
"""
ALIGNMENT = 8
"""Each part of a message, and each message, begins at a multiple of this many bytes, so that it is read without a
copy.
"""


def encode(positions: Tensor, values: Tensor, numel: int, code: ValueCode) -> Tensor:
    """Return a message with these positions and values: [·], uint8; its length is a multiple of 8.

    Args:
        positions: [k], int64, ascending, distinct, in [0, numel).
        values: [k], fp32: the numbers at these positions.
        numel: numbers of the tensor.
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
        message: what `encode` returned; its memory begins at a multiple of 8, and padding may follow it.
        numel: numbers of the reader's tensor.

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
    """Return the values [k], fp32, after encoding and decoding."""
    if code is ValueCode.FP32:
        return values
    return decode_values(encode_values(values.contiguous(), code), values.numel(), code)
