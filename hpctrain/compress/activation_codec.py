"""Activations and their gradients as messages of fewer bytes, from one pipeline stage to the next and back.

What rounding takes is lost: the next message is about other samples (decision 78).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from hpctrain.compress.codecs.integers import BLOCK, IntegerCode
from hpctrain.records.plan.compression import Messages


class ActivationCodec(Protocol):
    """Writes tensors as messages whose length goes by the tensor's shape alone, and reads them."""

    def empty(self, tensor: Tensor) -> Tensor:
        """Memory for a message about a tensor of this shape, on its device."""
        ...

    def write(self, tensor: Tensor) -> Tensor:
        """The message about a tensor of any shape, in memory of its own."""
        ...

    def read(self, message: Tensor, tensor: Tensor) -> None:
        """Write what a message says into a tensor of the shape that it is about."""
        ...


class Bf16ActivationCodec:
    """Each number rounded to 8 bits of mantissa: half the bytes of fp32."""

    def empty(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=torch.bfloat16, device=tensor.device)

    def write(self, tensor: Tensor) -> Tensor:
        return self.empty(tensor).copy_(tensor)

    def read(self, message: Tensor, tensor: Tensor) -> None:
        tensor.copy_(message)


class Int8ActivationCodec:
    """Integers of 8 bits with a scale in fp32 for each `BLOCK` numbers in the order of their memory, which is less than
    a token has in most models: a channel with large activations makes only its block coarse. The end is filled up with
    zeros. A block with a number that is not finite is read as such."""

    def __init__(self) -> None:
        self._code = IntegerCode(8)

    def empty(self, tensor: Tensor) -> Tensor:
        size = self._code.bytes_of(_padded_numel(tensor))
        return torch.empty(size, dtype=torch.uint8, device=tensor.device)

    def write(self, tensor: Tensor) -> Tensor:
        numbers = torch.empty(_padded_numel(tensor), device=tensor.device)
        numbers[: tensor.numel()].view(tensor.shape).copy_(tensor)
        numbers[tensor.numel() :] = 0.0
        message = self.empty(tensor)
        self._code.write(numbers, message)
        return message

    def read(self, message: Tensor, tensor: Tensor) -> None:
        numbers = torch.empty(_padded_numel(tensor), device=tensor.device)
        self._code.read(message, numbers)
        tensor.copy_(numbers[: tensor.numel()].view(tensor.shape))


def build_activation_codec(messages: Messages) -> ActivationCodec | None:
    """What writes and reads messages of that kind; None for those that travel as they are."""
    match messages:
        case "none":
            return None
        case "bf16":
            return Bf16ActivationCodec()
        case "int8":
            return Int8ActivationCodec()


def _padded_numel(tensor: Tensor) -> int:
    """Its numbers, up to the next multiple of `BLOCK`."""
    return -(-tensor.numel() // BLOCK) * BLOCK
